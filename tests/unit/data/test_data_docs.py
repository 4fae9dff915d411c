"""The tables of docs/data.md have every set as the registry has it."""

import re
from pathlib import Path

import pytest

from hetsngp.data.datasets.registry import DATASETS
from hetsngp.limits import DATA_LIMITS

PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def rows(head: str) -> list[list[str]]:
    """Cells of each row of the table with that head, without the escapes that Markdown needs."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(head) + 2
    found = []
    for line in lines[start : lines.index("", start)]:
        cells = re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
        found.append([re.sub(r"\\([<*|])", r"\1", cell) for cell in cells])
    return found


def table() -> dict[str, list[str]]:
    """What, splits, files, get, by name."""
    return {name.strip("`"): cells for name, *cells in rows("| name | what | splits | files | get |")}


def test_the_table_has_every_set_once_and_no_other() -> None:
    assert list(table()) == list(DATASETS)


@pytest.mark.parametrize("name", DATASETS)
def test_a_row_says_what_the_registry_says(name: str) -> None:
    data = DATASETS[name]
    splits = ", ".join(data.splits)
    if data.variants:
        splits += "; also " + ", ".join(f"`{name}:{variant}`" for variant in data.variants)
    assert table()[name] == [data.about, splits, data.layout, data.get]


def test_what_comes_back_is_what_the_registry_says() -> None:
    """For every set once: the classes that are named before the colon, if there is one."""
    found = [
        (name, gives.partition(":")[0].replace("`", ""))
        for sets, gives, _ in rows("| sets | `open_data` gives | to read |")
        for name in re.findall(r"`([^`]+)`", sets)
    ]
    assert sorted(found) == sorted((name, data.gives) for name, data in DATASETS.items())


def test_the_limits_are_those_in_force() -> None:
    assert rows("| what | limit | environment variable |") == [
        [limit.about, f"{limit.default:,} {limit.unit}", f"`{limit.variable}`"] for limit in DATA_LIMITS
    ]


def test_what_markdown_would_swallow_is_escaped() -> None:
    """A bare <wnid> is taken for HTML and not shown, a bare pair of asterisks for emphasis."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for row in (line for line in lines if line.startswith("| `")):
        assert not re.search(r"(?<!\\)[<*]", re.sub(r"`[^`]*`", "", row)), row
