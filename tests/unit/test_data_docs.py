"""The table of docs/data.md has every set as the registry has it."""

import re
from pathlib import Path

import pytest

from hetsngp.data.registry import DATASETS

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def table() -> dict[str, list[str]]:
    """Cells of each row by name: what, splits, files, get; without the escapes that Markdown needs."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index("| name | what | splits | files | get |") + 2
    found = {}
    for line in lines[start : lines.index("", start)]:
        name, *cells = re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
        found[name.strip("`")] = [re.sub(r"\\([<*|])", r"\1", cell) for cell in cells]
    return found


def test_the_table_has_every_set_once_and_no_other() -> None:
    assert list(table()) == list(DATASETS)


@pytest.mark.parametrize("name", DATASETS)
def test_a_row_says_what_the_registry_says(name: str) -> None:
    data = DATASETS[name]
    splits = ", ".join(data.splits)
    if data.variants:
        splits += "; also " + ", ".join(f"`{name}:{variant}`" for variant in data.variants)
    assert table()[name] == [data.about, splits, data.layout, data.get]


def test_what_markdown_would_swallow_is_escaped() -> None:
    """A bare <wnid> is taken for HTML and not shown, a bare pair of asterisks for emphasis."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for row in rows:
        assert not re.search(r"(?<!\\)[<*]", re.sub(r"`[^`]*`", "", row)), row
