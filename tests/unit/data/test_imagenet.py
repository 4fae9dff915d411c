"""ImageNet and its variants from folders: a label is a place in timm's list, whatever folders are there."""

import csv
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.data.test_image_files import backwards, paths_of_windows

from hetsngp.data.datasets.imagenet import (
    GET,
    IMAGENET_SETS,
    imagenet_subset,
    open_imagenet,
    open_imagenet_a,
    open_imagenet_c,
    open_imagenet_r,
    open_imagenet_v2,
)
from hetsngp.data.datasets.registry import DATASETS, open_data
from hetsngp.data.datasets.synsets import class_names, wnids

Image = pytest.importorskip("PIL.Image")
timm_data = pytest.importorskip("timm.data")

PART = "ignore:.*is a part of:UserWarning"
# Neither sorted nor next to one another: places 850, 0, 2, 999 of the list.
SOME = {"n04399382": 850, "n01440764": 0, "n01484850": 2, "n15075141": 999}


def put(file: Path, shade: int = 0, size: tuple[int, int] = (8, 8)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, shade).save(file, "JPEG")  # grey without edges is exact


def put_classes(folder: Path, names: Iterable[str], ending: str = "JPEG") -> None:
    for shade, name in enumerate(names):
        for number in (2, 1):
            put(folder / name / f"{name}_{number}.{ending}", shade)


def by_folder(files: tuple[Path, ...], labels: torch.Tensor) -> dict[str, int]:
    """Label of each folder; one only."""
    pairs = {(file.parent.name, label) for file, label in zip(files, labels.tolist(), strict=True)}
    found = dict(pairs)
    assert len(found) == len(pairs)
    return found


# --- lists of classes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "timms", "count"),
    [
        ("imagenet", "imagenet-1k", 1000),
        ("imagenet21k", "imagenet-21k-goog", 21843),
        ("imagenet22k", "imagenet-22k", 21841),
    ],
)
def test_lists_are_those_of_timms_own_interface(name: str, timms: str, count: int) -> None:
    info = timm_data.ImageNetInfo(timms)
    assert list(wnids(name)) == list(info.label_names())
    assert len(wnids(name)) == len(set(wnids(name))) == count
    names = class_names(name)
    assert len(set(names)) == count  # two classes are called "crane"
    for number in (0, 134, 517, count - 1):
        assert names[number].split(" (n")[0] == info.index_to_description(number).split(",")[0]
    assert class_names("imagenet")[134] == "crane (n02012849)"


@pytest.mark.parametrize("name", ["imagenet-a", "imagenet-r"])
def test_subsets_are_timms_indices(name: str) -> None:
    folder = Path(timm_data.__file__).parent / "_info"
    indices = [int(line) for line in (folder / f"{name.replace('-', '_')}_indices.txt").read_text().split()]
    subset = imagenet_subset(name)
    assert subset.index.tolist() == indices  # written down by timm apart from the wnids
    assert (subset.num_inputs, subset.num_classes, subset.missing) == (1000, 200, ())
    assert subset.class_names == tuple(class_names("imagenet")[index] for index in indices)
    logits = torch.randn(5, 1000)
    torch.testing.assert_close(subset.apply(logits.softmax(1)), logits[:, indices].softmax(1))


def test_unknown_subsets_are_refused() -> None:
    with pytest.raises(ValueError, match="imagenet-a"):
        imagenet_subset("imagenet-v2")


# --- folders by wnid -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings(PART)
@pytest.mark.parametrize(("split", "folder"), [("train", "train"), ("test", "val")])
def test_imagenet_labels_are_places_in_the_list(split: str, folder: str, tmp_path: Path) -> None:
    put_classes(tmp_path / "imagenet" / folder, SOME)
    data = open_imagenet(tmp_path, split)
    assert by_folder(data.files, data.labels) == SOME
    assert (len(data), data.num_classes) == (8, 1000)
    assert data.labels.tolist() == sorted(data.labels.tolist())
    assert [file.name for file in data.files[:2]] == ["n01440764_1.JPEG", "n01440764_2.JPEG"]
    assert data.class_names[850] == "teddy"


@pytest.mark.filterwarnings(PART)
def test_images_come_with_their_labels(tmp_path: Path) -> None:
    put_classes(tmp_path / "imagenet/val", SOME)
    data = open_imagenet(tmp_path, "test")
    shade_of = {label: shade for shade, label in enumerate(SOME.values())}
    loaded = data.load(8)
    assert loaded.images[:, 0, 0, 0].tolist() == [shade_of[label] for label in loaded.labels.tolist()]


