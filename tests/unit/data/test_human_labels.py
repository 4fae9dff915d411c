"""Human labels are matched to their images, from the authors' files, and run no code."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.small_sets import CIFAR_SIZES, cifar10_labels, make_cifar_small, write_cifar10

from hetsngp.data.datasets.human_labels import CIFAR10N_KEYS, load_cifar10h, load_cifar10n
from hetsngp.data.datasets.registry import open_data
from hetsngp.data.sources import open_images


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar_small(monkeypatch)


def human_labels(count: int, kind: Any = np.int64) -> dict[str, np.ndarray]:
    """The authors' dict, every list another."""
    draws = np.random.default_rng(0)
    return {key: draws.integers(0, 10, count).astype(kind) for key in CIFAR10N_KEYS.values()}


def write_zip(file: Path, content: Any) -> None:
    torch.save(content, file)


def write_legacy(file: Path, content: Any) -> None:
    torch.save(content, file, _use_new_zipfile_serialization=False)


def write_old_numpy(file: Path, content: Any) -> None:
    """A file written by NumPy 1, where the module of one function had another name."""
    torch.save(content, file)
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    changed = 0
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in entries.items():
            changed += data.count(b"cnumpy._core.multiarray\n")
            archive.writestr(name, data.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    assert changed


def write_npz(file: Path, content: dict[str, np.ndarray]) -> None:
    np.savez(file, **{f"c10_{key}": value for key, value in content.items()}, c100_noisy_label=np.zeros(3))


# --- CIFAR-10N -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "place", "kind"),
    [
        (write_zip, "CIFAR-10_human.pt", np.int64),
        (write_zip, "cifar10n/CIFAR-10_human.pt", np.uint8),
        (write_legacy, "cifar10/CIFAR-10_human.pt", np.int32),
        (write_old_numpy, "cifar-10-100n/data/CIFAR-10_human.pt", np.int64),
        (write_npz, "cifar10/cifar_n.npz", np.uint8),
    ],
)
def test_the_labels_are_those_that_went_in(
    write: Callable[[Path, Any], None], place: str, kind: Any, tmp_path: Path
) -> None:
    content = human_labels(50_000, kind)
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    write(tmp_path / place, content)
    labels = load_cifar10n(tmp_path)
    assert set(labels) == {"clean", "aggre", "random1", "random2", "random3", "worse"}
    for name, found in labels.items():
        assert found.dtype == torch.int64
        digit = name[-1] if name[-1].isdigit() else ""
        assert np.array_equal(found.numpy(), content[f"{name.rstrip('123')}_label{digit}"])


@pytest.mark.usefixtures("small")
def test_images_get_the_labels_asked_for(tmp_path: Path) -> None:
    pixels = write_cifar10(tmp_path)
    content = {**human_labels(20), "clean_label": cifar10_labels("train")}
    write_zip(tmp_path / "CIFAR-10_human.pt", content)
    for spec, key in {
        "cifar10n": "worse_label",
        "cifar10n:worse": "worse_label",
        "cifar10n:aggre": "aggre_label",
        "cifar10n:random2": "random_label2",
        "cifar10n:clean": "clean_label",
    }.items():
        data = open_images(spec, "train", root=tmp_path)
        assert np.array_equal(data.images.numpy(), pixels["train"])
        assert data.labels.tolist() == content[key].tolist()
        test = open_images(spec, "test", root=tmp_path)
        assert test.labels.tolist() == cifar10_labels("test").tolist()  # clean
    with pytest.raises(ValueError, match=r"'aggre', 'random1', 'random2', 'random3', 'worse', 'clean'"):
        open_images("cifar10n:wors", "train", root=tmp_path)


@pytest.mark.usefixtures("small")
def test_images_in_another_order_are_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    clean = cifar10_labels("train")
    clean[[0, 1]] = clean[[1, 0]]
    assert (clean != cifar10_labels("train")).sum() == 2
    write_zip(tmp_path / "CIFAR-10_human.pt", {**human_labels(20), "clean_label": clean})
    with pytest.raises(ValueError, match=r"for 2 of 20.*another order.*CIFAR10\(root.*git clone"):
        open_images("cifar10n:aggre", "train", root=tmp_path)


