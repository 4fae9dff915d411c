"""Prediction with a finished run: load it from disk and give a verdict on each input. No training code."""

from typing import Any

from hetsngp._moved import renamed
from hetsngp.serving.bundle import ServedModel, open_run, write_serving
from hetsngp.serving.contact_sheet import draw_contact_sheet
from hetsngp.serving.decisions import Thresholds, Verdict, set_thresholds
from hetsngp.serving.output import as_json, as_text, predict_and_show
from hetsngp.serving.predictions import PredictionRecord, predict_files, predict_set, predict_texts

__all__ = [
    "PredictionRecord",
    "ServedModel",
    "Thresholds",
    "Verdict",
    "as_json",
    "as_text",
    "draw_contact_sheet",
    "open_run",
    "predict_and_show",
    "predict_files",
    "predict_set",
    "predict_texts",
    "set_thresholds",
    "write_serving",
]


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
