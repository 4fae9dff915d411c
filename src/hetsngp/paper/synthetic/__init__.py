"""The paper's Figures 1 and 2: every method on three synthetic tasks, trained, measured and drawn."""
