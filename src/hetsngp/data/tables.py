"""Tables in CSV and Parquet files: features, classes, and an encoding that reads other files the same way.

:func:`load_table` reads the first file and decides the :class:`Encoding`, a dataclass of plain values;
:meth:`Table.encode` applies it to another file.
"""

from __future__ import annotations

import bz2
import csv
import difflib
import gzip
import io
import lzma
import re
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from hetsngp.data.bounded import buffered
from hetsngp.data.images.arrays import stratified
from hetsngp.limits import TABLE_BYTES, TABLE_COLUMNS, TABLE_FIELDS, LimitExceeded
from hetsngp.validation import check_choice

SEPARATORS = {".csv": ",", ".tsv": "\t"}
PARQUET = (".parquet", ".pq")
COMPRESSED = (".gz", ".bz2", ".xz", ".zip", ".zst")
GAPS = frozenset(("", "#n/a", "#n/a n/a", "#na", "-nan", "<na>", "n/a", "na", "nan", "none", "null"))
"""Texts, in any case, for a missing number or boolean in a text file; in a column of text they are values."""
_DATE = re.compile(
    r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))([T ]\d{1,2}:\d{2}\S*( [AP]M)?)?"
    r"|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"
)
MISSING = ("error", "mean")
HEAD_BYTES, MOST_SURPLUS = 2**22, 32
"""Part of a text file in which the header and the first row are counted, and their largest difference."""
MOST_CATEGORIES = 1000
"""Largest number of categories; a column of text with more is likely a name or an identifier."""
FEW_VALUES = 20
"""Number of different values that is always allowed; more are refused if more than half of the rows."""
_IDENTIFIER = re.compile(r"(?i:index|id|.*[_ .-]id)|.*[a-z]I[dD]")


def load_table(
    path: str | Path,
    target: str,
    *,
    drop: Sequence[str] = (),
    text: Sequence[str] = (),
    missing: str = "error",
) -> Table:
    r"""Read a .csv, .tsv (compressed or not) or .parquet file whose column ``target`` is the class.

    Numbers are features, true and false are 1 and 0. A column of text, or one named in ``text`` because its
    numbers are codes, is one-hot encoded; a missing category, or in another file an unknown one, is all
    zeros. ``drop`` names columns to leave out, such as identifiers, names and dates; a column of text that
    is likely one of these is an error, a column of numbers a warning. A missing number (an empty field,
    "NA", "null" and the like; in a column of text only an empty field is missing) is an error, or with
    ``missing="mean"`` the column's mean in this file, and a column with missing numbers gets an indicator
    feature. Text files are in UTF-8. The values of the target, sorted, are the classes.
    ``table.encode(path)`` reads another file the same way.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "people.csv"
    >>> _ = file.write_text("age,city,answer\n30,Rome,no\n41,Bonn,yes\n")
    >>> table = load_table(file, "answer")
    >>> table.feature_names, table.class_names
    (('age', 'city=Bonn', 'city=Rome'), ('no', 'yes'))
    """
    path, drop, text = Path(path).expanduser(), _as_tuple(drop), _as_tuple(text)
    check_choice("missing", missing, MISSING)
    frame = read_frame(path, text)
    check_columns(path, frame, [target, *drop, *text])
    names = [name for name in frame.columns if name != target and name not in drop]
    if not names:
        raise ValueError(f"{path} has no column but the target and dropped ones: it takes at least one more")
    nameless = [name for name in names if name.startswith("Unnamed: ")]
    if nameless:
        raise ValueError(
            f"{path} has a column without a name, likely the index of a data frame: leave it out with "
            f"drop=[{nameless[0]!r}], or save with to_csv(path, index=False)"
        )
    classes = _class_names(frame[target], path)
    columns = tuple(_column(frame[name], path, name in text, missing) for name in names)
    identifiers = [name for name in names if name not in text and _is_identifier(frame[name])]
    if identifiers:
        warnings.warn(
            f"{path}: {', '.join(map(repr, identifiers))}, another whole number in every row, is likely an "
            f"identifier, and is taken as a feature: leave it out with drop={identifiers!r}",
            stacklevel=2,
        )
    return Encoding(columns, target, not is_number(frame[target]), classes)._table(frame, path)


