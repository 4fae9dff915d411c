"""ImageNet-21k from folders and from shards, training on it, and the paper's evaluation on the 1,000."""

import gzip
import io
import json
import shutil
import tarfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.data.test_image_files import paths_of_windows
from torch import nn

import hetsngp
from hetsngp.data.datasets.imagenet import imagenet_subset
from hetsngp.data.datasets.imagenet21k import LABELS, open_imagenet21k, to_imagenet1k
from hetsngp.data.datasets.registry import open_data
from hetsngp.data.datasets.synsets import class_names, wnids
from hetsngp.data.images.multi_label import MultiLabelFiles
from hetsngp.data.shards.streams import ShardedImages
from hetsngp.fitting.loop import train
from hetsngp.models.methods import build

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")
pytest.importorskip("timm")

CLASSES = ("n00004475", "n01440764", "n02012849", "n03931044", "n15075141")
LISTS_21K = ("imagenet21k", "imagenet22k")
PART = "ignore:.*is a part of:UserWarning"


def grey(shade: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (10, 8), shade).save(stream, "JPEG")
    return stream.getvalue()


def put(folder: Path, images: Mapping[str, int]) -> None:
    for name, shade in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(grey(shade))


def write_tar(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, parts in samples.items():
            for kind, content in parts.items():
                member = tarfile.TarInfo(f"{key}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def seen(data: ShardedImages | MultiLabelFiles) -> dict[int, list[int]]:
    """Labels by shade of the image."""
    found = {}
    for x, y in data.loader(8, 3, num_workers=0):
        shades = (x[:, 0].mean((1, 2)) * 0.229 + 0.485).mul(255).round().long().tolist()
        found |= {shade: row.nonzero().flatten().tolist() for shade, row in zip(shades, y, strict=True)}
    return found


# --- to the 1,000 classes ------------------------------------------------------------------------------


def test_exactly_one_of_the_thousand_is_missing() -> None:
    class_map = to_imagenet1k()
    assert [wnids("imagenet")[label] for label in class_map.missing] == ["n04399382"]
    assert (class_map.num_inputs, class_map.num_classes) == (21843, 1000)
    assert class_map.class_names == class_names("imagenet")
    kept = class_map.index[class_map.index >= 0]
    assert len(kept.unique()) == 999
    for label, index in enumerate(class_map.index.tolist()):
        assert index == -1 or wnids("imagenet21k")[index] == wnids("imagenet")[label]


@pytest.mark.parametrize("normalise", ["softmax", "sigmoid", "none"])
def test_the_evaluation_of_the_paper(normalise: str) -> None:
    ours, all_of_them = wnids("imagenet"), wnids("imagenet21k")
    probs = torch.zeros(2, 21843)
    probs[0, all_of_them.index("n00004475")] = 0.9  # an organism, none of the 1,000
    probs[0, all_of_them.index("n02012849")] = 0.06  # the bird
    probs[0, all_of_them.index("n03126707")] = 0.02  # the machine, also a crane
    probs[1, all_of_them.index("n15075141")] = 0.5
    mapped = to_imagenet1k().apply(probs, normalise=normalise)
    assert mapped.shape == (2, 1000)
    assert mapped.argmax(1).tolist() == [ours.index("n02012849"), 999]
    assert mapped[:, ours.index("n04399382")].tolist() == [0.0, 0.0]
    assert mapped.count_nonzero(1).tolist() == [2, 1]
    bird = float(mapped[0, ours.index("n02012849")])
    odds = 0.06 / 0.94 / (0.06 / 0.94 + 0.02 / 0.98)
    assert bird == pytest.approx({"softmax": 0.75, "sigmoid": odds, "none": 0.06}[normalise], rel=1e-5)


def test_it_goes_on_to_the_subsets() -> None:
    for name in ("imagenet-a", "imagenet-r"):
        both = to_imagenet1k().compose(imagenet_subset(name))
        known = {
            index: wnid for index, wnid in zip(both.index.tolist(), wnids(name), strict=True) if index >= 0
        }
        assert all(wnids("imagenet21k")[index] == wnid for index, wnid in known.items())
        assert [wnids(name)[label] for label in both.missing] == [w for w in wnids(name) if w == "n04399382"]
        assert len(known) + len(both.missing) == 200


# --- folders -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(PART)
def test_folders_count_in_the_whole_list(tmp_path: Path) -> None:
    put(tmp_path / "imagenet21k", {"n15075141/n15075141_1.JPEG": 1, "n01440764/n01440764_7.JPEG": 2})
    data = open_imagenet21k(tmp_path, "train")
    assert isinstance(data, MultiLabelFiles)
    expected = {2: [wnids("imagenet21k").index("n01440764")], 1: [wnids("imagenet21k").index("n15075141")]}
    assert seen(data) == expected
    assert (len(data), data.num_classes, data.class_names) == (2, 21843, class_names("imagenet21k"))
    _, y = next(iter(data.loader(8, 2, num_workers=0)))
    assert (y.shape, y.dtype) == ((2, 21843), torch.float32)


@pytest.mark.filterwarnings(PART)
def test_an_image_in_several_folders_has_all_their_labels(tmp_path: Path) -> None:
    folder = tmp_path / "imagenet21k"
    put(folder, {"n01440764/fish.JPEG": 1, "n15075141/fish.JPEG": 1, "n02012849/fish.JPEG": 1})
    put(folder, {"n00004475/fish.JPEG": 9, "n03931044/fish.JPEG": 9})  # the same name, another image
    put(folder, {"n00004475/same.JPEG": 5, "n03931044/other.JPEG": 5})  # the same image, another name
    put(folder, {"n00004475/0001.JPEG": 20, "n01440764/0001.JPEG": 21})  # as large, and yet another image
    assert (folder / "n00004475/0001.JPEG").stat().st_size == (folder / "n01440764/0001.JPEG").stat().st_size
    data = open_imagenet21k(tmp_path, "train", classes=CLASSES)
    assert len(data) == 6
    assert sorted(data.labels_of(row).tolist() for row in range(6)) == [[0], [0], [0, 3], [1], [1, 2, 4], [3]]
    assert seen(data) == {1: [1, 2, 4], 9: [0, 3], 5: [3], 20: [0], 21: [1]}  # 5 twice, the later one stays


def test_labels_csv_lists_the_images_and_their_labels(tmp_path: Path) -> None:
    folder = tmp_path / "imagenet21k"
    put(folder, {"n01440764/a.JPEG": 1, "n02012849/b.JPEG": 2, "loose.jpg": 3, "n02012849/unlisted.JPEG": 4})
    lines = [
        "file,labels",
        'n01440764/a.JPEG,"n15075141 n01440764"',
        "n02012849/b.JPEG,n02012849",
        "loose.jpg,n00004475",
    ]
    (folder / LABELS).write_text("\n".join(lines))
    data = open_imagenet21k(tmp_path, "train", classes=CLASSES)
    assert seen(data) == {1: [1, 4], 2: [2], 3: [0]}
    assert data.file(2) == folder / "loose.jpg"
    (folder / LABELS).write_text("\n".join(lines[1:]))  # the first line is no image's name only if it says so
    assert len(open_imagenet21k(tmp_path, "train", classes=CLASSES)) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("n01440764/a.JPEG", "line 2 .* no label"),
        ("n01440764/a.JPEG,", "line 2 .* no label"),
        ("n01440764/a.JPEG,n00000000", "line 2 .*'n00000000'"),
        ("n01440764/a.JPEG,17", "line 2 .*'17'"),
        ("n01440764/b.JPEG,n01440764", "line 2 .*b.JPEG, which is not there"),
        ("n02012849/a.JPEG,n02012849", "line 2 .*which is not there"),
        ("n01440764/c.JPEG,n01440764", "line 2 .*a second time"),
    ],
)
def test_wrong_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    put(tmp_path / "imagenet21k", {"n01440764/a.JPEG": 1, "n01440764/c.JPEG": 1})
    (tmp_path / "imagenet21k" / LABELS).write_text(f"n01440764/c.JPEG,n01440764\n{line}\n")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_imagenet21k(tmp_path, "train", classes=CLASSES)


