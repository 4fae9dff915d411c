"""MultiInput: M inputs, one pass of the backbone, M heads (MIMO, Havasi et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.functional.sampling import draw_seed
from hetsngp.models.classifier import Classifier
from hetsngp.nn.multi_input import LAYERS, InputStack, input_stack, widened_module
from hetsngp.validation import check_class_labels, check_multi_hot, check_weight


class MultiInput(Classifier):
    """A classifier whose backbone takes M inputs at once and whose head has M members, an input each.

    In training the inputs are different examples, so that the members become independent networks inside
    one; to predict, all are the same input, and the members' probabilities are averaged. ``model(x)`` is that
    prediction too: a loop on it trains all members on equal inputs, without their independence.
    """

    input_repetition: float = 0.0
    """ρ: the share of examples for which all members get the same input, in training."""
    batch_repetition: int = 1
    """How often a batch is repeated in training, so that an example meets more partners a step."""
    _entrance: bool | None = None
    """Whether inputs are put side by side before the backbone; None: not tried yet."""

    def _training_batch(
        self, x: Any, y: Tensor, weight: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """B examples → features of B·r rows, and the labels and weights of their M inputs, row by row."""
        rows = _rows(x)
        check = check_multi_hot if self.head.sigmoid else check_class_labels
        y = check(y, self.num_classes, rows)
        weight = None if weight is None else check_weight(weight, rows)
        members = self.head.num_members
        if members == 1 and self.batch_repetition == 1:
            return self._features(x), y, weight
        order = self._partners(rows, generator).to(y.device)
        h = self._joint_features(_pick(x, order.flatten()), order.shape[1])
        picked = order.T.flatten()
        return h, y[picked], None if weight is None else weight[picked]

    def _joint_features(self, x: Any, rows: int) -> Tensor:
        """Features of ``rows`` rows of M inputs each; x holds the M·B inputs one after another.

        They go in as rows, and the widened layer puts them side by side, so that what stands before it sees
        single inputs. A network that remembers the number of rows from before that layer (many ViTs do) gets
        them side by side from the start. Which it is, is tried at the first batch; so is whether the widened
        layer, found by the order of registration, is the one that is called first.
        """
        if self._entrance is None and not torch.compiler.is_compiling():
            return self._first_features(x, rows)
        return self._enter(x, stacked=bool(self._entrance))

    def _enter(self, x: Any, *, stacked: bool) -> Tensor:
        inputs = self.inputs
        if stacked:
            x = torch.cat(x.chunk(inputs.num_inputs), self._channels(x))
        with inputs.distinct(stacked=stacked):
            return self._features(x)

    def _channels(self, x: Tensor) -> int:
        """The dimension of x that inputs stand along, to arrive side by side at the widened layer: the
        channels, which stay together when an image is flattened; of a sequence of features the last.
        """
        found = widened_module(self.backbone)
        assert found is not None
        layer, stack = found
        sequence = isinstance(layer, nn.Linear) and layer.in_features == stack.num_inputs * x.shape[-1]
        return -1 if sequence else 1

    def _first_features(self, x: Any, rows: int) -> Tensor:
        found = widened_module(self.backbone)
        assert found is not None
        called: list[nn.Module] = []
        handles = [
            layer.register_forward_pre_hook(lambda layer, _: called.append(layer))
            for layer in self.backbone.modules()
            if isinstance(layer, LAYERS)
        ]
        problem: Exception | None = None
        try:
            for stacked in (False, True) if isinstance(x, Tensor) else (False,):
                called.clear()
                try:
                    h = self._enter(x, stacked=stacked)
                except (RuntimeError, ValueError, TypeError, IndexError) as error:
                    problem = problem or error
                    continue
                if h.shape[0] == rows and (not isinstance(found[0], LAYERS) or called[:1] == [found[0]]):
                    self._entrance = stacked
                    return h
        finally:
            for handle in handles:
                handle.remove()
        # What it was given, or returned, is wrong as it stands.
        if isinstance(problem, ValueError | TypeError):
            raise problem
        raise RuntimeError(
            f"the backbone did not take {self.head.num_members} inputs at once: the layer that was widened "
            "must be the first to be called. Register the first layer first, or give the backbone a method "
            "widen_inputs(num_inputs, generator) that returns the dimension of x the inputs stand along"
        ) from problem

    def on_features(self) -> Classifier:
        """Not to be had: the backbone sees M inputs together, so that no example has features of its own."""
        raise TypeError(
            "a model of several inputs at once has no features of single examples: train it as a whole"
        )

    def _partners(self, rows: int, generator: torch.Generator | None) -> Tensor:
        """Which example is input m of each row: (M, B·r). Each example is each member's input r times."""
        own = torch.Generator().manual_seed(draw_seed(generator))
        order = torch.arange(rows).repeat(self.batch_repetition)
        order = order[torch.randperm(len(order), generator=own)]
        shuffled = round((1 - self.input_repetition) * len(order))
        each = []
        for _ in range(self.head.num_members):
            turn = torch.randperm(shuffled, generator=own)
            each.append(torch.cat([order[:shuffled][turn], order[shuffled:]]))
        return torch.stack(each)

    @property
    def inputs(self) -> InputStack:
        """In front of the backbone's first layer."""
        stack = input_stack(self.backbone)
        assert stack is not None
        return stack


def _rows(x: Any) -> int:
    """Rows of a batch: of a tensor, or of the first one in a dict."""
    if isinstance(x, Mapping):
        tensors = [value for value in x.values() if isinstance(value, Tensor) and value.dim() > 0]
        if tensors:
            return len(tensors[0])
    if not isinstance(x, Tensor):
        raise TypeError(
            f"several inputs at once need x as a tensor, or a dict of tensors, not {type(x).__name__}"
        )
    return len(x)


def _pick(x: Any, rows: Tensor) -> Any:
    """Rows of a batch: a tensor, or a dict of them, in which what is no tensor stays as it is."""
    if isinstance(x, Mapping):
        return {name: _pick(value, rows) for name, value in x.items()}
    return x[rows.to(x.device)] if isinstance(x, Tensor) and x.dim() > 0 else x
