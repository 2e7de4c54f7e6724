"""Libraries kept quiet: their warnings are about a training run or about data, and here is neither."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "transformers")
"""What fails under symbolic sizes is tried another way or raised as our own error, so that a log of it misleads."""


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, PyTorch and transformers log nothing and warnings are not shown; afterwards as before."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(each, each.level) for each in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for each in loggers:
                each.setLevel(logging.CRITICAL + 1)
            yield
        finally:
            for each, level in before:
                each.setLevel(level)
