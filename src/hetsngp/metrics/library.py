"""torchmetrics, imported where it is used. It guesses from the values whether it was given probabilities or
logits; whoever calls it from here hands it values in [0, 1].
"""

from __future__ import annotations

from types import ModuleType


def torchmetrics() -> ModuleType:
    """``torchmetrics.functional.classification``, or an error that names the extra."""
    try:
        from torchmetrics.functional import classification
    except ImportError as error:
        raise ImportError("metrics need torchmetrics: pip install 'hetsngp[cli]'") from error
    return classification