def test_a_part_of_the_classes_is_allowed_and_said(tmp_path: Path) -> None:
    put_classes(tmp_path / "imagenet/val", SOME)
    (tmp_path / "imagenet/val/n01443537").mkdir()  # a class without images is not there either
    (tmp_path / "imagenet/val/.cache").mkdir()
    (tmp_path / "imagenet/val/n01440764/notes.txt").write_text("no image")
    (tmp_path / "imagenet/val/n01440764/._n01440764_1.JPEG").write_text("left by another system")
    with pytest.warns(UserWarning, match=r"996 of 1000 classes, 'n01443537', 'n01491361'.* and 991 more"):
        assert len(open_imagenet(tmp_path, "test")) == 8


def test_all_classes_give_no_warning(tmp_path: Path) -> None:
    put(tmp_path / "image.jpg")
    for wnid in wnids("imagenet-a"):
        (tmp_path / "imagenet-a" / wnid).mkdir(parents=True)
        shutil.copy(tmp_path / "image.jpg", tmp_path / "imagenet-a" / wnid / "0.jpg")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = open_imagenet_a(tmp_path)
    assert data.labels.tolist() == list(range(200))
    assert [file.parent.name for file in data.files] == list(wnids("imagenet-a"))


@pytest.mark.filterwarnings(PART)
@pytest.mark.parametrize(
    ("name", "open_set"), [("imagenet-a", open_imagenet_a), ("imagenet-r", open_imagenet_r)]
)
def test_subsets_have_labels_of_their_own(
    name: str, open_set: Callable[[Path], object], tmp_path: Path
) -> None:
    chosen = [wnids(name)[place] for place in (199, 0, 57)]
    put_classes(tmp_path / name, chosen, "jpg")
    (tmp_path / name / "README.txt").write_text("as in the archive")
    data = open_set(tmp_path)
    assert by_folder(data.files, data.labels) == dict(zip(chosen, (199, 0, 57), strict=True))
    # The map takes a model that knows a class among the 1,000 to the label it has here.
    model = torch.zeros(3, 1000)
    model[range(3), [wnids("imagenet").index(wnid) for wnid in chosen]] = 1
    assert imagenet_subset(name).apply(model).argmax(1).tolist() == [199, 0, 57]


@pytest.mark.filterwarnings(PART)
@pytest.mark.parametrize("disk", [paths_of_windows, backwards])
def test_the_order_is_that_of_the_names_on_any_disk(
    disk: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.JPEG", "C.JPEG", "a.jpg"):
        put(tmp_path / "imagenet/val/n01440764" / name)
    disk(monkeypatch)
    data = open_imagenet(tmp_path, "test")
    assert [file.name for file in data.files] == ["C.JPEG", "a.jpg", "b.JPEG"]


@pytest.mark.filterwarnings(PART)
@pytest.mark.parametrize("place", ["n01440764/dead.JPEG", "n01443537"])
def test_links_that_lead_nowhere_are_named(place: str, tmp_path: Path) -> None:
    put_classes(tmp_path / "imagenet/val", SOME)
    (tmp_path / "imagenet/val/n01440764/notes.txt").symlink_to(tmp_path / "nowhere")  # nobody wants this one
    open_imagenet(tmp_path, "test")
    (tmp_path / "imagenet/val" / place).symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=rf"{place} is a link to .*nowhere, which is not there"):
        open_imagenet(tmp_path, "test")


# --- what is not as it should be -----------------------------------------------------------------------


def test_a_flat_validation_folder_says_how_to_sort_it(tmp_path: Path) -> None:
    put(tmp_path / "imagenet/val/ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(ValueError, match=r"no class folders such as n01440764/: sort .*valprep\.sh"):
        open_imagenet(tmp_path, "test")


def test_folders_that_are_no_class_are_named(tmp_path: Path) -> None:
    put_classes(tmp_path / "imagenet/val", [*SOME, "n00000001", "tench"])
    with pytest.raises(ValueError, match=r"'n00000001', 'tench', which are no class of imagenet"):
        open_imagenet(tmp_path, "test")
    put_classes(tmp_path / "imagenet-a", ["n01440764"])  # of ImageNet, not of ImageNet-A
    with pytest.raises(ValueError, match=r"'n01440764', which is no class of imagenet-a"):
        open_imagenet_a(tmp_path)


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "imagenet/val/n01440764").mkdir(parents=True)
    with pytest.raises(ValueError, match="has an image"):
        open_imagenet(tmp_path, "test")


