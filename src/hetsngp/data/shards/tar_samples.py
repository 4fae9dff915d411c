"""Samples in tar files as WebDataset names them: members that follow one another and share a key.

``n01440764_10026.jpg`` and ``n01440764_10026.cls`` are a sample; its key is the name up to the first dot.
Nothing is unpacked to disk; of skipped samples only the headers are read.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hetsngp.data.bounded import check_regular
from hetsngp.data.datasets.synsets import WNID
from hetsngp.limits import IMAGE_BYTES, LABEL_BYTES, Limit

KINDS = ("jpg", "jpeg", "png", "webp")
_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")
_WNID_FILE = re.compile(rf"(?:.*/)?({WNID.pattern})[_/][^/]*")
_BLOCK = 512
FORGED = (ArithmeticError, LookupError, TypeError, ValueError, RecursionError, MemoryError)
"""Errors of tarfile on headers that no program writes."""
LONGEST_NUMBER = 18
"""Digits of a class number in a text."""
_NUMBERING = (
    "give that list, hetsngp.data.datasets.imagenet21k.open_imagenet21k(root, split, numbering=…), where … "
    "is 'imagenet22k' (the 21,841 of 2011, as timm's shards), 'imagenet21k' (the 21,843) or a list of wnids"
)


@dataclass(frozen=True)
class Sample:
    """Encoded image, and its classes in increasing order."""

    shard: Path
    key: str
    image: bytes
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Labeller:
    """Reader of the classes of a sample, from the files beside its image.

    The first of these that is there: "wnids" or "labels" in its .json, its .cls, "wnid", "label" or
    "class_name" in its .json. Each is a wnid or a number, a list of them, or several in a text.

    A number is an index into a list of classes that the shards do not contain; a wnid is unambiguous. So
    where a single number comes with a wnid in the .json, as in timm's shards, the wnid decides. Where it
    comes with a file name that has a wnid (the key, or "filename" in the .json), the two must agree. Other
    numbers are an error unless ``numbering`` gives their list.
    """

    label_of: Mapping[str, int]
    """Label of each wnid."""
    numbering: tuple[str, ...] | None = None
    """List of wnids that numbers index. None: not given; numbers that a wnid confirms index ``label_of``."""

    def __call__(self, key: str, cls: bytes | None, meta: bytes | None) -> tuple[int, ...]:
        """Classes of the sample; errors do not name the sample."""
        about = {} if meta is None else _parse(meta)
        sources = [about.get("wnids"), about.get("labels"), None if cls is None else _text(cls)]
        sources += [about.get(name) for name in ("wnid", "label")]
        given = _wnid(about.get("wnid")) or _wnid(about.get("class_name"))
        found = next(
            (list(_tokens(source)) for source in sources if source is not None), [given] if given else []
        )
        if not found:
            raise ValueError(
                "it has no label: write key.cls with a class number or wnid, several with spaces between, or "
                "key.json with 'labels' or 'wnids', right after the image in the tar file"
            )
        if given and len(found) == 1 and _number(found[0]) is not None:
            return (self._label(given),)
        hint = given or _wnid_of(about.get("filename")) or _wnid_of(key)
        names = {self._name(token, hint if len(found) == 1 else None) for token in found}
        if hint and hint not in names and not all(map(_wnid, found)):
            raise ValueError(
                f"its label {' '.join(map(str, found))} means {', '.join(sorted(names))}, but its name or "
                f".json says {hint}: its numbers index another list of classes; {_NUMBERING}, or write "
                "wnids for numbers"
            )
        return tuple(sorted(self._label(name) for name in names))

    def _name(self, token: Any, hint: str | None) -> str:
        """Wnid of a token; ``hint``: the wnid that a number should mean."""
        wnid = _wnid(token)
        if wnid:
            return wnid
        number = _number(token)
        if number is None:
            raise ValueError(f"its label {token!r} is neither a class number nor a wnid such as n01440764")
        if self.numbering is None and hint is None:
            raise ValueError(
                f"its label is the number {token}, and nothing says in which list of classes: {_NUMBERING}; "
                "or write a wnid such as n01440764 into its .cls or .json"
            )
        if not 0 <= number < len(self._numbering):
            raise ValueError(
                f"its class number {token} is not in 0 … {len(self._numbering) - 1}: it indexes another list "
                f"of classes; {_NUMBERING}"
            )
        return self._numbering[number]

    @cached_property
    def _numbering(self) -> tuple[str, ...]:
        return tuple(self.label_of) if self.numbering is None else self.numbering

    def _label(self, wnid: str) -> int:
        if wnid not in self.label_of:
            raise ValueError(
                f"its class {wnid} is none of the {len(self.label_of)} classes: leave such samples out of "
                "the shards, or give a list of classes that has it"
            )
        return self.label_of[wnid]


def read_samples(
    shard: Path, labeller: Labeller, begin: int = 0, end: int | None = None, *, expected: int | None = None
) -> Iterator[Sample]:
    """Read samples ``begin`` … ``end`` − 1 of a shard.

    It is an error if a shard read to its end does not have ``expected`` samples.
    """
    number = 0
    with _opened(shard) as tar:
        for key, parts in _groups(tar, shard):
            image = _image_of(parts)
            if image is None:
                continue
            if begin <= number and (end is None or number < end):
                cls, meta = (_read(tar, parts.get(kind), LABEL_BYTES) for kind in ("cls", "json"))
                try:
                    labels = labeller(key, cls, meta)
                except ValueError as error:
                    raise ValueError(f"sample {key!r} of {shard} cannot be used: {error}") from error
                data = _read(tar, image, IMAGE_BYTES)
                assert data is not None
                yield Sample(shard, key, data, labels)
            number += 1
            if end is not None and number >= end and end != expected:
                return
    if expected is not None and number != expected:
        raise ValueError(
            f"{shard} has {number} samples where {expected} were counted before: it was changed since; "
            "remove the counts beside it (hetsngp_index.json, or _info.json where there is one)"
        )


def count_samples(shard: Path) -> int:
    """Number of samples of a shard, by the names of its members alone."""
    with _opened(shard) as tar:
        return sum(_image_of(parts) is not None for _, parts in _groups(tar, shard))


def _groups(tar: tarfile.TarFile, shard: Path) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Samples of a shard: key and members by ending."""
    current = ""
    parts: dict[str, tarfile.TarInfo] = {}
    while (member := _next(tar)) is not None:
        name = _NAME.fullmatch(member.name)
        if name is None or not member.isreg():
            continue
        key, kind = name[1], name[2].lower()
        if key != current:
            if parts:
                yield _checked(current, parts, shard)
            current, parts = key, {}
        if kind in parts:
            raise ValueError(
                f"sample {key!r} of {shard} has two members .{kind}: give each sample its own key"
            )
        parts[kind] = member
    if parts:
        yield _checked(current, parts, shard)
    # tarfile takes an invalid header for the end; the true end is a block of zeros.
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(_BLOCK) != bytes(_BLOCK):
        raise tarfile.ReadError(f"no end of the archive after {tar.offset} bytes")


