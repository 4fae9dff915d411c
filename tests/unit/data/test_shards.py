"""Tar shards: every sample once, with its labels, in an order that (seed, epoch) decides; damage is named."""

import io
import json
import pickle
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.toy import assert_same
from torch import nn

from hetsngp.data.datasets.synsets import wnids
from hetsngp.data.shards.index import INDEX
from hetsngp.data.shards.streams import ShardedImages, ShardLoader, hold_out_shards, shuffled
from hetsngp.data.shards.tar_samples import Labeller, count_samples, read_samples
from hetsngp.models.classifier import Classifier
from hetsngp.models.methods import build
from hetsngp.nn.initialization import seeded_linear
from hetsngp.training.loaders import ResumableLoader, shard_loader

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")

CLASSES = ("n01440764", "n01443537", "n01484850", "n01491361", "n01494475")
Parts = Mapping[str, bytes]


def grey(shade: int, side: int = 8) -> bytes:
    """A grey image without edges, which JPEG keeps exactly."""
    stream = io.BytesIO()
    Image.new("L", (side, side), shade).save(stream, "JPEG")
    return stream.getvalue()


def slope(number: int) -> bytes:
    """An image in which every place has another colour, so that crops can be told apart."""
    rows, columns = np.mgrid[0:32, 0:48]
    stream = io.BytesIO()
    Image.fromarray(np.stack([4 * rows, 4 * columns, 0 * rows + number], 2).astype(np.uint8)).save(
        stream, "PNG"
    )
    return stream.getvalue()


