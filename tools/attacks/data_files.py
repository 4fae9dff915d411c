"""Hostile data files, read by the public readers: forged, damaged, huge when expanded, or no files at all.

Each case makes its files in a folder of its own, outside the limits, and reads them inside. A case whose
files must be refused is silently wrong where they are read; a case that names what the files hold is silently
wrong where something else is read.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.attacks.harness import Result, Wrong, run_case

NAME = "data files"
SECONDS = 60.0
SMALL = {"train": 10, "test": 6}
"""Images of CIFAR's splits in these cases."""
MUTATIONS = 12
"""Random changes of a valid file, for each kind."""


@dataclass(frozen=True)
class Case:
    """Files to make, and how they are read."""

    kind: str
    name: str
    make: Callable[[Path], Any]
    read: Callable[[Path], Any]
    holds: Any = None
    """What a reader that accepts the files has to find; None: they must be refused."""
    any_content: bool = False
    """Whether the files may be refused or read as anything, as after a random change."""


def attack(seed: int, share: float, folder: Path) -> Iterator[Result]:
    """Run ``share`` of the cases, at least three of every kind."""
    draws = random.Random(seed)
    for kind, cases in _by_kind(draws).items():
        count = min(len(cases), max(3, round(share * len(cases))))
        for number, case in enumerate(sorted(draws.sample(cases, count), key=lambda case: case.name)):
            place = folder / f"{kind.replace(' ', '-')}-{number}"
            place.mkdir()
            case.make(place)
            yield run_case(NAME, f"{kind}: {case.name}", lambda: _read(case, place), seconds=SECONDS)  # noqa: B023
            shutil.rmtree(place)


def _read(case: Case, place: Path) -> None:
    from hetsngp.data.datasets import cifar

    cifar.SIZES.clear()
    cifar.SIZES.update(SMALL)
    found = case.read(place)
    if case.any_content:
        return
    if case.holds is None:
        raise Wrong("it was read")
    if not _same(found, case.holds):
        raise Wrong(f"it was read as {found!r:.100}")


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return np.array_equal(np.asarray(found), expected)
    return bool(found == expected)


def _by_kind(draws: random.Random) -> dict[str, list[Case]]:
    every = [
        *_pickles(),
        *_torch_files(),
        *_cifar_others(),
        *_arrays(),
        *_matlab(),
        *_images(),
        *_odd_paths(),
        *_shards(),
        *_lists(),
        *_tables(),
        *_parquet(),
        *_sheets(),
        *_label_files(),
        *_mutated(draws),
    ]
    kinds: dict[str, list[Case]] = {}
    for case in every:
        kinds.setdefault(case.kind, []).append(case)
    return kinds


def _file(name: str, content: bytes | Callable[[], bytes]) -> Callable[[Path], Any]:
    def make(place: Path) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content if isinstance(content, bytes) else content())

    return make


