"""Pretrained networks by name, with all that their inputs need."""
