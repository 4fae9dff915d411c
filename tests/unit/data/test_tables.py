"""Tables become numbers by rules that a second file follows too."""

import gzip
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetsngp.data.images.arrays import stratified
from hetsngp.data.tables import load_table

pandas = pytest.importorskip("pandas")

FIRST = """age,member,city,y
30,True,Rome,no
41.5,False,Bonn,yes
-2,True,,no
7,True,Rome,maybe
"""
X = [[30, 1, 0, 1], [41.5, 0, 1, 0], [-2, 1, 0, 0], [7, 1, 0, 1]]


def write_csv(file: Path, text: str = FIRST) -> Path:
    file.write_text(text)
    return file


def write_gzip(file: Path) -> Path:
    file.write_bytes(gzip.compress(FIRST.encode()))
    return file


def write_tsv(file: Path) -> Path:
    return write_csv(file, FIRST.replace(",", "\t"))


def write_parquet(file: Path) -> Path:
    pytest.importorskip("pyarrow")
    pandas.read_csv(write_csv(file.with_suffix(".csv"))).to_parquet(file)
    return file


def write_categories(file: Path) -> Path:
    """A categorical column of pandas, with a category that no row has."""
    pytest.importorskip("pyarrow")
    frame = pandas.read_csv(write_csv(file.with_suffix(".csv")))
    frame["city"] = pandas.Categorical(frame["city"], ["Rome", "Bonn", "Lima"])
    frame["age"] = frame["age"].astype("Float64")
    frame["member"] = frame["member"].astype("boolean")
    frame.to_parquet(file)
    return file


@pytest.mark.parametrize(
    ("write", "name"),
    [
        *((write_csv, "a.csv"), (write_gzip, "a.csv.gz"), (write_tsv, "a.tsv"), (write_csv, "A.CSV")),
        *((write_parquet, "a.parquet"), (write_categories, "a.parquet")),
    ],
)
def test_every_kind_of_file_gives_the_same_numbers(write: Any, name: str, tmp_path: Path) -> None:
    table = load_table(write(tmp_path / name), "y")
    assert table.feature_names == ("age", "member", "city=Bonn", "city=Rome")
    assert (table.x.dtype, table.y.dtype) == (torch.float32, torch.int64)
    assert table.x.tolist() == X
    assert table.class_names == ("maybe", "no", "yes")
    assert table.y.tolist() == [1, 2, 1, 0]
    assert len(table) == 4


