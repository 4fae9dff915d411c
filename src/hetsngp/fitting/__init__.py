"""Training in plain torch: the loop, the schedule, early stopping and L-BFGS. No Lightning."""

from hetsngp.fitting.loop import train
from hetsngp.fitting.schedule import Schedule

__all__ = ["Schedule", "train"]
