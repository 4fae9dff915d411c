"""Every ```python block of README.md and docs/*.md runs, unless its info string says no-run."""

import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BLOCK = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})python(?P<info>[ \t{][^\n]*)?\n(?P<body>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text: str) -> list[tuple[int, str]]:
    """Return (line of the code in the file, code) for each block that is to run."""
    return [
        (text.count("\n", 0, match.start("body")), textwrap.dedent(match["body"]))
        for match in BLOCK.finditer(text)
        if "no-run" not in (match["info"] or "")
    ]


def documents() -> list[Path]:
    return [path for path in sorted((ROOT / "docs").glob("*.md")) if blocks(path.read_text(encoding="utf-8"))]


def run(path: Path, module: ModuleType) -> None:
    for line, code in blocks(path.read_text(encoding="utf-8")):
        # the empty lines make a traceback name the line of the document
        exec(compile("\n" * line + code, str(path), "exec"), module.__dict__)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """One namespace per document, importable so that its classes pickle; and a folder to write into."""
    fresh = ModuleType("documentation")
    monkeypatch.setitem(sys.modules, fresh.__name__, fresh)
    monkeypatch.chdir(tmp_path)
    return fresh


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the README has on disk, and no network: initial weights instead of those that would be fetched."""
    timm = pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    from PIL import Image

    rng = np.random.default_rng(0)
    for label, level in (("cat", 60), ("dog", 180)):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(rng.normal(level, 40, (48, 48, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
    create = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda name, **options: create(name, **{**options, "pretrained": False})
    )


@pytest.mark.usefixtures("photos")
def test_readme(module: ModuleType) -> None:
    assert README.is_file(), "README.md is missing"
    assert blocks(README.read_text(encoding="utf-8")), "README.md shows no runnable ```python block"
    run(README, module)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_document(path: Path, module: ModuleType) -> None:
    run(path, module)


def test_blocks_run_in_order_and_fail_where_they_are_wrong(module: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        "# Page\n```python\nx = 1\n```\n```python no-run\nx = 2\n```\n```bash\nexit 1\n```\n"
        "- item\n  ```python\n  x += 1\n  ```\n```python\nassert x == 2\nraise KeyError(x)\n```\n"
    )
    with pytest.raises(KeyError, match="2") as error:
        run(path, module)
    assert error.traceback[-1].lineno + 1 == 17  # pytest counts from 0
