"""Random number generators of a process, from which dropout, transforms and samplers draw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the generators of torch (also the device's), NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - transforms draw from this one
    random.seed(seed)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """States of all generators as tensors, which processes can exchange."""
    numpy: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    _, keys, position, has_gauss, gauss = numpy
    version, words, gauss_next = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_rest": torch.tensor(
            [version, float("nan") if gauss_next is None else gauss_next], dtype=torch.float64
        ),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore the states that :func:`rng_state` returned."""
    # Copies: torch 2.13 reads past the end of a row of a larger tensor.
    state = {name: tensor.cpu().clone() for name, tensor in state.items()}
    torch.set_rng_state(state["torch"])
    position, has_gauss, gauss = state["numpy_rest"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    if not 0 <= position <= len(keys):  # NumPy would read beyond its memory
        raise ValueError(f"the position {position:g} of NumPy's generator is not one of {len(keys)}")
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))  # noqa: NPY002
    version, gauss_next = state["python_rest"].tolist()
    words = tuple(state["python"].tolist())
    random.setstate((int(version), words, None if gauss_next != gauss_next else gauss_next))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def seeded_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Seed all generators inside; restore the caller's states afterwards."""
    before = rng_state(device)
    seed_all(seed, device)
    try:
        yield
    finally:
        set_rng_state(before, device)


def loader_generators(loader: Any) -> list[torch.Generator]:
    """Generators that a DataLoader and its samplers draw from, besides torch's global one."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
