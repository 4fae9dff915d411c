"""Files that ask for more than they have, or are no files: refused with a line, or read within the limits."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.data.test_image_data import python2_pickle
from tests.unit.small_sets import make_cifar_small, random_bytes, write_image, write_svhn

from hetsngp.data.bounded import buffered
from hetsngp.data.datasets import cifar
from hetsngp.data.datasets.cifar import load_cifar
from hetsngp.data.datasets.cifar_c import open_cifar_c
from hetsngp.data.datasets.human_labels import CIFAR10N_KEYS, load_cifar10n
from hetsngp.data.datasets.svhn import load_svhn
from hetsngp.data.images import decoding
from hetsngp.data.images.decoding import open_picture, resize_and_center_crop
from hetsngp.data.images.files import ImageFiles, read_image
from hetsngp.data.images.folders import scan_folder
from hetsngp.data.images.npz import load_npz
from hetsngp.data.preprocessing import Preprocessing
from hetsngp.data.shards.streams import ShardedImages
from hetsngp.data.shards.tar_samples import count_samples
from hetsngp.data.sources import open_images
from hetsngp.data.tables import load_table
from hetsngp.limits import DATA_LIMITS, INDEX_BYTES, LimitExceeded

Image = pytest.importorskip("PIL.Image")
WNIDS = ("n00000001", "n00000002")


def png(width: int, height: int, data: bytes | None = None) -> bytes:
    """A grey PNG of any claimed size; ``data`` None: white pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    rows = zlib.compress((b"\x00" + b"\xff" * width) * height) if data is None else data
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def expect_limit(name: str) -> Any:
    return pytest.raises(LimitExceeded, match=rf"more than the limit of .*HETSNGP_MAX_{name}=\d+$")


# --- limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", DATA_LIMITS, ids=lambda limit: limit.name)
def test_every_limit_is_raised_by_its_variable(limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limit.check(limit.default, "a file")
    with expect_limit(limit.name):
        limit.check(limit.default + 1, "a file")
    monkeypatch.setenv(limit.variable, str(limit.default + 1))
    limit.check(limit.default + 1, "a file")


def test_a_stream_gives_what_it_has_and_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSNGP_MAX_INDEX_BYTES", "1000")
    for size in (0, 1, 999, 1000):
        content = random_bytes(size).tobytes()
        assert buffered(io.BytesIO(content), INDEX_BYTES, "a").read() == content
    with expect_limit("INDEX_BYTES"):
        buffered(io.BytesIO(bytes(1001)), INDEX_BYTES, "a").read()
    assert len(buffered(io.BytesIO(bytes(1001)), INDEX_BYTES, "a", least=2000).read()) == 1001
    endless = gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(bytes(10**8))))
    stream = buffered(endless, INDEX_BYTES, "a")
    with expect_limit("INDEX_BYTES"):
        stream.readline()
    assert endless.tell() < 10**6  # not expanded to its end


# --- images ---------------------------------------------------------------------------------------------


