"""What is traced of a person's own: a callable that makes a module with its inputs, or a module that exists."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tfcost.errors import InputError, TfcostError
from tfcost.tracing.recorder import dtype_name
from tfcost.tracing.sources import DTYPES, Source
from tfcost.tracing.torch_private import as_fake_tensor, fake_mode, torch
from tfcost.tracing.weights import without_initialisation

Dynamic = Mapping[Any, Mapping[int, str]]
"""Which axes are letters: ``{0: {0: "b", 1: "N"}}`` by position or ``{"input_ids": {0: "b"}}`` by name."""


def from_callable(spec: str, dtype: str | None = None) -> Source:
    """``package.module:callable``: what it returns, called under fake tensors. Importing it runs the person's code."""
    module_name, _, attribute = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise InputError(f"{spec}: no module named {error.name!r}") from None
    except AttributeError:
        raise InputError(f"{spec}: {module_name} has no {attribute!r}") from None
    except TfcostError:
        raise
    except (Exception, SystemExit) as error:  # the person's own code
        raise InputError(f"{spec}: importing it fails: {type(error).__name__}: {str(error)[:200]}") from None
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise InputError(f"{spec} is not callable; it must return (module, inputs, dynamic)")
    return from_factory(spec, found, dtype)


def from_factory(name: str, make: Callable[[], Any], dtype: str | None = None) -> Source:
    """A callable that returns ``(module, inputs)`` or ``(module, inputs, dynamic)``; it is called for each trace.

    With ``dtype``, weights and inputs of floating point are of that type.
    """

    def made() -> tuple[Any, Any, Dynamic]:
        try:
            with without_initialisation():
                result = make()
        except TfcostError:
            raise
        except (Exception, SystemExit) as error:  # the person's own code
            raise InputError(f"{name} fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
        if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], torch.nn.Module):
            raise InputError(
                f"{name} must return (module, inputs) or (module, inputs, dynamic), with a torch.nn.Module"
            )
        return result[0], result[1], result[2] if len(result) == 3 else {}

    with fake_mode(False):
        module, inputs, dynamic = made()
    letters = letters_of(inputs, dynamic)
    held: dict[str, Any] = {}

    def build(_: Mapping[str, Any]) -> Any:
        held["module"], held["inputs"], held["dynamic"] = made()
        return held["module"] if dtype is None else with_tensors(held["module"], lambda each: cast(each, dtype))

    def feed(s: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments(held["inputs"], held["dynamic"], s, dtype)

    inputs_of = {
        letter: {"b": "batch", "N": "seq_len", "T": "seq_len", "S": "src_len"}.get(letter, letter) for letter in letters
    }
    taken = frozenset(size for p in module.parameters() for size in p.shape)
    return Source(
        name, type(module).__name__, build, feed, letters, inputs_of, taken, [], dtype=dtype or types_of(module)
    )


def _named(inputs: Any) -> list[tuple[Any, Any]]:
    if isinstance(inputs, Mapping):
        return list(inputs.items())
    if isinstance(inputs, torch.Tensor):
        return [(0, inputs)]
    if isinstance(inputs, (tuple, list)):
        return list(enumerate(inputs))
    raise InputError(f"inputs must be tensors, a tuple of them or a dict by name, not {type(inputs).__name__}")


def letters_of(inputs: Any, dynamic: Dynamic) -> dict[str, int]:
    """The letters of some inputs with the sizes that the example has; one letter has one size."""
    given = dict(_named(inputs))
    letters: dict[str, int] = {}
    if not isinstance(dynamic, Mapping) or not all(isinstance(axes, Mapping) for axes in dynamic.values()):
        raise InputError(f"dynamic must be {{input: {{axis: letter}}}}, not {str(dynamic)[:80]}")
    for key, axes in dynamic.items():
        if key not in given:
            raise InputError(f"dynamic names the input {key!r}; the inputs are {', '.join(map(str, given))}")
        if not isinstance(given[key], torch.Tensor):
            raise InputError(f"dynamic: input {key!r} is no tensor, and has no axes")
        for axis, letter in axes.items():
            if not isinstance(axis, int) or not 0 <= axis < given[key].dim():
                raise InputError(f"dynamic: input {key!r} has {given[key].dim()} axes, and no axis {axis!r}")
            size = int(given[key].shape[axis])
            if size < 1:
                raise InputError(f"dynamic: {letter} is {size} in input {key!r}; sizes are at least 1")
            if letters.setdefault(str(letter), size) != size:
                raise InputError(f"dynamic: {letter} is {letters[str(letter)]} in one input and {size} in {key!r}")
    return letters


def arguments(
    inputs: Any, dynamic: Dynamic, sizes: Mapping[str, Any], dtype: str | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs like the example's with the sizes of the letters; their values are never looked at."""

    def resized(key: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        axes = dynamic.get(key, {})
        shape = [sizes[str(axes[axis])] if axis in axes else int(size) for axis, size in enumerate(value.shape)]
        fresh = cast(torch.empty(shape, dtype=value.dtype), dtype)
        return fresh.requires_grad_() if value.requires_grad else fresh

    made = [(key, resized(key, value)) for key, value in _named(inputs)]
    if isinstance(inputs, Mapping):
        return (), dict(made)
    return tuple(value for _, value in made), {}


def types_of(module: Any) -> str:
    """The types of a module's floating-point weights, as tfcost writes them."""
    found = {p.dtype for p in module.parameters() if p.is_floating_point()} or {torch.get_default_dtype()}
    return " and ".join(sorted({dtype_name(each) for each in found}))


def from_module(module: Any, inputs: Any, dynamic: Dynamic, dtype: str | None = None) -> Source:
    """A module that exists, with example inputs; inside a trace its weights are fake ones, then its own again."""
    letters = letters_of(inputs, dynamic)
    inputs_of = {
        letter: {"b": "batch", "N": "seq_len", "T": "seq_len", "S": "src_len"}.get(letter, letter) for letter in letters
    }
    taken = frozenset(int(size) for p in module.parameters() for size in p.shape)

    def build(_: Mapping[str, Any]) -> Any:
        return with_tensors(module, lambda each: cast(as_fake_tensor(each), dtype))

    def feed(s: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments(inputs, dynamic, s, dtype)

    name = type(module).__name__
    return Source(name, name, build, feed, letters, inputs_of, taken, [], dtype=dtype or types_of(module))


def cast(tensor: Any, dtype: str | None) -> Any:
    """A tensor of floating point in another type, where one is asked for."""
    return tensor.to(DTYPES[dtype]) if dtype and tensor.is_floating_point() else tensor


@contextmanager
def with_tensors(module: Any, convert: Callable[[Any], Any]) -> Iterator[Any]:
    """A module whose parameters and buffers are, inside, what ``convert`` makes of them; its own are put back."""
    known: dict[int, Any] = {}
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for each in module.modules():
            for group in (each._parameters, each._buffers):
                for name, tensor in group.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in known:
                        made = convert(tensor.detach())
                        if isinstance(tensor, torch.nn.Parameter):
                            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
                        known[id(tensor)] = made
                    undo.append((group, name, tensor))
                    group[name] = known[id(tensor)]
        yield module
    finally:
        for group, name, tensor in undo:
            group[name] = tensor
