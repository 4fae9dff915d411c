"""Maps from the classes of a model to those of a data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetsngp.data.datasets.synsets import LISTS, wnids
from hetsngp.validation import check_choice, eager

NORMALISE = ("softmax", "sigmoid", "none")
SAME_CLASSES = {"imagenet-c": "imagenet", "imagenet-v2": "imagenet"}
"""Sets that have the classes of another set."""


@dataclass(frozen=True, eq=False)
class ClassMap:
    """Class j of the data set is class ``index[j]`` of the model; −1: one that the model does not have.

    ``index``: (K',) int64. ``class_names``: the K' names of the data set. ``num_inputs``: the number K of
    classes of the model, where known; then probabilities over any other number of classes are refused.

    >>> two_of_three = ClassMap(torch.tensor([2, -1, 0]), ("cat", "unicorn", "dog"), num_inputs=3)
    >>> two_of_three.apply(torch.tensor([[0.2, 0.5, 0.3]]))
    tensor([[0.6000, 0.0000, 0.4000]])
    """

    index: Tensor
    class_names: tuple[str, ...]
    num_inputs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_names", tuple(map(str, self.class_names)))
        index = self.index
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() != 1:
            raise TypeError(
                "index must be a tensor (K',) of int64: torch.tensor([…]), −1 for a missing class"
            )
        if len(index) != len(self.class_names):
            raise ValueError(
                f"index has {len(index)} entries and there are {len(self.class_names)} class_names: name "
                "each class of the data set once"
            )
        kept = index[index >= 0]
        if len(kept) == 0 or int(index.min()) < -1:
            raise ValueError(
                "index must hold class numbers of the model, at least one, and −1 for classes it does not "
                f"have, got {_some(index)}"
            )
        if len(kept.unique()) < len(kept):
            twice = kept[kept.bincount()[kept] > 1][0]
            raise ValueError(
                f"index has class {int(twice)} of the model more than once, so its probability would count "
                "twice: give each class of the data set a class of its own, or −1"
            )
        if self.num_inputs is not None and int(index.max()) >= self.num_inputs:
            raise ValueError(
                f"index goes up to {int(index.max())}, but the model has num_inputs={self.num_inputs} "
                f"classes: use class numbers 0 … {self.num_inputs - 1}"
            )

    @classmethod
    def between(
        cls, inputs: Iterable[str], outputs: Iterable[str], class_names: Iterable[str] | None = None
    ) -> ClassMap:
        """Match classes by name or WordNet's number: each of ``outputs`` is looked up among ``inputs``.

        ``class_names``: other names of the outputs, to show.

        >>> ClassMap.between(["a", "b", "c"], ["c", "d", "a"]).index
        tensor([ 2, -1,  0])
        """
        for name, given in (("inputs", inputs), ("outputs", outputs)):
            if not isinstance(given, Iterable) or isinstance(given, Tensor):
                raise TypeError(f"{name} must be a list of names, got {type(given).__name__}")
        inputs, outputs = list(inputs), list(outputs)
        index_of = {name: number for number, name in enumerate(inputs)}
        if len(index_of) < len(inputs):
            raise ValueError("two classes of the model have the same name: give each a name of its own")
        index = torch.tensor([index_of.get(name, -1) for name in outputs])
        return cls(index, tuple(outputs if class_names is None else class_names), len(inputs))

    @property
    def num_classes(self) -> int:
        """Number of classes K' of the data set."""
        return len(self.class_names)

    @property
    def missing(self) -> tuple[int, ...]:
        """Labels of the data set that the model does not have."""
        return tuple((self.index < 0).nonzero().flatten().tolist())

    def apply(self, probs: Tensor, *, normalise: str = "softmax") -> Tensor:
        """(N, K) probabilities over the model's classes → (N, K') over those of the data set.

        ``normalise``: how each row is normalised to sum to one:

        - "softmax": p_j / Σ p, which is the softmax of the kept logits alone;
        - "sigmoid", for independent p: p_j/(1−p_j) / Σ p/(1−p), the probability of class j given that exactly
          one of the kept ones is there; that, too, is the softmax of the kept logits;
        - "none": the kept probabilities unchanged, for multi-label data.

        A missing class has probability zero. The most probable class is the same in all three. Where all kept
        probabilities were rounded to zero, the kept classes are equally likely. Half precision is computed in
        float32.

        >>> some = ClassMap(torch.tensor([0, 1]), ("cat", "dog"))
        >>> p = torch.tensor([[0.8, 0.5, 0.9]])
        >>> some.apply(p, normalise="sigmoid"), some.apply(p, normalise="none")
        (tensor([[0.8000, 0.2000]]), tensor([[0.8000, 0.5000]]))
        """
        check_choice("normalise", normalise, NORMALISE)
        self._check(probs)
        index = self.index.to(probs.device)
        known = index >= 0
        wide = probs if probs.dtype in (torch.float32, torch.float64) else probs.float()
        kept = wide[:, index.clamp(min=0)] * known
        if normalise == "none":
            return kept
        if normalise == "sigmoid":
            # At most 1 − ε: several classes that are all certain share the row instead of being ∞/∞.
            below = kept.clamp(max=1 - torch.finfo(kept.dtype).eps)
            kept = below / (1 - below)
        total = kept.sum(1, keepdim=True)
        even = known / known.sum()
        return torch.where(total > 0, kept / torch.where(total > 0, total, 1), even.to(kept))

    def compose(self, other: ClassMap) -> ClassMap:
        """Compose maps: first this one, K → K', then ``other``, K' → K''.

        >>> first = ClassMap(torch.tensor([4, -1, 2]), ("a", "b", "c"))
        >>> first.compose(ClassMap(torch.tensor([2, 1]), ("c", "b"))).index
        tensor([ 2, -1])
        """
        expected = other.num_inputs
        if (expected is not None and expected != self.num_classes) or int(
            other.index.max()
        ) >= self.num_classes:
            wanted = f"{expected}" if expected is not None else f"more than {int(other.index.max())}"
            raise ValueError(
                f"the second map takes {wanted} classes, the first gives {self.num_classes}: compose maps in "
                "the order they are applied, first.compose(second)"
            )
        through = self.index[other.index.clamp(min=0)]
        return ClassMap(torch.where(other.index >= 0, through, -1), other.class_names, self.num_inputs)

    def _check(self, probs: Any) -> None:
        if not isinstance(probs, Tensor) or not probs.is_floating_point() or probs.dim() != 2:
            got = f"{probs.dtype} {tuple(probs.shape)}" if isinstance(probs, Tensor) else type(probs).__name__
            raise TypeError(f"probs must be a tensor (N, K) of probabilities, got {got}")
        columns, highest = probs.shape[1], int(self.index.max())
        if columns != (columns if self.num_inputs is None else self.num_inputs) or columns <= highest:
            wanted = f"at least {highest + 1}" if self.num_inputs is None else f"{self.num_inputs}"
            raise ValueError(
                f"probs have {columns} classes, this map is for a model with {wanted}: use the map made for "
                "this model's classes, or none where they are those of the data set"
            )
        if eager(probs) and not bool(((probs >= 0) & (probs <= 1 + 1e-3)).all()):
            raise ValueError("probs must be probabilities in [0, 1]: for logits pass logits.softmax(1)")


def match_classes(
    trained_on: str, model_classes: Sequence[str], spec: str, set_classes: Sequence[str]
) -> ClassMap | None:
    """Map from the classes of a model trained on the set ``trained_on`` to those of the set ``spec``.

    None where they are the same. Sets of the ImageNet family are matched by WordNet's numbers, all others by
    class name.

    >>> match_classes("a", ["cat", "dog"], "b", ["dog", "owl"]).index
    tensor([ 1, -1])
    """
    ours, theirs = list(model_classes), list(set_classes)
    if ours == theirs:
        return None
    model_wnids, set_wnids = _wnids(trained_on, ours), _wnids(spec, theirs)
    if model_wnids is not None and set_wnids is not None:
        return ClassMap.between(model_wnids, set_wnids, theirs)
    if not set(ours) & set(theirs):
        raise ValueError(
            f"no class of {spec}, such as {theirs[0]!r}, is one of the model's, such as {ours[0]!r}: give it "
            "as an OOD set, or a set with the model's classes"
        )
    return ClassMap.between(ours, theirs)


def _wnids(name: str, names: Sequence[str]) -> tuple[str, ...] | None:
    base = name.partition(":")[0]
    base = SAME_CLASSES.get(base, base)
    known = wnids(base) if base in LISTS else None
    return known if known is not None and len(known) == len(names) else None


def _some(index: Tensor) -> str:
    values = index[:5].tolist()
    return f"{values}" if len(index) <= 5 else f"{values[:-1]} … ({len(index)} entries)"
