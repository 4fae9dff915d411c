"""What is no table, or no column to learn from, is refused with the way to mend it."""

import warnings
from datetime import date, time
from pathlib import Path
from typing import Any

import pytest

from hetsngp.data.tables import load_table

pandas = pytest.importorskip("pandas")


def write_csv(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column 'y', only 'a', 'b'"),
        ("y\nu\nv\n", "no column but the target"),
        ("a,y\n1,u\n2,u\n", "has 1 class, at least 2"),
        ("a,y\n", "no rows"),
        ("", "cannot be read as a table"),
        ("a,y\ninf,u\n2,v\n", "infinite"),
        ("a,y\n1e39,u\n2,v\n", "too large ones for float32"),
        ("a,b,y\n,1,u\n,2,v\n", r"column 'a' is empty.*drop=\['a'\]"),
        (",a,y\n0,1,u\n1,2,v\n", r"without a name.*drop=\['Unnamed: 0'\].*index=False"),
        ("a,y\n" + "".join(f"name{row},{row % 2}\n" for row in range(1001)), r"1001 different.*drop=\['a'\]"),
        ("a,y\n" + "".join(f"name{row},{row % 2}\n" for row in range(21)), r"21 different.*drop=\['a'\]"),
        (
            "a,y\n" + "".join(f"name{row % 1001},{row % 2}\n" for row in range(2100)),
            r"1001 different values in 2100 rows",
        ),
        ("a,b,y\n1001,5,7,u\n1002,6,8,v\n", r"more fields than the header.*'1001'.*a name"),
        ("a,b,y\n5,7,u,\n6,8,v,\n", r"more fields than the header.*'5'.*ends of the rows"),
        ("a,b,y\n5,7,u\n6,8,v,\n", "line 3, saw 4"),
        ("a,b,y,\n5,7,u,\n6,8,v,\n", r"without a name.*drop=\['Unnamed: 3'\]"),
        ("a;y\n5;u\n6;v\n", r"separated by ';', but ',' is expected.*sep=';'"),
        ("a;y\n5,1;u\n6,2;v\n", r"separated by ';', but ',' is expected.*decimal=','"),
        ("a, y\n5, u\n6, v\n", "no column 'y', only 'a', ' y'; did you mean ' y'"),
        ("a,Y\n5,u\n6,v\n", "did you mean 'Y'"),
    ],
)
def test_what_is_no_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"a.csv.*{message}"):
        load_table(write_csv(tmp_path / "a.csv", text), "y")


def test_many_values_may_be_categories_where_they_return(tmp_path: Path) -> None:
    """Twenty always, and more in no more than half of the rows."""
    for different, rows in ((20, 20), (30, 60)):
        lines = "".join(f"name{row % different},{row % 2}\n" for row in range(rows))
        assert load_table(write_csv(tmp_path / "a.csv", "a,y\n" + lines), "y").x.shape == (rows, different)


@pytest.mark.parametrize("target", ["anser", "answers", "ANSWER", " answer"])
def test_a_misspelt_target_is_told_the_likely_one(target: str, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", "a,answer\n1,u\n2,v\n")
    with pytest.raises(ValueError, match=rf"no column '{target}', only .*; did you mean 'answer'\?"):
        load_table(file, target)


def test_other_separators_and_letters_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"separated by ',', but '\\t' is expected"):
        load_table(write_csv(tmp_path / "a.tsv", "a,y\n1,u\n2,v\n"), "y")
    (tmp_path / "a.csv").write_bytes("city,y\nKöln,u\nBonn,v\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a.csv is not text in UTF-8.*encoding='latin-1'"):
        load_table(tmp_path / "a.csv", "y")


IDENTIFIERS = ["id", "ID", "index", "user_id", "PassengerId"]


