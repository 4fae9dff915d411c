"""The synthetic tasks are drawn as they say: geometry, label noise, and clusters nobody has seen."""

import math

import pytest
import torch
from sklearn.datasets import make_moons

from hetsngp.data.datasets.synthetic import (
    CLUSTER,
    DIRECTIONS,
    FIXED_NOISE,
    TASKS,
    SyntheticTask,
    flip_labels,
    gaussian_mixture,
    make_task,
    noisy_circles,
    two_moons,
)

SIZES = {
    "two_moons": (1000, 300, 2000),
    "gaussian_mixture": (1500, 300, 3000),
    "noisy_circles": (1500, 300, 6000),
}


def within_four_errors(values: torch.Tensor, expected: float) -> bool:
    error = float(values.std()) / math.sqrt(len(values))
    return abs(float(values.mean()) - expected) < 4 * error


@pytest.mark.parametrize("name", list(TASKS))
def test_sizes_and_balance(name: str) -> None:
    task = make_task(name, 0)
    assert task.name == name
    for points, size in zip((task.train, task.held_out, task.test), SIZES[name], strict=True):
        assert points.x.shape == (size, 2)
        assert points.x.dtype == torch.float32
        assert torch.bincount(points.clean).tolist() == [size // task.num_classes] * task.num_classes
        assert len(points.y) == size
        assert int(points.y.max()) < task.num_classes
    assert task.ood_directions.shape == (DIRECTIONS, CLUSTER, 2)
    assert (task.ood is None) == (name == "noisy_circles")


@pytest.mark.parametrize("name", list(TASKS))
def test_the_seed_decides_everything_and_no_point_is_drawn_twice(name: str) -> None:
    torch.manual_seed(5)
    one = make_task(name, 3)
    torch.manual_seed(6)
    same, other = make_task(name, 3), make_task(name, 4)
    for field in ("train", "held_out", "test"):
        a, b, c = (getattr(task, field) for task in (one, same, other))
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert not torch.equal(a.x, c.x)
    assert torch.equal(one.ood_directions, same.ood_directions)
    every = torch.cat([one.train.x, one.held_out.x, one.test.x, one.ood_directions.flatten(0, 1)])
    assert len(every.unique(dim=0)) == len(every)


@pytest.mark.parametrize("name", [name for name in TASKS if name not in FIXED_NOISE])
def test_label_noise_changes_labels_and_nothing_else(name: str) -> None:
    clean, noisy = make_task(name, 0), make_task(name, 0, 0.2)
    assert torch.equal(clean.train.y, clean.train.clean)
    assert clean.ood is not None
    assert noisy.ood is not None
    assert torch.equal(clean.ood, noisy.ood)
    assert torch.equal(clean.ood_directions, noisy.ood_directions)
    for field in ("train", "held_out", "test"):
        a, b = getattr(clean, field), getattr(noisy, field)
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.clean, b.clean)
        assert within_four_errors((b.y != b.clean).float(), 0.2)
    assert "20 %" in noisy.title


def test_flipped_labels_go_to_the_other_classes_alike(generator: torch.Generator) -> None:
    clean = torch.arange(3).repeat_interleave(20_000)
    probability = torch.tensor([0.1, 0.3, 0.5])
    given = flip_labels(clean, probability, generator)
    for k in range(3):
        part = given[clean == k]
        for other in range(3):
            share = 1 - probability[k] if other == k else probability[k] / 2
            assert within_four_errors((part == other).float(), float(share)), (k, other)


@pytest.mark.parametrize("field", ["train", "held_out", "test"])
def test_circles_are_mislabelled_as_fixed(field: str) -> None:
    points = getattr(noisy_circles(1), field)
    for k, share in enumerate((0.1, 0.3, 0.5)):
        part = points.y[points.clean == k]
        assert within_four_errors((part != k).float(), share)