def test_an_empty_list_and_odd_folders_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "imagenet21k", {"n01440764/a.JPEG": 1, "tench/a.JPEG": 1})
    with pytest.raises(ValueError, match="'tench', which is no class of imagenet21k"):
        open_imagenet21k(tmp_path, "train")
    (tmp_path / "imagenet21k" / LABELS).write_text("")
    with pytest.raises(ValueError, match="empty"):
        open_imagenet21k(tmp_path, "train")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "imagenet21k/n01440764").mkdir(parents=True)
    (tmp_path / "imagenet21k/n01440764/a.JPEG").write_bytes(grey(1)[:99])
    data = open_imagenet21k(tmp_path, "train", classes=("n01440764",))
    with pytest.raises(ValueError, match=r"n01440764/a\.JPEG cannot be read as an image"):
        seen(data)


@pytest.mark.filterwarnings(PART)
def test_folders_of_splits(tmp_path: Path) -> None:
    base = tmp_path / "imagenet21k"
    put(base / "train", {"n01440764/a.JPEG": 1})
    with pytest.raises(FileNotFoundError, match=f"no images of the split 'test'.*{base / 'val'}"):
        open_imagenet21k(tmp_path, "test", classes=CLASSES)
    put(base / "val", {"n02012849/a.JPEG": 2})
    assert seen(open_imagenet21k(tmp_path, "train", classes=CLASSES)) == {1: [1]}
    assert seen(open_imagenet21k(tmp_path, "test", classes=CLASSES)) == {2: [2]}
    shutil.rmtree(base)
    put(base, {"n01440764/a.JPEG": 1})
    with pytest.raises(FileNotFoundError, match=f"no images of the split 'test'.*{base / 'val'}"):
        open_imagenet21k(tmp_path, "test", classes=CLASSES)