def before(picture: Any, size: int, resize: int) -> torch.Tensor:
    """The centre crop of release 0.1."""
    short = min(picture.size)
    width, height = (resize if side == short else resize * side // short for side in picture.size)
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return torch.from_numpy(np.array(picture)[top : top + size, left : left + size]).permute(2, 0, 1)


def test_ordinary_images_keep_their_bits() -> None:
    draws = random.Random(0)
    for number in range(150):
        width, height = (draws.choice((1, 2, 7, 31, 64, 200, 333, 500)) + draws.randrange(3) for _ in "wh")
        size = draws.choice((1, 8, 32, 64, 96))
        resize = size + draws.choice((0, 1, 8, 32))
        picture = Image.fromarray(random_bytes(height, width, 3, seed=number))
        assert torch.equal(resize_and_center_crop(picture, size, resize), before(picture, size, resize))


@pytest.mark.parametrize("turned", [False, True])
def test_a_narrow_image_is_cropped_before_it_is_resized(
    turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its middle, as before, up to the rounding of the resized length."""
    monkeypatch.setattr(decoding, "MOST_RESIZED", 4 * 24**2)
    for short, long in ((1, 999), (2, 1000), (3, 40), (5, 5000), (30, 401)):
        steps = np.linspace(0, 255, long).astype(np.uint8)
        pixels = np.broadcast_to(steps[:, None, None], (long, short, 3)).copy()
        picture = Image.fromarray(pixels.transpose(1, 0, 2).copy() if turned else pixels)
        sizes: list[tuple[int, int]] = []
        monkeypatch.setattr(type(picture), "resize", _recorded(Image.Image.resize, sizes))
        found = resize_and_center_crop(picture, 20, 24)
        monkeypatch.undo()
        assert found.shape == (3, 20, 20)
        assert max(sizes[0]) <= 24 * 5
        expected = before(picture, 20, 24)
        assert (found.int() - expected.int()).abs().max() <= 2
        monkeypatch.setattr(decoding, "MOST_RESIZED", 4 * 24**2)


def _recorded(resize: Callable[..., Any], sizes: list[tuple[int, int]]) -> Callable[..., Any]:
    def record(picture: Any, size: tuple[int, int], *more: Any) -> Any:
        sizes.append(size)
        return resize(picture, size, *more)

    return record


def test_235_bytes_do_not_take_13_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(png(1, 40_000))
    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr(Image.Image, "resize", _recorded(Image.Image.resize, sizes))
    found = read_image(tmp_path / "a.png", 224, 256)
    assert torch.equal(found, torch.full((3, 224, 224), 255).byte())
    assert sizes
    assert all(width * height <= 2**24 + 256**2 for width, height in sizes)


def test_pixels_are_counted_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSNGP_MAX_IMAGE_PIXELS", "1000")
    monkeypatch.setattr(Image.Image, "convert", None)  # no pixel is decoded without it
    with expect_limit("IMAGE_PIXELS"):
        open_picture(png(30, 40), "a.png")
    monkeypatch.undo()
    assert open_picture(png(30, 40), "a.png").size == (30, 40)
    with expect_limit("IMAGE_PIXELS"):
        open_picture(png(13_000, 13_000, zlib.compress(b"")), "a.png")
    monkeypatch.setenv("HETSNGP_MAX_IMAGE_BYTES", "50")
    (tmp_path / "a.png").write_bytes(png(30, 40))
    for source in (png(30, 40), tmp_path / "a.png"):
        with expect_limit("IMAGE_BYTES"):
            open_picture(source, "a.png")


def test_postscript_does_not_reach_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (9, 9)).save(stream, "EPS")
    (tmp_path / "a.png").write_bytes(stream.getvalue())
    started = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args, **_: started.append(args))
    with pytest.raises(ValueError, match=r"a\.png cannot be read as an image \(cannot identify"):
        read_image(tmp_path / "a.png", 8)
    assert not started


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF", "TGA"])
def test_every_format_of_a_folder_is_read(kind: str) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (9, 7), (255, 255, 255)).save(stream, kind)
    assert np.array_equal(np.asarray(open_picture(stream.getvalue(), "a")), np.full((7, 9, 3), 255))


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_pipe, make_device])
def test_pipes_and_devices_are_no_files(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Opening them would never end."""
    make(tmp_path / "a.png")
    make(tmp_path / "a.tar")
    make(tmp_path / "a.npz")
    make(tmp_path / "a.csv")
    inputs = Preprocessing((8, 8), (0.5,) * 3, (0.5,) * 3, ("a", "b"))
    calls: list[Callable[[], Any]] = [
        lambda: ImageFiles((tmp_path / "a.png",), torch.tensor([0]), ("a",)).load(8),
        lambda: inputs.read([tmp_path / "a.png"]),
        lambda: count_samples(tmp_path / "a.tar"),
        lambda: load_npz(tmp_path / "a.npz"),
        lambda: load_table(tmp_path / "a.csv", "y"),
    ]
    for call in calls:
        with pytest.raises((ValueError, FileNotFoundError)):
            call()


def test_folders_that_contain_themselves_are_named(tmp_path: Path) -> None:
    write_image(tmp_path / "cat" / "a.png", random_bytes(8, 8, 3))
    (tmp_path / "cat" / "more").mkdir()
    write_image(tmp_path / "other" / "b.png", random_bytes(8, 8, 3))
    (tmp_path / "cat" / "elsewhere").symlink_to(tmp_path / "other")  # a link that leads out is followed
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "cat").symlink_to(tmp_path / "cat")
    assert [file.name for file in scan_folder(tmp_path / "root").files] == ["a.png", "b.png"]
    (tmp_path / "cat" / "more" / "loop").symlink_to("..")
    with pytest.raises(ValueError, match="loop is a link to a folder that contains it: remove the link"):
        scan_folder(tmp_path / "root")
    (tmp_path / "cat" / "more" / "loop").unlink()
    (tmp_path / "cat" / "c.png").symlink_to("c.png")
    with pytest.raises(OSError, match=r"c\.png cannot be read .*correct or remove it"):
        scan_folder(tmp_path / "root")


# --- arrays ---------------------------------------------------------------------------------------------


def test_a_label_does_not_make_a_billion_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = np.zeros((2, 8, 8), np.uint8), np.array([0, 10**9])
    np.savez(tmp_path / "a.npz", x=images, y=labels)
    with expect_limit("CLASSES"):
        load_npz(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x_train=images, y_train=labels, x_test=images, y_test=labels % 10**9)
    with expect_limit("CLASSES"):
        open_images(tmp_path / "b.npz", "test")
    np.savez(tmp_path / "c.npz", x=images, y=[0, 999], class_names=np.zeros(1001, "U1"))
    monkeypatch.setenv("HETSNGP_MAX_CLASSES", "1000")
    with expect_limit("CLASSES"):
        load_npz(tmp_path / "c.npz")
    monkeypatch.setenv("HETSNGP_MAX_CLASSES", "1001")
    assert load_npz(tmp_path / "c.npz").num_classes == 1001


def test_an_archive_expands_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.zeros((1000, 8, 8), np.uint8)
    np.savez_compressed(tmp_path / "a.npz", x=images, y=np.zeros(1000, int))
    np.savez(tmp_path / "b.npz", x=images, y=np.zeros(1000, int))
    monkeypatch.setenv("HETSNGP_MAX_ARRAY_BYTES", "10000")
    with expect_limit("ARRAY_BYTES"):
        load_npz(tmp_path / "a.npz")
    assert len(load_npz(tmp_path / "b.npz")) == 1000  # no larger than its file
    monkeypatch.setenv("HETSNGP_MAX_ARRAY_BYTES", "100000")
    assert len(load_npz(tmp_path / "a.npz")) == 1000


def test_only_numpys_compressions_are_read(tmp_path: Path) -> None:
    """A few bytes of the others expand to gigabytes at once."""
    for kind in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "a.npz", "w", kind) as archive:
            for name, values in (("x", np.zeros((2, 8, 8), np.uint8)), ("y", np.array([0, 1]))):
                stream = io.BytesIO()
                np.save(stream, values)
                archive.writestr(f"{name}.npy", stream.getvalue())
        with pytest.raises(ValueError, match="a compression that NumPy does not write"):
            load_npz(tmp_path / "a.npz")