@dataclass(frozen=True)
class Column:
    """Encoding of one column."""

    name: str
    categories: tuple[str, ...] | None = None
    """Categories of a column of text, one feature each; None: a number, or true and false as 1 and 0."""
    mean: float | None = None
    """Replacement of a missing number; None: it is an error."""
    indicator: bool = False
    """Whether a second feature is 1 where the number was missing."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the columns of :meth:`features`."""
        if self.categories is not None:
            return tuple(f"{self.name}={category}" for category in self.categories)
        return (self.name, f"{self.name} is missing") if self.indicator else (self.name,)

    def features(self, series: Any, path: Path) -> np.ndarray:
        """(N, features) float32."""
        if self.categories is not None:
            index = {category: i for i, category in enumerate(self.categories)}
            found = np.array([-1 if value is None else index.get(value, -1) for value in texts(series)])
            return (found[:, None] == np.arange(len(index))).astype(np.float32)
        values = numbers(series, path)
        absent = np.isnan(values)
        if absent.any() and self.mean is None:
            raise ValueError(
                f"{path}: column {self.name!r} has {absent.sum()} missing numbers: fill them in, leave the "
                f"column out with load_table(…, drop=[{self.name!r}]), or pass missing='mean'"
            )
        values = np.where(absent, self.mean or 0.0, values)
        if not (np.abs(values) <= np.finfo(np.float32).max).all():
            raise ValueError(
                f"{path}: column {self.name!r} has infinite numbers, or too large ones for float32: correct "
                "them, or take their logarithm"
            )
        return np.stack([values, absent] if self.indicator else [values], 1, dtype=np.float32)


@dataclass(frozen=True)
class Encoding:
    """Columns and classes of the first file, by which other files are read."""

    columns: tuple[Column, ...]
    target: str
    target_is_text: bool
    class_names: tuple[str, ...]

    def inputs(self, path: str | Path) -> Tensor:
        """Features (N, D) float32 of a file; the target may be absent."""
        path = Path(path).expanduser()
        return self._inputs(self._read(path), path)

    def table(self, path: str | Path) -> Table:
        """Features and classes of a file; a class that the first file did not have is an error."""
        path = Path(path).expanduser()
        frame = self._read(path)
        check_columns(path, frame, [self.target])
        return self._table(frame, path)

    def _read(self, path: Path) -> Any:
        text = [column.name for column in self.columns if column.categories is not None]
        frame = read_frame(path, [*text, self.target] if self.target_is_text else text)
        check_columns(path, frame, [column.name for column in self.columns])
        return frame

    def _table(self, frame: Any, path: Path) -> Table:
        number = {name: label for label, name in enumerate(self.class_names)}
        names = texts(frame[self.target])
        unknown = [name for name in names if name not in number]
        if None in unknown:
            raise ValueError(
                f"{path}: the target {self.target!r} is missing in {unknown.count(None)} rows: remove them"
            )
        if unknown:
            raise ValueError(
                f"{path} has the class {unknown[0]!r}, the first file only {', '.join(self.class_names)}: "
                "put examples of it there too, or leave it out here"
            )
        return Table(self._inputs(frame, path), torch.tensor([number[str(name)] for name in names]), self)

    def _inputs(self, frame: Any, path: Path) -> Tensor:
        features = [column.features(frame[column.name], path) for column in self.columns]
        return torch.from_numpy(np.concatenate(features, 1))


@dataclass(frozen=True, eq=False)
class Table:
    """Encoded table. ``x``: (N, D) float32. ``y``: (N,) int64 in 0 … K−1."""

    x: Tensor
    y: Tensor
    encoding: Encoding

    def __len__(self) -> int:
        return len(self.y)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the D features: "column", "column=category" or "column is missing"."""
        return tuple(name for column in self.encoding.columns for name in column.feature_names)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the K classes, sorted."""
        return self.encoding.class_names

    def encode(self, path: str | Path) -> Table:
        """Read another file with the features and classes of this one."""
        return self.encoding.table(path)

    def take(self, indices: Tensor) -> Table:
        """Examples at ``indices`` (n,), in that order; all classes stay."""
        return replace(self, x=self.x[indices], y=self.y[indices])

    def split(self, held_out: int | float, seed: int = 0) -> tuple[Table, Table]:
        """(rest, held out): ``held_out`` examples, or that fraction, by :func:`stratified`, in order."""
        rest, chosen = stratified(self.y, len(self.class_names), held_out, seed)
        return self.take(rest), self.take(chosen)


