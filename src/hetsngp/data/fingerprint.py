"""Fingerprints of data sets, by which a training that is resumed recognises its data wherever they are.

Compared are the number of examples, shapes, all labels and class names, the sizes of files, and SHA-256 of
contents: of all that is in memory up to a limit, and of a sample of anything larger, at positions that follow
from the number of examples. Paths and times of modification do not count: data are often copied afresh.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.files import ImageFiles, _FromDisk
from hetsngp.data.images.multi_label import MultiLabelFiles, _Decoded
from hetsngp.data.shards.streams import ShardedImages, ShardStream
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.data.text.tokenizer import TokenizedTexts

SAMPLE = 64
"""Examples, or files, whose content is hashed, the first and the last among them."""
SIZES = 100_000
"""Files whose size is compared; of a larger set as many, at equal distances."""
IN_MEMORY = 2**30
"""Bytes up to which tensors are hashed completely: less than a second."""
# Of a larger file, such as a tar of images, blocks at equal distances are hashed.
WHOLE_FILE, BLOCK, BLOCKS = 2**20, 2**16, 16
THREADS = 16
_CHUNK = 2**24

Fingerprint = dict[str, Any]
"""What strict JSON can hold: the same for the same data."""


def fingerprint_data(data: Any, *, everything: bool = False) -> Fingerprint | None:
    """Fingerprint of images, texts, a data set of tensors or batches in a list; None: of another kind.

    ``everything``: with a hash of all contents, however large.

    >>> data = ImageArrays(torch.zeros(4, 1, 2, 2).byte(), torch.tensor([0, 1, 0, 1]), ("cat", "dog"))
    >>> other = ImageArrays(torch.ones(4, 1, 2, 2).byte(), data.labels, data.class_names)
    >>> compare_fingerprints(fingerprint_data(data), fingerprint_data(other))
    ['image 0 has other content, and 3 more of the sample']
    """
    if isinstance(data, _Decoded | ShardStream):
        data = data.data
    if isinstance(data, ImageArrays):
        found = _tensors("image", [data.images], everything)
        return found | _labels(data.labels, data.class_names, data.targets)
    if isinstance(data, ImageFiles):
        found = _files(len(data), data.files.__getitem__, everything)
        return found | _labels(data.labels, data.class_names, data.targets)
    if isinstance(data, _FromDisk):
        found = _files(len(data), lambda row: Path(os.fsdecode(data.files[row])), everything)
        return found | _labels(data.labels, data.classes, data.targets)
    if isinstance(data, MultiLabelFiles):
        found = _files(len(data), data.file, everything)
        return found | _labels(torch.cat([data.labels, data.ends]), data.class_names)
    if isinstance(data, ShardedImages):
        names = (data.wnids, data.class_names, data.numbering)
        found = _files(len(data.shards), data.shards.__getitem__, everything)
        return found | {"examples": len(data), "labels": _sha(_json(names))}
    if isinstance(data, LabelledTexts):
        return _texts(data.texts) | _labels(data.labels, data.class_names, data.targets)
    if isinstance(data, TokenizedTexts):
        every = _sha_tensors([data.lengths, *data.tokens.values()])
        classes = map(str, range(data.num_classes))
        return {"examples": len(data), "all": every} | _labels(data.labels, classes, data.targets)
    if isinstance(data, Subset) and type(data.dataset) is TensorDataset:
        return _tensors("example", list(data.dataset.tensors), everything, torch.as_tensor(data.indices))
    if type(data) is TensorDataset:
        return _tensors("example", list(data.tensors), everything)
    if type(data) in (list, tuple):  # a subclass may do anything when it is iterated
        tensors = list(_nested(data))
        if tensors and all(isinstance(t, Tensor) and t.numel() for t in tensors):
            return {"examples": len(data), "all": _sha_tensors(tensors)}
    return None


def fingerprint_items(dataset: Any, reads: Callable[[int], Any]) -> Fingerprint | None:
    """Fingerprint of a sample of items; None where an item is not the same twice, or is no tensors.

    ``reads(i)`` reads item i, each time with other random numbers: random crops are no other data.
    """
    try:
        count = len(dataset)
        sample = []
        for row in _spread(count, SAMPLE):
            first, second = (_sha_tensors(list(_nested(reads(row)))) for _ in range(2))
            if first != second:
                return None
            sample.append([f"example {row}", first])
    except Exception:  # an item that cannot be read raises in the training, where its message belongs
        return None
    return {"examples": count, "sample": sample}


def compare_fingerprints(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences in words; what one of the two does not have is not compared."""
    found = []
    for key, words in (("examples", "examples"), ("shapes", "shapes"), ("bytes", "bytes")):
        if key in before and key in now and before[key] != now[key]:
            found.append(f"{words} {before[key]!r}, now {now[key]!r}")
    if not found:
        pairs = zip(before.get("sample", ()), now.get("sample", ()), strict=False)
        other = [str(new[0]) for old, new in pairs if old[1] != new[1]]
        more = f", and {len(other) - 1} more of the sample" if len(other) > 1 else ""
        found += [f"{other[0]} has other content{more}"] if other else []
    hashes = (("labels", "other labels or class names"), ("sizes", "files of other sizes"))
    found += [words for key, words in hashes if key in before and key in now and before[key] != now[key]]
    if not found and "all" in before and "all" in now and before["all"] != now["all"]:
        found.append("other content outside the sample")
    return found