def write_tar(path: Path, samples: Iterable[tuple[str, Parts]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, parts in samples:
            for kind, content in parts.items():
                member = tarfile.TarInfo(f"{key}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def make_shards(folder: Path, sizes: Iterable[int], image: Any = grey) -> ShardedImages:
    """Image number i, counted through all shards, has the shade i and the classes i % 5 and i // 5 % 5."""
    shards, number = [], 0
    for shard, size in enumerate(sizes):
        samples = []
        for i in range(number, number + size):
            kind = "png" if image is slope else "jpg"
            samples.append((f"{i:04d}", {kind: image(i), "cls": f"{i % 5} {i // 5 % 5}".encode()}))
        shards.append(write_tar(folder / f"shard-{shard:03d}.tar", samples))
        number += size
    return ShardedImages(tuple(shards), CLASSES, numbering=CLASSES)


def numbers(loader: Iterable[Any]) -> list[int]:
    """Which images a loader gives, by their shade; their targets are checked."""
    found = []
    for x, y in loader:
        shades = (x[:, 0].mean((1, 2)) * 0.229 + 0.485).mul(255).round().long().tolist()
        assert (x.dtype, y.dtype) == (torch.float32, torch.float32)
        assert y.shape == (len(shades), 5)
        for shade, row in zip(shades, y, strict=True):
            assert row.nonzero().flatten().tolist() == sorted({shade % 5, shade // 5 % 5})
            assert set(row.tolist()) <= {0.0, 1.0}
        found += shades
    return found


# --- each sample once ----------------------------------------------------------------------------------

UNEQUAL = (7, 1, 0, 20, 3)


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (3, 0), (1, 2), (2, 2)])
def test_to_evaluate_every_sample_comes_once(world: int, workers: int, tmp_path: Path) -> None:
    data = make_shards(tmp_path, UNEQUAL)
    assert (len(data), data.num_classes, data.counts) == (31, 5, UNEQUAL)
    found = []
    for rank in range(world):
        loader = data.loader(8, 4, num_workers=workers, rank=rank, world_size=world)
        batches = list(loader)
        part = numbers(batches)
        assert len(loader) == -(-len(part) // 4) == len(batches)
        assert len(loader.dataset) == 31  # of all processes, for the weight of the prior
        found += part
    assert sorted(found) == list(range(31))
    if workers == 0:
        assert found == list(range(31))


def test_whole_shards_are_held_out(tmp_path: Path) -> None:
    data = make_shards(tmp_path, UNEQUAL)
    for held_out, count in ((3, 3), (0.1, 3), (0.3, 10), (0.7, 21), (20, 20), (4, 4), (1, 1), (30, 30)):
        rest, chosen = data.split(held_out, seed=3)
        assert len(chosen) == count
        found = [numbers(part.loader(8, 4, num_workers=0)) for part in (rest, chosen)]
        assert sorted(found[0] + found[1]) == list(range(31))
        assert sorted(rest.shards + chosen.shards) == list(data.shards)
        assert list(rest.shards) == sorted(rest.shards)
        assert (rest.wnids, rest.numbering) == (chosen.wnids, chosen.numbering) == (CLASSES, CLASSES)


@pytest.mark.parametrize("seed", range(5))
def test_the_share_is_as_near_as_whole_shards_allow(seed: int) -> None:
    """All choices of up to eight shards are tried; with many shards the nearest is a matter of luck."""
    random = np.random.default_rng(seed)
    counts = random.integers(0, 50, 8)
    counts[:2] = 7  # two at least
    choices = (np.arange(1, 2**8)[:, None] >> np.arange(8)) & 1
    sums = choices @ counts
    sums = sums[(sums > 0) & (sums < counts.sum())]
    for share in (0.01, 0.1, 0.25, 0.5, 0.9, 0.999):
        best = abs(sums - share * counts.sum()).min()
        found = abs(counts[hold_out_shards(counts, share, seed)].sum() - share * counts.sum())
        assert found == pytest.approx(best, abs=1)


def test_of_equal_shards_any_is_held_out() -> None:
    drawn = [hold_out_shards([100] * 10, 0.2, seed).astype(int) for seed in range(300)]
    assert {int(chosen.sum()) for chosen in drawn} == {2}
    assert abs(sum(drawn) - 60).max() < 4 * (300 * 0.2 * 0.8) ** 0.5
    assert np.array_equal(hold_out_shards([100] * 10, 200, 5), hold_out_shards([100] * 10, 0.2, 5))


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    for sizes in ((5,), (5, 0), (0, 0)):
        with pytest.raises(ValueError, match=r"of . shards have images.*two shards or more"):
            make_shards(tmp_path / str(sizes), sizes).split(0.5)
    for held_out in (0, 10, 1.0, 0.0, True):
        with pytest.raises(ValueError, match=r"number of images from 1 to 9 or a fraction"):
            hold_out_shards([5, 5], held_out)


def test_the_first_shards(tmp_path: Path) -> None:
    data = make_shards(tmp_path, UNEQUAL)
    kept = {1: 7, 7: 7, 8: 8, 9: 28, 28: 28, 29: 31, 31: 31, 500: 31}
    for n, count in kept.items():
        assert len(data.first_shards(n)) == count
    assert numbers(data.first_shards(8).loader(8, 4, num_workers=0)) == list(range(8))
    with pytest.raises(ValueError, match="n must be a positive whole number"):
        data.first_shards(0)


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (3, 0), (1, 2), (2, 2)])
def test_to_train_all_processes_make_as_many_full_batches(world: int, workers: int, tmp_path: Path) -> None:
    data = make_shards(tmp_path, UNEQUAL)
    for epoch in (0, 1):
        found = []
        for rank in range(world):
            loader = data.loader(8, 4, train=True, num_workers=workers, rank=rank, world_size=world, buffer=5)
            loader.set_epoch(epoch)
            assert len(loader) == 31 // world // 4
            batches = list(loader)
            assert [len(y) for _, y in batches] == [4] * len(loader)
            found += numbers(batches)
        assert max(Counter(found).values()) == 1
        assert len(found) == world * (31 // world // 4) * 4


def test_the_stream_can_be_sent_to_a_process(tmp_path: Path) -> None:
    loader = make_shards(tmp_path, (3, 2)).loader(8, 5, train=True, num_workers=0)
    copy = pickle.loads(pickle.dumps(loader.dataset))
    assert [labels for _, labels in copy] == [labels for _, labels in loader.dataset]


def test_more_workers_than_batches(tmp_path: Path) -> None:
    data = make_shards(tmp_path, (3, 2))
    assert sorted(numbers(data.loader(8, 5, num_workers=2))) == list(range(5))


def test_what_is_left_over_changes(tmp_path: Path) -> None:
    """The last images of a single shard would otherwise never be trained on."""
    loader = make_shards(tmp_path, (11,)).loader(8, 4, train=True, num_workers=0)
    left = [frozenset(range(11)) - set(numbers(loader)) for _ in range(12)]
    assert all(len(rest) == 3 for rest in left)
    assert len(set(left)) > 1


# --- order and crops -----------------------------------------------------------------------------------


def test_order_follows_seed_and_epoch(tmp_path: Path) -> None:
    data = make_shards(tmp_path, (10, 10, 10, 10))

    def orders(seed: int) -> list[list[int]]:
        loader = data.loader(8, 10, train=True, num_workers=0, seed=seed, buffer=8)
        return [numbers(loader) for _ in range(3)]

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = orders(0)
    assert torch.equal(torch.get_rng_state(), before)  # the crops have taken none of the caller's numbers
    assert first == orders(0)
    assert all(sorted(order) == list(range(40)) for order in first)
    assert len({tuple(order) for order in [*first, *orders(1)]}) == 6
    loader = data.loader(8, 10, train=True, num_workers=0, buffer=8)
    loader.set_epoch(2)
    assert numbers(loader) == first[2]


def test_shards_come_in_an_order_of_the_seed_and_the_epoch(tmp_path: Path) -> None:
    """Without a buffer to draw from the images of a shard stay together."""
    data = make_shards(tmp_path, (2, 2, 2, 2, 2))
    found = set()
    for seed in (0, 1):
        loader = data.loader(8, 10, train=True, num_workers=0, seed=seed, buffer=1)
        for _ in (0, 1):
            order = numbers(loader)
            assert [number // 2 for number in order[::2]] == [number // 2 for number in order[1::2]]
            found.add(tuple(order))
    assert len(found) == 4


def test_draws_from_the_buffer_change_with_the_epoch(tmp_path: Path) -> None:
    """A single shard whose images all go into batches: only shuffling changes the order."""
    loader = make_shards(tmp_path, (12,)).loader(8, 12, train=True, num_workers=0, buffer=6)
    orders = [tuple(numbers(loader)) for _ in range(3)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len(set(orders)) == 3


def test_two_epochs_at_a_time(tmp_path: Path) -> None:
    loader = make_shards(tmp_path, (6, 6)).loader(8, 6, train=True, num_workers=0)
    first, second = iter(loader), iter(loader)
    interleaved = [(next(first)[1], next(second)[1]) for _ in range(2)]
    loader.set_epoch(0)
    apart = [[y for _, y in loader], [y for _, y in loader]]
    for row, (a, b) in enumerate(interleaved):
        assert torch.equal(a, apart[0][row])
        assert torch.equal(b, apart[1][row])


def test_crops_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    data = make_shards(tmp_path, (6, 6), slope)

    def crops(epoch: int, **options: Any) -> dict[int, torch.Tensor]:
        loader = data.loader(8, 4, train=True, **options)
        loader.set_epoch(epoch)
        images = torch.cat([x for x, _ in loader])
        shades = (images[:, 2].mean((1, 2)) * 0.225 + 0.406).mul(255).round().long().tolist()
        return dict(zip(shades, images, strict=True))

    alone, helped, later = crops(0, num_workers=0), crops(0, num_workers=2), crops(1, num_workers=0)
    assert sorted(alone) == sorted(helped) == list(range(12))
    assert all(torch.equal(alone[number], helped[number]) for number in alone)
    assert len({tuple(image[:2].flatten().tolist()) for image in alone.values()}) == 12  # none like another
    assert not any(torch.equal(alone[number], later[number]) for number in alone)
    # Red grows downwards and green to the right in all of them, unless mirrored, which some are.
    mirrored = [bool(image[1, 0, 0] > image[1, 0, -1]) for image in alone.values()]
    assert 0 < sum(mirrored) < 12
    assert all(image[0, 0, 0] < image[0, -1, 0] for image in alone.values())


def test_to_evaluate_the_pixels_are_those_of_a_folder(tmp_path: Path) -> None:
    from hetsngp.data.images.folders import folder_loader

    data = make_shards(tmp_path / "shards", (4,), slope)
    for number in range(4):
        file = tmp_path / "folder" / "only" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(slope(number))
    (x, _), (expected, _) = (
        next(iter(loader))
        for loader in (
            data.loader(24, 4, num_workers=0),
            folder_loader(tmp_path / "folder", 24, 4, train=False, num_workers=0),
        )
    )
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-6)


def test_mean_and_std_may_be_given(tmp_path: Path) -> None:
    data = make_shards(tmp_path, (3,))
    x, _ = next(iter(data.loader(8, 3, num_workers=0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))))
    assert (255 * x[:, :, 0, 0]).round().tolist() == [[0] * 3, [1] * 3, [2] * 3]


def test_a_draw_is_one_of_the_next_few() -> None:
    for size in (1, 4, 100):
        order = list(shuffled(range(50), size, np.random.default_rng(1)))
        assert sorted(order) == list(range(50))
        assert all(item < turn + size for turn, item in enumerate(order))
        assert (order == list(range(50))) == (size == 1)
    # All orders of three are equally likely: within 4 standard errors of 1000 each.
    orders = Counter(tuple(shuffled(range(3), 3, np.random.default_rng(seed))) for seed in range(6000))
    assert len(orders) == 6
    assert all(abs(count - 1000) < 4 * (6000 * 1 / 6 * 5 / 6) ** 0.5 for count in orders.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 6, "train": True}, "5 images give no batch of 6 in each of 1"),
        ({"batch_size": 3, "train": True, "world_size": 2}, "no batch of 3 in each of 2"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, "rank"),
        ({"batch_size": 2, "seed": -1}, "seed"),
        ({"batch_size": 2, "buffer": 0}, "buffer"),
    ],
)
def test_impossible_loaders_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_shards(tmp_path, (5,)).loader(8, **options)


