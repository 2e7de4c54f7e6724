"""What is noted of a running program: its ops, the storages that autograd keeps, calls that may be counted again."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tfcost.graph import Size


class Chosen(NamedTuple):
    """A size that values decide: its letter, the most that it can be, and the op and module that choose."""

    letter: str
    most: Size
    op: str
    path: str


class OpRecord:
    """One op of a module and the ops of its gradient; ``copies`` is how often the program runs it.

    Figures are of one run: multiply-accumulates and elements of forward and backward, the work that a fused backward
    makes again, and bytes read and written by both. ``unpriced`` counts ops by name that have no known price.
    """

    __slots__ = (
        "backward_macs", "backward_read", "backward_written", "copies", "elements", "macs", "name", "out_shape", "path",
        "read", "recompute", "shapes", "square", "unpriced", "written",
    )  # fmt: skip

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.name = name
        self.copies = 1
        self.macs: Size = 0
        self.elements: Size = 0
        self.recompute: Size = 0
        self.backward_macs: Size = 0
        self.read: Size = 0
        self.written: Size = 0
        self.backward_read: Size = 0
        self.backward_written: Size = 0
        self.square = False
        self.shapes: tuple[tuple[Size, ...], ...] = ()
        self.out_shape: tuple[Size, ...] = ()
        self.unpriced: Counter[str] = Counter()

    @property
    def empty(self) -> bool:
        """Whether nothing was computed or moved: a view whose gradient is one."""
        moved = (self.read, self.written, self.backward_read, self.backward_written, self.macs, self.backward_macs)
        return not self.unpriced and all(isinstance(each, int) and each == 0 for each in moved)


class SavedRecord:
    """A storage that autograd keeps: the module and node number that kept it first, and one tensor of its."""

    __slots__ = ("bytes", "copies", "dtype", "floating", "number", "op", "path", "shape")

    def __init__(
        self, path: str, number: int, shape: tuple[Size, ...], dtype: str, bytes: Size, floating: bool
    ) -> None:
        self.path = path
        self.number = number
        self.shape = shape
        self.dtype = dtype
        self.bytes = bytes
        self.floating = floating
        self.op = ""
        self.copies = 1


class Frame:
    """What a module's call recorded, so that it can be counted again for a call that is proved to be the same.

    Nodes numbered from ``first`` to before ``end`` are of its forward pass. ``between`` stands for what its backward
    does that is no single op's; its ``copies`` are how often the frame runs.
    """

    def __init__(self, path: str, born: int, first: int) -> None:
        self.ops: Counter[OpRecord] = Counter()
        self.saved: list[tuple[int, SavedRecord, bool]] = []
        self.born = born
        self.first = first
        self.end = -1
        self.between = OpRecord(path, "gradient")
