"""Attacks on the library, one module for each kind; ``tools/attack.py`` runs them and counts the outcomes."""