def test_impossible_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one tar file"):
        ShardedImages((), CLASSES)
    with pytest.raises(ValueError, match="each class once"):
        ShardedImages((tmp_path / "a.tar",), ("n01440764", "n01440764"))


# --- labels --------------------------------------------------------------------------------------------


def labels(
    key: str = "a", cls: str | None = None, numbering: tuple[str, ...] | None = CLASSES, **meta: Any
) -> list[int]:
    labeller = Labeller({wnid: place for place, wnid in enumerate(CLASSES)}, numbering)
    text = json.dumps(meta).encode() if meta else None
    return list(labeller(key, None if cls is None else cls.encode(), text))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"cls": "3"}, [3]),
        ({"cls": "3\n"}, [3]),
        ({"cls": "4 0 4"}, [0, 4]),
        ({"cls": "4,0"}, [0, 4]),
        ({"cls": "n01494475 n01443537"}, [1, 4]),
        ({"label": 2}, [2]),
        ({"label": "n01484850"}, [2]),
        ({"labels": [4, 1]}, [1, 4]),
        ({"labels": ["n01494475", 1]}, [1, 4]),
        ({"wnid": "n01484850"}, [2]),
        ({"wnids": ["n01484850", "n01440764"]}, [0, 2]),
        ({"wnids": "n01484850 n01440764"}, [0, 2]),
        ({"class_name": "n01484850", "width": 500}, [2]),
        ({"class_name": "great white shark", "label": 2}, [2]),
        # All of them before the one
        ({"cls": "2", "labels": [2, 3]}, [2, 3]),
        ({"cls": "2", "wnids": ["n01484850", "n01491361"], "wnid": "n01484850"}, [2, 3]),
        ({"cls": "2 3", "wnid": "n01484850"}, [2, 3]),
        # The key agrees
        ({"key": "train/n01484850_17", "cls": "2"}, [2]),
        ({"key": "n01484850_17", "cls": "1 2"}, [1, 2]),
    ],
)
def test_labels_as_they_may_be_written(written: dict[str, Any], expected: list[int]) -> None:
    assert labels(**written) == expected


