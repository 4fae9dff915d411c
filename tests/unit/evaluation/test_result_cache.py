"""Results on disk: read back only with their fingerprint, and the fingerprint of code follows its imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hetsngp.evaluation.cache import ResultCache, code_fingerprint, fingerprint_of, imported_modules

# --- results --------------------------------------------------------------------------------------------

VALUE = {"numbers": [0.1, 1 / 3], "none": None}
ARRAYS = {"a": np.arange(1000.0), "text": np.array("b")}


def test_a_result_is_read_with_its_fingerprint_alone(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path / "new" / "folder")
    assert cache.read("a", "1") is None
    assert cache.read_arrays("a", "1") is None
    cache.write("a", "1", VALUE)
    cache.write_arrays("a", "1", ARRAYS)
    assert cache.read("a", "1") == VALUE
    found = cache.read_arrays("a", "1")
    assert found is not None
    assert set(found) == set(ARRAYS)
    assert np.array_equal(found["a"], ARRAYS["a"])
    for name, fingerprint in (("a", "2"), ("b", "1")):
        assert cache.read(name, fingerprint) is None
        assert cache.read_arrays(name, fingerprint) is None
    cache.write("a", "2", {"numbers": 1})
    assert cache.read("a", "1") is None
    assert cache.read("a", "2") == {"numbers": 1}


def test_a_number_that_has_changed_on_disk_is_not_read(tmp_path: Path) -> None:
    """It is a number still, which the grammar of JSON does not find."""
    cache = ResultCache(tmp_path)
    cache.write("a", "1", {"accuracy": 0.91, "by class": {10: 1, 9: 2}})
    assert cache.read("a", "1") == {"accuracy": 0.91, "by class": {"10": 1, "9": 2}}
    file = cache.file("a", ".json")
    file.write_text(file.read_text().replace("0.91", "0.81"))
    assert cache.read("a", "1") is None


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path / "parts")
    cache.clean()
    assert not cache.folder.exists()
    for write in (lambda: cache.write("a", "1", VALUE), cache.clean):
        cache.folder.mkdir(exist_ok=True)
        for name in (".saving-1", ".lock"):
            (cache.folder / name).write_text("half")
        write()
        assert [file.name for file in cache.folder.iterdir()] == ["a.json"]


WRITE = """
import sys
from pathlib import Path
from hetsngp.evaluation.cache import ResultCache
cache = ResultCache(Path(sys.argv[1]))
for i in range(40):
    cache.write("a", "1", {"numbers": [i] * 1000})
    found = cache.read("a", "1")
    assert found is not None and len(set(found["numbers"])) == 1
"""


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Each removes temporary files: never those of another that is writing."""
    processes = [subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0] * 3
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_without_a_fingerprint_nothing_is_stored(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path / "folder")
    cache.write("a", None, VALUE)
    cache.write_arrays("a", None, ARRAYS)
    assert not cache.folder.exists()
    cache.write("a", "1", VALUE)
    cache.write_arrays("a", "1", ARRAYS)
    assert cache.read("a", None) is None
    assert cache.read_arrays("a", None) is None