def test_an_archive_in_place_of_an_array_is_named(tmp_path: Path) -> None:
    (tmp_path / "CIFAR-10-C").mkdir()
    with open(tmp_path / "CIFAR-10-C" / "labels.npy", "wb") as file:
        np.savez(file, x=[1])
    np.save(tmp_path / "CIFAR-10-C" / "fog.npy", np.zeros(3))
    found = pytest.raises(ValueError, match="archive of arrays, not a single one")
    with pytest.warns(UserWarning, match="lacks"), found:
        open_cifar_c(tmp_path, "cifar10-c")


def test_matlab_files_are_checked_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    write_svhn(tmp_path, "test", [1, 2, 3])
    monkeypatch.setenv("HETSNGP_MAX_ARRAY_BYTES", "1000")
    assert len(load_svhn("test", tmp_path)) == 3  # no larger than its file
    cells = np.empty(1, object)
    cells[0] = np.zeros(3)
    numbers = {"X": np.zeros((32, 32, 3, 50), np.uint8), "y": np.ones((50, 1))}
    scipy_io.savemat(tmp_path / "test_32x32.mat", numbers, do_compression=True)
    with expect_limit("ARRAY_BYTES"):
        load_svhn("test", tmp_path)
    monkeypatch.setattr(scipy_io, "loadmat", None)
    scipy_io.savemat(tmp_path / "test_32x32.mat", numbers | {"X": cells})
    with pytest.raises(ValueError, match="X is a cell of shape"):
        load_svhn("test", tmp_path)


# --- CIFAR ----------------------------------------------------------------------------------------------


def tower(key: bytes, levels: int = 12) -> bytes:
    """Keys and values of a dict, ``key`` last: a list of 10 lists of 10 lists of …, 10**12 values."""
    made = b"U\x01a](K\x01eq\x01"
    for level in range(2, levels + 2):
        name = key if level == levels + 1 else b"U\x01a"
        made += name + b"](" + (b"h" + bytes([level - 1])) * 10 + b"eq" + bytes([level])
    return made


