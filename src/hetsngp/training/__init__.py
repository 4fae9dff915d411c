"""The training engine, on Lightning Fabric: ``pip install 'hetsngp[train]'``."""

from hetsngp.fitting.schedule import Schedule
from hetsngp.training.config import CheckpointConfig, TrainConfig
from hetsngp.training.engine import Engine, Trained
from hetsngp.training.hardware import Hardware

__all__ = ["CheckpointConfig", "Engine", "Hardware", "Schedule", "TrainConfig", "Trained"]
