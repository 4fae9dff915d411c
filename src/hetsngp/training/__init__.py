"""The training engine, on Lightning Fabric: ``pip install 'hetsngp[train]'``."""

from typing import Any

from hetsngp._moved import renamed
from hetsngp.fitting.schedule import Schedule
from hetsngp.training.config import CheckpointConfig, TrainConfig
from hetsngp.training.engine import Engine, Trained
from hetsngp.training.hardware import Hardware

__all__ = ["CheckpointConfig", "Engine", "Hardware", "Schedule", "TrainConfig", "Trained"]


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
