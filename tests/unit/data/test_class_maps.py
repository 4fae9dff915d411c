"""Probabilities go to the classes of the data set: a softmax, or sigmoid, of the kept logits."""

from typing import Any

import pytest
import torch

from hetsngp.data.class_maps import ClassMap

NAMES = ("fox", "yeti", "owl", "cat")
INDEX = torch.tensor([3, -1, 0, 5])


def class_map(**options: Any) -> ClassMap:
    return ClassMap(INDEX, NAMES, **options)


@pytest.mark.parametrize("normalise", ["softmax", "sigmoid"])
def test_normalised_is_the_softmax_of_the_kept_logits(normalise: str) -> None:
    logits = 3 * torch.randn(50, 7, dtype=torch.float64)
    probs = logits.softmax(1) if normalise == "softmax" else logits.sigmoid()
    mapped = class_map().apply(probs, normalise=normalise)
    expected = torch.zeros(50, 4, dtype=torch.float64)
    expected[:, [0, 2, 3]] = logits[:, [3, 0, 5]].softmax(1)
    torch.testing.assert_close(mapped, expected, rtol=1e-12, atol=0)


def test_none_leaves_the_kept_probabilities_as_they_are() -> None:
    probs = torch.rand(9, 6)
    mapped = class_map().apply(probs, normalise="none")
    expected = torch.stack([probs[:, 3], torch.zeros(9), probs[:, 0], probs[:, 5]], 1)
    assert torch.equal(mapped, expected)


def test_the_best_class_does_not_depend_on_the_normalisation() -> None:
    probs = torch.rand(200, 6)
    best = [class_map().apply(probs, normalise=kind).argmax(1) for kind in ("softmax", "sigmoid", "none")]
    assert torch.equal(best[0], best[1])
    assert torch.equal(best[0], best[2])
    assert not (best[0] == 1).any()  # the class that the model does not have


@pytest.mark.parametrize("normalise", ["softmax", "sigmoid"])
def test_rows_without_any_kept_probability_are_even(normalise: str) -> None:
    probs = torch.tensor([[0, 1.0, 0, 0, 0, 0], [1, 0, 0, 1.0, 0, 0]])
    third = 1 / 3
    expected = torch.tensor([[third, 0, third, third], [0.5, 0, 0.5, 0]])
    mapped = class_map().apply(probs, normalise=normalise)
    torch.testing.assert_close(mapped, expected, rtol=1e-6, atol=1e-6)
    assert mapped[:, 1].tolist() == [0.0, 0.0]


def test_halves_become_float32_and_doubles_stay() -> None:
    for dtype, expected in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        for normalise in ("softmax", "sigmoid", "none"):
            assert class_map().apply(torch.rand(2, 6).to(dtype), normalise=normalise).dtype == expected
    # Divided in bfloat16 a row would add up to one within 0.01 only.
    rows = class_map().apply(torch.rand(100, 6).bfloat16()).sum(1)
    torch.testing.assert_close(rows, torch.ones(100), rtol=1e-6, atol=0)


def test_gradients_flow_also_through_rows_of_zeros() -> None:
    probs = torch.tensor([[0.0, 1, 0, 0, 0, 0], [0.2, 0, 0.1, 0.3, 0, 0.4]], requires_grad=True)
    class_map().apply(probs)[:, 0].sum().backward()
    assert probs.grad is not None
    assert probs.grad.isfinite().all()
    assert probs.grad[1].abs().sum() > 0


def test_composed_is_one_after_the_other() -> None:
    first = class_map(num_inputs=6)
    second = ClassMap(torch.tensor([2, 1, -1, 3]), ("owl", "yeti", "elk", "cat"), num_inputs=4)
    both = first.compose(second)
    assert both.index.tolist() == [0, -1, -1, 5]
    assert (both.class_names, both.num_inputs, both.missing) == (second.class_names, 6, (1, 2))
    probs = torch.rand(20, 6)
    torch.testing.assert_close(both.apply(probs), second.apply(first.apply(probs)))


def test_between_goes_by_name() -> None:
    made = ClassMap.between(["b", "c", "a"], ["a", "x", "b"], ["Ann", "Xen", "Bob"])
    assert made.index.tolist() == [2, -1, 0]
    assert (made.class_names, made.num_inputs, made.num_classes) == (("Ann", "Xen", "Bob"), 3, 3)
    with pytest.raises(ValueError, match="same name"):
        ClassMap.between(["a", "a"], ["a"])


@pytest.mark.parametrize(
    ("index", "options", "message"),
    [
        ([3, -1, 0, 5], {}, "torch.tensor"),
        (INDEX.int(), {}, "int64"),
        (INDEX[:3], {}, "name each class"),
        (torch.tensor([-1, -1, -1, -1]), {}, "at least one"),
        (torch.tensor([-2, 0, 1, 2]), {}, "−1 for classes it does not have"),
        (torch.tensor([3, -1, 3, 5]), {}, "class 3 of the model more than once"),
        (INDEX, {"num_inputs": 5}, "class numbers 0 … 4"),
    ],
)
def test_wrong_maps_are_refused(index: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ClassMap(index, NAMES, **options)


@pytest.mark.parametrize(
    ("probs", "options", "message"),
    [
        (torch.rand(3, 5), {}, "at least 6"),
        (torch.rand(3, 8), {"num_inputs": 7}, "a model with 7"),
        (torch.randn(30, 6), {}, r"logits.softmax\(1\)"),
        (torch.rand(6), {}, r"\(N, K\)"),
        (torch.ones(2, 6).long(), {}, r"\(N, K\)"),
    ],
)
def test_wrong_probabilities_are_refused(probs: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        class_map(**options).apply(probs)


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'softmax'"):
        class_map().apply(torch.rand(2, 6), normalise="softmaxed")
    with pytest.raises(ValueError, match=r"first.compose\(second\)"):
        class_map().compose(class_map(num_inputs=7))
    with pytest.raises(ValueError, match=r"takes more than 5 classes, the first gives 4"):
        class_map().compose(class_map())
