"""Importing hetsngp loads nothing, its public names need three packages, and its imports point one way."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

BASE = ("types", "validation", "files", "locking", "choices")
# Package or module → those it stands on. It may import these, and whatever they stand on; nothing else.
STANDS_ON: dict[str, tuple[str, ...]] = {
    "limits": (),
    **dict.fromkeys(BASE, ("limits",)),
    "functional": BASE,
    "nn": ("functional",),
    "models": ("nn",),
    "posterior": ("models",),
    "conversion": ("models",),
    "fitting": ("posterior", "conversion"),
    "io": ("posterior", "conversion"),
    "frozen": ("fitting", "io", "labels"),
    "metrics": BASE,
    "labels": BASE,
    "data": ("metrics", "labels"),
    "serving": ("data", "io"),
    "evaluation": ("serving", "fitting"),
    "pretrained": ("data", "fitting"),
    "training": ("evaluation", "frozen", "pretrained"),
    "auditing": ("training",),
    "estimator": ("frozen", "labels"),
    "exporting": ("io",),  # planned
    "integrations": ("io",),  # planned
    "paper": ("training", "estimator"),
    "cli": ("paper", "auditing", "exporting", "integrations"),
    "__main__": ("cli",),
}
ANYWHERE = {"_moved"}
"""Modules that all others may import: names of earlier releases."""

OPTIONAL = {
    *("sklearn", "scipy", "pandas", "matplotlib", "PIL", "typer", "rich", "jinja2", "timm", "torchvision"),
    *("lightning", "lightning_fabric", "torchmetrics", "transformers"),
}


def run_python(code: str, cwd: Path) -> str:
    """Run `code` in a fresh interpreter that knows the checkout only through PYTHONPATH."""
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    run = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


# --- cost of an import ---------------------------------------------------------------------------------

USE_EVERY_NAME = "[getattr(hetsngp, name) for name in hetsngp.__all__ if name != 'evaluate']"


def test_import_loads_nothing_but_the_package(tmp_path: Path) -> None:
    """Not even torch: names are imported when they are used. Modules are counted, because seconds vary."""
    code = (
        "import sys; before = set(sys.modules); import hetsngp; print(hetsngp.__file__, "
        "*(name for name in set(sys.modules) - before "
        "if name.split('.')[0] not in sys.stdlib_module_names))"
    )
    file, *loaded = run_python(code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(SRC)
    assert set(loaded) == {"hetsngp", "hetsngp._moved"}


def test_public_names_pull_in_no_optional_package(tmp_path: Path) -> None:
    code = f"import sys, hetsngp; {USE_EVERY_NAME}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = set(run_python(code, cwd=tmp_path).split())
    assert {"torch", "numpy", "safetensors"} <= loaded
    assert not loaded & OPTIONAL


def test_public_names_need_only_torch_numpy_and_safetensors(tmp_path: Path) -> None:
    """Whatever else is loaded was loaded by those three, or is Python's own."""
    code = (
        "import sys, torch, numpy, safetensors.torch; before = set(sys.modules); import hetsngp; "
        f"{USE_EVERY_NAME}; new = {{name.split('.')[0] for name in set(sys.modules) - before}}; "
        "print(*(new - set(sys.stdlib_module_names)))"
    )
    assert set(run_python(code, cwd=tmp_path).split()) <= {"hetsngp", "torch", "numpy", "safetensors"}


# --- dependencies point one way ------------------------------------------------------------------------


def below(package: str, stands_on: dict[str, tuple[str, ...]] = STANDS_ON) -> set[str]:
    """All that ``package`` may import."""
    return {name for lower in stands_on[package] for name in {lower, *below(lower, stands_on)}}


