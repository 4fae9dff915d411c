"""The training engine, on Lightning Fabric: ``pip install 'hetsngp[train]'``."""

from hetsngp.schedule import Schedule
from hetsngp.training.engine import Engine, Trained
from hetsngp.training.hardware import Hardware
from hetsngp.training.plan import Keep, Plan

__all__ = ["Engine", "Hardware", "Keep", "Plan", "Schedule", "Trained"]
