"""Checkpoints of a training: everything that the rest of the run depends on, without pickle."""