OTHERS = ("n00004475", *CLASSES)
"""A list with one class more, in front: every number in it is another one's."""


def test_a_wnid_decides_against_a_number_of_another_list() -> None:
    """timm's shards count in the list of 2011, beside which they write the wnid."""
    assert labels(cls="3", class_name="n01484850", label=3, label_12k=1) == [2]
    assert labels(cls="3", wnid="n01484850") == [2]


NOBODY_SAID = (
    r"number 3, and nothing says .*open_imagenet21k\(root, split, numbering=…\).*'imagenet22k'.*'imagenet21k'"
)


@pytest.mark.parametrize(
    "written",
    [
        {"cls": "3"},
        {"label": 3},
        {"label": 3, "filename": "3_n01491361.JPEG", "class_name": "stingray"},
        {"cls": "3 3"},
        {"cls": "n01494475 3"},
        # One of several may agree with a wnid and the others index another list.
        {"cls": "3 4", "wnid": "n01491361"},
        {"key": "n01491361_17", "cls": "3 4"},
    ],
)
def test_numbers_that_may_count_in_any_list_are_refused(written: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=NOBODY_SAID):
        labels(**written, numbering=None)
    assert 3 in labels(**written)


@pytest.mark.parametrize(
    "named",
    [
        {"key": "train/n01491361_17"},
        {"key": "n01491361/17"},
        {"filename": "n01491361_17.JPEG", "key": "000017"},
        {"filename": "train/n01491361/n01491361_17.JPEG"},
        {"filename": "n01491361/17.JPEG"},
    ],
)
def test_the_name_of_a_file_confirms_a_number(named: dict[str, Any]) -> None:
    assert labels(cls="3", **named, numbering=None) == [3]
    for numbering in (None, CLASSES):
        with pytest.raises(ValueError, match=r"2 means n01484850, but .* says n01491361.*numbering=…"):
            labels(cls="2", **named, numbering=numbering)
    assert labels(cls="4", **named, numbering=OTHERS) == [3]


