"""Both runtime tables of the paper."""