# --- how columns are encoded ----------------------------------------------------------------------------


def _column(series: Any, path: Path, is_text: bool, missing: str) -> Column:
    if not series.notna().any():
        raise ValueError(f"{path}: column {series.name!r} is empty: leave it out with drop=[{series.name!r}]")
    if is_text or not is_number(series):
        return Column(series.name, _categories(series, path, is_text))
    if missing == "error":
        return Column(series.name)
    values = numbers(series, path)
    mean = values[~np.isnan(values)].mean()
    return Column(series.name, mean=float(mean), indicator=bool(np.isnan(values).any()))


def _categories(series: Any, path: Path, declared: bool) -> tuple[str, ...]:
    where, fix = f"{path}: column {series.name!r}", f"leave it out with drop=[{series.name!r}]"
    if is_nested(series):
        raise ValueError(f"{where} has neither numbers nor text, e.g. {series.dropna().iloc[0]!r}: {fix}")
    present = [value for value in texts(series) if value is not None]
    categories = sorted(set(present))
    typed = series.dtype.kind in "mM"
    if typed or (are_dates(categories) and not declared):
        as_text = "" if typed else f", or take each as a category with text=[{series.name!r}]"
        raise ValueError(
            f"{where} ({series.dtype}) has dates or times, e.g. {categories[0]!r}: {fix}, or make numbers of "
            f"it, e.g. days since the first{as_text}"
        )
    many = len(categories) > FEW_VALUES and len(categories) > len(present) / 2
    if many or len(categories) > MOST_CATEGORIES:
        raise ValueError(
            f"{where} has {len(categories)} different values in {len(present)} rows and no numbers, likely "
            f"names or other text: {fix}, or make numbers or groups of it, e.g. an embedding of the text"
        )
    return tuple(categories)


def _is_identifier(series: Any) -> bool:
    if not _IDENTIFIER.fullmatch(series.name) or not is_number(series) or series.dtype.kind == "b":
        return False
    values = series.dropna()
    return bool(values.is_unique and (values % 1 == 0).all())


def _class_names(series: Any, path: Path) -> tuple[str, ...]:
    present = series.dropna()
    names = set(texts(present))
    by_number = is_number(series) and series.dtype.kind != "b"
    fractions = by_number and any(not float(name).is_integer() for name in names if name)
    if len(names) > FEW_VALUES and (fractions or len(names) > len(present) / 2):
        raise ValueError(
            f"{path}: the target {series.name!r} has {len(names)} different values in {len(present)} rows, a "
            "quantity or a name rather than a class: choose another column, or make classes of it, e.g. with "
            f"pandas.qcut(frame[{series.name!r}], 5, labels=False)"
        )
    if len(names) < 2:
        raise ValueError(f"{path}: the target {series.name!r} has {len(names)} class, at least 2 are needed")
    return tuple(sorted(map(str, names), key=float if by_number else None))


def _as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


# --- reading files --------------------------------------------------------------------------------------


def read_frame(path: Path, text: Sequence[str] | None = ()) -> Any:
    """Read a file into a data frame of pandas; the columns in ``text`` stay text, None: all as they are.

    Every field of a text file is read as text, and the type of a column is decided here: pandas takes "NA"
    for missing, and "true" for a bool or an object depending on the rest of the column.
    """
    pandas = _pandas()
    endings = [ending.lower() for ending in path.suffixes]
    if endings and endings[-1] in COMPRESSED:
        endings.pop()
    kind = endings[-1] if endings else ""
    check_choice(f"ending of {path}:", kind, (*SEPARATORS, *PARQUET))
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        frame = _read_parquet(path) if kind in PARQUET else _read_text(path, SEPARATORS[kind])
    except LimitExceeded as error:
        raise LimitExceeded(str(error)) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8 ({error}): save it as that, e.g. with pandas.read_csv(path, "
            "encoding='latin-1').to_csv('table.csv', index=False)"
        ) from error
    except ImportError as error:
        raise ImportError("Parquet is read with pyarrow: pip install 'hetsngp[tables]'") from error
    except Exception as error:  # pandas, pyarrow and the decompressors raise many types
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} cannot be read as a table ({reason}): save it again") from error
    if kind in SEPARATORS:
        _check_fields(path, frame, SEPARATORS[kind])
    if len(frame) == 0:
        raise ValueError(f"{path} has no rows: give a file with at least one")
    frame.columns = [str(name) for name in frame.columns]
    if not frame.columns.is_unique:
        raise ValueError(f"{path} has two columns of one name: give each a name of its own")
    if text is None:
        return frame
    convert = _from_parquet if kind in PARQUET else _from_text
    # A new frame: replacing columns one by one takes time that grows with their square.
    return pandas.DataFrame({name: v if name in text else convert(v) for name, v in frame.items()})