def test_wnids_need_no_numbering() -> None:
    assert labels(cls="n01494475 n01443537", numbering=None) == [1, 4]
    assert labels(cls="20000", class_name="n01484850", numbering=None) == [2]  # a number beyond our classes


def test_numbers_of_another_list_are_noticed_by_the_key() -> None:
    with pytest.raises(
        ValueError, match=r"3 means n01491361, but its name or .json says n01484850.*numbering"
    ):
        labels("n01484850_17", cls="3")
    with pytest.raises(ValueError, match="numbering"):
        labels(cls="3 4", wnid="n01484850")
    assert labels("n01484850_17", cls="3", numbering=OTHERS) == [2]
    assert labels(cls="3 4", wnid="n01484850", numbering=OTHERS) == [2, 3]


def test_the_two_lists_differ_where_it_is_said_that_they_do() -> None:
    pytest.importorskip("timm")
    ours, theirs = wnids("imagenet21k"), wnids("imagenet22k")
    shifted = [number for number, wnid in enumerate(theirs) if ours[number] != wnid]
    assert shifted == list(range(9205, 21841))  # more than half


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "no label: write key.cls"),
        ({"cls": ""}, "no label"),
        ({"labels": []}, "no label"),
        ({"width": 3}, "no label"),
        ({"cls": "5"}, "5 is not in 0 … 4"),
        ({"label": -1}, "-1 is not in 0 … 4"),
        ({"cls": "tench"}, "'tench' is neither a class number nor a wnid"),
        ({"label": True}, "True is neither"),
        ({"label": 1.5}, "1.5 is neither"),
        ({"cls": "n00000001"}, "n00000001 is none of the 5 classes"),
    ],
)
def test_labels_that_say_nothing_are_refused(written: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        labels(**written)


# --- tar files -----------------------------------------------------------------------------------------


def test_members_as_others_write_them(tmp_path: Path) -> None:
    """Folders, several dots, capitals, notes, hidden files of another system: only samples count."""
    path = tmp_path / "a.tar"
    names = [
        "./x/a.JPG",
        "./x/a.json",
        "./x/._b.jpg",
        "x/b.seg.png",
        "x/b.webp",
        "x/b.cls",
        "notes.txt",
        "info.json",
    ]
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        folder = tarfile.TarInfo("x")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in [*names, "x/" + 150 * "ü" + ".png", "x/" + 150 * "ü" + ".cls"]:
            content = {"json": b'{"label": 1}', "cls": b"2"}.get(name.rpartition(".")[2], name.encode())
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    found = list(read_samples(path, ShardedImages((path,), CLASSES, numbering=CLASSES).labeller))
    assert [(sample.key, sample.labels) for sample in found] == [
        ("./x/a", (1,)),
        ("x/b", (2,)),
        ("x/" + 150 * "ü", (2,)),
    ]
    assert found[1].image == b"x/b.webp"  # and not b.seg.png
    assert count_samples(path) == 3


def test_a_cut_anywhere_is_noticed(tmp_path: Path) -> None:
    whole = make_shards(tmp_path, (3,)).shards[0]
    content = whole.read_bytes()
    end = len(content.rstrip(b"\0"))
    end += -end % 512
    cut = tmp_path / "cut.tar"
    for length in [0, 100, 512, *range(600, end, 333), *range(512, end + 1, 512)]:
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut\.tar is no whole tar file.*copy it again"):
            count_samples(cut)
    cut.write_bytes(content[: end + 512])
    assert count_samples(cut) == 3


def test_rubbish_in_the_middle_is_noticed(tmp_path: Path) -> None:
    shard = make_shards(tmp_path, (3,)).shards[0]
    with tarfile.open(shard) as tar:
        offset = tar.getmembers()[2].offset
    content = bytearray(shard.read_bytes())
    content[offset : offset + 512] = 512 * b"?"
    shard.write_bytes(content)
    with tarfile.open(shard) as tar:
        assert len(tar.getmembers()) == 2  # Python's own reader takes it for the end
    with pytest.raises(ValueError, match="no end of the archive"):
        count_samples(shard)


@pytest.mark.parametrize("label", ["cls", "json"])
def test_dots_in_names_are_said_to_be_the_reason(label: str, tmp_path: Path) -> None:
    """Otherwise the images would all be passed over as further parts of the sample 'a'."""
    parts = {"jpg": grey(1), label: {"cls": b"1", "json": b'{"label": 1}'}[label]}
    good = ("good", {"jpg": grey(0), "cls": b"0"})
    shard = write_tar(tmp_path / "a.tar", [good, ("v1.0", parts), ("v1.1", parts)])
    with pytest.raises(ValueError, match=r"v1\.0\.jpg in .*a\.tar has a dot .*write the shards again"):
        count_samples(shard)


def test_shards_without_images_say_so(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "whole.tar", [("n01440764", {"tar": b"one class"})])
    with pytest.raises(ValueError, match=r"no images in .*whole\.tar.*should hold samples such as 0001\.jpg"):
        ShardedImages((shard,), CLASSES).loader(8, 1, num_workers=0)


def test_a_compressed_shard_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w:gz"):
        pass
    with pytest.raises(ValueError, match=r"a\.tar is no whole tar file.*gunzip"):
        count_samples(tmp_path / "a.tar")
    with pytest.raises(FileNotFoundError, match="open the data set again"):
        count_samples(tmp_path / "b.tar")


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([("k", {"jpg": grey(1)})], "no label"),
        ([("k", {"jpg": grey(1), "cls": b"99"})], "99 is not in 0 … 4"),
        ([("k", {"jpg": grey(1), "json": b"{"})], r"\.json cannot be read"),
        ([("k", {"jpg": grey(1), "json": b"[1]"})], r"\.json holds a list"),
        ([("k", {"jpg": grey(1), "cls": b"\xff"})], r"\.cls is no text"),
        ([("k", {"jpg": grey(1)[:200], "cls": b"1"})], "cannot be read as an image"),
        ([("k", {"cls": b"1"})], "a label and no image"),
        ([("k", {"jpg": grey(1)}), ("j", {"jpg": grey(1)}), ("k", {"cls": b"1"})], "must follow one another"),
        ([("k", {"jpg": grey(1)}), ("k", {"jpg": grey(2)})], r"two members \.jpg"),
    ],
)
def test_bad_samples_are_named(samples: list[tuple[str, Parts]], message: str, tmp_path: Path) -> None:
    good = ("good", {"jpg": grey(0), "cls": b"0"})
    shard = write_tar(tmp_path / "bad.tar", [good, *samples])
    with pytest.raises(ValueError, match=message) as error:
        list(ShardedImages((shard,), CLASSES, numbering=CLASSES).loader(8, 1, num_workers=0))
    assert "sample 'k'" in str(error.value)
    assert str(shard) in str(error.value)