# --- tensors --------------------------------------------------------------------------------------------


def _tensors(
    word: str, tensors: Sequence[Tensor], everything: bool, chosen: Tensor | None = None
) -> Fingerprint:
    """Fingerprint of tensors with one example in each row; ``chosen``: of these rows."""
    count = len(tensors[0]) if chosen is None else len(chosen)
    places = _spread(count, SAMPLE)
    rows = places if chosen is None else chosen[places].tolist()
    found = {
        "examples": count,
        "shapes": [[str(t.dtype).removeprefix("torch."), *t.shape[1:]] for t in tensors],
        "sample": [
            [f"{word} {place}", _sha_tensors([t[row] for t in tensors])]
            for place, row in zip(places, rows, strict=True)
        ],
    }
    if everything or sum(t[:1].numel() * count * t.element_size() for t in tensors) <= IN_MEMORY:
        found["all"] = _sha_tensors(tensors if chosen is None else [t[chosen] for t in tensors])
    return found


def _texts(texts: Sequence[str]) -> Fingerprint:
    return {
        "examples": len(texts),
        "sample": [[f"text {row}", _sha(_json(texts[row]))] for row in _spread(len(texts), SAMPLE)],
        "all": _sha(_json(texts)),
    }


def _labels(labels: Tensor, class_names: Iterable[str], targets: Tensor | None = None) -> Fingerprint:
    tensors = [labels] if targets is None else [labels, targets]
    return {"labels": _sha(_json([_sha_tensors(tensors), list(class_names)]))}


def _sha_tensors(tensors: Sequence[Any]) -> str:
    """SHA-256 of values, types and shapes of tensors and plain numbers; raises a TypeError for others."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if not isinstance(tensor, Tensor | np.ndarray | np.generic | bool | int | float | str):
            raise TypeError(f"{type(tensor).__name__} has no content that could be compared")
        if isinstance(tensor, str):
            digest.update(_json(tensor))
            continue
        values = tensor if isinstance(tensor, Tensor) else torch.as_tensor(tensor)
        digest.update(_json([str(values.dtype), list(values.shape)]))
        rows = max(1, _CHUNK // max(1, values[:1].numel())) if values.dim() else 1
        for part in values.detach().split(rows) if values.dim() else [values.detach()]:
            # As bytes: NumPy has no bfloat16.
            digest.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _nested(value: Any) -> Iterable[Any]:
    """Leaves of nested lists, tuples and dicts."""
    if isinstance(value, Mapping):
        value = [part for item in value.items() for part in item]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _nested(part)
    else:
        yield value


# --- files ----------------------------------------------------------------------------------------------


def _files(count: int, file: Callable[[int], Path], everything: bool) -> Fingerprint:
    """Fingerprint of ``file(0)`` … ``file(count - 1)``: sizes, and contents."""
    rows = _spread(count, count if everything else SIZES)
    sizes = _in_threads(lambda row: file(row).stat().st_size, rows)
    rows = _spread(count, SAMPLE)
    hashes = _in_threads(lambda row: _sha_of_parts(file(row)), rows)
    names = [f"{file(row).parent.name}/{file(row).name}" for row in rows]
    found = {
        "examples": count,
        "bytes": sum(sizes),
        "sizes": _sha(np.array(sizes, np.int64).tobytes()),
        "sample": [[name, each] for name, each in zip(names, hashes, strict=True)],
    }
    if everything:
        found["all"] = _sha(b"".join(_in_threads(lambda row: _sha_of_file(file(row)), range(count))))
    return found


def _in_threads(read: Callable[[int], Any], rows: Sequence[int]) -> list[Any]:
    """``[read(row) for row in rows]``, for file systems with a high latency."""
    size = max(1, min(1000, len(rows) // THREADS))  # a task for each of many small files would be slow
    parts = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(itertools.chain(*pool.map(lambda part: [read(row) for row in part], parts)))


def _sha_of_parts(file: Path) -> str:
    size = file.stat().st_size
    if size <= WHOLE_FILE:
        return _sha_of_file(file).hex()[:32]
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        for block in range(BLOCKS):
            handle.seek((size - BLOCK) * block // (BLOCKS - 1))
            digest.update(handle.read(BLOCK))
    return digest.hexdigest()[:32]


def _sha_of_file(file: Path) -> bytes:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").digest()


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` of the rows 0 … count − 1, at equal distances, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [place * (count - 1) // (most - 1) for place in range(most)]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