def _read_text(path: Path, separator: str) -> Any:
    plain: dict[str, Any] = {"dtype": str, "keep_default_na": False, "na_values": [""], "sep": separator}
    with expanded(path) as stream:
        _check_width(path, stream.read(HEAD_BYTES).decode("utf-8", "replace"), separator)
    with expanded(path) as stream:
        return _pandas().read_csv(stream, **plain)


def _check_width(path: Path, head: str, separator: str) -> None:
    """Check the numbers of columns and of fields: pandas would take minutes for a million, and takes surplus
    fields of the first row as an index.
    """
    rows = (row for row in csv.reader(io.StringIO(head, newline=""), delimiter=separator) if row)
    try:
        names = next(rows, [])
    except csv.Error:  # a name of more than 128 KiB
        raise ValueError("a header with a name of more than 128 KiB") from None
    TABLE_COLUMNS.check(len(names), str(path))
    try:
        first = next(rows, [])
    except csv.Error:  # a field of more than 128 KiB
        return
    if len(first) > len(names) + MOST_SURPLUS:
        raise _surplus(path, first[0])


def _surplus(path: Path, begin: str) -> ValueError:
    return ValueError(
        f"{path}: rows have more fields than the header has names, e.g. the one that begins with "
        f"{begin!r:.100}: give every column a name, or remove separators at the ends of the rows"
    )


def expanded(path: Path) -> IO[bytes]:
    """Content of a file, decompressed within the limit."""
    ending = path.suffix.lower()
    if ending not in COMPRESSED:
        return open(path, "rb")
    stream: Any
    if ending == ".zip":
        archive = zipfile.ZipFile(path)
        (member,) = archive.infolist() if len(archive.infolist()) == 1 else [None]
        if member is None or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            archive.close()
            raise ValueError("an archive of other than one file, or of a compression that is not read")
        stream = archive.open(member)
    elif ending == ".zst":
        try:
            import zstandard  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise ValueError("it needs the package zstandard: pip install zstandard") from error
        stream = zstandard.open(path, "rb")
    else:
        openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        stream = openers[ending](path)
    return buffered(stream, TABLE_BYTES, str(path), least=path.stat().st_size)


def _read_parquet(path: Path) -> Any:
    """Read a table. Lists and structures, which no method takes and which may expand without limit, are not
    read: their columns hold empty lists.
    """
    names, nested = _check_parquet(path)
    plain = [name for name in names if name not in nested]
    frame = _pandas().read_parquet(path, engine="pyarrow", columns=plain)
    for place, name in enumerate(names):
        if name in nested:
            frame.insert(place, name, [[]] * len(frame))
    return frame


def _check_parquet(path: Path) -> tuple[list[str], set[str]]:
    """Check the size of a table; returns the names of its columns, and those that are nested.

    A text that a column repeats is in the file once: it is read that way here, to know how much memory all of
    them would take.
    """
    import pyarrow
    import pyarrow.compute
    import pyarrow.parquet

    kinds = (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary())
    with pyarrow.parquet.ParquetFile(path) as file:
        meta, schema = file.metadata, file.schema_arrow
    TABLE_COLUMNS.check(meta.num_columns, str(path))
    groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
    values = [group.column(column).num_values for group in groups for column in range(meta.num_columns)]
    TABLE_FIELDS.check(max(sum(values), meta.num_columns * meta.num_rows), str(path))
    needed, repeated = 0, [field.name for field in schema if field.type in kinds]
    with pyarrow.parquet.ParquetFile(path, read_dictionary=repeated) as file:
        for chunk in (chunk for column in file.read(repeated).columns for chunk in column.chunks):
            if isinstance(chunk, pyarrow.DictionaryArray):
                lengths = pyarrow.compute.binary_length(chunk.dictionary)
                needed += pyarrow.compute.sum(lengths.take(chunk.indices)).as_py() or 0
    if needed > path.stat().st_size:
        TABLE_BYTES.check(needed, str(path))
    nested = {field.name for field in schema if pyarrow.types.is_nested(field.type)}
    return list(schema.names), nested


