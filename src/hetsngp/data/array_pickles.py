"""Pickles of numbers, text, lists, dicts and integer arrays of NumPy, read without running anything.

:mod:`pickle` calls what a file names, and the functions by which NumPy builds an array trust their arguments:
from a forged state of a dtype, bytes of the file become object pointers. Here an interpreter of the few
opcodes that such files have calls nothing. It does not recurse, keys of dicts are text, and memory is bounded
by the size of the file and the number of its opcodes. Strings of Python 2 are read as Latin-1, those of more
than 255 letters as bytes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from struct import Struct, error
from typing import Any

import numpy as np

from hetsngp.limits import PICKLE_VALUES

_INTEGER = re.compile(r"[|<>]?([iu][1248])")
_DTYPE_STATE = (None, None, None, -1, -1, 0)
"""No subarray, no names, no fields, size and alignment as usual, no flags: all that a plain dtype has."""
_MOST_DIMENSIONS = 32
_INT, _UNSIGNED, _SHORT, _LONG = Struct("<i"), Struct("<I"), Struct("<H"), Struct("<Q")


@dataclass(frozen=True, eq=False)
class _Name:
    """Function or class that a file may name; none is ever called."""

    name: str


_NDARRAY, _DTYPE, _ENCODE = _Name("ndarray"), _Name("dtype"), _Name("encode")
_RECONSTRUCT, _FROM_BUFFER = _Name("_reconstruct"), _Name("_frombuffer")
_NAMES = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DTYPE,
    ("_codecs", "encode"): _ENCODE,  # by which old protocols write bytes
    # NumPy 2 moved them; files written before and after exist.
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy.core.numeric", "_frombuffer"): _FROM_BUFFER,
    ("numpy._core.numeric", "_frombuffer"): _FROM_BUFFER,
}


class _Dtype:
    """Integer type; ``dtype`` is set once its state was read."""

    def __init__(self, name: str) -> None:
        self.name, self.dtype = name, np.dtype(name)
        self.complete = False

    def build(self, state: Any) -> None:
        orders = "|" if self.dtype.itemsize == 1 else "<>"
        if not isinstance(state, tuple) or len(state) != 8 or state[0] != 3 or state[2:] != _DTYPE_STATE:
            raise ValueError("a dtype that is more than whole numbers")
        if not isinstance(state[1], str) or len(state[1]) != 1 or state[1] not in orders:
            raise ValueError("a dtype of no known byte order")
        self.dtype, self.complete = np.dtype(state[1] + self.name), True


class _Array:
    """Array; ``values`` are set once its state was read."""

    values: np.ndarray | None = None

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or state[0] != 1 or self.values is not None:
            raise ValueError("an array that NumPy did not write")
        _, shape, dtype, by_column, content = state
        # Short strings of Python 2 were read as text.
        self.fill(content.encode("latin-1") if isinstance(content, str) else content, dtype, shape, by_column)

    def fill(self, content: Any, dtype: Any, shape: Any, by_column: Any) -> _Array:
        if not isinstance(dtype, _Dtype) or not dtype.complete or by_column not in (False, True):
            raise ValueError("an array of anything but whole numbers")
        if not isinstance(shape, tuple) or len(shape) > _MOST_DIMENSIONS:
            raise ValueError("an array without a shape")
        if not isinstance(content, bytes | memoryview) or not all(
            type(side) is int and side >= 0 for side in shape
        ):
            raise ValueError("an array that is no bytes, or has no shape")
        if math.prod(shape) * dtype.dtype.itemsize != len(content):
            raise ValueError(f"an array of {len(content)} bytes, which is not what its shape says")
        self.values = np.frombuffer(content, dtype.dtype).reshape(shape, order="F" if by_column else "C")
        return self


def read_pickle(data: bytes, begin: int = 0) -> tuple[Any, int]:
    """Value of the pickle at ``begin`` of ``data``, and where it ends. Arrays are found at the top level and
    in a dict there, nowhere deeper.

    >>> import pickle
    >>> content = {"data": np.arange(3, dtype=np.uint8), "labels": [1, 2]}
    >>> read_pickle(pickle.dumps(content))[0]
    {'data': array([0, 1, 2], dtype=uint8), 'labels': [1, 2]}
    """
    try:
        value, end = _read(data, begin)
    except (IndexError, KeyError, error) as reason:
        raise ValueError("it ends too early, or is no pickle") from reason
    copies: dict[int, bytes] = {}
    if isinstance(value, dict):
        return {name: _finished(entry, copies) for name, entry in value.items()}, end
    return _finished(value, copies), end


def _finished(value: Any, copies: dict[int, bytes]) -> Any:
    """Value as it is returned; ``copies`` has the bytes that were copied, since a file may repeat a value."""
    if isinstance(value, _Array):
        if value.values is None:
            raise ValueError("an array without content")
        return value.values
    if isinstance(value, memoryview):
        if id(value) not in copies:
            copies[id(value)] = bytes(value)
        return copies[id(value)]
    if isinstance(value, _Dtype | _Name):
        raise ValueError(f"{value.name}, which is no value")
    return value


def _read(data: bytes, at: int) -> tuple[Any, int]:
    """Run the opcodes; the order of the branches is that of their frequency in CIFAR's files."""
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}
    count, most = 0, PICKLE_VALUES.value
    copied = 0
    view, size = memoryview(data), len(data)

    def part(begin: int, length: int) -> memoryview:
        """Bytes of the file, not copied: an array may be nearly all of it."""
        if begin + length > size:
            raise IndexError
        return view[begin : begin + length]

    def remember(place: int) -> None:
        if place > count:  # picklers number values as they come
            raise ValueError(f"a value remembered at {place}")
        memo[place] = stack[-1]

    def copy(text: Any) -> None:
        """Count a text that is copied as bytes: a file may use one that it holds once many times."""
        nonlocal copied
        copied += len(text) if isinstance(text, str) else 0
        if copied > 2 * size:  # a byte above 127 is two in the file
            raise ValueError("texts that are used again and again")

    while True:
        code = data[at]
        at += 1
        count += 1
        if count > most:
            PICKLE_VALUES.check(count, "it")
        if code == 0x4B:  # K: byte
            stack.append(data[at])
            at += 1
        elif code == 0x55:  # U: string of Python 2, up to 255 letters
            begin, at = at + 1, at + 1 + data[at]
            stack.append(data[begin:at].decode("latin-1"))
        elif code == 0x72:  # r: remember at an int
            remember(_UNSIGNED.unpack_from(data, at)[0])
            at += 4
        elif code == 0x71:  # q: remember at a byte
            remember(data[at])
            at += 1
        elif code == 0x94:  # remember at the next place
            memo[len(memo)] = stack[-1]
        elif code == 0x8C:  # text of up to 255 bytes
            begin, at = at + 1, at + 1 + data[at]
            stack.append(data[begin:at].decode("utf-8", "surrogatepass"))
        elif code == 0x58:  # X: text
            length = _UNSIGNED.unpack_from(data, at)[0]
            stack.append(str(part(at + 4, length), "utf-8", "surrogatepass"))
            at += 4 + length
        elif code in (0x54, 0x42):  # T, B: string of Python 2, or bytes
            length = _UNSIGNED.unpack_from(data, at)[0]
            stack.append(part(at + 4, length))
            at += 4 + length
        elif code == 0x43:  # C: up to 255 bytes
            stack.append(bytes(part(at + 1, data[at])))
            at += 1 + data[at]
        elif code in (0x8E, 0x96):  # bytes or a bytearray of any length
            length = _LONG.unpack_from(data, at)[0]
            stack.append(part(at + 8, length))
            at += 8 + length
        elif code == 0x4D:  # M: two bytes
            stack.append(_SHORT.unpack_from(data, at)[0])
            at += 2
        elif code == 0x4A:  # J: int
            stack.append(_INT.unpack_from(data, at)[0])
            at += 4
        elif code == 0x8A:  # whole number of up to 255 bytes
            stack.append(int.from_bytes(part(at + 1, data[at]), "little", signed=True))
            at += 1 + data[at]
        elif code == 0x68:  # h: what was remembered at a byte
            stack.append(memo[data[at]])
            at += 1
        elif code == 0x6A:  # j: what was remembered at an int
            stack.append(memo[_UNSIGNED.unpack_from(data, at)[0]])
            at += 4
        elif code == 0x28:  # (: mark
            marks.append(stack)
            stack = []
        elif code == 0x5D:  # ]: empty list
            stack.append([])
        elif code == 0x7D:  # }: empty dict
            stack.append({})
        elif code == 0x29:  # ): empty tuple
            stack.append(())
        elif code in (0x61, 0x65):  # a, e: append one value, or all since the mark
            values, stack = ([stack.pop()], stack) if code == 0x61 else (stack, marks.pop())
            if not isinstance(stack[-1], list):
                raise ValueError("values appended to what is no list")
            stack[-1].extend(values)
        elif code in (0x73, 0x75):  # s, u: set one key, or all since the mark
            if code == 0x73:
                value, key = stack.pop(), stack.pop()
                values = [key, value]
            else:
                values, stack = stack, marks.pop()
            keys = values[::2]
            # Keys of other kinds may take forever to hash, or overflow the stack.
            if not isinstance(stack[-1], dict) or len(values) % 2 or not all(type(k) is str for k in keys):
                raise ValueError("a dict whose keys are not text")
            stack[-1].update(zip(keys, values[1::2], strict=True))
        elif code == 0x74:  # t: tuple of all since the mark
            values, stack = stack, marks.pop()
            stack.append(tuple(values))
        elif code in (0x85, 0x86, 0x87):  # tuple of one, two or three
            length = code - 0x84
            if len(stack) < length:
                raise IndexError
            stack[-length:] = [tuple(stack[-length:])]
        elif code == 0x4E:  # N
            stack.append(None)
        elif code in (0x88, 0x89):
            stack.append(code == 0x88)
        elif code == 0x63:  # c: name, as two lines
            middle = data.index(b"\n", at, at + 100)
            end = data.index(b"\n", middle + 1, middle + 100)
            stack.append(_named(data[at:middle].decode("utf-8"), data[middle + 1 : end].decode("utf-8")))
            at = end + 1
        elif code == 0x93:  # name, as two texts
            name, module = stack.pop(), stack.pop()
            stack.append(_named(module, name))
        elif code == 0x52:  # R: call
            arguments, function = stack.pop(), stack.pop()
            if function is _ENCODE and arguments:
                copy(arguments[0])
            stack.append(_value_of_call(function, arguments))
        elif code == 0x62:  # b: set the state
            state = stack.pop()
            if not isinstance(stack[-1], _Array | _Dtype):
                raise ValueError("a state for what has none")
            if isinstance(state, tuple) and state:
                copy(state[-1])
            stack[-1].build(state)
        elif code == 0x80:  # protocol
            at += 1
        elif code == 0x95:  # frame
            at += 8
        elif code == 0x2E:  # .: end
            return stack.pop(), at
        else:
            raise ValueError(f"the opcode {chr(code)!a}, which is no part of the data")


