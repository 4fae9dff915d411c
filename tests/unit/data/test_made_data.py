"""The made sets open as the real ones do: by name, with as many images and the labels that were written."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from tests.made_data import ORGANISM, TEDDY, Made, made_data, small_cifar

from hetsngp.data.datasets import cifar
from hetsngp.data.datasets.imagenet21k import open_imagenet21k, to_imagenet1k
from hetsngp.data.datasets.registry import DATASETS, open_data
from hetsngp.data.datasets.synsets import wnids
from hetsngp.data.sources import open_images

pytest.importorskip("PIL.Image")
pytest.importorskip("timm")
pytestmark = pytest.mark.filterwarnings("ignore:.*(is a part of|lacks):UserWarning")

FEW = {"corruptions": ("gaussian_noise", "fog"), "severities": (1, 5)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_data(tmp_path_factory.mktemp("data"), **FEW)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    small_cifar(monkeypatch, made)


def test_every_set_of_the_paper_is_made(made: Made) -> None:
    assert {name for name, _ in made.labels} | {"imagenet21k"} == {*DATASETS, "photos"} - {"svhn", "clinc150"}


ONE_LABEL = [
    (name, split)
    for name, data in DATASETS.items()
    for split in data.splits
    if data.gives in ("ImageArrays", "ImageFiles")
    and name != "svhn"
    and (name, split) != ("places365", "train")
]


@pytest.mark.parametrize(("name", "split"), ONE_LABEL)
def test_sets_with_one_label(made: Made, name: str, split: str) -> None:
    data = open_data(name, split, made.root)
    assert data.labels.tolist() == made.labels[name, split]
    assert len(data) == len(made.labels[name, split])


def test_labels_of_the_family_of_imagenet_are_those_of_its_classes(made: Made) -> None:
    """Written down by wnid alone, apart from how labels were remembered."""
    for name, known in (("imagenet", "imagenet"), ("imagenet-a", "imagenet-a"), ("imagenet-r", "imagenet-r")):
        data = open_data(name, "test", made.root)
        assert [wnids(known)[label] for label in data.labels] == [file.parent.name for file in data.files]
    assert TEDDY in made.wnids
    data = open_data("imagenet-v2", "test", made.root)
    assert {wnids("imagenet")[label] for label in data.labels} == set(made.wnids)


def test_corrupted_sets(made: Made) -> None:
    for name in ("imagenet-c", "cifar10-c", "cifar100-c"):
        sets = open_data(name, "test", made.root)
        severities = FEW["severities"] if name == "imagenet-c" else (1, 2, 3, 4, 5)
        assert list(sets) == [(corruption, s) for corruption in FEW["corruptions"] for s in severities]
        for key in sets:
            assert sets[key].labels.tolist() == made.labels[name, "test"]


def test_all_of_the_corruptions_are_there_unless_fewer_are_asked_for(tmp_path: Path) -> None:
    made_data(tmp_path, classes=2, images=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lacks")
        assert [len(open_data(name, "test", tmp_path)) for name in ("imagenet-c", "cifar100-c")] == [75, 75]


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_imagenet21k_is_multi_label(made: Made, tmp_path: Path, shards: bool, split: str) -> None:
    pytest.importorskip("torchvision")
    if shards:
        made = made_data(tmp_path, **FEW, shards=True)
    data = open_imagenet21k(made.root, split)
    rows = [y for _, targets in data.loader(8, 4, num_workers=0) for y in targets]
    found = [row.nonzero().flatten().tolist() for row in rows]
    assert found == made.several[split]
    organism = wnids("imagenet21k").index(ORGANISM)
    assert {len(row) for row in found} == {1, 2}
    assert all(organism in row for row in found if len(row) == 2)
    # The other label is a class of the 1,000, for the way from 21,843 to them.
    first = {label for row in found for label in row} - {organism}
    assert first <= set(to_imagenet1k().index.tolist())


def test_human_labels(made: Made) -> None:
    given, own = (open_data(name, "train", made.root) for name in ("cifar10n:worse", "cifar10"))
    assert int((given.labels != own.labels).sum()) == len(own) // 4
    voted = open_data("cifar10h", "test", made.root)
    assert voted.votes.argmax(1).tolist() == voted.images.labels.tolist() == made.labels["cifar10h", "test"]


def test_a_folder_of_ones_own(made: Made) -> None:
    for split in ("train", "test"):
        data = open_images(made.root / "photos", split, size=16)
        assert data.labels.tolist() == made.labels["photos", split]


@pytest.mark.parametrize("name", ["cifar100", "imagenet", "imagenet-r", "photos"])
def test_a_class_can_be_told_by_its_colour(made: Made, name: str) -> None:
    """The nearest mean colour of the training images of a class is that of its test images."""
    spec = made.root / name if name == "photos" else name
    size = None if name == "cifar100" else 16
    root = None if name == "photos" else made.root
    test = open_images(spec, "test", size=size, root=root)
    train = test if name == "imagenet-r" else open_images(spec, "train", size=size, root=root)
    means = torch.stack(
        [train.images[train.labels == c].float().mean((0, 2, 3)) for c in train.labels.unique()]
    )
    nearest = torch.cdist(test.images.float().mean((2, 3)), means).argmin(1)
    assert train.labels.unique()[nearest].tolist() == test.labels.tolist()


def test_it_is_the_same_every_time(made: Made, tmp_path: Path) -> None:
    again = made_data(tmp_path, **FEW)
    files = sorted(file.relative_to(made.root) for file in made.root.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file())
    for file in files:
        if file.suffix != ".npz":  # which remembers when it was written
            assert (made.root / file).read_bytes() == (again.root / file).read_bytes(), file


def test_the_command_takes_cifar_for_whole(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    program, flag, code = made.command
    assert (program, flag) == (sys.executable, "-c")
    before, main = code.split("from hetsngp.cli import main;")
    assert main.strip() == "main()"
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.setattr(cifar, "SIZES", {"train": 50_000, "test": 10_000})
    with pytest.raises(ValueError, match="where 50000 were expected"):
        open_data("cifar100", "train", made.root)
    exec(before)
    assert sys.argv == ["hetsngp"]
    assert len(open_data("cifar100", "train", made.root)) == made.sizes["train"]
