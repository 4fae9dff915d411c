"""Files of tables as data frames, and their columns as numbers or text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetsngp.validation import check_choice

SEPARATORS = {".csv": ",", ".tsv": "\t"}
PARQUET = (".parquet", ".pq")
COMPRESSED = (".gz", ".bz2", ".xz", ".zip", ".zst")
GAPS = frozenset(("", "#n/a", "#n/a n/a", "#na", "-nan", "<na>", "n/a", "na", "nan", "none", "null"))
"""What stands for a missing number, or true or false, in a text file, in small letters or large; in a
column of text they are values.
"""
_DATE = re.compile(
    r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))([T ]\d{1,2}:\d{2}\S*( [AP]M)?)?"
    r"|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"
)


def read_frame(path: Path, text: Sequence[str] = ()) -> Any:
    """The file as a data frame of pandas; the columns in ``text`` are not looked at for numbers.

    Every field of a text file is read as text, and what a column holds is decided here: left to itself pandas
    takes "NA" for missing and makes a number, a bool or an object of "true" as the rest of the column has it.
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
        if kind in PARQUET:
            frame = pandas.read_parquet(path, engine="pyarrow")
        else:
            plain: dict[str, Any] = {"dtype": str, "keep_default_na": False, "na_values": [""]}
            frame = pandas.read_csv(path, sep=SEPARATORS[kind], **plain)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8 ({error}): save it as that, e.g. with pandas.read_csv(path, "
            "encoding='latin-1').to_csv('table.csv', index=False)"
        ) from error
    except ImportError as error:
        raise ImportError("Parquet is read with pyarrow: pip install 'hetsngp[tables]'") from error
    except Exception as error:  # pandas, pyarrow and the decompressors fail each in its own way
        raise ValueError(f"{path} cannot be read as a table ({error}): save it again") from error
    if kind in SEPARATORS:
        _check_fields(path, frame, SEPARATORS[kind])
    if len(frame) == 0:
        raise ValueError(f"{path} has no rows: give a file with at least one")
    frame.columns = [str(name) for name in frame.columns]
    settle = _from_parquet if kind in PARQUET else _from_text
    for name in frame.columns:
        if name not in text:
            frame[name] = settle(frame[name])
    return frame


def _check_fields(path: Path, frame: Any, separator: str) -> None:
    header = str(frame.columns[0])
    others = [other for other in (";", "\t", ",") if other != separator and other in header]
    if len(frame.columns) == 1 and others:
        raise ValueError(
            f"{path} has fields separated by {others[0]!r}, but {separator!r} is expected: save it again, "
            f"e.g. with pandas.read_csv(path, sep={others[0]!r}).to_csv('table.csv', index=False), and with "
            "decimal=',' where numbers have a comma"
        )
    if type(frame.index).__name__ != "RangeIndex":  # pandas takes what is too much as names of the rows
        raise ValueError(
            f"{path}: rows have more fields than the header has names, e.g. the one that begins with "
            f"{frame.index[0]!r}: give every column a name, or remove separators at the ends of the rows"
        )


def _from_text(series: Any) -> Any:
    """Numbers, or true and false, where there is nothing else; else the text as it was."""
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
    """True and false with gaps, and decimals, come as Python's objects."""
    kinds = {"boolean": "boolean", "decimal": "float64"}
    return series.astype(kinds.get(_content(series), series.dtype))


def texts(series: Any) -> list[str | None]:
    """Every value as text, a whole number without its point; None: missing."""
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
    """Whether a column holds numbers, or true and false; categories are text, whatever they are."""
    return bool(_pandas().api.types.is_numeric_dtype(series.dtype))


def is_nested(series: Any) -> bool:
    """Whether a column of Parquet holds lists, structures or bytes."""
    return _content(series).startswith(("mixed", "bytes"))


def are_dates(values: Sequence[str]) -> bool:
    """Whether all are written as dates or times are.

    >>> are_dates(["2024-01-31", "1.2.2024"]), are_dates(["2024-01-31T12:00:00Z"]), are_dates(["2024-01"])
    (True, True, False)
    """
    return all(_DATE.fullmatch(value.strip()) for value in values)


def _content(series: Any) -> str:
    """What Python's objects in a column are; "": it has no such."""
    return str(_pandas().api.types.infer_dtype(series, skipna=True)) if series.dtype == object else ""


def check_columns(path: Path, frame: Any, names: Sequence[str]) -> None:
    """All of ``names`` are there."""
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