@pytest.mark.parametrize("suffix", [".json", ".npz"])
def test_a_damaged_file_counts_as_missing(suffix: str, tmp_path: Path) -> None:
    cache = ResultCache(tmp_path)
    cache.write("a", "1", VALUE)
    cache.write_arrays("a", "1", ARRAYS)
    file = cache.file("a", suffix)
    whole = file.read_bytes()
    read = cache.read if suffix == ".json" else cache.read_arrays
    middle = bytes(255 - byte for byte in whole[len(whole) // 2 - 20 : len(whole) // 2])
    for content in (
        *(b"", b"\0" * 50, b"[]", b"3", b"{}", whole[:-9], whole[: len(whole) // 2]),
        whole[: len(whole) // 2 - 20] + middle + whole[len(whole) // 2 :],
    ):
        file.write_bytes(content)
        assert read("a", "1") is None
    file.write_bytes(whole)
    assert read("a", "1") is not None


def test_names_that_look_alike_have_files_of_their_own(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path)
    names = ["ood['a/b']", "ood['a b']", "ood['a.b']", "a" * 100, "b" + "a" * 99, "a-b", "a_b"]
    assert len({cache.file(name, ".json").name for name in names}) == len(names)
    assert cache.file("cifar100.fog.3", ".json").name == "cifar100.fog.3.json"
    assert all(cache.file(name, ".json").parent == tmp_path for name in names)


def test_a_value_that_is_not_strict_json_leaves_what_was_there(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path)
    cache.write("a", "1", VALUE)
    with pytest.raises(ValueError, match="JSON"):
        cache.write("a", "1", {"a": float("nan")})
    assert cache.read("a", "1") == VALUE
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_fingerprint_is_of_values_and_not_of_the_order_of_keys() -> None:
    assert fingerprint_of({"a": 1, "b": 2}) == fingerprint_of(json.loads('{"b": 2, "a": 1}'))
    assert fingerprint_of("a", "b") != fingerprint_of("ab")
    assert fingerprint_of({"a": 1}) != fingerprint_of({"a": 2})


# --- the fingerprint of code ----------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """start → near → far, start → inner (inside a function) → data.one; others are not imported."""
    files = {
        "__init__": "import hetsngp.other",
        "start": "from hetsngp.near import f\n\ndef g():\n    from hetsngp.parts import inner",
        "near": "import torch\nimport hetsngp.far",
        "far": "f = 1",
        "parts/__init__": "from hetsngp.parts.unused import x",
        "parts/inner": "from hetsngp.data.one import y",
        "parts/unused": "x = 1",
        "data/__init__": "",
        "data/one": "y = 1",
        "data/deep/two": "z = 1",
        "other": "a = 1",
    }
    for name, text in files.items():
        file = tmp_path / "hetsngp" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "hetsngp"


def fingerprint(package: Path, *modules: str) -> str:
    code_fingerprint.cache_clear()
    return code_fingerprint(*(modules or ("hetsngp.start",)), package=package)


@pytest.mark.parametrize(
    ("module", "counts"),
    [
        *((name, True) for name in ("start", "near", "far", "parts/inner", "data/one")),
        *((name, False) for name in ("other", "parts/__init__", "parts/unused", "data/deep/two", "__init__")),
    ],
)
def test_code_counts_where_it_is_imported(package: Path, module: str, counts: bool) -> None:
    """Directly or not, at the top of a file or in a function."""
    before = fingerprint(package)
    file = package / f"{module}.py"
    file.write_text(file.read_text() + "\n# changed")
    assert (fingerprint(package) != before) == counts
    assert fingerprint(package) == fingerprint(package)


def test_a_module_that_has_moved_is_an_error(package: Path) -> None:
    (package / "far.py").rename(package / "farther.py")
    with pytest.raises(ModuleNotFoundError, match=r"hetsngp\.far"):
        fingerprint(package)
    for name in ("hetsngp.no_such", "hetsngp.no_such.*"):
        with pytest.raises(ModuleNotFoundError, match="no_such"):
            fingerprint(package, name)


def test_a_name_that_moved_to_another_module_takes_its_code_along(package: Path) -> None:
    (package / "start.py").write_text("from hetsngp.other import a")
    before = fingerprint(package)
    (package / "other.py").write_text("a = 2")
    assert fingerprint(package) != before


def test_a_star_stands_for_a_whole_package(package: Path) -> None:
    assert set(imported_modules("hetsngp.data.*", package=package)) == {
        "hetsngp.data",
        "hetsngp.data.one",
        "hetsngp.data.deep.two",
    }


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("if TYPE_CHECKING:\n    from hetsngp.other import a", False),
        ("if typing.TYPE_CHECKING:\n    from hetsngp.other import a", False),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from hetsngp.other import a", True),
        ("if not TYPE_CHECKING:\n    from hetsngp.other import a", True),
    ],
)
def test_imports_for_annotations_alone_do_not_count(package: Path, line: str, counts: bool) -> None:
    (package / "near.py").write_text(line)
    assert ("hetsngp.other" in imported_modules("hetsngp.start", package=package)) == counts


def test_names_of_earlier_releases_do_not_count(package: Path) -> None:
    (package / "_moved.py").write_text("from hetsngp.other import a")
    (package / "near.py").write_text("from hetsngp._moved import renamed\nfrom hetsngp import _moved")
    before = fingerprint(package)
    assert not {"hetsngp._moved", "hetsngp.other"} & set(imported_modules("hetsngp.start", package=package))
    (package / "_moved.py").write_text("renamed = 1")
    assert fingerprint(package) == before


@pytest.mark.parametrize(
    "line", ["from .far import f", "from . import far", "from hetsngp import f", "import hetsngp"]
)
def test_imports_that_cannot_be_followed_are_errors(package: Path, line: str) -> None:
    (package / "near.py").write_text(line)
    with pytest.raises(ValueError, match="near"):
        fingerprint(package)


def test_what_decides_our_own_results_is_found() -> None:
    demo = imported_modules("hetsngp.paper.synthetic.experiment")
    assert {"hetsngp.fitting.loop", "hetsngp.functional.link", "hetsngp.posterior.fit"} <= set(demo)
    assert not {name for name in demo if name.split(".")[1] in ("cli", "serving", "training")}
    assert "hetsngp.paper.synthetic.plots" not in demo
    measured = imported_modules("hetsngp.paper.measurements")
    assert {"hetsngp.evaluation.loader_quality", "hetsngp.metrics.per_example"} <= set(measured)
    # An edited note of a table is no reason to measure again.
    assert [name for name in measured if ".paper." in name] == ["hetsngp.paper.measurements"]