def _check_fields(path: Path, frame: Any, separator: str) -> None:
    header = str(frame.columns[0])
    others = [other for other in (";", "\t", ",") if other != separator and other in header]
    if len(frame.columns) == 1 and others:
        raise ValueError(
            f"{path} has fields separated by {others[0]!r}, but {separator!r} is expected: save it again, "
            f"e.g. with pandas.read_csv(path, sep={others[0]!r}).to_csv('table.csv', index=False), and with "
            "decimal=',' where numbers have a comma"
        )
    if type(frame.index).__name__ != "RangeIndex":  # pandas takes surplus fields as the index
        raise _surplus(path, str(frame.index[0]))


def _from_text(series: Any) -> Any:
    """Convert a column to numbers or booleans where every value is one; else return the text."""
    try:
        found = _pandas().to_numeric(series)
    except ValueError:
        written = {value: value.strip().lower() for value in series.dropna().unique()}
        absent = series.isna() | series.isin([value for value, plain in written.items() if plain in GAPS])
        if set(written.values()) <= {"true", "false", *GAPS}:
            return series.map(lambda value: written.get(value) == "true").astype("boolean").mask(absent)
        try:
            found = _pandas().to_numeric(series.mask(absent))
        except ValueError:
            return series
    return found if is_number(found) else series  # whole numbers beyond 64 bits stay objects


def _from_parquet(series: Any) -> Any:
    """Convert booleans with missing values, and decimals, which Parquet gives as Python objects."""
    kinds = {"boolean": "boolean", "decimal": "float64"}
    return series.astype(kinds.get(_content(series), series.dtype))


def texts(series: Any) -> list[str | None]:
    """Every value as text, a whole number without decimals; None: missing."""
    return [
        None if absent else str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        for value, absent in zip(series.tolist(), series.isna().tolist(), strict=True)
    ]


def numbers(series: Any, path: Path) -> np.ndarray:
    """(N,) float64, NaN where missing."""
    try:
        if series.dtype.kind in "mM":  # which NumPy would count in nanoseconds
            raise TypeError("dates or times")
        values: np.ndarray = series.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: column {series.name!r} has more than numbers, unlike the first file ({error}): correct "
            f"it, or load the first file with text=[{series.name!r}]"
        ) from error
    return values


def is_number(series: Any) -> bool:
    """Whether a column holds numbers or booleans; pandas' categories are text, even of numbers."""
    return bool(_pandas().api.types.is_numeric_dtype(series.dtype))


def is_nested(series: Any) -> bool:
    """Whether a column of Parquet holds lists, structures or bytes."""
    return _content(series).startswith(("mixed", "bytes"))


def are_dates(values: Sequence[str]) -> bool:
    """Whether all values look like dates or times.

    >>> are_dates(["2024-01-31", "1.2.2024"]), are_dates(["2024-01-31T12:00:00Z"]), are_dates(["2024-01"])
    (True, True, False)
    """
    return all(_DATE.fullmatch(value.strip()) for value in values)


def _content(series: Any) -> str:
    """Kind of the Python objects in a column; "" where it has none."""
    return str(_pandas().api.types.infer_dtype(series, skipna=True)) if series.dtype == object else ""


def check_columns(path: Path, frame: Any, names: Sequence[str]) -> None:
    """Raise where one of the columns ``names`` is missing."""
    absent = [name for name in names if name not in frame.columns]
    if absent:
        known = {name.strip().casefold(): name for name in frame.columns}
        close = difflib.get_close_matches(absent[0].strip().casefold(), known, n=1)
        hint = f"; did you mean {known[close[0]]!r}?" if close else ""
        listed = ", ".join(map(repr, frame.columns))
        raise ValueError(f"{path} has no column {absent[0]!r}, only {listed}{hint}")


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError("tables are read with pandas: pip install 'hetsngp[tables]'") from error
    return pandas
