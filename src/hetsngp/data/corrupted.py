"""Sets of corrupted images by (corruption, severity), computed or read at each access."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hetsngp._moved import renamed
from hetsngp.data import corruptions
from hetsngp.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt, has_frost, load_frost
from hetsngp.data.corruptions.apply import check, check_images
from hetsngp.data.corruptions.frost_images import GET
from hetsngp.data.corruptions.weather import CIFAR_FROST, shrunk
from hetsngp.data.datasets.cifar_c import FOLDERS, CorruptedFiles, open_cifar_c
from hetsngp.data.datasets.dataset import ENVIRONMENT, data_root
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.sources import open_images
from hetsngp.validation import check_choice

LARGEST_CIFAR = 64
"""Largest side in pixels for which CIFAR-C's mild constants are the default."""
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class CorruptedImages(Mapping[tuple[str, int], ImageArrays]):
    """Clean ``images`` under the corruptions ``names`` at ``severities``, computed at each access.

    Returned by :func:`corrupted_images`.
    """

    images: ImageArrays
    names: tuple[str, ...]
    severities: tuple[int, ...]
    constants: str
    seed: int
    frost: tuple[Tensor, ...] | None
    left_out: tuple[str, ...] = ()
    """Standard corruptions left out because the frost overlays are missing."""

    def __getitem__(self, key: tuple[str, int]) -> ImageArrays:
        if key not in self:
            raise KeyError(
                f"no {key!r}: ask for (corruption, severity), of {', '.join(self.names)} and "
                f"{', '.join(map(str, self.severities))}"
            )
        name, severity = key
        made = corrupt(
            self.images.images, name, severity, seed=self.seed, constants=self.constants, frost=self.frost
        )
        return replace(self.images, images=made)

    def fingerprint(self, key: tuple[str, int]) -> str:
        """Digest of all that decides the set, code included; ``evaluate`` finds cached results by it."""
        return f"{self._digest} {key}"

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(f"{self.constants} {self.seed}".encode())
        for tensor in (self.images.images, self.images.labels, *(self.frost or ())):
            digest.update(f"{tuple(tensor.shape)}".encode() + tensor.cpu().contiguous().numpy().tobytes())
        for file in sorted(Path(corruptions.__file__).parent.glob("*.py")):
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def __contains__(self, key: object) -> bool:
        return key in tuple(self)  # Mapping's own would compute the set

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((name, severity) for name in self.names for severity in self.severities)

    def __len__(self) -> int:
        return len(self.names) * len(self.severities)


def corrupted_images(
    images: ImageArrays,
    names: Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    *,
    constants: str | None = None,
    seed: int = 0,
    root: str | Path | None = None,
) -> CorruptedImages:
    """Corrupt ``images`` by the 15 standard corruptions, or those of ``names``, on the device of the images.

    ``constants``: "cifar" or "imagenet"; None: CIFAR-C's up to 64 pixels. Where the folder ``frost`` of data
    sets (``root``, or HETSNGP_DATA) is missing, frost is left out with a warning; ``names`` that include it
    are an error there. Overlays that are smaller than the images are enlarged.

    >>> import torch
    >>> grey = ImageArrays(torch.full((2, 3, 32, 32), 128).byte(), torch.tensor([0, 1]), ("a", "b"))
    >>> sets = corrupted_images(grey, ["fog", "contrast"])
    >>> len(sets), len(sets["fog", 5])
    (10, 2)
    """
    check_images(images.images)
    if constants is None:
        constants = "cifar" if max(images.images.shape[-2:]) <= LARGEST_CIFAR else "imagenet"
    left_out: tuple[str, ...] = ()
    if names is None:
        names = tuple(CORRUPTIONS)
        if not has_frost(root):
            left_out, names = ("frost",), tuple(name for name in names if name != "frost")
            warnings.warn(
                f"no frost overlays in {_frost_folder(root)}, so a mean over corruptions is over 14 of 15: "
                f"{GET}",
                stacklevel=2,
            )
    # Once each: a repeated set would count twice in a mean.
    names = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
    severities = tuple(dict.fromkeys(severities))
    frost = load_frost(root) if "frost" in names else None
    for name in names:
        for severity in severities:
            check(name, severity, constants, frost)
    if frost is not None:
        frost = _large_enough(frost, images.images.shape[-2:], constants)
    severities = tuple(int(severity) for severity in severities)  # of NumPy's integers too
    return CorruptedImages(images, names, severities, constants, seed, frost, left_out)


def open_corrupted(
    name: str, root: str | Path | None = None, *, seed: int = 0
) -> CorruptedImages | CorruptedFiles:
    """Open CIFAR-10-C or CIFAR-100-C: the published files, or else computed from the clean test images.

    The random numbers differ from the published ones, so results agree within sampling error only;
    ``isinstance(found, CorruptedFiles)`` tells which it is. ``seed`` is for computed sets.
    """
    check_choice("name", name, tuple(FOLDERS))
    base = data_root(root)
    published, clean = base / FOLDERS[name], name.removesuffix("-c")
    if published.is_dir():
        return open_cifar_c(base, name)
    try:
        images = open_images(clean, "test", root=base)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"no {name}: there is no folder {published}, and no clean images to make it from: {error}"
        ) from error
    return corrupted_images(images, seed=seed, root=base)


@dataclass(frozen=True, eq=False)
class LazyMap(Mapping[Any, Value], Generic[Value]):
    """``fn`` of each value of ``sets``, applied at access, such as a loader of each corrupted set.

    >>> doubled = LazyMap({"a": 1}, lambda value: 2 * value)
    >>> doubled["a"], list(doubled)
    (2, ['a'])
    """

    sets: Mapping[Any, Any]
    fn: Callable[[Any], Value]
    about: str | None = None
    """All that decides the result of ``fn`` (say, mean and std of a loader), so that a resumed evaluation
    finds a cached result without computing the set. None: it computes the set and compares."""

    def fingerprint(self, key: Any) -> str | None:
        """Fingerprint of the set, with ``about``; None where one of them is missing."""
        inner = getattr(self.sets, "fingerprint", lambda key: None)(key)
        return None if self.about is None or inner is None else f"{inner} {self.about}"

    def __getitem__(self, key: Any) -> Value:
        return self.fn(self.sets[key])

    def __contains__(self, key: object) -> bool:
        return key in self.sets  # Mapping's own would compute the value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sets)

    def __len__(self) -> int:
        return len(self.sets)


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)


def _frost_folder(root: str | Path | None) -> str:
    if root is None and not os.environ.get(ENVIRONMENT):
        return f"the folder frost of data sets ({ENVIRONMENT} is not set)"
    return str(data_root(root) / "frost")


def _large_enough(frost: Sequence[Tensor], size: Sequence[int], constants: str) -> tuple[Tensor, ...]:
    """Enlarge the overlays, all by one factor, where images of ``size`` (H, W) would not fit into each.

    The smallest published one has 315 pixels, or 63 after the shrinking for CIFAR.
    """
    scale = CIFAR_FROST if constants == "cifar" else 1.0
    factor = max(
        math.ceil(side / scale) / own
        for overlay in frost
        for side, own in zip(size, overlay.shape[-2:], strict=True)
    )
    if factor <= 1:
        return tuple(frost)
    return tuple(shrunk(overlay.float(), factor).round().to(torch.uint8) for overlay in frost)
