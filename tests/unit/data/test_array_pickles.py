"""Pickles of CIFAR's kind are read as Python's pickle reads them, and forged ones are refused."""

import pickle
import struct
from typing import Any

import numpy as np
import pytest
from tests.unit.data.test_image_data import python2_pickle
from tests.unit.small_sets import random_bytes

from hetsngp.data.array_pickles import read_pickle
from hetsngp.limits import LimitExceeded

DTYPE = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
PLAIN = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
"""State of the dtype in the published files."""
EMPTY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"


def array(dtype: bytes = DTYPE + PLAIN, shape: bytes = b"(K\x04t", content: bytes = b"U\x04abcd") -> bytes:
    """A pickle of {"data": array}, as Python 2 wrote them."""
    return b"\x80\x02}U\x04data" + EMPTY + b"(K\x01" + shape + dtype + b"\x89" + content + b"tbs."


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    return type(found) is type(expected) and bool(found == expected)


def test_a_file_of_python_2_is_read_as_pickle_reads_it() -> None:
    written = python2_pickle(random_bytes(7, 3072), "labels", [3, 1, 4, 1, 5, 9, 2])
    found, end = read_pickle(written)
    expected = pickle.loads(written, encoding="latin1")
    assert end == len(written)
    assert list(found) == list(expected)
    assert all(same(found[key], expected[key]) for key in expected)
    found, _ = read_pickle(array())
    assert same(found["data"], np.frombuffer(b"abcd", np.uint8))
    assert same(found["data"], pickle.loads(array(), encoding="latin1")["data"])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["u1", "<i8", ">i4", "<u2"])
@pytest.mark.parametrize("numpy_1", [True, False])
def test_what_numpy_writes_today_is_read(protocol: int, kind: str, numpy_1: bool) -> None:
    values = np.arange(6_000).reshape(20, 300).astype(kind)
    names = ["cat", "größe", "\ud800", "x" * 300]
    content = {
        "data": values,
        "by column": values.T,
        "labels": list(range(-400, 70_000, 999)),
        "names": names,
    }
    content |= {"raw": b"abc", "long": b"abc" * 200, "nothing": None, "pair": (True, False, 2**70, -(2**40))}
    written = pickle.dumps(content, protocol=protocol)
    if numpy_1:  # where the modules had other names
        for module in (b"multiarray", b"numeric"):
            new, old = b"numpy._core." + module, b"numpy.core." + module
            written = written.replace(b"c" + new, b"c" + old)
            written = written.replace(bytes([0x8C, len(new)]) + new, bytes([0x8C, len(old)]) + old)
        assert b"_core" not in written
    found, end = read_pickle(b"before" + written, 6)
    assert end == 6 + len(written)
    assert list(found) == list(content)
    assert all(same(found[key], value) for key, value in content.items())


