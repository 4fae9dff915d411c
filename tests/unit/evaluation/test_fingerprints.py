"""Digests: equal values are equal, others are not, and what cannot be seen into is neither."""

from __future__ import annotations

import collections
import datetime
import enum
import functools
import math
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hetsngp.evaluation.fingerprints import CannotFingerprint, Fingerprinter


def digest(value: Any) -> str:
    return Fingerprinter().of(value)


# --- values ---------------------------------------------------------------------------------------------


class Slots:
    __slots__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    a: int
    b: int


class Named(list[int]):
    scale = 1.0


def scaled(by: float) -> Named:
    out = Named([1, 2])
    out.scale = by
    return out


def times(factor: float) -> Callable[[float], float]:
    return lambda value: factor * value


class Folder:
    def __init__(self, size: int) -> None:
        self.size, self.me = size, self  # holds itself

    def take(self, row: int) -> int:
        return self.size + row


PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "range": (lambda: range(1000), lambda: range(1020)),
    "set": (lambda: {"a", "b", "c"}, lambda: {"a", "b", "d"}),
    "frozenset": (lambda: frozenset({1, 2}), lambda: frozenset({1, 3})),
    "partial": (lambda: functools.partial(math.pow, 2), lambda: functools.partial(math.pow, 3)),
    "slots": (lambda: Slots(1, [2]), lambda: Slots(1, [3])),
    "enum": (lambda: Colour.RED, lambda: Colour.BLUE),
    "named tuple": (lambda: Pair(1, 2), lambda: Pair(1, 3)),
    "a list with more": (lambda: scaled(1.0), lambda: scaled(2.0)),
    "deque": (lambda: collections.deque([1, 2]), lambda: collections.deque([1, 3])),
    "bytes": (lambda: b"ab", lambda: b"ac"),
    "dtype": (lambda: torch.float32, lambda: torch.float64),
    "device": (lambda: torch.device("cpu"), lambda: torch.device("meta")),
    "date": (lambda: datetime.date(2020, 1, 2), lambda: datetime.date(2020, 1, 3)),
    "fraction": (lambda: Fraction(1, 3), lambda: Fraction(2, 3)),
    "pattern": (lambda: re.compile("a+"), lambda: re.compile("a*")),
    "builtin": (lambda: math.exp, lambda: math.log),
    "bound builtin": (lambda: [1].count, lambda: [2].count),
    "class": (lambda: Slots, lambda: Pair),
    "lambda": (lambda: lambda v: 2 * v, lambda: lambda v: 3 * v),
    "closure": (lambda: times(2.0), lambda: times(3.0)),
    "default": (lambda: lambda v, w=2: v * w, lambda: lambda v, w=3: v * w),
    "method": (lambda: Folder(1).take, lambda: Folder(2).take),
    "holds itself": (lambda: Folder(1), lambda: Folder(2)),
    "tensor": (lambda: torch.ones(3), lambda: torch.ones(3).double()),
    "bfloat16": (lambda: torch.ones(2).bfloat16(), lambda: torch.zeros(2).bfloat16()),
    "shape": (lambda: torch.zeros(2, 3), lambda: torch.zeros(3, 2)),
    "array": (lambda: np.arange(3), lambda: np.arange(3.0)),
    "dates": (lambda: np.array(["2020-01-01"], "M8[D]"), lambda: np.array(["2020-01-02"], "M8[D]")),
    "objects": (lambda: np.array(["a", None]), lambda: np.array(["b", None])),
    "masked": (lambda: np.ma.array([1, 2], mask=[0, 1]), lambda: np.ma.array([1, 2], mask=[1, 0])),
    "many names": (lambda: ["a"] * 2000, lambda: ["a"] * 1999 + ["b"]),
    "many paths": (lambda: [(Path("a"), 1)] * 2000, lambda: [(Path("b"), 1)] * 2000),
    "cell without value": (lambda: times, lambda: digest),
    "random": (lambda: [torch.Generator(), 1], lambda: [torch.Generator(), 2]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equal_values_are_equal_and_others_are_not(name: str) -> None:
    one, other = PAIRS[name]
    assert digest(one()) == digest(one())
    assert digest(one()) != digest(other())
    assert digest({"a": [one()]}) != digest({"a": [other()]})


def test_frames_count_by_their_cells() -> None:
    pandas = pytest.importorskip("pandas")

    def frame(last: int = 5, name: str = "y", text: str = "b") -> Any:
        return pandas.DataFrame({"x": [1.0, 2.0, 3.0], name: [3, 4, last], "t": ["a", None, text]})

    found = {digest(each) for each in (frame(), frame(last=6), frame(name="z"), frame(text="c"))}
    assert len(found) == 4
    assert digest(frame()) == digest(frame())
    assert digest(frame()["y"]) != digest(frame(last=6)["y"])
    assert digest(frame().set_index("x")) != digest(frame())


def test_where_random_numbers_have_got_to_is_no_difference() -> None:
    for make in (lambda: torch.Generator(), lambda: random.Random(0), lambda: np.random.default_rng(0)):
        one, other = make(), make()
        torch.rand(3, generator=one) if isinstance(one, torch.Generator) else one.random()
        assert digest([one]) == digest([other])


def test_what_cannot_be_seen_into_is_not_equal_to_another(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        for value in (file, threading.Lock(), (i for i in range(3)), torch.zeros(2, device="meta")):
            with pytest.raises(CannotFingerprint):
                digest({"a": [value]})
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(CannotFingerprint, match="deep"):
        digest(deep)


@pytest.mark.slow
def test_another_process_finds_the_same() -> None:
    """Sets and hashes have another order there."""
    code = (
        "import torch, functools; from hetsngp.evaluation.fingerprints import Fingerprinter\n"
        "def f(v): return v in {'a', 'b', 'c', 'd'}\n"
        "net = torch.nn.Sequential(torch.nn.LeakyReLU(0.3))\n"
        "print(Fingerprinter().of([{'a', 'b', 'c'}, f, net, functools.partial(f, 1), torch.float16]))"
    )
    found = set()
    for seed in ("1", "2"):
        there = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code]
        found.add(subprocess.run(command, env=there, capture_output=True, check=True).stdout)
    assert len(found) == 1