def _next(tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    """Next member; tarfile keeps those before, which nothing needs."""
    tar.members.clear()  # type: ignore[attr-defined]
    try:
        member = tar.next()
    except FORGED as error:
        raise tarfile.ReadError(f"an invalid header, {error!r:.100}") from error
    # A negative size, which may lead back to a member before.
    if member is not None and (member.size < 0 or tar.offset <= member.offset):
        raise tarfile.ReadError(f"a member of {member.size} bytes")
    return member


def _checked(
    key: str, parts: dict[str, tarfile.TarInfo], shard: Path
) -> tuple[str, dict[str, tarfile.TarInfo]]:
    if _image_of(parts) is not None:
        return key, parts
    dotted = next((kind for kind in parts if kind.rpartition(".")[2] in KINDS), None)
    if dotted:
        raise ValueError(
            f"{key}.{dotted} in {shard} has a dot before its ending, and the key of a sample ends at the "
            "first dot: write the shards again with another sign for it, such as _"
        )
    if "cls" in parts:
        raise ValueError(
            f"sample {key!r} of {shard} has a label and no image (.{', .'.join(KINDS)}): the "
            "members of a sample must follow one another in the tar file"
        )
    return key, parts


def _image_of(parts: Mapping[str, tarfile.TarInfo]) -> tarfile.TarInfo | None:
    return next((parts[kind] for kind in KINDS if kind in parts), None)


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo | None, limit: Limit) -> bytes | None:
    """Content of a member; a sparse one has its size by its header, not by the bytes in the file."""
    if member is None:
        return None
    limit.check(member.size, f"{member.name!r} of {tar.name!r}")
    try:
        stream = tar.extractfile(member)
        return None if stream is None else stream.read()
    except (*FORGED, AttributeError) as error:
        raise tarfile.ReadError(f"an invalid member, {error!r:.100}") from error


@contextmanager
def _opened(shard: Path) -> Iterator[tarfile.TarFile]:
    """Open a tar file; errors in reading it name it."""
    try:
        check_regular(shard)
        with _open_tar(shard) as tar:
            yield tar
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no file {shard} any more: open the data set again") from error
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(
            f"{shard} is no whole tar file ({error}): it was cut off, damaged, or is compressed; copy it "
            "again, or unpack it with gunzip"
        ) from error


def _open_tar(shard: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(shard, "r:")  # reads the first header
    except FORGED as error:
        raise tarfile.ReadError(f"an invalid header, {error!r:.100}") from error


def _parse(meta: bytes) -> dict[str, Any]:
    try:
        about = json.loads(meta)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its .json cannot be read ({error}): write it again") from error
    if not isinstance(about, dict):
        raise ValueError(f"its .json holds a {type(about).__name__} where names and values were expected")
    return about


def _text(cls: bytes) -> str:
    try:
        return cls.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"its .cls is no text ({error}): write class numbers or wnids") from error


def _tokens(source: Any) -> Iterator[Any]:
    """Wnids and numbers of a text, or of a list of them."""
    for entry in source if isinstance(source, list) else [source]:
        if isinstance(entry, list | dict):
            raise ValueError("its labels are a list in a list, or names and values: write one list")
        yield from entry.replace(",", " ").split() if isinstance(entry, str) else [entry]


def _number(token: Any) -> int | None:
    if isinstance(token, str) and token.isdecimal() and len(token) <= LONGEST_NUMBER:
        return int(token)
    return token if isinstance(token, int) and not isinstance(token, bool) else None


def _wnid_of(file: Any) -> str | None:
    """Wnid at the beginning of the name of a file, or of its folder."""
    found = _WNID_FILE.fullmatch(file) if isinstance(file, str) else None
    return found and found[1]


def _wnid(value: Any) -> str | None:
    return value if isinstance(value, str) and WNID.fullmatch(value) else None