# --- shards --------------------------------------------------------------------------------------------


def timm_sample(wnid: str, shade: int) -> tuple[str, dict[str, bytes]]:
    """Numbers in timm/imagenet-22k-wds index the list of 2011."""
    number = wnids("imagenet22k").index(wnid)
    meta = {"label": number, "label_12k": -1, "class_name": wnid, "width": 10, "height": 8}
    content = {"jpg": grey(shade), "json": json.dumps(meta).encode(), "cls": str(number).encode()}
    return f"{wnid}_{shade}", content


def test_shards_of_timm(tmp_path: Path) -> None:
    base = tmp_path / "imagenet21k"
    # Beyond n03931044, which is not in its list, timm's numbers are not ours.
    write_tar(
        base / "imagenet22k-train-0000.tar", dict([timm_sample("n01440764", 1), timm_sample("n15075141", 2)])
    )
    write_tar(base / "imagenet22k-train-0001.tar", dict([timm_sample("n04399537", 3)]))
    write_tar(base / "imagenet22k-validation-0000.tar", dict([timm_sample("n02012849", 4)]))
    ours = wnids("imagenet21k")
    expected = {1: "n01440764", 2: "n15075141", 3: "n04399537"}
    data = open_imagenet21k(tmp_path, "train")
    assert isinstance(data, ShardedImages)
    assert seen(data) == {shade: [ours.index(wnid)] for shade, wnid in expected.items()}
    assert ours.index("n15075141") != wnids("imagenet22k").index("n15075141")
    assert seen(open_imagenet21k(tmp_path, "test")) == {4: [ours.index("n02012849")]}


def test_bare_numbers_of_another_list_need_that_list(tmp_path: Path) -> None:
    key, parts = timm_sample("n15075141", 7)
    write_tar(tmp_path / "imagenet21k/train/a.tar", {key: {kind: parts[kind] for kind in ("jpg", "cls")}})
    with pytest.raises(ValueError, match="numbering"):
        seen(open_imagenet21k(tmp_path, "train"))
    for numbering in ("imagenet22k", wnids("imagenet22k")):
        data = open_imagenet21k(tmp_path, "train", numbering=numbering)
        assert seen(data) == {7: [wnids("imagenet21k").index("n15075141")]}
    with pytest.raises(ValueError, match=r"list of classes 'imagenet-22k'.*'imagenet22k'"):
        open_imagenet21k(tmp_path, "train", numbering="imagenet-22k")