def test_another_file_is_read_as_the_first_was(tmp_path: Path) -> None:
    """Columns in another order, one more, an unknown code, a class less, and codes that look like numbers."""
    table = load_table(write_csv(tmp_path / "a.csv", "zip,age,y\n007,1,a\nX1,2,b\n12,3,b\n"), "y")
    assert table.feature_names == ("zip=007", "zip=12", "zip=X1", "age")
    second = table.encode(write_csv(tmp_path / "b.csv", "new,y,age,zip\n9,b,5,007\n9,b,6,12\n9,b,7,99\n"))
    assert second.x.tolist() == [[1, 0, 0, 5], [0, 1, 0, 6], [0, 0, 0, 7]]
    assert second.y.tolist() == [1, 1, 1]
    assert second.feature_names == table.feature_names
    unlabelled = write_csv(tmp_path / "c.csv", "age,zip\n8,X1\n")
    assert table.encoding.inputs(unlabelled).tolist() == [[0, 0, 1, 8]]
    with pytest.raises(ValueError, match=r"c.csv has no column 'y', only 'age', 'zip'"):
        table.encode(unlabelled)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_codes_may_be_declared_text(ending: str, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", "code,id,y\n10,5,a\n9,6,b\n,7,a\n")
    if ending == "parquet":
        pytest.importorskip("pyarrow")
        file = tmp_path / "a.parquet"
        pandas.read_csv(tmp_path / "a.csv").to_parquet(file)  # there 10 is 10.0
    table = load_table(file, "y", text=["code"], drop="id")
    assert table.feature_names == ("code=10", "code=9")
    assert table.x.tolist() == [[1, 0], [0, 1], [0, 0]]


def test_a_class_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    table = load_table(write_csv(tmp_path / "a.csv", "a,y\n1,01\n2,x\n"), "y")
    assert table.encode(write_csv(tmp_path / "b.csv", "a,y\n3,01\n")).y.tolist() == [0]


KINDS = {
    "number": (["1.5", "-2", "3e1", "4"], [[1.5], [-2], [30], [4]]),
    "whole": (["1", "2", "3", "1"], [[1], [2], [3], [1]]),
    "whole with gaps": (["1", "", "NA", "4"], [[1, 0], [2.5, 1], [2.5, 1], [4, 0]]),
    "true": (["true", "false", "true", "true"], [[1], [0], [1], [1]]),
    "True": (["True", "False", "False", "True"], [[1], [0], [0], [1]]),
    "TRUE": (["TRUE", "FALSE", "FALSE", "TRUE"], [[1], [0], [0], [1]]),
    "true with gaps": (["true", "", "false", "null"], [[1, 0], [0.5, 1], [0, 0], [0.5, 1]]),
    "True with gaps": (["True", "", "True", "False"], [[1, 0], [2 / 3, 1], [1, 0], [0, 0]]),
    "TRUE with gaps": (["", "TRUE", "FALSE", ""], [[0.5, 1], [1, 0], [0, 0], [0.5, 1]]),
    "text": (["b", "a", "a", "b"], [[0, 1], [1, 0], [1, 0], [0, 1]]),
    "text with gaps": (["b", "", "a", "b"], [[0, 1], [0, 0], [1, 0], [0, 1]]),
    "NA in text": (["NA", "EU", "", "null"], [[0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1]]),
    "more than true": (["true", "false", "maybe", ""], [[0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]]),
    "codes": (["007", "x", "12", "007"], [[1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_csv_is_read_again_as_it_was(kind: str, tmp_path: Path) -> None:
    """Also a part of it, where less is seen of what a column holds."""
    values, expected = KINDS[kind]
    rows = [f"{value},{label}\n" for value, label in zip(values, "uvuv", strict=True)]
    file = write_csv(tmp_path / "a.csv", "a,y\n" + "".join(rows))
    table = load_table(file, "y", missing="mean")
    torch.testing.assert_close(table.x, torch.tensor(expected, dtype=torch.float32))
    assert torch.equal(table.encode(file).x, table.x)
    for row, line in enumerate(rows):
        part = table.encode(write_csv(tmp_path / "b.csv", "a,y\n" + line))
        assert torch.equal(part.x, table.x[row : row + 1])


def test_a_parquet_file_is_read_again_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(
        {
            "number": [1.5, 2.0, None],
            "whole": pandas.array([1, None, 3], "Int64"),
            "true": [True, False, True],
            "true with gaps": pandas.Series([True, None, False], dtype=object),
            "decimal": [Decimal("0.5"), None, Decimal(2)],
            "text": ["NA", "b", "NA"],
            "text with gaps": ["True", None, "False"],
            "y": ["u", "v", "u"],
        }
    )
    frame.to_parquet(tmp_path / "a.parquet")
    table = load_table(tmp_path / "a.parquet", "y", missing="mean")
    expected = [
        [1.5, 0, 1, 0, 1, 1, 0, 0.5, 0, 1, 0, 0, 1],
        [2, 0, 2, 1, 0, 0.5, 1, 1.25, 1, 0, 1, 0, 0],
        [1.75, 1, 3, 0, 1, 0, 0, 2, 0, 1, 0, 1, 0],
    ]
    torch.testing.assert_close(table.x, torch.tensor(expected))
    assert torch.equal(table.encode(tmp_path / "a.parquet").x, table.x)
    frame.to_csv(tmp_path / "a.csv", index=False)
    assert torch.equal(table.encode(tmp_path / "a.csv").x, table.x)


def test_na_may_be_a_class(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", "a,y\n1,None\n2,yes\n3,None\n")
    table = load_table(file, "y")
    assert (table.class_names, table.y.tolist()) == (("None", "yes"), [0, 1, 0])
    assert table.encode(write_csv(tmp_path / "b.csv", "a,y\n1,None\n")).y.tolist() == [0]


# --- missing values ------------------------------------------------------------------------------------

GAPS = "a,b,c,y\n1,5,1,u\n,6,2,v\n4,,3,u\n7,7,5,v\n"


def test_missing_numbers_are_refused_or_the_mean(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", GAPS)
    with pytest.raises(ValueError, match=r"column 'a' has 1 missing numbers.*drop=\['a'\].*missing='mean'"):
        load_table(file, "y")
    table = load_table(file, "y", missing="mean")
    assert table.feature_names == ("a", "a is missing", "b", "b is missing", "c")
    assert table.x.tolist() == [[1, 0, 5, 0, 1], [4, 1, 6, 0, 2], [4, 0, 6, 1, 3], [7, 0, 7, 0, 5]]
    # Of another file: the means of the first, also where that one missed nothing.
    second = table.encode(write_csv(tmp_path / "b.csv", "a,b,c,y\n,100,,u\n100,,0,v\n"))
    assert second.x.tolist() == [[4, 1, 100, 0, 2.75], [100, 0, 6, 1, 0]]
    with pytest.raises(ValueError, match="unknown missing 'median'"):
        load_table(file, "y", missing="median")


def test_missing_numbers_of_another_file_are_refused_too(tmp_path: Path) -> None:
    table = load_table(write_csv(tmp_path / "a.csv"), "y")
    second = write_csv(tmp_path / "b.csv", "age,member,city,y\n,True,Rome,no\n,False,Rome,no\n")
    with pytest.raises(ValueError, match=r"b.csv: column 'age' has 2 missing numbers"):
        table.encode(second)


# --- classes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["10", "9", "2", "10"], ("2", "9", "10")),  # as numbers are sorted
        (["1.0", "0.0", "1.0"], ("0", "1")),
        (["0.5", "1.5", "0.5"], ("0.5", "1.5")),
        (["9", "x", "10"], ("10", "9", "x")),  # as text is
        (["True", "False"], ("False", "True")),
    ],
)
def test_class_names_are_sorted(values: list[str], names: tuple[str, ...], tmp_path: Path) -> None:
    rows = "".join(f"1,{value}\n" for value in values)
    table = load_table(write_csv(tmp_path / "a.csv", "a,y\n" + rows), "y")
    assert table.class_names == names
    assert [names[label] for label in table.y] == [value.removesuffix(".0") for value in values]


def test_quantities_are_no_classes(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    file = tmp_path / "a.csv"
    for target, refused in (
        (draws.normal(size=200), True),
        (draws.normal(size=30).repeat(10), True),  # fractions, many of them
        (np.arange(200), True),  # every row its own
        (np.array([f"name {number}" for number in range(200)]), True),
        (np.arange(200) % 50, False),
        (draws.choice([0.25, 0.5, 0.75], 200), False),
    ):
        pandas.DataFrame({"a": 1.0, "price": target}).to_csv(file, index=False)
        if refused:
            with pytest.raises(ValueError, match=r"target 'price'.*different values.*pandas.qcut"):
                load_table(file, "price")
        else:
            assert len(load_table(file, "price").class_names) == len(set(target.tolist()))


def test_classes_of_another_file_must_be_known(tmp_path: Path) -> None:
    table = load_table(write_csv(tmp_path / "a.csv", "a,y\n1,1\n2,2\n"), "y")
    with pytest.raises(ValueError, match=r"b.csv has the class '3', the first file only 1, 2"):
        table.encode(write_csv(tmp_path / "b.csv", "a,y\n1,3\n"))
    with pytest.raises(ValueError, match=r"target 'y' is missing in 2 rows"):
        table.encode(write_csv(tmp_path / "b.csv", "a,y\n1,\n1,\n1,2\n"))
    with pytest.raises(ValueError, match=r"target 'y' is missing in 1 rows"):
        load_table(write_csv(tmp_path / "b.csv", "a,y\n1,u\n1,\n1,v\n"), "y")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pyarrow: pip install 'hetsngp\[tables\]'"):
        load_table(file, "y")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pandas: pip install 'hetsngp\[tables\]'"):
        load_table(tmp_path / "a.csv", "y")


# --- splits, and what it is for ------------------------------------------------------------------------


def test_split_divides_every_class_alike(tmp_path: Path) -> None:
    rows = "".join(f"{row},{'u' if row < 40 else 'v'}\n" for row in range(60))
    table = load_table(write_csv(tmp_path / "a.csv", "a,y\n" + rows), "y")
    rest, held_out = table.split(0.25, seed=1)
    assert torch.bincount(rest.y).tolist() == [30, 15]
    assert torch.bincount(held_out.y).tolist() == [10, 5]
    assert sorted([*rest.x[:, 0].tolist(), *held_out.x[:, 0].tolist()]) == list(range(60))
    assert (held_out.x[:, 0] >= 40).long().tolist() == held_out.y.tolist()
    assert not torch.equal(held_out.x, table.split(0.25, seed=2)[1].x)
    chosen = stratified(table.y, 2, 0.25, seed=1)  # the rows that a set of images would give
    assert [part.x[:, 0].tolist() for part in (rest, held_out)] == [rows.tolist() for rows in chosen]


def test_the_estimator_learns_from_it(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from hetsngp.estimator import HetSNGPClassifier

    draws = np.random.default_rng(0)
    city = draws.choice(["Rome", "Bonn"], 300)
    frame = pandas.DataFrame({"age": draws.normal(40, 10, 300), "city": city, "y": city == "Rome"})
    frame[:200].to_csv(tmp_path / "train.csv", index=False)
    frame[200:].to_csv(tmp_path / "test.csv.gz", index=False)
    train = load_table(tmp_path / "train.csv", "y")
    test = train.encode(tmp_path / "test.csv.gz")
    model = HetSNGPClassifier("sngp", width=32, depth=1, random_features=64, epochs=20, random_state=0)
    model.fit(train.x.numpy(), train.y.numpy())
    assert model.score(test.x.numpy(), test.y.numpy()) > 0.95
