"""Closed forms derived from a running PyTorch program: see :func:`tfcost.trace`. Needs torch."""
