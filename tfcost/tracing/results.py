"""Results of ops on symbolic shapes, remembered: an op on tensors that are like others has a result like theirs.

PyTorch derives the shape of every result anew, in Python, and remembers only results of plain sizes. In the layers of a
model most ops come again with the same shapes, and the second derivation would ask and answer the same questions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sympy import expand

from tfcost.graph import Size
from tfcost.tracing.torch_private import FakeTensor, fake_empty, fake_view, storage_key, torch

VALUES_DECIDE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
PLAIN = (
    int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def size_of(value: Any) -> Size:
    """A size as an int or as the expression behind a symbolic one."""
    return value if isinstance(value, int) else value.node.expr


class Unlike(Exception):
    """An argument of which likeness cannot be said, or a result that no call could repeat."""


class Like(NamedTuple):
    """A tensor of a result: a new one, or a view of the storage of the argument with this index."""

    of: int | None
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device

    def make(self, tensors: list[Any]) -> Any:
        """One more tensor like it."""
        if self.of is None:
            return fake_empty(self.shape, self.stride, self.dtype, self.device)
        return fake_view(tensors[self.of], self.shape, self.stride, self.offset, self.device)


class Results:
    """Runs ops, each distinct call once. Only for ops that write into none of their arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Like] | Like | None] = {}
        self._repeatable: dict[Any, bool] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``func(*args, **kwargs)``, or tensors like those that it gave before."""
        repeatable = self._repeatable.get(func)
        if repeatable is None:
            repeatable = self._repeatable[func] = _repeatable(func)
        if not repeatable:
            return func(*args, **kwargs)
        tensors: list[Any] = []
        try:
            key = (func, _key(args, tensors), _key(kwargs, tensors) if kwargs else ())
        except Unlike:
            return func(*args, **kwargs)
        found = self._known.get(key)
        if found is not None:
            return found.make(tensors) if isinstance(found, Like) else tuple([each.make(tensors) for each in found])
        out = func(*args, **kwargs)
        if key not in self._known:
            try:
                self._known[key] = _likes(out, tensors)
            except Unlike:
                self._known[key] = None
        return out


def _repeatable(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and not schema.is_mutable and not any(tag in func.tags for tag in VALUES_DECIDE)


def _is_bare(tensor: Any) -> bool:
    """Whether a tensor is its sizes, strides and type: one with a value may decide by it, a conjugate is not copied."""
    return (
        isinstance(tensor, FakeTensor)
        and tensor.constant is None
        and tensor.layout == torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _key(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        if not _is_bare(value):
            raise Unlike
        tensors.append(value)
        shape, stride = tuple(map(size_of, value.shape)), tuple(map(size_of, value.stride()))
        return shape, stride, size_of(value.storage_offset()), value.dtype, str(value.device)
    if isinstance(value, PLAIN):
        return type(value), value  # 1, 1.0 and True are different arguments
    if isinstance(value, (tuple, list)):
        return tuple([_key(each, tensors) for each in value])
    if isinstance(value, dict):
        return tuple([(name, _key(each, tensors)) for name, each in value.items()])
    if hasattr(value, "node"):
        return value.node.pytype, value.node.expr
    raise Unlike


def _likes(out: Any, tensors: list[Any]) -> list[Like] | Like:
    if isinstance(out, torch.Tensor):
        return _like(out, tensors)
    if type(out) is not tuple:
        raise Unlike
    likes = [_like(each, tensors) for each in out]
    made = [storage_key(each) for each in out]
    if len(set(made)) != len(made):
        raise Unlike  # pieces of one new storage
    return likes


def _like(out: Any, tensors: list[Any]) -> Like:
    if not _is_bare(out):
        raise Unlike
    storages = [storage_key(each) for each in tensors]
    described = tuple(out.shape), tuple(out.stride()), out.storage_offset(), out.dtype, out.fake_device
    storage = storage_key(out)
    if storage in storages:
        index = storages.index(storage)
        if out.dtype != tensors[index].dtype:
            raise Unlike  # the same bytes as numbers of another kind
        return Like(index, *described)
    # A sliced, padded or repeated result is not a whole storage of its own.
    whole, there = size_of(out.numel()) * out.itemsize, size_of(out.untyped_storage().nbytes())
    if described[2] != 0 or (whole != there and expand(whole - there) != 0):
        raise Unlike
    return Like(None, *described)