def expected_folders(name: str, root: Path) -> dict[str, list[Path]]:
    v2 = "imagenetv2-matched-frequency-format-val"
    folders = {
        "imagenet": {"train": [root / "imagenet/train"], "test": [root / "imagenet/val"]},
        "imagenet-v2": {"test": [root / v2, root / "imagenet-v2" / v2, root / "imagenet-v2"]},
        "imagenet21k": {split: [root / "imagenet21k"] for split in ("train", "test")},
    }
    return folders.get(name, {"test": [root / name]})


@pytest.mark.parametrize("data", IMAGENET_SETS, ids=lambda data: data.name)
def test_a_missing_set_names_the_folders_and_the_source(data, tmp_path: Path) -> None:
    assert DATASETS[data.name] is data
    folders = expected_folders(data.name, tmp_path)
    assert set(data.splits) == set(folders)
    for split, places in folders.items():
        with pytest.raises(FileNotFoundError) as error:
            open_data(data.name, split, tmp_path)
        for place in places:
            assert f"\n  {place}\n" in str(error.value)
        assert data.get in str(error.value)
        assert "https://" in data.get


def test_the_sources() -> None:
    assert {data.name for data in IMAGENET_SETS} == {*GET, "imagenet21k"}
    assert GET["imagenet-c"].endswith("2235448")


def test_unknown_splits_are_refused(tmp_path: Path) -> None:
    for open_set in (open_imagenet, open_imagenet_a, open_imagenet_c, open_imagenet_v2):
        with pytest.raises(ValueError, match="split"):
            open_set(tmp_path, "vla")


# --- ImageNet-V2 ---------------------------------------------------------------------------------------

TRAP = [0, 1, 2, 10, 11, 100, 999]


def put_numbered(folder: Path, labels: list[int]) -> None:
    for label in labels:
        put(folder / str(label) / f"{label:x}.jpeg", label % 256)


@pytest.mark.filterwarnings(PART)
@pytest.mark.parametrize(
    "place",
    [
        "imagenet-v2",
        "imagenetv2-matched-frequency-format-val",
        "imagenet-v2/imagenetv2-matched-frequency-format-val",
    ],
)
def test_v2_labels_are_the_numbers_not_their_order_as_text(place: str, tmp_path: Path) -> None:
    put_numbered(tmp_path / place, TRAP)
    data = open_imagenet_v2(tmp_path)
    assert data.labels.tolist() == TRAP
    assert [file.parent.name for file in data.files] == [str(label) for label in TRAP]
    assert sorted(map(str, TRAP)) != list(map(str, TRAP))  # as text: 0, 1, 10, 100, …
    assert data.load(8).images[:, 0, 0, 0].tolist() == [label % 256 for label in TRAP]
    assert data.class_names == class_names("imagenet")


def test_v2_complete(tmp_path: Path) -> None:
    put(tmp_path / "image.jpeg")
    folder = tmp_path / "imagenetv2-top-images-format-val"
    for label in range(1000):
        (folder / str(label)).mkdir(parents=True)
        (folder / str(label) / "a.jpeg").hardlink_to(tmp_path / "image.jpeg")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = open_data("imagenet-v2:top-images", "test", tmp_path)
    assert data.labels.tolist() == list(range(1000))
    with pytest.raises(FileNotFoundError, match=r"imagenetv2-threshold0\.7-format-val"):
        open_data("imagenet-v2:threshold0.7", "test", tmp_path)
    with pytest.raises(FileNotFoundError, match="matched-frequency"):
        open_imagenet_v2(tmp_path)


@pytest.mark.parametrize("place", ["", "imagenet-v2"])
def test_v2_offers_the_sets_that_are_there(place: str, tmp_path: Path) -> None:
    put_numbered(tmp_path / place / "imagenetv2-top-images-format-val", TRAP)
    with pytest.raises(FileNotFoundError) as error:
        open_data("imagenet-v2", root=tmp_path)
    message = str(error.value)
    assert message.startswith("no imagenet-v2:matched-frequency: there is none of\n")
    assert message.endswith(
        "ImageNetV2, imagenetv2-matched-frequency.tar.gz; what is there opens as imagenet-v2:top-images"
    )


