"""Places365 by its lists and by its folders, and the scenes: every file with its own class."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from tests.unit.small_sets import random_bytes, write_image, write_scenes

from hetsngp.data.datasets.places import open_places365
from hetsngp.data.datasets.registry import open_data
from hetsngp.data.sources import has_test, open_images

CATEGORIES = ["/a/airfield", "/a/apartment_building/outdoor", "/z/zen_garden"]
NAMES = ("airfield", "apartment_building-outdoor", "zen_garden")
VAL = [
    ("Places365_val_00000001.jpg", 2),
    ("Places365_val_00000002.jpg", 0),
    ("Places365_val_00000003.jpg", 1),
]
TRAIN = [
    ("/a/airfield/00000001.jpg", 0),
    ("/a/apartment_building/outdoor/00000001.jpg", 1),
    ("/a/apartment_building/outdoor/00000002.jpg", 1),
    ("/z/zen_garden/00000001.jpg", 2),
]


def write_places(home: Path, images: str, file_list: str, pairs: list[tuple[str, int]]) -> None:
    """Write torchvision's layout."""
    for number, (name, _) in enumerate(pairs):
        write_image(home / images / name.lstrip("/"), random_bytes(20, 24, 3, seed=number))
    write_lines(home / "categories_places365.txt", [(name, i) for i, name in enumerate(CATEGORIES)])
    write_lines(home / file_list, pairs)


def write_lines(file: Path, pairs: list[tuple[str, int]]) -> None:
    file.write_text("".join(f"{name} {number}\n" for name, number in pairs))


@pytest.mark.parametrize("home", ["", "places365"])
@pytest.mark.parametrize(
    ("split", "images", "file_list", "pairs"),
    [
        ("test", "val_256", "places365_val.txt", VAL),
        ("test", "val_large", "places365_val.txt", VAL),
        ("train", "data_256_standard", "places365_train_standard.txt", TRAIN),
        ("train", "data_large_standard", "places365_train_standard.txt", TRAIN),
        ("train", "data_256", "places365_train_standard.txt", TRAIN),
    ],
)
def test_lists_say_what_is_where(
    home: str, split: str, images: str, file_list: str, pairs: list[tuple[str, int]], tmp_path: Path
) -> None:
    write_places(tmp_path / home, images, file_list, pairs)
    data = open_data("places365", split, tmp_path)
    assert data.files == tuple(tmp_path / home / images / name.lstrip("/") for name, _ in pairs)
    assert data.labels.tolist() == [label for _, label in pairs]
    assert data.class_names == NAMES
    assert open_images("places365", split, size=16, root=tmp_path).images.shape == (len(pairs), 3, 16, 16)
    with pytest.raises(ValueError, match="size=224"):
        open_images("places365", split, root=tmp_path)