class Evil:
    """A pickle of it calls ``function``."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("write", [write_zip, write_legacy])
@pytest.mark.parametrize(
    "make",
    [
        lambda mark: Evil(os.system, f"touch '{mark}'"),
        lambda mark: Evil(eval, f"open({str(mark)!r}, 'w')"),
        lambda mark: Evil(np.savetxt, str(mark), [1]),
    ],
)
def test_a_file_that_would_run_code_is_refused(
    make: Callable[[Path], Evil], write: Callable[[Path, Any], None], tmp_path: Path
) -> None:
    mark, file = tmp_path / "mark", tmp_path / "CIFAR-10_human.pt"
    write(file, {**human_labels(50_000), "worse_label": make(mark)})
    with pytest.raises(ValueError, match="get it again, git clone"):
        load_cifar10n(tmp_path)
    assert not mark.exists()
    torch.load(file, weights_only=False)  # and it would have
    assert mark.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (human_labels(49_999), r"\(49999,\) where \(50000,\)"),
        ({key: value + 1 for key, value in human_labels(50_000).items()}, "from 1 to 10"),
        ({key: value / 1.0 for key, value in human_labels(50_000, np.int8).items()}, "only whole ones"),
        ({"clean_label": np.zeros(50_000, int)}, "aggre_label"),
        ([1, 2], "a list, not a dict"),
    ],
)
def test_other_files_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    write_zip(tmp_path / "CIFAR-10_human.pt", content)
    with pytest.raises(ValueError, match=f"(?s)CIFAR-10_human.pt is damaged.*{message}.*get it again"):
        load_cifar10n(tmp_path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "CIFAR-10_human.pt"
    write_zip(file, human_labels(50_000))
    file.write_bytes(file.read_bytes()[:100_000])
    with pytest.raises(ValueError, match=r"(?s)CIFAR-10_human.pt is damaged.*get it again"):
        load_cifar10n(tmp_path)


# --- CIFAR-10H -----------------------------------------------------------------------------------------


def votes_for(labels: np.ndarray) -> np.ndarray:
    """About 50 each, most of them right."""
    votes = np.random.default_rng(1).integers(0, 3, (len(labels), 10))
    votes[np.arange(len(labels)), labels] += 40
    return votes


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "place",
    [
        *("cifar10h-counts.npy", "cifar10h/cifar10h-counts.npy", "cifar-10h/data/cifar10h-counts.npy"),
        "cifar10/cifar10h_counts.npz",
    ],
)
def test_votes_stand_beside_their_images(place: str, tmp_path: Path) -> None:
    pixels = write_cifar10(tmp_path)
    votes = votes_for(cifar10_labels("test"))
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    if place.endswith("npz"):
        np.savez(tmp_path / place, counts=votes.astype(np.uint8))
    else:
        np.save(tmp_path / place, votes.astype(float))
    data = open_data("cifar10h", root=tmp_path)
    assert data.votes.dtype == torch.int64
    assert np.array_equal(data.votes.numpy(), votes)
    assert np.array_equal(data.images.images.numpy(), pixels["test"])
    assert len(data) == CIFAR_SIZES["test"]
    with pytest.raises(ValueError, match=r"VotedImages.*open_data\('cifar10h'"):
        open_images("cifar10h", "test", root=tmp_path)


@pytest.mark.usefixtures("small")
def test_votes_in_another_order_are_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    np.save(tmp_path / "cifar10h-counts.npy", votes_for(np.roll(cifar10_labels("test"), 1)))
    with pytest.raises(ValueError, match=r"on 0% of the test images, not on 99 %.*another order"):
        open_data("cifar10h", root=tmp_path)


@pytest.mark.parametrize("right", [1, 8])
@pytest.mark.usefixtures("small")
def test_votes_that_agree_by_chance_are_refused(right: int, tmp_path: Path) -> None:
    """One in ten agrees in another order, not none."""
    write_cifar10(tmp_path)
    voted = cifar10_labels("test")
    voted[right:] = (voted[right:] + 1) % 10
    np.save(tmp_path / "cifar10h-counts.npy", votes_for(voted))
    with pytest.raises(ValueError, match=rf"on {right}0% of the test images, not on 99 %.*another order"):
        open_data("cifar10h", root=tmp_path)


@pytest.mark.parametrize(
    "votes",
    [
        np.full((10_000, 10), 0.1),  # the authors' other file, of probabilities
        np.ones((9_999, 10)),
        -np.ones((10_000, 10)),
    ],
)
def test_what_is_no_votes_is_refused(votes: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "cifar10h-counts.npy", votes, allow_pickle=True)
    with pytest.raises(ValueError, match=r"cifar10h-counts.npy is damaged.*get it again"):
        load_cifar10h(tmp_path)


def test_votes_run_no_code(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    np.save(tmp_path / "cifar10h-counts.npy", np.array([Evil(Path.touch, mark), 1]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"cifar10h-counts.npy is damaged.*get it again"):
        load_cifar10h(tmp_path)
    assert not mark.exists()
    np.load(tmp_path / "cifar10h-counts.npy", allow_pickle=True)  # and it would have
    assert mark.exists()


# --- the real ones -------------------------------------------------------------------------------------

# Shares of wrong labels as the authors publish them, per cent.
PUBLISHED = {"aggre": 9.03, "random1": 17.23, "random2": 18.12, "random3": 17.64, "worse": 40.21, "clean": 0}


def test_the_real_labels(data_root: Path) -> None:
    try:
        labels = load_cifar10n(data_root)
    except FileNotFoundError:
        pytest.skip("no cifar10n in HETSNGP_DATA")
    for name, published in PUBLISHED.items():
        wrong = 100 * float((labels[name] != labels["clean"]).double().mean())
        assert wrong == pytest.approx(published, abs=0.03), name
    data = open_images("cifar10n:worse", "train", root=data_root)
    assert torch.equal(data.labels, labels["worse"])


def test_the_real_votes(data_root: Path) -> None:
    try:
        data = open_data("cifar10h", root=data_root)
    except FileNotFoundError:
        pytest.skip("no cifar10h in HETSNGP_DATA")
    counts = data.votes.sum(1)
    assert (int(counts.min()), int(counts.max())) == (47, 63)
    assert float((data.votes.argmax(1) == data.images.labels).double().mean()) > 0.99
