"""Saved models: a folder with ``config.json`` and one safetensors file."""

from hetsngp.io.artifact import load, save
from hetsngp.io.storage import ArtifactError

__all__ = ["ArtifactError", "load", "save"]
