"""Files of tables as data frames, and their columns as numbers or text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetsngp.validation import check_choice

SEPARATORS = {".csv": ",", ".tsv": "\t"}
PARQUET = (".parquet", ".pq")
COMPRESSED = (".gz", ".bz2", ".xz", ".zip", ".zst")


def read_frame(path: Path, text: Sequence[str] = ()) -> Any:
    """The file as a data frame of pandas; the columns in ``text`` are not looked at for numbers."""
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
            kinds = dict.fromkeys(text, "str")
            frame = pandas.read_csv(path, sep=SEPARATORS[kind], dtype=kinds, low_memory=False)
    except ImportError as error:
        raise ImportError("Parquet is read with pyarrow: pip install 'hetsngp[tables]'") from error
    except Exception as error:  # pandas, pyarrow and the decompressors fail each in its own way
        raise ValueError(f"{path} cannot be read as a table ({error}): save it again") from error
    if len(frame) == 0:
        raise ValueError(f"{path} has no rows: give a file with at least one")
    frame.columns = [str(name) for name in frame.columns]
    return frame


def texts(series: Any) -> list[str | None]:
    """Every value as text, a whole number without its point; None: missing."""
    return [
        None if absent else str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        for value, absent in zip(series.tolist(), series.isna().tolist(), strict=True)
    ]


def numbers(series: Any, path: Path) -> np.ndarray:
    """(N,) float64, NaN where missing."""
    try:
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


def check_columns(path: Path, frame: Any, names: Sequence[str]) -> None:
    """All of ``names`` are there."""
    absent = [name for name in names if name not in frame.columns]
    if absent:
        raise ValueError(f"{path} has no column {absent[0]!r}, only {', '.join(map(repr, frame.columns))}")


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError("tables are read with pandas: pip install 'hetsngp[tables]'") from error
    return pandas