FORGED = {
    "flags of a dtype": array(DTYPE + PLAIN[:-4] + b"K\x3ftb"),
    "fields of a dtype": array(DTYPE + b"(K\x03U\x01|N(U\x01at}U\x01a(U\x01bK\x00tsJ" + PLAIN[-13:]),
    "a subarray": array(DTYPE + b"(K\x03U\x01|(h\x00K\x02tNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"),
    "another size": array(DTYPE + b"(K\x03U\x01|NNNK\x40K\x01K\x00tb"),
    "byte order": array(DTYPE + PLAIN.replace(b"|", b"S")),
    "metadata": array(DTYPE + b"(K\x04U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00}tb"),
    "no state": array(DTYPE),
    "objects": array(DTYPE.replace(b"u1", b"O8") + PLAIN),
    "texts": array(DTYPE.replace(b"u1", b"S1") + PLAIN),
    "more than there is": array(shape=b"(\x8a\x08" + struct.pack("<q", 10**12) + b"t"),
    "less than there is": array(shape=b"(K\x03t"),
    "a negative side": array(shape=b"(J\xfc\xff\xff\xffJ\xff\xff\xff\xfft"),
    "a thousand sides": array(shape=b"(" + 1000 * b"K\x01" + b"t"),
    "a list for bytes": array(content=b"]"),
    "a shape of lists": array(shape=b"(]t"),
    "an array twice": array()[:-2] + b"N" + array()[-2:],
    "a string longer than the file": b"T\xff\xff\xff\x7fabc.",
    "text longer than the file": b"X\xff\xff\xff\xffabc.",
    "bytes longer than any memory": b"\x80\x04\x8e" + struct.pack("<Q", 2**63) + b"abc.",
    "a place in the memory": b"K\x01r\xff\xff\xff\xff.",
    "what was never there": b"h\x05.",
    "a number of 2 GB": b"\x8b\xff\xff\xff\x7fabc.",
    "a key that is a tuple": b"}" + b")" + 100_000 * b"\x85" + b"K\x01s.",
    "a key that is a number": b"}K\x01K\x01s.",
    "a name made of lists": b"\x80\x04]]\x93.",
    "a persistent id": b"U\x01aQ.",
    "an extension": b"\x82\x01.",
    "an instance": b"(i__builtin__\ndict\n.",
    "an object": b"c_codecs\nencode\n)\x81.",
    "a call of what is called nothing": DTYPE + b")R.",
    "another codec": b"c_codecs\nencode\n(X\x01\x00\x00\x00aU\x05rot13tR.",
    "a state of a list": b"]}b.",
    "only a class": b"cnumpy\nndarray\n.",
    "only an array": EMPTY + b".",
    "no list": b"}K\x01a.",
    "half a pair": b"}(U\x01au.",
    "no value": b".",
    "no end": b"K\x01",
    "nothing": b"",
    "a page": b"<html>not found</html>",
}


@pytest.mark.parametrize("written", FORGED.values(), ids=FORGED.keys())
def test_what_is_forged_is_refused(written: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_pickle(written)


def test_every_beginning_of_a_file_is_refused() -> None:
    written = pickle.dumps({"data": random_bytes(2, 3), "labels": [1, 300]}, protocol=4)
    for end in range(len(written)):
        with pytest.raises(ValueError, match=r"."):
            read_pickle(written[:end])


def test_the_number_of_values_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte of the file may become 56 of an empty list."""
    monkeypatch.setenv("HETSNGP_MAX_PICKLE_VALUES", "1000")
    with pytest.raises(LimitExceeded, match=r"more than the limit of 1,000.*HETSNGP_MAX_PICKLE_VALUES="):
        read_pickle(2000 * b"]" + b".")
    monkeypatch.setenv("HETSNGP_MAX_PICKLE_VALUES", "3000")
    assert read_pickle(2000 * b"]" + b".")[0] == []


def test_a_value_that_is_used_many_times_is_copied_once() -> None:
    """Or refused: a file of a megabyte must not become a hundred."""
    long = 10**6
    text = b"X" + struct.pack("<I", long) + b"a" * long + b"q\x01"
    encoded = b"c_codecs\nencode\n(h\x01X\x06\x00\x00\x00latin1tR"
    with pytest.raises(ValueError, match="again and again"):
        read_pickle(b"\x80\x02" + text + b"]" + (encoded + b"a") * 100 + b".")
    content = b"B" + struct.pack("<I", long) + b"a" * long + b"q\x01"
    entries = b"".join(b"U\x02%02dh\x01" % i for i in range(100))
    found, _ = read_pickle(b"\x80\x02" + content + b"}(" + entries + b"u.")
    assert len({id(value) for value in found.values()}) == 1


def test_setting_keys_takes_time_by_their_number_alone() -> None:
    """Copies of the stack below would be counted in the bytes of lists that Python allocates."""
    import tracemalloc

    count = 20_000
    written = b"\x80\x02" + b"N" * count + b"}" + b"U\x01aNs" * 50 + b"."
    tracemalloc.start()
    try:
        read_pickle(written)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.9 * 8 * count  # the stack once; a copy of it would be as large again
