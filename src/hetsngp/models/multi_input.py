"""MultiInput: M inputs, one pass of the backbone, M heads (MIMO, Havasi et al. 2021)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetsngp.functional.sampling import draw_seed
from hetsngp.models.classifier import Classifier
from hetsngp.nn.multi_input import LAYERS, InputStack, input_stack, widened_module
from hetsngp.validation import check_multi_hot, check_targets, check_weight


class MultiInput(Classifier):
    """A classifier whose backbone takes M inputs at once and whose head has M members, one for each input.

    In training the inputs are different examples, so that the members become independent networks that share
    a backbone; in prediction all inputs are the same, and the members' probabilities are averaged.
    ``model(x)`` is that prediction too: a loop on it trains all members on equal inputs, so that they do not
    become independent.
    """

    input_repetition: float = 0.0
    """Share ρ of the training examples for which all members get the same input."""
    batch_repetition: int = 1
    """Number of times a training batch is repeated, so that an example is combined with more others."""
    _keeps_rows = False
    _stacked_inputs: bool | None = None
    """Whether inputs are concatenated before the backbone; None: not tried yet."""

    def _training_batch(
        self, x: Any, y: Tensor, weight: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """B examples → features of B·r rows of M inputs each, and the labels and weights of these inputs."""
        num_examples = _batch_size(x)
        check = check_multi_hot if self.head.sigmoid else check_targets
        y = check(y, self.num_classes, num_examples)
        weight = None if weight is None else check_weight(weight, num_examples)
        members = self.head.num_members
        if members == 1 and self.batch_repetition == 1:
            return self._features(x), y, weight
        order = self._partners(num_examples, generator).to(y.device)
        h = self._joint_features(_select(x, order.flatten()), order.shape[1])
        index = order.T.flatten()
        return h, y[index], None if weight is None else weight[index]

    def _joint_features(self, x: Any, rows: int) -> Tensor:
        """Features of ``rows`` rows of M inputs each; x holds the M·B inputs one after another.

        The backbone gets them as a batch, and the widened layer concatenates them, so that layers before it
        see single inputs. A network that uses the batch size from before that layer (many ViTs do) gets them
        concatenated. The first batch tries which of the two works, and whether the widened layer, found by
        the order of registration, is the one that is called first.
        """
        if self._stacked_inputs is None and not torch.compiler.is_compiling():
            return self._probed_features(x, rows)
        return self._combined_features(x, stacked=bool(self._stacked_inputs))

    def _combined_features(self, x: Any, *, stacked: bool) -> Tensor:
        inputs = self.inputs
        if stacked:
            x = torch.cat(x.chunk(inputs.num_inputs), self._channels(x))
        with inputs.distinct(stacked=stacked):
            return self._features(x)

    def _channels(self, x: Tensor) -> int:
        """Dimension of x along which inputs are concatenated for the widened layer: the channels, which stay
        together when an image is flattened; the last dimension of a sequence of features.
        """
        found = widened_module(self.backbone)
        assert found is not None
        layer, stack = found
        sequence = isinstance(layer, nn.Linear) and layer.in_features == stack.num_inputs * x.shape[-1]
        return -1 if sequence else 1

    def _probed_features(self, x: Any, rows: int) -> Tensor:
        found = widened_module(self.backbone)
        assert found is not None
        called: list[nn.Module] = []
        me = threading.get_ident()

        def note(layer: nn.Module, _: Any) -> None:
            if threading.get_ident() == me:  # another thread may predict
                called.append(layer)

        handles = [
            layer.register_forward_pre_hook(note)
            for layer in self.backbone.modules()
            if isinstance(layer, LAYERS)
        ]
        problem: Exception | None = None
        try:
            for stacked in (False, True) if isinstance(x, Tensor) else (False,):
                called.clear()
                try:
                    h = self._combined_features(x, stacked=stacked)
                except (RuntimeError, ValueError, TypeError, IndexError) as error:
                    problem = problem or error
                    continue
                if h.shape[0] == rows and (not isinstance(found[0], LAYERS) or called[:1] == [found[0]]):
                    self._stacked_inputs = stacked
                    return h
        finally:
            for handle in handles:
                handle.remove()
        # The input, or the output of the backbone, is wrong in itself.
        if isinstance(problem, ValueError | TypeError):
            raise problem
        raise RuntimeError(
            f"the backbone did not take {self.head.num_members} inputs at once: the layer that was widened "
            "must be the first to be called. Register the first layer first, or give the backbone a method "
            "widen_inputs(num_inputs, generator) that returns the dimension of x the inputs stand along"
            + (f" ({problem})" if problem else "")
        ) from problem

    def on_features(self) -> Classifier:
        """Raise a TypeError: the backbone sees M inputs together, so no single example has features."""
        raise TypeError(
            "a model of several inputs at once has no features of single examples: train it as a whole"
        )

    def _partners(self, num_examples: int, generator: torch.Generator | None) -> Tensor:
        """Index of the example that is input m of each row: (M, B·r). Each member gets an example r times."""
        own = torch.Generator().manual_seed(draw_seed(generator))
        order = torch.arange(num_examples).repeat(self.batch_repetition)
        order = order[torch.randperm(len(order), generator=own)]
        shuffled = round((1 - self.input_repetition) * len(order))
        orders = []
        for _ in range(self.head.num_members):
            permutation = torch.randperm(shuffled, generator=own)
            orders.append(torch.cat([order[:shuffled][permutation], order[shuffled:]]))
        return torch.stack(orders)

    @property
    def inputs(self) -> InputStack:
        """Concatenation of inputs before the backbone's first layer."""
        stack = input_stack(self.backbone)
        assert stack is not None
        return stack


def _batch_size(x: Any) -> int:
    """Number of examples in a tensor, or in the first tensor of a dict."""
    if isinstance(x, Mapping):
        tensors = [value for value in x.values() if isinstance(value, Tensor) and value.dim() > 0]
        if tensors:
            return len(tensors[0])
    if not isinstance(x, Tensor):
        raise TypeError(
            f"several inputs at once need x as a tensor, or a dict of tensors, not {type(x).__name__}"
        )
    return len(x)


def _select(x: Any, index: Tensor) -> Any:
    """Select examples of a tensor, or of the tensors in a dict; other values of the dict do not change."""
    if isinstance(x, Mapping):
        return {name: _select(value, index) for name, value in x.items()}
    return x[index.to(x.device)] if isinstance(x, Tensor) and x.dim() > 0 else x
