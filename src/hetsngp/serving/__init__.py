"""A trained model at work: a finished run opened from disk, and a verdict on each input. No training code."""

from hetsngp.serving.bundle import Served, open_run, write_serving
from hetsngp.serving.contact_sheet import draw_lines
from hetsngp.serving.decisions import Thresholds, Verdict, set_thresholds
from hetsngp.serving.output import as_json, as_text, predict_and_show
from hetsngp.serving.predictions import Line, predict_files, predict_set

__all__ = [
    "Line",
    "Served",
    "Thresholds",
    "Verdict",
    "as_json",
    "as_text",
    "draw_lines",
    "open_run",
    "predict_and_show",
    "predict_files",
    "predict_set",
    "set_thresholds",
    "write_serving",
]