def test_deep_pixels_are_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.full((8, 8), 60000, np.uint16)).save(stream, "PNG")
    shard = write_tar(tmp_path / "a.tar", [("k", {"png": stream.getvalue(), "cls": b"1"})])
    with pytest.raises(ValueError, match="8 bits a channel"):
        list(ShardedImages((shard,), CLASSES, numbering=CLASSES).loader(8, 1, num_workers=0))


# --- counts --------------------------------------------------------------------------------------------


def test_counts_are_kept_and_checked(tmp_path: Path) -> None:
    data = make_shards(tmp_path, (4, 2))
    assert not (tmp_path / INDEX).exists()
    assert len(data) == 6
    index = json.loads((tmp_path / INDEX).read_text())
    assert {name: row["samples"] for name, row in index["shards"].items()} == {
        "shard-000.tar": 4,
        "shard-001.tar": 2,
    }
    # It is believed, until the shard is read to its end.
    for wrong in (3, 5):
        index["shards"]["shard-000.tar"]["samples"] = wrong
        (tmp_path / INDEX).write_text(json.dumps(index))
        again = ShardedImages(data.shards, CLASSES, numbering=CLASSES)
        assert len(again) == wrong + 2
        with pytest.raises(ValueError, match=rf"shard-000\.tar has 4 samples where {wrong} .*{INDEX}"):
            list(again.loader(8, 2, num_workers=0))
    # A shard of another size is counted again, and a new one added.
    make_shards(tmp_path, (40, 2, 1))
    again = ShardedImages((*data.shards, tmp_path / "shard-002.tar"), CLASSES)
    assert again.counts == (40, 2, 1)
    assert json.loads((tmp_path / INDEX).read_text())["shards"]["shard-000.tar"]["samples"] == 40


