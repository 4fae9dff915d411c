"""Pure mathematics on tensors: features → laplace → noise → link. No modules, no I/O, no global state."""