def test_v2_empty_names_the_archive(tmp_path: Path) -> None:
    (tmp_path / "imagenet-v2").mkdir()
    with pytest.raises(ValueError, match=r"unpack imagenetv2-matched-frequency\.tar\.gz again"):
        open_imagenet_v2(tmp_path)


@pytest.mark.parametrize("odd", ["1000", "007", "n01440764"])
def test_v2_folders_that_are_no_label_are_refused(odd: str, tmp_path: Path) -> None:
    put_numbered(tmp_path / "imagenet-v2", TRAP)
    put(tmp_path / "imagenet-v2" / odd / "a.jpeg")
    with pytest.raises(ValueError, match=f"'{odd}', which is no class of imagenet-v2"):
        open_imagenet_v2(tmp_path)


# --- ImageNet-C ----------------------------------------------------------------------------------------

LACKS = "ignore:.*lacks:UserWarning"


@pytest.mark.filterwarnings(PART, LACKS)
def test_c_with_and_without_the_folders_of_its_archives(tmp_path: Path) -> None:
    root = tmp_path / "imagenet-c"
    for severity in (1, 2, 3, 4, 5):
        put_classes(root / "gaussian_noise" / str(severity), SOME)
        put_classes(root / "weather/fog" / str(severity), list(SOME)[:severity])
    put_classes(root / "extra/spatter/3", SOME)
    data = open_imagenet_c(tmp_path)
    fog = [("fog", severity) for severity in (1, 2, 3, 4, 5)]
    assert list(data) == [("gaussian_noise", severity) for severity in (1, 2, 3, 4, 5)] + [
        *fog,
        ("spatter", 3),
    ]
    assert len(data) == 11
    assert by_folder(data["gaussian_noise", 4].files, data["gaussian_noise", 4].labels) == SOME
    for severity in (1, 2, 3, 4, 5):
        files = data["fog", severity].files
        assert len(files) == 2 * min(severity, 4)
        assert all(file.is_relative_to(root / "weather/fog" / str(severity)) for file in files)
    with pytest.raises(KeyError, match="gaussian_noise, fog, spatter"):
        data["fog", 6]


def test_c_is_lazy_and_says_what_it_lacks(tmp_path: Path) -> None:
    put_classes(tmp_path / "imagenet-c/noise/shot_noise/1", ["no class at all"])
    with pytest.warns(UserWarning, match=r"lacks gaussian_noise, shot_noise,.*zenodo"):
        data = open_imagenet_c(tmp_path)  # no class folder has been looked at
    assert ("shot_noise", 1) in data
    assert ("shot_noise", 2) not in data
    with pytest.raises(ValueError, match="no class at all"):
        data["shot_noise", 1]


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["fog/1", "weather/fog/1"], "same corruption"),
        (["fog/6"], "it has '6' where folders 1 … 5"),
        (["n01440764"], "it has nothing where folders 1 … 5"),
        ([], "noise.tar"),
        (["weather"], "noise.tar"),
    ],
)
def test_c_of_another_layout_is_refused(folders: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "imagenet-c").mkdir()
    for folder in folders:
        (tmp_path / "imagenet-c" / folder).mkdir(parents=True)
    with pytest.raises(ValueError, match=message):
        open_imagenet_c(tmp_path)


# --- real images ---------------------------------------------------------------------------------------


def test_real_images_sorted_into_folders(data_root: Path, tmp_path: Path) -> None:
    """Two validation images a class, put where ImageNet's lie: each class gets the label it was given."""
    folder = (data_root / "imagenet_val2_224").resolve()  # links to it lie elsewhere
    if not folder.is_dir():
        pytest.skip("no imagenet_val2_224")
    with open(folder / "labels.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        (tmp_path / "imagenet/val" / row["wnid"]).mkdir(parents=True, exist_ok=True)
        name = f"{row['image']}.webp"
        (tmp_path / "imagenet/val" / row["wnid"] / name).symlink_to(folder / name)
    data = open_imagenet(tmp_path, "test")
    given = {row["image"]: int(row["label"]) for row in rows}
    assert [given[file.stem] for file in data.files] == data.labels.tolist()
    assert np.bincount(data.labels.numpy()).tolist() == [2] * 1000
    assert data.take([0, 1999]).load(224).images.float().std() > 10
