"""Where to predict."""

from __future__ import annotations

import torch


def find_device(text: str) -> torch.device:
    """A device of torch's that is there; "auto": a GPU if there is one.

    >>> find_device("cpu")
    device(type='cpu')
    """
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"there is no device {text!r} here ({reason}): give cpu, or leave it out") from None
    return device