@pytest.mark.parametrize("content", ["", "[]", '{"shards": 3}', '{"shards": {"shard-000.tar": 4}}'])
def test_an_index_that_is_none_is_made_again(content: str, tmp_path: Path) -> None:
    data = make_shards(tmp_path, (3,))
    (tmp_path / INDEX).write_text(content)
    assert len(data) == 3
    assert len(json.loads((tmp_path / INDEX).read_text())["shards"]) == 1


def test_nothing_needs_to_be_written(tmp_path: Path) -> None:
    (tmp_path / INDEX).mkdir()  # in the way, as a folder without rights is, also for the superuser
    data = make_shards(tmp_path, (3,))
    assert sorted(numbers(data.loader(8, 2, num_workers=0))) == [0, 1, 2]
    assert sorted(file.name for file in tmp_path.iterdir()) == [INDEX, "shard-000.tar"]


def test_counts_of_timm_are_used(tmp_path: Path) -> None:
    data = make_shards(tmp_path, (4, 2))
    names = [shard.name for shard in data.shards]
    split = {"filenames": [*names, "elsewhere.tar"], "shard_lengths": [4, 2, 9], "alt_label": None}
    other = {"filenames": names, "shard_lengths": [1, 1], "alt_label": "label_12k"}
    (tmp_path / "_info.json").write_text(json.dumps({"splits": {"train": split, "train_12k": other}}))
    data.shards[0].rename(tmp_path / "away.tar")
    assert len(data) == 6  # not by looking
    assert not (tmp_path / INDEX).exists()


def test_what_we_counted_goes_before_what_timm_says(tmp_path: Path) -> None:
    """Ours is known to be of this very file, by its size; shards may have been written again since timm's."""
    data = make_shards(tmp_path, (4, 2))
    assert len(data) == 6
    names = [shard.name for shard in data.shards]
    split = {"filenames": names, "shard_lengths": [9, 9], "alt_label": None}
    (tmp_path / "_info.json").write_text(json.dumps({"splits": {"train": split}}))
    again = ShardedImages(data.shards, CLASSES, numbering=CLASSES)
    assert again.counts == (4, 2)
    assert numbers(again.loader(8, 3, num_workers=0)) == list(range(6))


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """The last quarter of the images is made without opening the shards before it."""
    data = make_shards(tmp_path, (4, 4, 4, 4))
    assert len(data) == 16
    for shard in data.shards[:3]:
        shard.write_bytes(b"damaged since")
    assert numbers(data.loader(8, 2, num_workers=0, rank=3, world_size=4)) == [12, 13, 14, 15]


# --- the training engine -------------------------------------------------------------------------------


class Corners(nn.Module):
    """Sees the place of a crop."""

    num_features = 4

    def __init__(self) -> None:
        super().__init__()
        self.layer = seeded_linear(3, 4, torch.Generator().manual_seed(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x[:, :, 0, 0]))


def multi_label() -> Classifier:
    """The same at every call."""
    generator = torch.Generator().manual_seed(2)
    return build("hetsngp", Corners(), 5, link="sigmoid", rank=1, random_features=16, generator=generator)


