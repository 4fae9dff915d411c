"""Checkpoints of a training, without pickle."""