def test_bare_numbers_without_any_wnid_are_refused(tmp_path: Path) -> None:
    """They would be other classes in half of the cases, and nobody would notice."""
    number = wnids("imagenet22k").index("n15075141")
    write_tar(tmp_path / "imagenet21k/train/a.tar", {"000007": {"jpg": grey(7), "cls": str(number).encode()}})
    with pytest.raises(
        ValueError, match=rf"sample '000007' .*number {number}, and nothing says.*'imagenet22k'"
    ):
        seen(open_imagenet21k(tmp_path, "train"))
    found = {name: seen(open_imagenet21k(tmp_path, "train", numbering=name))[7][0] for name in LISTS_21K}
    assert wnids("imagenet21k")[found["imagenet22k"]] == "n15075141"
    assert found["imagenet21k"] == number != found["imagenet22k"]


@pytest.mark.parametrize("name", ["imagenet22k-train-0000.tar.gz", "imagenet22k-train-0000.tgz"])
def test_compressed_shards_say_how_to_unpack_them(name: str, tmp_path: Path) -> None:
    base = tmp_path / "imagenet21k"
    base.mkdir()
    (base / name).write_bytes(gzip.compress(b"a tar file"))
    message = rf"compressed archives, such as {name}.*gunzip them"
    with pytest.raises(ValueError, match=message):
        open_imagenet21k(tmp_path, "train")
    write_tar(base / "imagenet22k-train-0001.tar", dict([timm_sample("n01440764", 1)]))
    with pytest.raises(ValueError, match=message):  # a part of the shards would be left out
        open_imagenet21k(tmp_path, "train")


@pytest.mark.filterwarnings(PART)
def test_the_archive_may_stay_beside_its_folders(tmp_path: Path) -> None:
    put(tmp_path / "imagenet21k", {"n01440764/a.JPEG": 1})
    (tmp_path / "imagenet21k/winter21_whole.tar.gz").write_bytes(b"")
    assert len(open_imagenet21k(tmp_path, "train")) == 1


def test_hidden_shards_are_passed_over_and_the_others_sorted_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths_of_windows(monkeypatch)
    base = tmp_path / "imagenet21k"
    for name in ("b.tar", "C.tar"):
        write_tar(base / name, dict([timm_sample("n01440764", 1)]))
    (base / "._b.tar").write_bytes(b"left by another system")
    assert [shard.name for shard in open_imagenet21k(tmp_path, "train").shards] == ["C.tar", "b.tar"]


@pytest.mark.parametrize("name", ["a-val-000.tar", "val_3.tar", "x.test.tar", "validation.tar"])
def test_shards_that_are_held_out_by_name(name: str, tmp_path: Path) -> None:
    sample = {"k": {"jpg": grey(1), "cls": b"1"}}
    write_tar(tmp_path / "imagenet21k/valley-000.tar", sample)  # not that
    with pytest.raises(FileNotFoundError, match="no images of the split 'test'"):
        open_imagenet21k(tmp_path, "test", classes=CLASSES)
    write_tar(tmp_path / "imagenet21k" / name, sample)
    train_shards, test_shards = (
        open_imagenet21k(tmp_path, s, classes=CLASSES).shards for s in ("train", "test")
    )
    assert [[shard.name for shard in part] for part in (train_shards, test_shards)] == [
        ["valley-000.tar"],
        [name],
    ]


def test_archives_of_single_classes_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "imagenet21k/n01440764.tar", {"n01440764_1": {"JPEG": grey(1)}})
    with pytest.raises(ValueError, match=r"archives of one class, such as n01440764\.tar.*unpack each"):
        open_imagenet21k(tmp_path, "train")


def test_shards_beside_folders_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "imagenet21k", {"n01440764/a.JPEG": 1})
    write_tar(tmp_path / "imagenet21k/a.tar", {"k": {"jpg": grey(1), "cls": b"1"}})
    with pytest.raises(ValueError, match="keep one kind"):
        open_imagenet21k(tmp_path, "train")


# --- training ------------------------------------------------------------------------------------------


def twenty(kind: str, root: Path) -> ShardedImages | MultiLabelFiles:
    """Dark, middling and bright images; the bright ones have a second label."""
    shades = {f"{number:02d}": 12 * number for number in range(20)}
    chosen = {name: [CLASSES[0], *([CLASSES[1]] if shade > 120 else [])] for name, shade in shades.items()}
    base = root / kind / "imagenet21k"
    if kind == "shards":
        for part in range(4):
            samples = {
                name: {"jpg": grey(shades[name]), "cls": " ".join(chosen[name]).encode()}
                for name in list(shades)[part::4]
            }
            write_tar(base / f"{part}.tar", samples)
    else:
        for name, labels in chosen.items():
            put(base, {f"{wnid}/{name}.JPEG": shades[name] for wnid in labels})
    return open_imagenet21k(root / kind, "train", classes=CLASSES[:3])