@pytest.mark.parametrize("name", IDENTIFIERS)
def test_numbers_that_are_likely_identifiers_get_a_warning(name: str, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", f"{name},a,y\n10,1,u\n11,2,v\n12,3,u\n")
    with pytest.warns(UserWarning, match=rf"a.csv: '{name}'.*drop=\['{name}'\]") as found:
        table = load_table(file, "y")
    assert found[0].filename == __file__
    assert table.feature_names == (name, "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_table(file, "y", drop=[name])
        table.encode(file)


@pytest.mark.parametrize("column", ["id,7,8,7", "id,1.5,2.5,3", "width,1,2,3", "idle,1,2,3", "liquid,1,2,3"])
def test_other_numbers_get_none(column: str, tmp_path: Path) -> None:
    name, *values = column.split(",")
    rows = "".join(f"{value},{label}\n" for value, label in zip(values, "uvu", strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_table(write_csv(tmp_path / "a.csv", f"{name},y\n{rows}"), "y")


def test_text_where_the_first_file_has_numbers_is_refused(tmp_path: Path) -> None:
    table = load_table(write_csv(tmp_path / "a.csv", "a,y\n1,u\n2,v\n"), "y")
    with pytest.raises(ValueError, match=r"b.csv: column 'a' has more than numbers.*many.*text=\['a'\]"):
        table.encode(write_csv(tmp_path / "b.csv", "a,y\nmany,u\n2,v\n"))


DATES = [
    ["2020-01-01", "2020-12-31"],
    ["2020-01-01 10:00:00", "2020-01-01T10:00:00.5+02:00"],
    ["31.12.2020", "1.2.2020"],
    ["12/31/20", "1/2/20 3:15 PM"],
    ["10:15", "9:05:30"],
]


@pytest.mark.parametrize("dates", DATES, ids=lambda dates: dates[0])
def test_dates_in_text_are_refused_unless_declared(dates: list[str], tmp_path: Path) -> None:
    """However few: those of another file are others."""
    rows = "".join(f"{dates[row % 2]},{row % 3}\n" for row in range(60))
    file = write_csv(tmp_path / "a.csv", "day,y\n,1\n" + rows)
    with pytest.raises(ValueError, match=r"'day' .*dates.*drop=\['day'\].*make numbers.*text=\['day'\]"):
        load_table(file, "y")
    assert load_table(file, "y", text="day").x.shape == (61, 2)


def test_text_with_some_dates_is_text(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", "when,y\n2020-01-01,u\nnever,v\n1-2,u\n")
    assert load_table(file, "y").x.shape == (3, 3)


@pytest.mark.parametrize(
    "values",
    [
        pandas.to_datetime(["2020-01-01", "2020-01-02"]),
        pandas.to_timedelta([1, 2], "h"),
        [date(2020, 1, 1), None],
        [time(10, 15), time(9, 5)],
    ],
    ids=["datetime64", "timedelta64", "date32", "time"],
)
def test_dates_in_parquet_are_refused(values: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pandas.DataFrame({"day": values, "y": ["u", "v"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'day' .*dates.*drop=\['day'\].*make numbers"):
        load_table(tmp_path / "a.parquet", "y")
    table = load_table(write_csv(tmp_path / "a.csv", "day,y\n1,u\n2,v\n"), "y")
    with pytest.raises(ValueError, match=r"a.parquet: column 'day' has more than numbers"):
        table.encode(tmp_path / "a.parquet")


@pytest.mark.parametrize("values", [[[1, 2], [3]], [{"a": 1}, {"a": 2}], [b"a", b"b"], [None, [1]]], ids=str)
def test_lists_in_parquet_are_refused_unless_dropped(values: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"a": [1, 2], "b": values, "y": ["u", "v"]})
    frame.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"column 'b' has neither numbers nor text.*drop=\['b'\]"):
        load_table(tmp_path / "a.parquet", "y")
    assert load_table(tmp_path / "a.parquet", "y", drop="b").x.tolist() == [[1], [2]]


def test_the_index_of_a_parquet_file_is_no_feature(tmp_path: Path) -> None:
    """A shuffled or filtered data frame has one, which took the place of no column."""
    pytest.importorskip("pyarrow")
    pandas.DataFrame({"a": [1, 2], "y": ["u", "v"]}, index=[7, 3]).to_parquet(tmp_path / "a.parquet")
    assert load_table(tmp_path / "a.parquet", "y").x.tolist() == [[1], [2]]


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a.xlsx.*'.csv', '.tsv', '.parquet'"):
        load_table(tmp_path / "a.xlsx", "y")
    with pytest.raises(FileNotFoundError, match=r"a\.csv"):
        load_table(tmp_path / "a.csv", "y")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"a.parquet cannot be read as a table"):
        load_table(tmp_path / "a.parquet", "y")