@pytest.mark.parametrize("split", ["train", "test"])
def test_torchvision_reads_the_same(split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.setattr("torchvision.datasets.places365.check_integrity", lambda *_, **__: True)
    write_places(tmp_path, "val_256", "places365_val.txt", VAL)
    write_places(tmp_path, "data_256_standard", "places365_train_standard.txt", TRAIN)
    part = "val" if split == "test" else "train-standard"
    theirs, ours = datasets.Places365(tmp_path, part, small=True), open_places365(tmp_path, split)
    assert [str(file) for file in ours.files] == [file for file, _ in theirs.imgs]
    assert ours.labels.tolist() == theirs.targets
    assert [name.split("/", 2)[2].replace("/", "-") for name in theirs.classes] == list(ours.class_names)


def test_small_images_come_first(tmp_path: Path) -> None:
    for images in ("val_large", "val_256"):
        write_places(tmp_path, images, "places365_val.txt", VAL)
    assert open_places365(tmp_path).files[0].parent.name == "val_256"
    for images in ("data_large", "data_large_standard", "data_256", "data_256_standard"):
        write_places(tmp_path, images, "places365_train_standard.txt", TRAIN)
        first = open_places365(tmp_path, "train").files[0].relative_to(tmp_path)
        assert first.parts[0] == images  # each before those written until then


@pytest.mark.parametrize("home", ["", "places365"])
def test_folders_of_the_easy_format(home: str, tmp_path: Path) -> None:
    for part, count in (("train", 2), ("val", 1)):
        for label, name in enumerate(NAMES):
            for number in range(count):
                file = tmp_path / home / "places365_standard" / part / name / f"{number}.jpg"
                write_image(file, random_bytes(9, 9, 3, seed=label))
    train, test = (open_places365(tmp_path, split) for split in ("train", "test"))
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert test.labels.tolist() == [0, 1, 2]
    assert train.class_names == test.class_names == NAMES
    assert {file.parents[1].name for file in test.files} == {"val"}


def write_easy(home: Path, part: str, names: Iterable[str]) -> None:
    for label, name in enumerate(names):
        write_image(home / "places365_standard" / part / name / "1.jpg", random_bytes(9, 9, 3, seed=label))


@pytest.mark.parametrize("place", ["", "places365_standard"])
@pytest.mark.filterwarnings("ignore:.*is a part of places365:UserWarning")
def test_the_easy_format_has_the_authors_numbers_where_they_are(place: str, tmp_path: Path) -> None:
    write_easy(tmp_path, "train", NAMES[1:])
    write_easy(tmp_path, "val", (NAMES[0], NAMES[2]))
    # Neither in the order of the names nor in that of the folders
    numbers = {CATEGORIES[0]: 1, CATEGORIES[1]: 2, CATEGORIES[2]: 0}
    write_lines(tmp_path / place / "categories_places365.txt", list(numbers.items()))
    train, test = (open_places365(tmp_path, split) for split in ("train", "test"))
    assert [
        (file.parent.name, label) for file, label in zip(train.files, train.labels.tolist(), strict=True)
    ] == [
        (NAMES[2], 0),
        (NAMES[1], 2),
    ]
    assert [
        (file.parent.name, label) for file, label in zip(test.files, test.labels.tolist(), strict=True)
    ] == [
        (NAMES[2], 0),
        (NAMES[0], 1),
    ]
    assert train.class_names == test.class_names == (NAMES[2], NAMES[0], NAMES[1])


def test_the_easy_format_must_have_the_same_classes_in_both_splits(tmp_path: Path) -> None:
    write_easy(tmp_path, "val", (NAMES[0], NAMES[2]))
    assert open_places365(tmp_path).class_names == (NAMES[0], NAMES[2])
    write_easy(tmp_path, "train", NAMES)
    for split in ("train", "test"):
        with pytest.raises(
            ValueError, match=rf"different classes, e\.g\. '{NAMES[1]}'.*categories_places365"
        ):
            open_places365(tmp_path, split)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda at: (at / "places365_val.txt").unlink(), "places365_val.txt is missing or damaged"),
        (lambda at: (at / "categories_places365.txt").unlink(), "categories_places365.txt is missing"),
        (lambda at: (at / "places365_val.txt").write_text(""), "it is empty"),
        (lambda at: (at / "places365_val.txt").write_text("a.jpg\n"), "places365_val.txt is missing or"),
        (lambda at: write_lines(at / "places365_val.txt", [("a.jpg", 3)]), "a label is none of 0 … 2"),
        (lambda at: write_lines(at / "places365_val.txt", [("a.jpg", -1)]), "txt .*a label is none of 0 … 2"),
        (lambda at: write_lines(at / "categories_places365.txt", [("/a/x", 1)]), "numbers are not 0, 1"),
        *(
            (
                lambda at, name=name: (at / "val_256" / name).unlink(),
                f"places365_val.txt and .*val_256 disagree: 1 of 3 images of the list .*such as {name}",
            )
            for name, _ in VAL  # the one in the middle too
        ),
    ],
)
def test_wrong_lists_are_named(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    write_places(tmp_path, "val_256", "places365_val.txt", VAL)
    open_places365(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        open_places365(tmp_path)
    assert "filelist_places365-standard.tar" in str(error.value)


def test_scenes_have_their_size(tmp_path: Path) -> None:
    pixels = torch.from_numpy(write_scenes(tmp_path)).permute(0, 3, 1, 2)
    data = open_images("scenes", "test", root=tmp_path)
    assert torch.equal(data.images, pixels)
    assert data.labels.tolist() == [0, 0, 1, 1]
    assert data.class_names == ("airport", "kitchen")
    assert open_images("scenes", "test", size=32, root=tmp_path).images.shape == (4, 3, 32, 32)
    assert has_test("scenes")
    with pytest.raises(ValueError, match="split of scenes 'train'"):
        open_images("scenes", "train", root=tmp_path)
