"""Tables as text: aligned, whatever the cells hold."""

import builtins
from typing import Any

import pytest

from hetsngp.serving.text_tables import markdown_table, plain_table, rich_table


def test_names_are_left_and_numbers_right() -> None:
    text = plain_table(["", "", "NLL ↓"], [["a", "ours", "0.5"], ["", "paper", "12.25"]], num_names=2)
    assert text.splitlines() == ["          NLL ↓", "a  ours     0.5", "   paper  12.25"]


def test_spaces_at_the_end_of_a_cell_are_kept_and_those_of_a_line_are_not() -> None:
    text = plain_table(["a", "b", "c"], [["x", "1.0*", "2"], ["y", "1.0 ", " "]], gap=1)
    assert text.splitlines() == ["a    b c", "x 1.0* 2", "y 1.0"]


def test_cells_may_have_several_lines() -> None:
    text = plain_table(["a", "b"], [["x", "1.0\n±.1"], ["y", "2"]])
    assert text.splitlines() == ["a    b", "x  1.0", "   ±.1", "y    2"]


def test_cells_are_text_and_no_markup() -> None:
    text = plain_table(["[bold]a[/bold]", "b"], [["[red]x", "[1]"], [":smile:", "日本"]])
    assert text.splitlines()[1:] == ["[red]x           [1]", ":smile:         日本"]


def test_wide_tables_are_not_wrapped() -> None:
    rows = [[f"name {i}", *(f"{j:.3f}" for j in range(60))] for i in range(3)]
    lines = plain_table(["a", *map(str, range(60))], rows).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1


def test_markdown_keeps_bars_in_cells() -> None:
    text = markdown_table(["a", "b|c"], [["x|y", "1"]])
    assert text.splitlines() == ["| a | b\\|c |", "|---|---:|", "| x\\|y | 1 |"]


def test_without_rich_columns_are_aligned_and_a_table_for_the_terminal_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = plain_table(["a", "b"], [["x\nyyy", "1"], ["z", "10"]])
    real = builtins.__import__

    def without_rich(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    with pytest.raises(ImportError, match=r"pip install 'hetsngp\[eval\]'"):
        rich_table(["a"], [["b"]])
    assert plain_table(["a", "b"], [["x\nyyy", "1"], ["z", "10"]]) == expected
    assert markdown_table(["a"], [["b"]])
