"""Importing hetsngp is light, and inside it imports point one way."""

import ast
import importlib
import inspect
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

# Lowest first; a room imports from its own layer and from those below.
LAYERS: list[set[str]] = [
    {"factors", "types", "errors", "validation", "storage"},
    {"functional"},
    {"nn"},
    {"model", "multi_input", "ensemble"},
    {
        *(
            "options",
            "parts",
            "recipes",
            "conversion",
            "tracing",
            "locating",
            "libraries",
            "calibration",
            "report",
            "posterior",
        ),
        *(
            "crossfit",
            "counting",
            "schedule",
            "watching",
            "loop",
            "descent",
            "leaving",
            "table",
            "fitting",
            "progress",
            "features",
            "frozen",
        ),
    },
    {"saved", "artifact", "estimator"},
    {"data", "training", "evaluation", "metrics", "serving"},
    {"reproduction"},
    {"cli", "__main__"},
]
LAYER_OF = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

OPTIONAL = {
    *("sklearn", "scipy", "pandas", "matplotlib", "PIL", "typer", "rich", "timm", "torchvision"),
    *("lightning", "lightning_fabric", "torchmetrics", "transformers"),
}


def run_python(code: str, cwd: Path) -> str:
    """Run `code` in a fresh interpreter that knows the checkout only through PYTHONPATH."""
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    run = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


# --- what `import hetsngp` costs -----------------------------------------------------------------------


def test_import_pulls_in_no_optional_package(tmp_path: Path) -> None:
    code = "import sys, hetsngp; print(hetsngp.__file__, *{name.split('.')[0] for name in sys.modules})"
    file, *loaded = run_python(code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(SRC)
    assert not set(loaded) & OPTIONAL


def test_import_needs_only_torch_numpy_and_safetensors(tmp_path: Path) -> None:
    """Whatever else is loaded was loaded by those three, or is Python's own."""
    code = (
        "import sys, torch, numpy, safetensors.torch; before = set(sys.modules); import hetsngp; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(*(new - set(sys.stdlib_module_names)))"
    )
    assert set(run_python(code, cwd=tmp_path).split()) <= {"hetsngp", "torch", "numpy", "safetensors"}


def test_import_is_cheap(tmp_path: Path) -> None:
    code = (
        "import time, torch, numpy, safetensors; start = time.perf_counter(); "
        "import hetsngp; print(time.perf_counter() - start)"
    )
    seconds = [float(run_python(code, cwd=tmp_path)) for _ in range(3)]
    assert statistics.median(seconds) < 1.5, seconds


# --- dependencies point one way ------------------------------------------------------------------------


def module_name(path: Path, src: Path) -> str:
    parts = path.relative_to(src).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, src: Path, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, module of ours) for every import in the file, wherever it stands."""
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
    """Say which imports below src/hetsngp point up, or round in a circle."""
    files = sorted((src / "hetsngp").rglob("*.py"))
    modules = {module_name(path, src) for path in files}
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for path in files:
        if module_name(path, src) == "hetsngp":
            continue  # the public names come from everywhere
        room = module_name(path, src).split(".")[1]
        if room not in LAYER_OF:
            found.append(f"{path.relative_to(src)}: {room} has no layer; give it one in LAYERS")
            continue
        for line, target in imports(path, src, modules):
            where = f"{path.relative_to(src)}:{line} imports {target}"
            if target == "hetsngp":
                found.append(f"{where}: name the module, the package root imports everything")
                continue
            other = target.split(".")[1]
            if other not in LAYER_OF:
                found.append(f"{where}: {other} has no layer; give it one in LAYERS")
            elif LAYER_OF[other] > LAYER_OF[room]:
                found.append(f"{where}: points up")
            elif other != room:
                graph.setdefault(room, set()).add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("circle: " + " → ".join(error.args[1]))
    return found


def test_imports_point_one_way() -> None:
    assert (SRC / "hetsngp" / "functional").is_dir()
    assert not violations(SRC), "\n".join(violations(SRC))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"nn/heads.py": "from hetsngp.functional import link", "functional/link.py": ""}, None),
        ({"nn/heads.py": "from ..functional.link import softmax", "functional/link.py": ""}, None),
        ({"__init__.py": "from hetsngp.models.classifier import Classifier", "model.py": ""}, None),
        ({"posterior.py": "from hetsngp import loop", "loop.py": ""}, None),
        ({"functional/link.py": "from hetsngp.nn.heads import Head", "nn/heads.py": ""}, "points up"),
        ({"functional/link.py": "from ..nn import heads", "nn/heads.py": ""}, "points up"),
        ({"functional/__init__.py": "from .. import model", "model.py": ""}, "points up"),
        ({"types.py": "import hetsngp.functional.link", "functional/link.py": ""}, "points up"),
        (
            {"model.py": "def f():\n    from hetsngp.models.methods import build", "recipes.py": ""},
            "points up",
        ),
        ({"model.py": "from hetsngp import build"}, "package root"),
        ({"utils.py": ""}, "no layer"),
        ({"loop.py": "import hetsngp.posterior.fit", "posterior.py": "from . import loop"}, "circle"),
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
        if package == "hetsngp" and name not in LAYER_OF:
            assert not inspect.ismodule(getattr(loaded, name)), f"{package}.{name} must stay callable"


def test_no_utils() -> None:
    assert not [
        path for path in SRC.rglob("*") if path.stem.strip("_") in {"util", "utils", "helpers", "misc"}
    ]
