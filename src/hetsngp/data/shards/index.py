"""Numbers of samples of tar shards, counted once and cached beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetsngp.data.bounded import read_file
from hetsngp.data.shards.tar_samples import count_samples
from hetsngp.files import replace_file
from hetsngp.limits import INDEX_BYTES

INDEX = "hetsngp_index.json"
HEADER_BYTES, MOST_BYTES = 512, 2**40
TIMM_INDEX = ("_info.json", "info.json")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def sample_counts(shards: Sequence[Path]) -> tuple[int, ...]:
    """Number of samples of each shard, from files beside them, or by reading the headers of all members.

    The files are timm's ``_info.json`` and ``hetsngp_index.json``, which is written after counting where the
    folder is writable. A shard whose size differs from that in hetsngp_index.json is counted again.
    """
    ours: dict[Path, int] = {}
    theirs: dict[Path, int] = {}
    for folder in {shard.parent for shard in shards}:
        ours |= _from_index(folder)
        theirs |= _from_timm(folder)
    unknown = [shard for shard in shards if shard not in ours and shard not in theirs]
    with ThreadPoolExecutor() as pool:  # for disks with a high latency
        ours |= dict(zip(unknown, pool.map(count_samples, unknown), strict=True))
    for folder in {shard.parent for shard in unknown}:
        _write_index(folder, {shard: count for shard, count in ours.items() if shard.parent == folder})
    known = theirs | ours
    return tuple(known[shard] for shard in shards)


def _from_index(folder: Path) -> dict[Path, int]:
    try:
        content = json.loads(read_file(folder / INDEX, INDEX_BYTES))
        rows = [(folder / name, row["samples"], row["bytes"]) for name, row in content["shards"].items()]
        kept = [(file, count) for file, count, size in rows if file.is_file() and _size(file) == size]
        return {file: count for file, count in kept if _is_possible(count, _size(file))}
    except _UNREADABLE:
        return {}  # missing or invalid: it is written again


def _from_timm(folder: Path) -> dict[Path, int]:
    for name in TIMM_INDEX:
        with suppress(*_UNREADABLE):
            splits = json.loads(read_file(folder / name, INDEX_BYTES))["splits"]
            # Splits with an alternative label leave out the samples that lack it.
            complete = [split for split in splits.values() if not split.get("alt_label")]
            rows = [row for s in complete for row in zip(s["filenames"], s["shard_lengths"], strict=True)]
            known = [(folder / file, count) for file, count in rows]
            return {file: count for file, count in known if _is_possible(count, MOST_BYTES)}
    return {}


def _is_possible(count: Any, size: int) -> bool:
    """Whether a shard of ``size`` bytes may have so many samples: each takes a header at least."""
    return type(count) is int and 0 <= count <= size // HEADER_BYTES


def _write_index(folder: Path, counts: dict[Path, int]) -> None:
    rows = {file.name: {"samples": counts[file], "bytes": _size(file)} for file in sorted(counts, key=str)}
    text = json.dumps({"shards": rows}, indent=1) + "\n"
    with suppress(OSError):  # not writable: counted again the next time
        replace_file(folder / INDEX, lambda file: file.write_text(text, encoding="utf-8"))


def _size(file: Path) -> int:
    return file.stat().st_size
