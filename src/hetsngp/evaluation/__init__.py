"""Tables and figures: train, measure, draw. ``synthetic`` is the paper's Figures 1 and 2."""