class Brightness(nn.Module):
    num_features = 4

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x.mean((2, 3))))


@pytest.mark.filterwarnings(PART)
@pytest.mark.parametrize("kind", ["shards", "folders"])
def test_a_multi_label_model_is_trained_and_fitted(kind: str, tmp_path: Path) -> None:
    data = twenty(kind, tmp_path)
    assert (len(data), data.num_classes) == (20, 3)
    assert seen(data) == {12 * n: [0, 1] if n > 10 else [0] for n in range(20)}
    options: dict[str, Any] = {"size": 8, "batch_size": 6, "num_workers": 0}
    model = build("hetsngp", Brightness(), 3, link="sigmoid", rank=1, num_samples=8)
    batches = data.loader(train=True, **options)
    history = train(model, batches, epochs=20, lr=0.05)
    assert torch.isfinite(model.loss(*next(iter(batches))))
    assert history[-1].loss < 0.7 * history[0].loss
    assert model.dataset_size == 20
    report = hetsngp.fit_posterior(model, data.loader(**options))
    assert report.count == 20
    found = torch.cat([model.predict(x).probs for x, _ in data.loader(**options)])
    truth = torch.cat([y for _, y in data.loader(**options)])
    assert ((found > 0.5) == (truth > 0.5)).float().mean() > 0.9


@pytest.mark.filterwarnings(PART)
def test_both_forms_give_the_same_images(tmp_path: Path) -> None:
    """The order differs: shards as they were written, folders by class and name."""
    shards, folders = (
        {
            tuple(x.flatten().tolist()): y.tolist()
            for x, y in zip(*next(iter(data.loader(8, 20, num_workers=0))), strict=True)
        }
        for data in (twenty(kind, tmp_path) for kind in ("shards", "folders"))
    )
    assert len(shards) == 20
    assert shards == folders


@pytest.mark.filterwarnings(PART)
def test_files_are_trained_on_in_an_order_of_the_seed_and_the_epoch(tmp_path: Path) -> None:
    """Each its own shade, 20 of them in batches of 6: two are left out, others in each epoch."""
    data = twenty("folders", tmp_path)

    def orders(seed: int) -> list[list[int]]:
        loader = data.loader(8, 6, train=True, num_workers=0, seed=seed)
        assert len(loader) == 3
        epochs = [list(loader) for _ in range(3)]
        assert [len(x) for epoch in epochs for x, _ in epoch] == [6] * 9
        shades = [torch.cat([x for x, _ in epoch])[:, 0].mean((1, 2)) for epoch in epochs]
        return [(shade * 0.229 + 0.485).mul(255 / 12).round().long().tolist() for shade in shades]

    torch.manual_seed(1)
    first = orders(0)
    for order in first:
        assert len(set(order)) == 18
        assert set(order) < set(range(20))
        assert order != sorted(order)
    assert len({frozenset(order) for order in first}) > 1
    torch.manual_seed(2)
    assert orders(0) == first
    found = {tuple(order) for order in (*first, *orders(1))}
    assert len(found) == 6
    assert [len(x) for x, _ in data.loader(8, 6, num_workers=0)] == [6, 6, 6, 2]


def test_the_split_is_that_of_open_data_where_none_is_named(tmp_path: Path) -> None:
    put(tmp_path / "imagenet21k/train", {f"{wnid}/a.JPEG": 1 for wnid in CLASSES})
    put(tmp_path / "imagenet21k/val", {f"{wnid}/a.JPEG": 2 for wnid in CLASSES})
    assert open_imagenet21k(tmp_path, classes=CLASSES).folder.name == "val"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert open_data("imagenet21k", root=tmp_path).folder.name == "val"


def test_lists_of_files_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one list an image"):
        MultiLabelFiles.of(tmp_path, ["a"], [], ("cat",))
    with pytest.raises(ValueError, match="go from 0 to 1, but there are 1"):
        MultiLabelFiles.of(tmp_path, ["a"], [[0, 1]], ("cat",))