def fabric(rank: int, world: int) -> Any:
    return SimpleNamespace(device=torch.device("cpu"), global_rank=rank, world_size=world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_train_on_their_parts_of_one_loader(world: int, tmp_path: Path) -> None:
    data = make_shards(tmp_path, UNEQUAL)
    options: dict[str, Any] = {"train": True, "num_workers": 0, "seed": 3, "buffer": 5}
    feeds = [
        ResumableLoader(data.loader(8, 4, **options), multi_label(), fabric(rank, world))
        for rank in range(world)
    ]
    for epoch in (2, 1):
        found = []
        for rank, feed in enumerate(feeds):
            batches = feed.begin(epoch)
            assert len(batches) == 31 // world // 4
            part = numbers(batches)
            own = data.loader(8, 4, **options, rank=rank, world_size=world)
            own.set_epoch(epoch - 1)
            assert part == numbers(own)
            found += part
        assert len(set(found)) == len(found) == world * (31 // world // 4) * 4


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shares_hold_every_image_once(world: int, tmp_path: Path) -> None:
    data = make_shards(tmp_path, UNEQUAL)
    loader, found = data.loader(8, 4, num_workers=0), []
    for rank in range(world):
        share = shard_loader(loader, fabric(rank, world))
        assert len(share.dataset) == 31
        found += numbers(share)
        own = data.loader(8, 4, num_workers=0, rank=rank, world_size=world)
        assert shard_loader(own, fabric(rank, world)) is own
    assert found == list(range(31))


def test_a_part_keeps_what_the_loader_was_told(tmp_path: Path) -> None:
    loader = make_shards(tmp_path, (12,), slope).loader(8, 2, train=True, num_workers=1, seed=4, buffer=7)
    loader.set_epoch(3)
    part = loader.shard(1, 2)
    assert isinstance(part, ShardLoader)
    assert (part.num_workers, part.batch_size, part.stream.epoch, loader.stream.epoch) == (1, 2, 3, 3)
    assert (part.stream.seed, part.stream.buffer, part.stream.part) == (4, 7, (1, 2))
    with pytest.raises(ValueError, match="rank must be one of 0 … 1"):
        loader.shard(2, 2)
    with pytest.raises(ValueError, match="12 images give no batch of 2 in each of 7 processes"):
        loader.shard(0, 7)


def test_parts_of_other_processes_are_refused(tmp_path: Path) -> None:
    data = make_shards(tmp_path, (12,))
    for part in ({"rank": 1, "world_size": 2}, {"rank": 0, "world_size": 3}):
        loader = data.loader(8, 2, train=True, num_workers=0, **part)
        for here in (fabric(0, 2), fabric(0, 1)):
            message = rf"for rank {part['rank']} of .*not for rank 0 of {here.world_size}.*leave out rank"
            with pytest.raises(ValueError, match=message):
                ResumableLoader(loader, multi_label(), here)
            with pytest.raises(ValueError, match=message):
                shard_loader(loader, here)


def test_several_processes_do_not_train_in_parts_of_different_sizes(tmp_path: Path) -> None:
    loader = make_shards(tmp_path, (9,)).loader(8, 4, num_workers=0)
    assert [len(loader.shard(rank, 2)) for rank in (0, 1)] == [1, 2]  # the second would wait for the first
    with pytest.raises(ValueError, match=r"2 processes cannot train .*train=True"):
        ResumableLoader(loader, multi_label(), fabric(0, 2))
    assert len(ResumableLoader(loader, multi_label(), fabric(0, 1)).begin(1)) == 3


class Died(BaseException):
    pass


@pytest.mark.parametrize("updates", [2, 3, 4, 6])
def test_a_run_goes_on_in_the_order_of_its_epoch(
    updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped within the first epoch of 3 updates, after it, within and after the second."""
    pytest.importorskip("lightning")
    from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig, Trained, run

    data = make_shards(tmp_path, (4, 6), slope)

    def go(name: str) -> Trained:
        loader = data.loader(8, 3, train=True, num_workers=0, buffer=4)
        checkpoints = CheckpointConfig(tmp_path / name, seconds=0, tensorboard=False)
        return Engine(Hardware(accelerator="cpu")).train(
            multi_label(), loader, TrainConfig(Schedule(3, 0.05)), checkpoints=checkpoints, show=False
        )

    alone, real, writes = go("alone"), run.write_state, []

    def write_state(folder: Path, state: dict[str, Any]) -> None:
        real(folder, state)
        writes.append(folder)
        if len(writes) == updates:
            raise Died

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_state", write_state)
        with pytest.raises(Died):
            go("died")
    again = go("died")
    assert again.resumed == updates
    assert [result.loss for result in again.history] == [result.loss for result in alone.history]
    assert_same(again.model.state_dict(), alone.model.state_dict())
