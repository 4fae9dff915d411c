"""The training engine, on Lightning Fabric: ``pip install 'hetsngp[train]'``."""

from hetsngp.fitting.schedule import Schedule
from hetsngp.training.config import Keep, Plan
from hetsngp.training.engine import Engine, Trained
from hetsngp.training.hardware import Hardware

__all__ = ["Engine", "Hardware", "Keep", "Plan", "Schedule", "Trained"]