@pytest.mark.parametrize("file", ["test_batch", "batches.meta"])
def test_a_tower_of_lists_is_no_list_of_labels(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cifar_small(monkeypatch)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = random_bytes(10, 3072)
    (folder / "test_batch").write_bytes(python2_pickle(pixels, "labels", [0] * 10))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["a", "b"]}, protocol=2))
    loaded = load_cifar("cifar10", "test", tmp_path)
    assert np.array_equal(loaded.images.numpy().reshape(10, -1), pixels)
    key = {"test_batch": b"U\x06labels", "batches.meta": b"U\x0blabel_names"}[file]
    data = b"U\x04data" + pickle.dumps(pixels, protocol=2)[2:-1]
    (folder / file).write_bytes(b"\x80\x02}(" + data + tower(key) + b"u.")
    with pytest.raises(ValueError, match=rf"{file} is missing or damaged \(no "):
        load_cifar("cifar10", "test", tmp_path)


def test_a_forged_dtype_in_a_torch_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own unpickler hands it to NumPy."""
    make_cifar_small(monkeypatch)
    count = cifar.SIZES["train"]
    torch.save({key: np.zeros(count, np.uint8) for key in CIFAR10N_KEYS.values()}, tmp_path / "a.pt")
    target = tmp_path / "CIFAR-10_human.pt"
    for forge in (False, True):
        with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(target, "w") as new:
            for name in old.namelist():
                content = old.read(name)
                state = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"
                assert not name.endswith("data.pkl") or state in content
                forged = content.replace(state, b"NNNJ\xff\xff\xff\xffK\x01K\x00t")
                new.writestr(name, forged if forge else content)
        if not forge:
            assert torch.equal(load_cifar10n(tmp_path)["worse"], torch.zeros(count).long())
    with pytest.raises(ValueError, match="a dtype that is more than whole numbers"):
        load_cifar10n(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"split,index,label,class_name\n" + bytes(10**8), "more than the limit of 1,000,000"),
        (b"split,index,label,class_name\n" + b"a\n" * 200, "more than .* rows"),
        (b",".join([b"a"] * 100), "100 columns"),
        (b"split,index,label,class_name\ntest,0," + b"9" * 300 + b",a\n", "labels other than"),
        (b"split,index,label,class_name\ntest,0,0," + b"a" * 200_000, "field larger than field limit"),
        (b"split,label,class_name,row_in_strip\ntest,0,../../a,0\n", "no part of a file name"),
    ],
)
def test_an_index_of_strips_is_bounded(
    text: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cifar_small(monkeypatch)
    monkeypatch.setenv("HETSNGP_MAX_INDEX_BYTES", "1000000")
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "index.csv.gz").write_bytes(gzip.compress(text))
    with pytest.raises(ValueError, match=rf"index\.csv\.gz is missing or damaged \(.*{reason}"):
        load_cifar("cifar10", "test", tmp_path)


# --- shards ---------------------------------------------------------------------------------------------


def tar_header(name: str, size: bytes, kind: bytes = b"0", real_size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = size.ljust(12, b"\0")
    if kind == tarfile.GNUTYPE_SPARSE:
        block[386:410] = b"00000000000\0" * 2
        block[483:495] = b"%011o\0" % real_size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def tar_member(name: str, content: bytes) -> bytes:
    return tar_header(name, b"%011o\0" % len(content)) + content + bytes(-len(content) % 512)


def read_shard(file: Path) -> list[list[float]]:
    return [row for _, y in ShardedImages((file,), WNIDS).loader(8, 2, num_workers=0) for row in y.tolist()]


def test_a_sparse_member_is_not_expanded(tmp_path: Path) -> None:
    sparse = tar_header("1.png", b"00000000000", tarfile.GNUTYPE_SPARSE, 8 * 2**30 - 1)
    (tmp_path / "a.tar").write_bytes(sparse + tar_member("1.cls", b"n00000001") + bytes(1024))
    with expect_limit("IMAGE_BYTES"):
        read_shard(tmp_path / "a.tar")


def test_labels_of_a_sample_are_bounded(tmp_path: Path) -> None:
    image = tar_member("1.png", png(9, 9))
    for name, content in (("1.cls", b"n00000001 " * 200_000), ("1.json", b"[" + b"[]," * 400_000)):
        (tmp_path / "a.tar").write_bytes(image + tar_member(name, content) + bytes(1024))
        with expect_limit("LABEL_BYTES"):
            read_shard(tmp_path / "a.tar")
    nested = b'{"labels": ' + b"[" * 900 + b"]" * 900 + b"}"
    for name, content in (("1.cls", b"9" * 5000), ("1.json", nested)):
        (tmp_path / "a.tar").write_bytes(image + tar_member(name, content) + bytes(1024))
        with pytest.raises(ValueError, match=r"sample '1' of .*a\.tar cannot be used: its label"):
            read_shard(tmp_path / "a.tar")


@pytest.mark.parametrize(
    "header",
    [
        tar_header("2.png", b"\xff" * 12),
        tar_header("2.png", b"\xff" + (-1024).to_bytes(11, "big", signed=True)),
        tar_header("2.png", b"zzzzzzzzzzz"),
    ],
    ids=["minus one", "back to the beginning", "no digits"],
)
@pytest.mark.parametrize("first", [False, True])
def test_forged_headers_are_named(header: bytes, first: bool, tmp_path: Path) -> None:
    members = tar_member("1.png", png(9, 9)) + tar_member("1.cls", b"n00000001")
    (tmp_path / "a.tar").write_bytes((header + members if first else members + header) + bytes(1024))
    with pytest.raises(ValueError, match=r"a\.tar is no whole tar file"):
        count_samples(tmp_path / "a.tar")


@pytest.mark.parametrize("first", [False, True])
def test_headers_of_headers_are_named_or_skipped(first: bool, tmp_path: Path) -> None:
    """Some versions of tarfile recurse into each."""
    header = tar_header("x", b"00000000000", tarfile.XHDTYPE) * 5000
    members = tar_member("1.png", png(9, 9)) + tar_member("1.cls", b"n00000001")
    (tmp_path / "a.tar").write_bytes((header + members if first else members + header) + bytes(1024))
    try:
        assert count_samples(tmp_path / "a.tar") == 1
    except ValueError as error:
        assert "is no whole tar file" in str(error)  # noqa: PT017


@pytest.mark.parametrize("count", [10**18, -1, 0.5, True, "2", None])
def test_impossible_counts_are_counted_again(count: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(tar_member("1.png", png(9, 9)) + tar_member("1.cls", b"n00000002") + bytes(1024))
    row = {"samples": count, "bytes": file.stat().st_size}
    (tmp_path / "hetsngp_index.json").write_text(json.dumps({"shards": {"a.tar": row}}))
    assert read_shard(file) == [[0.0, 1.0]]


# --- tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zip"])
def test_a_compressed_table_expands_within_the_limit(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": np.zeros(2000), "y": ["a", "b"] * 1000})
    file = tmp_path / f"a.csv.{ending}"
    frame.to_csv(file, index=False)
    assert len(load_table(file, "y")) == 2000
    monkeypatch.setenv("HETSNGP_MAX_TABLE_BYTES", "5000")
    with expect_limit("TABLE_BYTES"):
        load_table(file, "y")
    frame.to_csv(tmp_path / "a.csv", index=False)
    assert len(load_table(tmp_path / "a.csv", "y")) == 2000  # nothing expands


def test_columns_are_counted_before_the_table_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({**{f"c{i}": [1, 2] for i in range(20)}, "y": ["a", "b"]})
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    monkeypatch.setenv("HETSNGP_MAX_TABLE_COLUMNS", "20")
    for name in ("a.csv", "a.parquet"):
        with expect_limit("TABLE_COLUMNS"):
            load_table(tmp_path / name, "y")
    monkeypatch.undo()
    monkeypatch.setenv("HETSNGP_MAX_TABLE_FIELDS", "41")
    with expect_limit("TABLE_FIELDS"):
        load_table(tmp_path / "a.parquet", "y")
    (tmp_path / "b.csv").write_text("x,y\n" + "1," * 1000 + "a\n")
    with pytest.raises(ValueError, match="more fields than the header has names"):
        load_table(tmp_path / "b.csv", "y")


def test_a_text_that_parquet_repeats_is_not_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": ["z" * 1000] * 500, "y": ["a", "b"] * 250})
    frame.to_parquet(tmp_path / "a.parquet")
    assert load_table(tmp_path / "a.parquet", "y").feature_names == (f"x={'z' * 1000}",)
    monkeypatch.setenv("HETSNGP_MAX_TABLE_BYTES", "400000")
    monkeypatch.setattr(pandas, "read_parquet", None)
    with expect_limit("TABLE_BYTES"):
        load_table(tmp_path / "a.parquet", "y")