def _named(module: Any, name: Any) -> _Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("a name that is no text")
    if (module, name) not in _NAMES:
        raise ValueError(f"it wants to run {module:.100}.{name:.100}, which is no part of the data")
    return _NAMES[module, name]


def _value_of_call(function: Any, arguments: Any) -> Any:
    """What the call of a function in the file would give, as far as it is needed."""
    if not isinstance(arguments, tuple):
        raise ValueError("a call without arguments")
    if function is _ENCODE and len(arguments) == 2 and isinstance(arguments[0], str):
        if arguments[1] in ("latin1", "latin-1"):
            return arguments[0].encode("latin-1")
    elif function is _DTYPE and 1 <= len(arguments) <= 3 and isinstance(arguments[0], str):
        kind = _INTEGER.fullmatch(arguments[0])
        if kind is None:
            raise ValueError(f"numbers of type {arguments[0]!a:.20}, only whole ones are read")
        return _Dtype(kind[1])
    elif function is _RECONSTRUCT and len(arguments) == 3 and arguments[0] is _NDARRAY:
        return _Array()
    elif function is _FROM_BUFFER and len(arguments) == 4 and arguments[3] in ("C", "F"):
        content, dtype, shape, order = arguments
        return _Array().fill(content, dtype, shape, order == "F")
    raise ValueError("a call that is no part of the data")