def test_circles_have_their_radii_and_overlap() -> None:
    test = noisy_circles(0).test
    radius = test.x.norm(dim=1)
    for k in range(3):
        part = radius[test.clean == k]
        assert within_four_errors(part, k + 1.0)
        assert abs(float(part.std()) - 0.25) < 4 * 0.25 / math.sqrt(2 * len(part))
    for coordinate in (0, 1):  # every angle alike
        assert within_four_errors(test.x[:, coordinate] / radius, 0.0)
    # A normal is beyond two standard deviations on one side with 0.02275: one boundary, two, and one.
    right = (radius - 0.5).floor().clamp(0, 2).long() == test.clean
    assert within_four_errors(right.float(), 1 - 4 * 0.02275 / 3)


def test_moons_are_those_of_scikit_learn_moved_apart() -> None:
    test = two_moons(0).test
    reference, label = make_moons(20_001, noise=None, shuffle=False)
    centres = ((-0.1, 0.2), (1.1, 0.3))
    for k, shift in enumerate(((-0.1, 0.2), (0.1, -0.2))):
        part, ideal = test.x[test.clean == k], torch.tensor(reference[label == k]) + torch.tensor(shift)
        for axis in (0, 1):
            assert within_four_errors(part[:, axis], float(ideal[:, axis].mean()))
            expected = math.sqrt(float(ideal[:, axis].var()) + 0.1**2)
            assert float(part[:, axis].std()) == pytest.approx(expected, rel=0.08)
        away = (part - torch.tensor(centres[k])).norm(dim=1)
        assert abs(float(away.std()) - 0.1) < 4 * 0.1 / math.sqrt(2 * len(away))


def test_the_mixture_leaves_one_corner_unseen() -> None:
    task = gaussian_mixture(0)
    corners = {(-2, -2), (-2, 2), (2, 2)}
    for k in range(3):
        part = task.test.x[task.test.clean == k]
        corner = tuple(part.mean(0).round().int().tolist())
        corners.remove(corner)
        for axis in (0, 1):
            assert within_four_errors(part[:, axis], corner[axis])
            assert abs(float(part[:, axis].std()) - 0.5) < 4 * 0.5 / math.sqrt(2 * len(part))
    assert not corners
    assert task.ood is not None
    assert task.ood.mean(0).round().tolist() == [2, -2]


@pytest.mark.parametrize(
    ("name", "distance"), [("two_moons", 3.5), ("gaussian_mixture", 7.0), ("noisy_circles", 7.0)]
)
def test_clusters_stand_in_every_direction_and_clear_of_the_data(name: str, distance: float) -> None:
    task: SyntheticTask = make_task(name, 0)
    offset = task.ood_directions.mean(1) - task.train.x.mean(0)
    assert offset.norm(dim=1).tolist() == pytest.approx([distance] * 16, abs=0.15)
    angle = torch.atan2(offset[:, 1], offset[:, 0]) % math.tau
    gaps = (angle.roll(-1) - angle) % math.tau
    assert gaps.tolist() == pytest.approx([math.tau / 16] * 16, abs=0.05)
    nearest = torch.cdist(task.ood_directions.flatten(0, 1), task.train.x).min()
    assert nearest > 0.5
    left, right, bottom, top = task.frame
    assert right - left == top - bottom
    points = task.test.x
    assert bool(((points > torch.tensor([left, bottom])) & (points < torch.tensor([right, top]))).all())


def test_the_papers_cluster_is_where_it_should_be() -> None:
    ood = two_moons(0).ood
    assert ood is not None
    assert ood.shape == (200, 2)
    assert within_four_errors(ood[:, 0], 2.5)
    assert within_four_errors(ood[:, 1], -1.75)


@pytest.mark.parametrize("label_noise", [-0.1, 0.5, 1.0, float("nan")])
def test_label_noise_out_of_range_is_refused(label_noise: float) -> None:
    with pytest.raises(ValueError, match=r"below 0\.5"):
        two_moons(0, label_noise)
