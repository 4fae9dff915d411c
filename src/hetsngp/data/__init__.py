"""Data sets. ``synthetic`` needs torch only."""