def _all(*makers: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda place: [make(place) for make in makers]


# --- pickles --------------------------------------------------------------------------------------------

DTYPE = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
STATE = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
EMPTY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
FOLDER = "cifar-10-batches-py"
PIXELS = np.arange(6 * 3072, dtype=np.uint64).astype(np.uint8).reshape(6, 3072)


def _python_2(
    dtype: bytes = DTYPE + STATE,
    shape: bytes = b"(K\x06M\x00\x0ct",
    content: bytes = b"T" + struct.pack("<I", PIXELS.size) + PIXELS.tobytes(),
    labels: bytes = b"](K\x00K\x01K\x02K\x03K\x04K\x05e",
) -> bytes:
    """A file as CIFAR's authors wrote it."""
    array = EMPTY + b"(K\x01" + shape + dtype + b"\x89" + content + b"tb"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + labels + b"u."


def _nested(key: bytes, levels: int = 12) -> bytes:
    """Keys and values of a dict, ``key`` last: a list of 10 lists of 10 lists of …, 10**12 values."""
    made = b"U\x01a](K\x01eq\x01"
    for level in range(2, levels + 2):
        name = key if level == levels + 1 else b"U\x01a"
        made += name + b"](" + (b"h" + bytes([level - 1])) * 10 + b"eq" + bytes([level])
    return made


def _pickles() -> Iterator[Case]:
    from hetsngp.data.datasets.cifar import load_cifar

    def read(place: Path) -> np.ndarray:
        data = load_cifar("cifar10", "test", place)
        return data.images.numpy().reshape(len(data), -1)

    meta = _file(f"{FOLDER}/batches.meta", pickle.dumps({"label_names": NAMES}, protocol=2))

    def case(name: str, content: bytes, holds: Any = None, **more: Any) -> Case:
        return Case("pickle", name, _all(meta, _file(f"{FOLDER}/test_batch", content)), read, holds, **more)

    yield case("as published", _python_2(), PIXELS)
    for protocol in (2, 3, 4, 5):
        record = {"data": PIXELS, "labels": list(range(6))}
        yield case(f"protocol {protocol}", pickle.dumps(record, protocol=protocol), PIXELS)
    forged = {
        "flags for object pointers": DTYPE + STATE[:-4] + b"K\x3ftb",
        "fields": DTYPE + b"(K\x03U\x01|N(U\x01at}U\x01a(U\x01bK\x00tsJ" + STATE[-13:],
        "subarray": DTYPE + b"(K\x03U\x01|(NK\x02tNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
        "subarray of itself": DTYPE + b"q\x00(K\x03U\x01|(h\x00(K\x02ttNN" + STATE[9:],
        "size": DTYPE + b"(K\x03U\x01|NNNM\xff\xffM\xff\xffK\x00tb",
        "byte order": DTYPE + STATE.replace(b"|", b"\xff"),
        "metadata": DTYPE + b"(K\x04U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00}tb",
        "objects": DTYPE.replace(b"u1", b"O8") + STATE.replace(b"K\x00tb", b"K\x3ftb"),
        "datetime": b"cnumpy\ndtype\n(U\x02M8K\x00K\x01tR" + STATE,
    }
    for name, dtype in forged.items():
        yield case(f"forged dtype, {name}", _python_2(dtype))
    for name, shape in {
        "10¹² rows": b"(\x8a\x08" + struct.pack("<q", 10**12) + b"M\x00\x0ct",
        "negative": b"(J\xfa\xff\xff\xffM\x00\x0ct",
        "64 dimensions": b"(" + 64 * b"K\x01" + b"t",
        "overflow": b"(\x8a\x09" + (2**64 + 6).to_bytes(9, "little") + b"M\x00\x0ct",
        "a list": b"]",
    }.items():
        yield case(f"shape, {name}", _python_2(shape=shape))
    for name, labels in {
        "lists of lists of lists": b"]" + _nested(b"U\x06labels"),
        "too large": b"](" + 6 * (b"\x8a\x20" + 32 * b"\x7f") + b"e",
        "texts": b"](" + 6 * b"U\x01a" + b"e",
        "negative": b"](" + 6 * b"J\xff\xff\xff\xff" + b"e",
        "too few": b"]",
        "itself": b"]q\x00(" + 6 * b"h\x00" + b"e",
    }.items():
        yield case(f"labels, {name}", _python_2(labels=labels))
    calls = {
        "os.system": b"cposix\nsystem\n",
        "eval": b"cbuiltins\neval\n",
        "getattr": b"cbuiltins\ngetattr\n",
    }
    calls |= {"numpy.load": b"cnumpy\nload\n", "ctypes": b"cctypes\nstring_at\n", "dtype": b"cnumpy\ndtype\n"}
    for name, code in calls.items():
        yield case(f"call of {name}", _python_2(labels=code + b"(U\x04exittR"))
    yield case("memo at 2³² − 1", b"\x80\x02}r\xff\xff\xff\xffs.")
    yield case("string of 4 GB", b"\x80\x02T\xff\xff\xff\xffabc.")
    yield case("bytes of 2⁶³", b"\x80\x04\x8e" + struct.pack("<Q", 2**63 - 1) + b"abc.")
    yield case("frame of 2⁶³", b"\x80\x04\x95" + struct.pack("<Q", 2**63 - 1) + b"}.")
    yield case("number of 2 GB", b"\x80\x02\x8b\xff\xff\xff\x7f\x01.")
    yield case("tuples, a million deep", b"\x80\x02})" + 10**6 * b"\x85" + b"K\x01s.")
    yield case("lists, a million deep", b"\x80\x02" + 10**6 * b"]" + (10**6 - 1) * b"a" + b".")
    yield case("ten million lists", b"\x80\x02(" + 10**7 * b"]" + b"l.")
    yield case("marks only", b"\x80\x02" + 10**6 * b"(")
    yield case("keys that collide", b"\x80\x02}(" + 10**5 * (b"\x8a\x08" + b"\x00" * 8 + b"N") + b"u.")
    yield case("a persistent id", b"\x80\x02U\x01aQ.")
    tower = b"\x80\x02}(" + _nested(b"U\x0blabel_names") + b"u."
    make = _all(_file(f"{FOLDER}/test_batch", _python_2()), _file(f"{FOLDER}/batches.meta", tower))
    yield Case("pickle", "names in a tower", make, read)


def _torch_files() -> Iterator[Case]:
    from hetsngp.data.datasets.human_labels import CIFAR10N_KEYS, load_cifar10n

    values = np.arange(SMALL["train"]) % 10
    content = dict.fromkeys(CIFAR10N_KEYS.values(), values)

    def read(place: Path) -> np.ndarray:
        return load_cifar10n(place)["worse"].numpy()

    def saved(value: Any, **options: Any) -> bytes:
        stream = io.BytesIO()
        torch.save(value, stream, **options)
        return stream.getvalue()

    def archive(*members: tuple[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", kind) as made:
            for name, data in members:
                made.writestr(name, data)
        return stream.getvalue()

    def case(name: str, data: bytes | Callable[[], bytes], holds: Any = None) -> Case:
        return Case("torch file", name, _file("CIFAR-10_human.pt", data), read, holds)

    yield case("as torch writes it", saved(content), values)
    yield case("as torch wrote it", saved(content, _use_new_zipfile_serialization=False), values)
    forged = pickle.dumps(content, protocol=2).replace(b"NNNJ", b"NN}J")
    yield case("forged dtype", archive(("a/data.pkl", forged)))
    yield case("a bomb", lambda: archive(("a/data.pkl", bytes(2**29 * 3))))
    yield case("a bomb in bzip2", lambda: archive(("a/data.pkl", bytes(2**28)), kind=zipfile.ZIP_BZIP2))
    yield case("no pickle", archive(("a/other", b"")))
    yield case("tuples as keys", archive(("a/data.pkl", b"\x80\x02})" + 10**6 * b"\x85" + b"Ns.")))
    yield case("a tensor of 10¹²", saved(torch.zeros(1).expand(3)))
    yield case("half", saved(content)[:500])
    yield case("code", b"\x80\x02cposix\nsystem\n(U\x04exittR.")


def _cifar_others() -> Iterator[Case]:
    """The binary files, and WebP strips with their index."""
    from hetsngp.data.datasets.cifar import load_cifar

    def read(place: Path) -> np.ndarray:
        return load_cifar("cifar10", "test", place).labels.numpy()

    def binary(name: str, data: bytes, names: bytes = "\n".join(NAMES).encode(), holds: Any = None) -> Case:
        folder = "cifar-10-batches-bin"
        make = _all(_file(f"{folder}/test_batch.bin", data), _file(f"{folder}/batches.meta.txt", names))
        return Case("cifar strips", f"binary, {name}", make, read, holds)

    records = b"".join(bytes([label]) + bytes(3072) for label in range(6))
    yield binary("as published", records, holds=np.arange(6))
    yield binary("half a record", records[:-1])
    yield binary("a label of 255", b"\xff" + records[1:])
    yield binary("no text", records, b"\xff\xfe")
    yield binary("no names", records, b"")
    head = "split,index,label,class_name,filename\n"
    rows = "".join(f"test,{i},{i},{NAMES[i]},a\n" for i in range(6))
    strip = _file("cifar10/test_00.webp", lambda: _encoded("WEBP", (32, 192), lossless=True))

    def index(
        name: str, text: str | bytes | Callable[[], bytes], holds: Any = None, pack: bool = True
    ) -> Case:
        def content() -> bytes:
            data = text() if callable(text) else text.encode() if isinstance(text, str) else text
            return gzip.compress(data, 1) if pack else data

        return Case("cifar strips", name, _all(strip, _file("cifar10/index.csv.gz", content)), read, holds)

    yield index("as it should be", head + rows, np.arange(6))
    yield index("a bomb of one field", lambda: head.encode() + bytes(2**30))
    yield index("a bomb of rows", lambda: head.encode() + 20_000_000 * b"a\n")
    yield index("a bomb of columns", 3_000_000 * "a," + "\n" + 1000 * "b\n")
    yield index("a label of 10³⁰⁰", head + rows.replace("test,5,5", "test,5," + "9" * 300))
    yield index("a negative label", head + rows.replace("test,5,5", "test,5,-1"))
    yield index("an index of 10³⁰⁰", head + rows.replace("test,5,5", f"test,{'9' * 300},5"))
    yield index("no header", rows)
    yield index("short rows", head + "test\n" * 6)
    yield index("no text", bytes(range(128, 256)))
    yield index("no archive", b"abc", pack=False)
    yield index("half an archive", gzip.compress((head + rows).encode())[:-9], pack=False)
    yield index("names that are paths", "split,label,class_name,row_in_strip\ntest,0,../../../etc/x,0\n")
    fifo = lambda place: ((place / "cifar10").mkdir(), os.mkfifo(place / "cifar10" / "index.csv.gz"))  # noqa: E731
    yield Case("cifar strips", "an index that is a pipe", fifo, read)


# --- arrays ---------------------------------------------------------------------------------------------


def _npy(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    text = header.encode("latin-1") + b"\n"
    size = struct.pack("<H", len(text)) if version == (1, 0) else struct.pack("<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text + data


def _head(shape: Any, descr: Any = "|u1", order: bool = False) -> str:
    return repr({"descr": descr, "fortran_order": order, "shape": shape})


def _npz(*members: tuple[str, bytes | Any], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", kind, compresslevel=1) as made:
        for name, data in members:
            with made.open(f"{name}.npy", "w") as file:
                if isinstance(data, bytes):
                    file.write(data)
                else:
                    np.save(file, data)
    return stream.getvalue()


def _zeros_npz(count: int) -> bytes:
    """An archive of ``count`` bytes of images that expands a thousandfold."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made,
        made.open("x.npy", "w", force_zip64=True) as file,
    ):
        file.write(_npy(_head((count // 64, 8, 8))))
        for _ in range(count // 2**20):
            file.write(bytes(2**20))
    return stream.getvalue()


def _arrays() -> Iterator[Case]:
    from hetsngp.data.datasets.cifar_c import open_cifar_c
    from hetsngp.data.datasets.human_labels import load_cifar10h
    from hetsngp.data.images.npz import load_npz
    from hetsngp.data.sources import open_images

    images, labels = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 1, 0])

    def read(place: Path) -> np.ndarray:
        return load_npz(place / "a.npz").labels.numpy()

    def case(name: str, data: bytes | Callable[[], bytes], holds: Any = None) -> Case:
        return Case("npz", name, _file("a.npz", data), read, holds)

    yield case("as it should be", _npz(("x", images), ("y", labels)), labels)
    by_column = _npy(_head((4, 8, 8), order=True), images.tobytes())
    yield case("by column", _npz(("x", by_column), ("y", labels)), labels)
    yield case("a label of 10⁹", _npz(("x", images), ("y", labels * 10**9)))
    yield case("a label of 2⁶³", _npz(("x", images), ("y", np.full(4, 2**63, np.uint64))))
    yield case("a negative label", _npz(("x", images), ("y", -labels)))
    yield case("3 GB of zeros", lambda: _zeros_npz(3 * 2**30))
    yield case("3 GB of zeros, 40 GB by the directory", lambda: _claimed(_zeros_npz(2**26), 40 * 2**30))
    for name, head in {
        "10¹² images": _head((10**12, 8, 8)),
        "overflow": _head((2**62, 2**62, 4)),
        "negative": _head((-4, 8, 8)),
        "objects": _head((4, 8, 8), "|O"),
        "fields": _head((4, 8, 8), [("a", "|O"), ("b", "|u1")]),
        "items of 2 GB": _head((4,), "|V2147483647"),
        "no items": _head((10**15,), "|V0"),
        "code": "__import__('os').system('true')",
        "a deep header": "(" * 5000 + ")" * 5000,
        "a shape of texts": "{'descr': '|u1', 'fortran_order': False, 'shape': ('a',)}",
    }.items():
        yield case(f"header, {name}", _npz(("x", _npy(head, images.tobytes())), ("y", labels)))
    yield case("long header", _npz(("x", _npy(" " * 10**7 + _head((4,)), version=(2, 0))), ("y", labels)))
    yield case("bzip2", lambda: _npz(("x", bytes(2**28)), ("y", labels), kind=zipfile.ZIP_BZIP2))
    yield case("lzma", lambda: _npz(("x", bytes(2**26)), ("y", labels), kind=zipfile.ZIP_LZMA))
    yield case("a pickle", pickle.dumps(images))
    yield case("pickled objects", _npz(("x", images), ("y", pickle.dumps([1]))))
    yield case("a single array", _npy(_head((4, 8, 8)), images.tobytes()))
    yield case("overlapping members", lambda: _overlapping(_npz(("x", images), ("y", labels))))
    names = _npz(("x", images), ("y", labels), ("class_names", np.zeros(2**21, "U1")))
    yield case("two million names", names)
    for split in ("train", "test"):
        data = _npz(("x_train", images), ("y_train", labels), ("x_test", images), ("y_test", labels * 10**9))
        reader = lambda place, split=split: open_images(str(place / "a.npz"), split)  # noqa: E731
        yield Case("npz", f"labels of {split}", _file("a.npz", data), reader)

    def corrupted(place: Path) -> Any:
        return open_cifar_c(place, "cifar10-c")["fog", 1].labels.numpy()

    def pair(name: str, fog: bytes, numbers: bytes, holds: Any = None) -> Case:
        make = _all(_file("CIFAR-10-C/fog.npy", fog), _file("CIFAR-10-C/labels.npy", numbers))
        return Case("npy", name, make, corrupted, holds)

    good, numbers = _npy(_head((10, 32, 32, 3)), bytes(10 * 3072)), _npy(_head((10,)), bytes(10))
    yield pair("as it should be", good, numbers, np.zeros(2, int))
    yield pair("images that are an archive", _npz(("x", images)), numbers)
    yield pair("labels that are an archive", good, _npz(("x", images)))
    yield pair("more than the file has", _npy(_head((10**9, 32, 32, 3))), numbers)
    yield pair("objects", _npy(_head((10,), "|O"), pickle.dumps([1])), numbers)
    yield pair("labels without end", good, _npy(_head((10**15,))))
    yield pair("labels of texts", good, _npy(_head((10,), "<U1"), bytes(40)))
    yield pair("a pickle", good, pickle.dumps([1]))

    def votes(name: str, data: bytes) -> Case:
        return Case("npy", f"votes, {name}", _file("cifar10h-counts.npy", data), load_cifar10h)

    yield votes("of another shape", _npy(_head((10**10, 10), "<f8")))
    yield votes("objects", _npy(_head((6, 10), "|O"), pickle.dumps([1])))
    yield votes("texts", _npy(_head((6, 10), "<U1"), bytes(240)))
    yield votes("not numbers", _npy(_head((6, 10), "<f8"), b"\xff" * 480))


def _claimed(data: bytes, size: int) -> bytes:
    """The archive, whose directory claims another expanded size for its first member."""
    at = data.index(b"PK\x01\x02")
    return data[: at + 24] + struct.pack("<I", min(size, 2**32 - 2)) + data[at + 28 :]


def _overlapping(data: bytes) -> bytes:
    """The archive, all of whose members begin at the same place."""
    parts = data.split(b"PK\x01\x02")
    return parts[0] + b"".join(b"PK\x01\x02" + part[:38] + bytes(4) + part[42:] for part in parts[1:])


def _matlab() -> Iterator[Case]:
    import scipy.io

    from hetsngp.data.datasets.svhn import load_svhn

    def mat(**arrays: Any) -> bytes:
        stream = io.BytesIO()
        scipy.io.savemat(stream, arrays, do_compression=True)
        return stream.getvalue()

    def element(kind: int, data: bytes) -> bytes:
        return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)

    def matrix(
        name: bytes, shape: tuple[int, ...], data: bytes, kind: int = 9, claim: int | None = None
    ) -> bytes:
        body = element(6, struct.pack("<II", kind, 0)) + element(5, struct.pack(f"<{len(shape)}i", *shape))
        body += element(1, name) + struct.pack("<II", 2, len(data) if claim is None else claim) + data
        packed = zlib.compress(struct.pack("<II", 14, min(len(body), 2**32 - 1)) + body, 1)
        return struct.pack("<II", 15, len(packed)) + packed

    head = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
    pixels, digits = np.zeros((32, 32, 3, 5), np.uint8), np.array([[1], [2], [3], [4], [10]])
    y = matrix(b"y", (5, 1), bytes([1, 2, 3, 4, 10]))

    def read(place: Path) -> np.ndarray:
        return load_svhn("test", place).labels.numpy()

    def case(name: str, data: bytes | Callable[[], bytes], holds: Any = None) -> Case:
        return Case("mat", name, _file("test_32x32.mat", data), read, holds)

    yield case("as published", mat(X=pixels, y=digits), np.array([1, 2, 3, 4, 0]))
    yield case("made here", head + matrix(b"X", (32, 32, 3, 5), bytes(15360)) + y, np.array([1, 2, 3, 4, 0]))
    cells = np.empty(1, object)
    cells[0] = pixels
    yield case("cells", mat(X=cells, y=digits))
    yield case("structures", mat(X={"a": pixels}, y=digits))
    yield case("texts", mat(X="abc", y=digits))
    yield case("10⁹ images", head + matrix(b"X", (32, 32, 3, 2**30), b"") + y)
    yield case("negative sides", head + matrix(b"X", (32, 32, 3, -5), bytes(15360)) + y)
    yield case("a claim of 4 GB", head + matrix(b"X", (32, 32, 3, 5), bytes(9), claim=2**32 - 8) + y)

    def bomb() -> bytes:
        """A variable of 5 images, and 3 GB of zeros in place of them."""
        body = element(6, struct.pack("<II", 9, 0)) + element(5, struct.pack("<4i", 32, 32, 3, 5))
        body += element(1, b"X") + struct.pack("<II", 2, 3 * 2**30)
        packer = zlib.compressobj(1)
        parts = [packer.compress(struct.pack("<II", 14, 2**31) + body)]
        parts += [packer.compress(bytes(2**20)) for _ in range(3 * 2**10)]
        packed = b"".join([*parts, packer.flush()])
        return head + struct.pack("<II", 15, len(packed)) + packed + y

    yield case("3 GB of zeros", bomb)
    nest = b"".join(
        struct.pack("<II", 14, 2**31 - 1) + element(6, struct.pack("<II", 1, 0)) for _ in range(10**5)
    )
    yield case("cells, 100,000 deep", head + nest)
    yield case("a function", head + matrix(b"X", (1, 1), b"", kind=16) + y)
    yield case("an object", head + matrix(b"X", (1, 1), b"", kind=3) + y)
    yield case("a sparse matrix", head + matrix(b"X", (2**30, 2**30), bytes(8), kind=5) + y)
    yield case("a later version", b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(1000))
    yield case("half", mat(X=pixels, y=digits)[:150])
    yield case("version 4", struct.pack("<5i", 50, 2**30, 2**30, 0, 2) + b"X\x00")
    yield case("nothing", b"")


# --- images ---------------------------------------------------------------------------------------------


def _encoded(kind: str, size: tuple[int, int], colour: Any = (10, 20, 30), **options: Any) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, kind, **options)
    return stream.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(
    width: int, height: int, *extra: bytes, data: bytes | None = None, depth: int = 8, kind: int = 0
) -> bytes:
    """A grey PNG of any claimed size; ``data`` None: white pixels."""
    head = struct.pack(">IIBBBBB", width & 0xFFFFFFFF, height & 0xFFFFFFFF, depth, kind, 0, 0, 0)
    rows = zlib.compress((b"\x00" + b"\xff" * width) * height, 1) if data is None else data
    body = _chunk(b"IHDR", head) + b"".join(extra) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _tiff(*tags: tuple[int, int, int, int], following: int = 0) -> bytes:
    """A TIFF of tags (number, type, count, value)."""
    rows = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\x00" + struct.pack("<IH", 8, len(tags)) + rows + struct.pack("<I", following) + bytes(64)


READ_BY_SOME = ("tiff that leads to itself",)
"""Images whose first frame is whole."""
WHITE = np.full((3, 24, 24), 255, np.uint8)


def _image_files() -> dict[str, tuple[str, bytes | Callable[[], bytes], Any]]:
    """Name → ending, content, and pixels of the crop where they are known."""
    zeros = zlib.compress(bytes(10**8), 9)
    colour = np.broadcast_to(np.array([10, 20, 30], np.uint8)[:, None, None], (3, 24, 24))
    text = b"comment\x00\x00" + zeros
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n%%EndComments\n(%pipe%touch mark) (w) file\n"
    small = (256, 3, 1, 4), (257, 3, 1, 4), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)
    huge = (256, 4, 1, 2**31 - 1), (257, 4, 1, 2**31 - 1), (258, 3, 1, 8), (259, 3, 1, 5), (262, 3, 1, 1)
    jpeg = _encoded("JPEG", (40, 30))
    start, bmp = jpeg.index(b"\xff\xc0"), "<IHHIIiiHHI"
    segment = b"\xff\xe2\x00\x09ABCDEFG"
    exif = b"\xff\xe1\x00\x16Exif\x00\x00II*\x00\xff\xff\xff\xff1234"
    several = b"\xff\xe2\x00\x16MPF\x00II*\x00\x08\x00\x00\x00\xff\xff1234"
    gif = (
        b"GIF89a"
        + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0)
        + b"\x2c"
        + struct.pack("<4HB", 0, 0, 9, 9, 0)
    )
    canvas = b"VP8X" + struct.pack("<I", 10) + b"\x02\x00\x00\x00" + b"\xfe\x3f\x00\xfe\x3f\x00"
    return {
        "png of 1 × 40,000": ("png", _png(1, 40_000), WHITE),
        "png of 40,000 × 1": ("png", _png(40_000, 1), WHITE),
        "png of 3 × 200,000": ("png", _png(3, 200_000), WHITE),
        "png of 1 × 2³¹": ("png", _png(1, 2**31 - 1, data=zeros), None),
        "png of 60,000 × 60,000": ("png", _png(60_000, 60_000, data=zeros), None),
        "png of 13,000 × 13,000": ("png", lambda: _png(13_000, 13_000), None),
        "png of 11,000 × 11,000": ("png", lambda: _png(11_000, 11_000), WHITE),
        "png of 0 × 0": ("png", _png(0, 0), None),
        "png with a comment of 100 MB": ("png", _png(30, 30, _chunk(b"zTXt", text)), WHITE),
        "png with 100 such": ("png", _png(30, 30, *[_chunk(b"zTXt", text)] * 100), WHITE),
        "png with a profile of 100 MB": ("png", _png(30, 30, _chunk(b"iCCP", text)), WHITE),
        "png with 200,000 comments": ("png", _png(30, 30, *[_chunk(b"tEXt", b"a\x00b")] * 200_000), WHITE),
        "png with too many pixels": ("png", _png(30, 30, data=zeros), np.zeros((3, 24, 24), np.uint8)),
        "png of 16 bits": ("png", _png(30, 30, data=zeros, depth=16), None),
        "png of an unknown kind": ("png", _png(30, 30, kind=9), None),
        "png, half": ("png", _png(300, 300)[:200], None),
        "eps": ("eps", eps, None),
        "eps as png": ("png", eps, None),
        "eps as jpg": ("jpg", eps, None),
        "pdf": ("png", b"%PDF-1.4\n", None),
        "svg": ("png", b"<svg xmlns='http://www.w3.org/2000/svg'/>", None),
        "wmf": ("png", b"\xd7\xcd\xc6\x9a" + bytes(200), None),
        "hdf5": ("png", b"\x89HDF\r\n\x1a\n" + bytes(99), None),
        "fits": ("png", b"SIMPLE  =                    T" + bytes(2880), None),
        "icns": ("png", b"icns" + struct.pack(">I", 2**31) + bytes(99), None),
        "psd": ("png", b"8BPS\x00\x01" + bytes(6) + struct.pack(">HIIHH", 3, 30_000, 30_000, 8, 3), None),
        "gif of 65,535 × 65,535": ("gif", gif, None),
        "gif of 2,000 frames": ("gif", _frames, np.full((3, 24, 24), 0, np.uint8)),
        "webp of 16,383 × 16,383": ("webp", b"RIFF" + struct.pack("<I", 22) + b"WEBP" + canvas, None),
        "webp, half": ("webp", _encoded("WEBP", (40, 30))[:40], None),
        "tiff of 2³¹ × 2³¹": ("tif", _tiff(*huge), None),
        "tiff that leads to itself": ("tif", _tiff(*small, (273, 4, 1, 74), following=8), None),
        "tiff with a tag of 4 GB": ("tif", _tiff(*small, (270, 2, 2**32 - 1, 8)), None),
        "tiff with 2³² strips": ("tif", _tiff(*small, (273, 4, 2**32 - 1, 8)), None),
        "tiff of tiles": ("tif", _tiff(*small, (322, 4, 1, 2**31 - 1), (323, 4, 1, 2**31 - 1)), None),
        "big tiff": ("tif", b"II+\x00\x08\x00\x00\x00" + struct.pack("<QQ", 2**62, 2**62), None),
        "bmp of 2³¹": ("bmp", b"BM" + struct.pack(bmp, 99, 0, 0, 54, 40, 2**31 - 1, 9, 1, 24, 0), None),
        "bmp of −2³¹": ("bmp", b"BM" + struct.pack(bmp, 99, 0, 0, 54, 40, 9, -(2**31), 1, 24, 0), None),
        "ppm of 10⁸ × 10⁸": ("ppm", b"P6 100000000 100000000 255\n", None),
        "ppm of 10³⁰": ("ppm", b"P6 " + b"9" * 30 + b" 9 255\n", None),
        "ppm without a size": ("ppm", b"P6 " + b"#" * 10**6, None),
        "ppm of text": ("ppm", b"P3 9 9 255\n" + b"9" * 10**6, None),
        "tga of 65,535 × 65,535": ("tga", b"\x00\x00\x02" + bytes(9) + b"\xff\xff\xff\xff\x18\x00", None),
        "jpeg of 65,535 × 65,535": ("jpg", jpeg[: start + 5] + b"\xff\xff\xff\xff" + jpeg[start + 9 :], None),
        "jpeg, half": ("jpg", jpeg[: len(jpeg) // 2], None),
        "jpeg with 5,000 segments": ("jpg", jpeg[:2] + 5000 * segment + jpeg[2:], colour),
        "jpeg with an odd EXIF": ("jpg", jpeg[:2] + exif + jpeg[2:], colour),
        "jpeg of several images": ("jpg", jpeg[:2] + several + jpeg[2:], colour),
        "zeros": ("png", bytes(10**6), None),
        "nothing": ("png", b"", None),
        "a page": ("jpg", b"<html>not found</html>", None),
    }  # fmt: skip


def _frames() -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    pictures = [Image.new("P", (30, 30), number % 2) for number in range(2000)]
    pictures[0].putpalette([0, 0, 0, 255, 255, 255])
    pictures[0].save(stream, "GIF", save_all=True, append_images=pictures[1:])
    return stream.getvalue()


def _images() -> Iterator[Case]:
    from hetsngp.data.images.decoding import Decoder
    from hetsngp.data.images.folders import scan_folder
    from hetsngp.data.preprocessing import Preprocessing
    from hetsngp.serving.predictions import image_files

    inputs = Preprocessing((24, 24), (0.0,) * 3, (1.0,) * 3, ("a", "b"), resize=28)

    def by_folder(place: Path) -> np.ndarray:
        return scan_folder(place).load(24, resize=28).images[0].numpy()

    def by_prediction(place: Path) -> np.ndarray:
        pixels = inputs.read(image_files(sorted((place / "class").iterdir())))[0]
        return (255 * pixels).round().byte().numpy()

    def by_decoder(place: Path) -> np.ndarray:
        (file,) = (place / "class").iterdir()
        pixels = Decoder(24, 28, train=False, mean=(0.0,) * 3, std=(1.0,) * 3)(file.read_bytes(), "sample 1")
        return (255 * pixels).round().byte().numpy()

    def by_training(place: Path) -> tuple[int, ...]:
        (file,) = (place / "class").iterdir()
        return tuple(Decoder(24, train=True)(file, "sample 1", seed=0).shape)

    readers = (by_folder, by_prediction, by_decoder)
    for number, (name, (ending, content, holds)) in enumerate(_image_files().items()):
        make = _file(f"class/a.{ending}", content)
        read = by_prediction if ending == "eps" else readers[number % 3]
        yield Case("image", name, make, read, holds, any_content=name in READ_BY_SOME)
        if name.startswith("png of") and holds is not None:
            yield Case("image", f"{name}, for training", make, by_training, (3, 24, 24))


def _odd_paths() -> Iterator[Case]:
    """What has the name of an image and is none, or no file at all."""
    from hetsngp.data.images.files import ImageFiles
    from hetsngp.data.images.folders import scan_folder
    from hetsngp.data.preprocessing import Preprocessing
    from hetsngp.serving.predictions import image_files

    inputs = Preprocessing((24, 24), (0.0,) * 3, (1.0,) * 3, ("a", "b"))

    def direct(place: Path) -> Any:
        return ImageFiles((place / "class" / "a.png",), torch.tensor([0]), ("a",)).load(24)

    def predicted(place: Path) -> Any:
        return inputs.read([place / "class" / "a.png"])

    def listed(place: Path) -> Any:
        return inputs.read(image_files([place / "class"]))

    def sparse(place: Path, ending: str = "png") -> None:
        with open(place / "class" / "a.png", "wb") as file:
            file.write(_png(30, 30)[:40] if ending == "png" else b"RIFF\x00\x00\x00\x7fWEBPVP8L")
            file.truncate(40 * 2**30)

    makers: dict[str, Callable[[Path], Any]] = {
        "a pipe": lambda place: os.mkfifo(place / "class" / "a.png"),
        "/dev/zero": lambda place: os.symlink("/dev/zero", place / "class" / "a.png"),
        "/dev/random": lambda place: os.symlink("/dev/random", place / "class" / "a.png"),
        "a link to itself": lambda place: os.symlink("a.png", place / "class" / "a.png"),
        "a link to nowhere": lambda place: os.symlink("nowhere", place / "class" / "a.png"),
        "a folder": lambda place: (place / "class" / "a.png").mkdir(),
        "a file of 40 GB": sparse,
        "a webp of 40 GB": lambda place: sparse(place, "webp"),
        "/proc/self/mem": lambda place: os.symlink("/proc/self/mem", place / "class" / "a.png"),
    }
    for name, make in makers.items():
        for how, read in {"given": direct, "predicted": predicted, "in a folder": listed}.items():
            yield Case("path", f"{name}, {how}", _all(lambda p: (p / "class").mkdir(), make), read)
    nested = lambda place: os.makedirs(place / "class" / "/".join("d" * 900))  # noqa: E731
    yield Case("path", "folders, 900 deep", nested, scan_folder)
    loop = _all(lambda p: (p / "class").mkdir(), lambda p: os.symlink(".", p / "class" / "loop"))
    yield Case("path", "a folder that contains itself", loop, scan_folder)


# --- shards ---------------------------------------------------------------------------------------------

WNIDS = ("n00000001", "n00000002")


def _tar(*members: tuple[str, bytes] | bytes, end: bool = True) -> bytes:
    stream = io.BytesIO()
    for member in members:
        if isinstance(member, bytes):
            stream.write(member)
            continue
        name, data = member
        info = tarfile.TarInfo(name)
        info.size = len(data)
        stream.write(info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512))
    return stream.getvalue() + (bytes(10240) if end else b"")


def _header(name: str, size: bytes | int, kind: bytes = b"0", tail: bytes = b"") -> bytes:
    """A header with any field of the size, and a checksum."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    block[124:136] = field.ljust(12, b"\0")
    block[386 : 386 + len(tail)] = tail
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def _shards() -> Iterator[Case]:
    from hetsngp.data.shards.streams import ShardedImages

    image = _encoded("PNG", (30, 30))

    def read(place: Path) -> list[list[float]]:
        data = ShardedImages(tuple(sorted(place.glob("*.tar"))), WNIDS)
        found = data.loader(8, 2, num_workers=0)
        return [row for _, y in found for row in y.tolist()]

    def case(
        name: str, data: bytes | Callable[[], bytes], holds: Any = None, *more: Callable[[Path], Any]
    ) -> Case:
        return Case("shard", name, _all(_file("a.tar", data), *more), read, holds)

    good = ("1.png", image), ("1.cls", b"n00000002")
    right = [[0.0, 1.0]]
    yield case("as it should be", _tar(*good), right)
    sparse = _header("2.png", 0, b"S", struct.pack("12s12s", b"00000000000", b"00000000000"))
    sizes = bytearray(sparse)
    sizes[483:495] = b"%011o\0" % (2**33 - 1)
    sizes[148:156] = b" " * 8
    sizes[148:156] = b"%06o\0 " % sum(sizes)
    yield case("a sparse member of 8 GB", _tar(bytes(sizes), ("2.cls", b"n00000001")))
    pax = b"".join(
        b"%d %s\n" % (len(text) + 4, text)
        for text in (b"GNU.sparse.major=0", b"GNU.sparse.minor=1", b"GNU.sparse.name=2.png")
    )
    pax += b"33 GNU.sparse.size=99999999999999\n" + b"23 GNU.sparse.map=0,0\n\n"
    yield case("a sparse member of PAX", _tar(_header("x", len(pax), b"x") + pax.ljust(512, b"\0"), *good))
    yield case("a size beyond the file", _tar(_header("1.png", 8**11 - 1), *good))
    yield case("a negative size", _tar(*good, _header("2.png", b"\xff" * 12), *good))
    yield case(
        "a size that leads back",
        _tar(*good, _header("2.png", b"\xff" + (-1024).to_bytes(11, "big", signed=True))),
    )
    yield case("a size of no digits", _tar(_header("1.png", b"zzzzzzzzzzz"), *good))
    yield case("a long name without end", _tar(_header("x", 8**11 - 1, b"L"), *good))
    yield case("PAX headers in a row", _tar(*[_header("x", 0, b"x")] * 5000, *good), right)
    yield case("a PAX header of digits", _tar(_header("x", 512, b"x") + b"9" * 512, *good), right)
    device = [
        _header(f"{number}.png", 0, kind) for number, kind in enumerate((b"1", b"2", b"3", b"4", b"6"), 5)
    ]
    yield case("links, devices and pipes", _tar(*device, *good), right)
    yield case("names that are paths", _tar(("../../1.png", image), ("../../1.cls", b"n00000002")), right)
    yield case("absolute names", _tar(("/etc/1.png", image), ("/etc/1.cls", b"n00000002")), right)
    yield case("half", _tar(*good)[:700])
    yield case("no end", _tar(*good, end=False))
    yield case("compressed", gzip.compress(_tar(*good)))
    yield case("nothing", b"")
    yield case("zeros", bytes(10**6))
    yield case("no samples", _tar(("readme", b"")))
    yield case("two images of one key", _tar(("1.png", image), ("1.png", image)))
    yield case("no label", _tar(("1.png", image)))
    for name, label in {
        "of 5,000 digits": b"9" * 5000,
        "of 10¹⁰⁰": b"1" + b"0" * 100,
        "negative": b"-1",
        "no text": b"\xff\xfe",
        "of 2 MB": b"n00000002 " * 200_000,
        "of another class": b"n99999999",
        "without a list": b"1",
        "empty": b"",
    }.items():
        yield case(f"label {name}", _tar(("1.png", image), ("1.cls", label)))
    for name, text in {
        "a list": b"[]",
        "deep": b"[" * 10**5,
        "deep labels": b'{"labels": ' + b"[" * 900 + b"]" * 900 + b"}",
        "of 2 MB": b'{"labels": [' + b"1," * 10**6 + b"1]}",
        "a number of 5,000 digits": b'{"label": ' + b"9" * 5000 + b"}",
        "NaN": b'{"label": NaN}',
        "a fraction": b'{"label": 0.5}',
        "names and values": b'{"labels": {"a": 1}}',
        "no JSON": b"{",
        "no text": b"\xff\xfe\x00",
    }.items():
        yield case(f"JSON, {name}", _tar(("1.png", image), ("1.json", text)))
    for name, counts in {
        "10¹⁸ samples": {"shards": {"a.tar": {"samples": 10**18, "bytes": len(_tar(*good))}}},
        "−5 samples": {"shards": {"a.tar": {"samples": -5, "bytes": len(_tar(*good))}}},
        "half a sample": {"shards": {"a.tar": {"samples": 0.5, "bytes": len(_tar(*good))}}},
        "a list": [],
    }.items():
        index = _file("hetsngp_index.json", json.dumps(counts).encode())
        yield case(f"index, {name}", _tar(*good), right, index)
    yield case("index, deep", _tar(*good), right, _file("hetsngp_index.json", b"[" * 10**5))
    yield case("index, a pipe", _tar(*good), right, lambda place: os.mkfifo(place / "hetsngp_index.json"))
    timm = {"splits": {"train": {"filenames": ["a.tar"], "shard_lengths": [10**30], "alt_label": None}}}
    yield case(
        "index of timm, 10³⁰ samples", _tar(*good), right, _file("_info.json", json.dumps(timm).encode())
    )
    timm["splits"]["train"]["shard_lengths"] = [7]
    yield case("index of timm, wrong", _tar(*good), None, _file("_info.json", json.dumps(timm).encode()))
    yield Case("shard", "a pipe", lambda place: os.mkfifo(place / "a.tar"), read)
    yield Case("shard", "/dev/zero", lambda place: os.symlink("/dev/zero", place / "a.tar"), read)


# --- lists and tables -----------------------------------------------------------------------------------


def _lists() -> Iterator[Case]:
    from hetsngp.data.datasets.imagenet21k import open_imagenet21k
    from hetsngp.data.datasets.places import open_places365

    image = _encoded("PNG", (30, 30))

    def places(place: Path) -> np.ndarray:
        return open_places365(place, "test").labels.numpy()

    def listed(name: str, pairs: bytes, categories: bytes = b"/a/x 0\n/b/y 1\n", holds: Any = None) -> Case:
        make = _all(
            _file("val_256/1.jpg", image),
            _file("places365_val.txt", pairs),
            _file("categories_places365.txt", categories),
        )
        return Case("list", f"places, {name}", make, places, holds)

    yield listed("as published", b"1.jpg 1\n", holds=np.array([1]))
    yield listed("a label of 10³⁰", b"1.jpg 1" + b"0" * 30)
    yield listed("a label of 5,000 digits", b"1.jpg " + b"9" * 5000)
    yield listed("a negative label", b"1.jpg -1")
    yield listed("a path out of the folder", b"../../1.jpg 1")
    yield listed("no text", b"\xff\xfe\x00 1")
    yield listed("zeros", bytes(10**6))
    yield listed("no number", b"1.jpg")
    yield listed("a gap in the categories", b"1.jpg 1\n", b"/a/x 0\n/b/y 1000000000\n")
    yield listed("categories of 10³⁰", b"1.jpg 1\n", b"/a/x 0\n/b/y " + b"9" * 30)

    def several(place: Path) -> list[int]:
        return list(open_imagenet21k(place, "train", classes=WNIDS).labels_of(0).tolist())

    def csv_file(name: str, content: bytes, holds: Any = None) -> Case:
        base = "imagenet21k"
        make = _all(_file(f"{base}/n00000001/a.png", image), _file(f"{base}/labels.csv", content))
        return Case("list", f"labels.csv, {name}", make, several, holds)

    yield csv_file("as it should be", b"n00000001/a.png,n00000001 n00000002\n", [0, 1])
    yield csv_file("one field of 10 MB", b"n00000001/a.png," + b"n" * 10**7)
    yield csv_file("a million columns", b"n00000001/a.png" + b",n00000001" * 10**6, [0])
    yield csv_file("a quote without end", b'"n00000001/a.png' + b"\n" * 10**6)
    yield csv_file("no text", b"n00000001/a.png,\xff\xfe")
    yield csv_file("zeros", bytes(1000))
    yield csv_file("a path out of the folder", b"../../etc/a.png,n00000001")
    yield csv_file("an absolute path", b"/etc/a.png,n00000001")
    yield csv_file("nothing", b"")


def _tables() -> Iterator[Case]:
    from hetsngp.data.tables import load_table

    def case(name: str, file: str, data: bytes | Callable[[], bytes], holds: Any = None, **more: Any) -> Case:
        def read(place: Path) -> np.ndarray:
            return load_table(place / file, "y").y.numpy()

        return Case("table", name, _file(file, data), read, holds, **more)

    def bounded(name: str, file: str, data: Callable[[], bytes]) -> Case:
        """A bomb of 40 MiB, and a limit of 32 MiB to save time."""

        def read(place: Path) -> Any:
            os.environ["HETSNGP_MAX_TABLE_BYTES"] = str(32 * 2**20)
            return load_table(place / file, "y")

        return Case("table", name, _file(file, data), read)

    rows = b"x,y\n" + b"1,a\n2,b\n" * 5
    labels = np.array([0, 1] * 5)
    packers: dict[str, Callable[[bytes], bytes]] = {
        "gz": lambda data: gzip.compress(data, 1),
        "bz2": bz2.compress,
        "xz": lambda data: lzma.compress(data, preset=0),
        "zip": _zipped,
    }
    bombs: dict[str, Callable[[], bytes]] = {
        "one field": lambda: b"x,y\n" + bytes(40 * 2**20),
        "empty rows": lambda: b"x,y\n" + b"\n" * (40 * 2**20),
        "a header": lambda: b"x" * (40 * 2**20),
        "rows": lambda: b"x,y\n" + b"1,a\n" * (10 * 2**20),
    }
    for ending, pack in packers.items():
        yield case(f"{ending}, as it should be", f"a.csv.{ending}", pack(rows), labels)
        yield case(f"{ending}, half", f"a.csv.{ending}", pack(rows)[:-12])
        yield case(f"{ending}, no archive", f"a.csv.{ending}", rows)
        for name, bomb in bombs.items():
            if name in ("rows", "empty rows") and ending != "gz":  # seconds each
                continue
            made = lambda pack=pack, bomb=bomb: pack(bomb())  # noqa: E731
            yield bounded(f"{ending}, a bomb of {name}", f"a.csv.{ending}", made)
    yield case("gz, 1.2 GB of zeros", "a.csv.gz", lambda: gzip.compress(b"x,y\n" + bytes(1200 * 2**20), 1))
    yield case("zip, two files", "a.csv.zip", _zipped(rows, b"x"))
    yield case("zip, bzip2 inside", "a.csv.zip", lambda: _zipped(bytes(2**28), kind=zipfile.ZIP_BZIP2))
    wide = b",".join(b"c%d" % number for number in range(10**6))
    yield case("a million columns", "a.csv", wide + b",y\n" + b"1," * 10**6 + b"a\n")
    yield case("a field of 50 MB", "a.csv", b"x,y\n" + b"9" * (50 * 2**20) + b",a\n1,b\n", any_content=True)
    yield case("numbers of 5,000 digits", "a.csv", b"x,y\n" + b"9" * 5000 + b",a\n1,b\n", any_content=True)
    yield case("numbers beyond float32", "a.csv", b"x,y\n1e300,a\n1,b\n")
    yield case("infinite numbers", "a.csv", b"x,y\ninf,a\n1,b\n")
    yield case("a quote without end", "a.csv", b'x,y\n"1,a\n' + b"2,b\n" * 10**5)
    yield case("two columns of one name", "a.csv", b"x,x,y\n1,2,a\n3,4,b\n", np.array([0, 1]))
    yield case("rows of many fields", "a.csv", b"x,y\n" + b"1," * 10**5 + b"a\n")
    yield case("no text", "a.csv", b"\xff\xfe\x00\x01" * 100)
    yield case("zeros", "a.csv", bytes(10**6))
    yield case("nothing", "a.csv", b"")
    yield case("only a header", "a.csv", b"x,y\n")
    yield case("formulas", "a.csv", b"x,y\n=1+1,a\n=cmd|'/C calc'!A0,b\n", np.array([0, 1]))
    yield Case("table", "a pipe", lambda p: os.mkfifo(p / "a.csv"), lambda p: load_table(p / "a.csv", "y"))
    zero = lambda place: os.symlink("/dev/zero", place / "a.csv")  # noqa: E731
    yield Case("table", "/dev/zero", zero, lambda place: load_table(place / "a.csv", "y"))


def _zipped(*members: bytes, kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", kind, compresslevel=1) as made:
        for number, member in enumerate(members):
            made.writestr(f"{number}.csv", member)
    return stream.getvalue()


def _parquet() -> Iterator[Case]:
    import pyarrow
    import pyarrow.parquet

    from hetsngp.data.tables import load_table

    def written(table: Any, **options: Any) -> bytes:
        stream = io.BytesIO()
        pyarrow.parquet.write_table(table, stream, **options)
        return stream.getvalue()

    def case(
        name: str, data: bytes | Callable[[], bytes], holds: Any = None, small_limit: bool = False
    ) -> Case:
        def read(place: Path) -> np.ndarray:
            if small_limit:  # to save time
                os.environ["HETSNGP_MAX_TABLE_FIELDS"] = str(2**20)
            return load_table(place / "a.parquet", "y").y.numpy()

        return Case("parquet", name, _file("a.parquet", data), read, holds)

    def repeated(text: str, count: int) -> Any:
        indices = pyarrow.array(np.zeros(count, np.int32))
        return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([text]))

    y = pyarrow.array(["a", "b"] * 5)
    good = pyarrow.table({"x": np.arange(10.0), "y": y})
    yield case("as it should be", written(good), np.array([0, 1] * 5))
    long = lambda: written(pyarrow.table({"x": repeated("z" * 2**20, 10_000), "y": repeated("a", 10_000)}))  # noqa: E731
    yield case("10,000 × 1 MB", long)
    rows = lambda: written(pyarrow.table({"x": repeated("z", 10**7), "y": repeated("a", 10**7)}))  # noqa: E731
    yield case("10⁷ rows", rows, small_limit=True)
    wide = lambda: written(pyarrow.table({f"c{number}": [1] for number in range(40_000)}))  # noqa: E731
    yield case("40,000 columns", wide)
    lists = pyarrow.array([[1, 2]] * 10)
    yield case("lists", written(pyarrow.table({"x": lists, "y": y})))
    big = lambda: written(pyarrow.table({"x": pyarrow.array([np.zeros(10**7, np.int8)]), "y": ["a"]}))  # noqa: E731
    yield case("a list of 10⁷", big, small_limit=True)
    plain = written(good)
    yield case("half", plain[: len(plain) // 2])
    yield case("only the end", plain[-200:])
    yield case("a footer of 2 GB", plain[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1")
    yield case("nothing", b"")
    yield case("no Parquet", b"PAR1" + bytes(1000) + b"PAR1")


def _sheets() -> Iterator[Case]:
    """Contact sheets and tables of predictions with hostile names."""
    from hetsngp.serving.contact_sheet import draw_contact_sheet
    from hetsngp.serving.output import as_json, as_text
    from hetsngp.serving.predictions import PredictionRecord

    names = {
        "formulas": "a$\\frac{$b^{$.png",
        "dollars": "$$.png",
        "line breaks": "a\n\r\x1b[31m.png",
        "zeros": "a\x00b.png",
        "half a letter": "a\udcff.png",
        "long": "a" * 10**6,
        "right to left": "\u202egnp.exe",
    }
    for name, text in names.items():

        def draw(place: Path, text: str = text) -> bool:
            numbers = {"data_uncertainty": 0.1, "model_uncertainty": 0.2, "ood_score": 0.3}
            record = PredictionRecord(
                text, text, 0.5, **numbers, verdict="confident", text=text, top=((text, 0.5),), given=text
            )
            draw_contact_sheet([record], [torch.zeros(3, 8, 8).byte()], place / "sheet.png")
            lines = list(as_text([record]))
            return len(lines) == 2 and json.loads(as_json(record))["name"] == text

        yield Case("sheet", name, lambda place: None, draw, True)


# --- corrected labels -----------------------------------------------------------------------------------


def _label_files() -> Iterator[Case]:
    from safetensors.torch import load, save

    from hetsngp.data.label_files import CORRECTED, LABELS, LabelFile, read_labels
    from hetsngp.files import with_checksum

    def read(place: Path) -> list[int]:
        found: list[int] = read_labels(place).labels.tolist()
        return found

    def alone(place: Path) -> list[int]:
        found: list[int] = read_labels(place / CORRECTED, ("cat", "dog")).labels.tolist()
        return found

    def write(place: Path, about: Any = None, tensors: Any = None) -> None:
        file = LabelFile(("0", "1"), ("cat", "dog"), torch.tensor([0, 1]), torch.eye(2).flip(0)).write(place)
        written = load(file.read_bytes())
        content = json.loads(written["about"].numpy().tobytes())
        content = with_checksum({**content, **about}) if isinstance(about, dict) else about
        tensors = dict(tensors or {})
        if about is not None:
            text = content if isinstance(content, bytes) else json.dumps(content).encode()
            tensors["about"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        file.write_bytes(save({**written, **tensors}))

    yield Case("labels", "as written", write, read, [1, 0])
    forged: dict[str, Any] = {
        "names of numbers": {"names": [0, 1]},
        "too few names": {"names": ["0"]},
        "names that are none": {"names": None},
        "classes of one name": {"class_names": ["cat", "cat"]},
        "another version": {"version": 10**400},
        "a deep list": b"[" * 100_000,
        "a number of 10,000 digits": b"9" * 10_000,
        "no JSON": b"\xff\xfe",
        "a list": b"[1, 2]",
    }
    for name, about in forged.items():
        yield Case("labels", name, lambda place, about=about: write(place, about), read)
    changed: dict[str, dict[str, torch.Tensor]] = {
        "targets that are NaN": {"targets": torch.full((2, 2), torch.nan)},
        "targets of three dimensions": {"targets": torch.ones(2, 2, 1)},
        "targets of other numbers": {"targets": torch.eye(2)},
        "labels out of range": {"given": torch.tensor([0, 2**40])},
        "labels that are no numbers": {"given": torch.zeros(2)},
        "a description of no dimension": {"about": torch.tensor(3)},
        "a description of other numbers": {"about": torch.zeros(9).bfloat16()},
        "a choice of no example": {"kept": torch.ones(3).bool()},
    }
    for name, tensors in changed.items():
        yield Case("labels", name, lambda place, tensors=tensors: write(place, tensors=tensors), read)
    for target, name in ((LABELS, "labels"), (CORRECTED, "choices")):
        reader = read if target == LABELS else alone
        yield Case(
            "labels", f"{name}: a pipe", lambda place, target=target: os.mkfifo(place / target), reader
        )
        zero = lambda place, target=target: os.symlink("/dev/zero", place / target)  # noqa: E731
        yield Case("labels", f"{name}: /dev/zero", zero, reader)
        yield Case(
            "labels", f"{name}: a folder", lambda place, target=target: (place / target).mkdir(), reader
        )
    head = b"index,given_label,label,source\n"
    yield Case(
        "labels", "choices", _file(CORRECTED, head + b"0,cat,dog,person\n1,dog,,given\n"), alone, [1, 1]
    )
    for name, lines in {
        "no lines": b"",
        "an unknown class": b"0,cat,cow,person\n",
        "a field of a megabyte": b"0,cat," + b"c" * 2**20 + b",person\n",
        "an open quote": b'0,cat,"dog,person\n1,dog,dog,given\n',
        "zero bytes": bytes(1000),
        "no UTF-8": b"0,cat,d\xf6g,person\n",
        "an example twice": b"0,cat,dog,person\n0,cat,cat,person\n",
    }.items():
        yield Case("labels", f"choices: {name}", _file(CORRECTED, head + lines), alone)


# --- random changes -------------------------------------------------------------------------------------


def _mutated(draws: random.Random) -> Iterator[Case]:
    """Valid files with a few bytes changed, cut out or repeated."""
    valid: dict[str, Case] = {}
    makers = (
        _pickles,
        _torch_files,
        _arrays,
        _matlab,
        _shards,
        _tables,
        _parquet,
        _cifar_others,
        _label_files,
    )
    for make in makers:
        first = next(make())
        valid[first.kind] = first
    for kind, case in valid.items():
        for number in range(MUTATIONS):
            seed = draws.randrange(2**32)

            def change(place: Path, case: Case = case, seed: int = seed) -> None:
                case.make(place)
                files = sorted(file for file in place.rglob("*") if file.is_file())
                _change(random.Random(seed), files[-1])

            yield Case(kind, f"random change {number}", change, case.read, any_content=True)
    pictures = [
        (kind, _encoded(kind, (40, 30)))
        for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "TGA")
    ]
    for kind, content in pictures:
        for number in range(MUTATIONS):
            seed = draws.randrange(2**32)

            def alter(place: Path, content: bytes = content, seed: int = seed) -> None:
                (place / "a.png").write_bytes(content)
                _change(random.Random(seed), place / "a.png")

            yield Case("image", f"{kind}, random change {number}", alter, _read_one, any_content=True)


def _read_one(place: Path) -> Any:
    from hetsngp.data.images.files import read_image

    return read_image(place / "a.png", 24, 28)


def _change(draws: random.Random, file: Path) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(draws.choice((1, 1, 2, 5, 20))):
        at = draws.randrange(max(1, len(content)))
        kind = draws.randrange(4)
        if kind == 0:
            content[at : at + 1] = bytes([draws.randrange(256)])
        elif kind == 1:
            content[at : at + 4] = draws.choice((b"\xff\xff\xff\xff", bytes(4), b"\xff\xff\xff\x7f"))
        elif kind == 2:
            del content[at : at + draws.randrange(1, 40)]
        else:
            content[at:at] = content[at : at + draws.randrange(1, 40)]
    file.write_bytes(bytes(content))