def module_name(path: Path, src: Path) -> str:
    parts = path.relative_to(src).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, src: Path, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, module of ours) for every import in the file, at any level of it."""
    package = module_name(path, src).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from a import b` means the module a.b where there is one, else a name inside a
            names = [f"{origin}.{alias.name}" for alias in node.names]
            targets = [name if name in modules else origin for name in names]
        else:
            continue
        yield from ((node.lineno, target) for target in targets if target.split(".")[0] == "hetsngp")


def violations(src: Path) -> list[str]:
    """Say which imports below src/hetsngp are not of what their package stands on."""
    files = sorted((src / "hetsngp").rglob("*.py"))
    modules = {module_name(path, src) for path in files}
    found: list[str] = []
    for path in files:
        if module_name(path, src) == "hetsngp":
            continue  # the public names come from everywhere
        package = module_name(path, src).split(".")[1]
        if package not in STANDS_ON and package not in ANYWHERE:
            found.append(f"{path.relative_to(src)}: {package} has no place; give it one in STANDS_ON")
            continue
        for line, target in imports(path, src, modules):
            where = f"{path.relative_to(src)}:{line} imports {target}"
            if target == "hetsngp":
                found.append(f"{where}: name the module, the package root imports everything")
                continue
            other = target.split(".")[1]
            if other not in STANDS_ON and other not in ANYWHERE:
                found.append(f"{where}: {other} has no place; give it one in STANDS_ON")
            elif package in ANYWHERE:
                found.append(f"{where}: {package} is imported by all others, and stands on none")
            elif other not in {package, *ANYWHERE, *below(package)}:
                found.append(f"{where}: {package} does not stand on {other}")
    return found


def test_imports_point_one_way() -> None:
    assert (SRC / "hetsngp" / "functional").is_dir()
    assert not violations(SRC), "\n".join(violations(SRC))


def test_every_package_has_a_place_and_the_order_has_no_circle() -> None:
    TopologicalSorter(STANDS_ON).prepare()  # raises CycleError
    folder = SRC / "hetsngp"
    here = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert here - {"__init__"} - ANYWHERE <= set(STANDS_ON)
    assert set(STANDS_ON) - here <= {"labels", "exporting", "integrations"}


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ("functional", "nn"),
        ("nn", "models"),
        ("models", "posterior"),
        ("models", "conversion"),
        ("posterior", "fitting"),
        ("conversion", "io"),
        ("io", "frozen"),
        ("metrics", "data"),
        ("data", "serving"),
        ("serving", "evaluation"),
        ("evaluation", "training"),
        ("training", "auditing"),
        ("auditing", "cli"),
        ("frozen", "estimator"),
    ],
)
def test_the_order_is_that_of_the_design(lower: str, upper: str) -> None:
    assert lower in below(upper)
    assert upper not in below(lower)


@pytest.mark.parametrize(
    "apart",
    [
        BASE,
        ("posterior", "conversion"),
        ("fitting", "io"),
        ("metrics", "labels"),
        ("exporting", "integrations"),
        ("training", "estimator"),
        ("auditing", "paper"),
        ("pretrained", "frozen"),
        ("data", "models"),
    ],
)
def test_packages_side_by_side_do_not_import_each_other(apart: tuple[str, ...]) -> None:
    assert not any(a in below(b) for a in apart for b in apart)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"nn/heads.py": "from hetsngp.functional import link", "functional/link.py": ""}, None),
        ({"nn/heads.py": "from ..functional.link import softmax", "functional/link.py": ""}, None),
        ({"nn/heads.py": "from .latent import Latent", "nn/latent.py": ""}, None),
        (
            {"__init__.py": "from hetsngp.models.classifier import Classifier", "models/classifier.py": ""},
            None,
        ),
        ({"fitting/loop.py": "from hetsngp import posterior", "posterior/__init__.py": ""}, None),
        ({"types.py": "from hetsngp._moved import renamed", "_moved.py": ""}, None),
        ({"functional/link.py": "from hetsngp.nn.heads import Head", "nn/heads.py": ""}, "not stand on nn"),
        ({"functional/link.py": "from ..nn import heads", "nn/heads.py": ""}, "not stand on nn"),
        (
            {"functional/__init__.py": "from .. import models", "models/__init__.py": ""},
            "not stand on models",
        ),
        ({"types.py": "import hetsngp.functional.link", "functional/link.py": ""}, "not stand on functional"),
        (
            {"models/ensemble.py": "def f():\n    from hetsngp.io import save", "io/__init__.py": ""},
            "stand on io",
        ),
        ({"posterior/fit.py": "from hetsngp.conversion import convert"}, "not stand on conversion"),
        ({"data/tables.py": "from hetsngp.models import build"}, "not stand on models"),
        ({"types.py": "from hetsngp.files import write_json"}, "not stand on files"),
        ({"models/classifier.py": "from hetsngp import build"}, "package root"),
        ({"_moved.py": "from hetsngp import types", "types.py": ""}, "imported by all others"),
        ({"utils.py": ""}, "no place"),
        ({"nn/heads.py": "from hetsngp.utils import f"}, "no place"),
    ],
)
def test_the_import_check_can_fail(files: dict[str, str], expected: str | None, tmp_path: Path) -> None:
    for name, text in {"__init__.py": "", **files}.items():
        path = tmp_path / "hetsngp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = violations(tmp_path)
    if expected is None:
        assert not found
    else:
        assert len(found) == 1
        assert expected in found[0]


# --- names ---------------------------------------------------------------------------------------------


def packages() -> list[str]:
    return [module_name(path, SRC) for path in sorted((SRC / "hetsngp").rglob("__init__.py"))]


@pytest.mark.parametrize("package", packages())
def test_no_module_has_the_name_of_a_public_function(package: str) -> None:
    loaded = importlib.import_module(package)
    folder = Path(loaded.__file__).parent
    inside = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    for name in getattr(loaded, "__all__", []):
        if name in inside:
            assert inspect.ismodule(getattr(loaded, name)), f"{package}.{name} is a name and a module"
        if package == "hetsngp" and name not in STANDS_ON:
            assert not inspect.ismodule(getattr(loaded, name)), f"{package}.{name} must stay callable"


def defined_types(path: Path) -> Iterator[str]:
    """Names of the classes of a file, at any level of it, and of its module-level type aliases."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            yield from (name for name in names if not name.isupper() and name.lstrip("_")[:1].isupper())


def repeated_types(src: Path) -> dict[str, list[str]]:
    """Names that several classes or type aliases have → their modules."""
    found: dict[str, list[str]] = {}
    for path in sorted((src / "hetsngp").rglob("*.py")):
        for name in defined_types(path):
            found.setdefault(name, []).append(module_name(path, src))
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_names_of_classes_and_type_aliases_are_unique() -> None:
    assert not repeated_types(SRC)


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ("class Row: ...", True),
        ("Row = dict[str, float | int | None]", True),
        ("Row = int | str", True),
        ("def f():\n    class Row: ...", True),
        ("class Rows: ...", False),
        ("ROW = TABLE[0]", False),
        ("from hetsngp.a import Row", False),
    ],
)
def test_a_repeated_name_is_found(text: str, repeated: bool, tmp_path: Path) -> None:
    (tmp_path / "hetsngp").mkdir()
    (tmp_path / "hetsngp" / "a.py").write_text("class Row: ...")
    (tmp_path / "hetsngp" / "b.py").write_text(text)
    assert repeated_types(tmp_path) == ({"Row": ["hetsngp.a", "hetsngp.b"]} if repeated else {})


def test_no_utils() -> None:
    assert not [
        path for path in SRC.rglob("*") if path.stem.strip("_") in {"util", "utils", "helpers", "misc"}
    ]
