"""Weights that take neither memory nor time: nothing fills them, and fake tensors stand for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tfcost.tracing.torch_private import active_fake_mode, fake_like, outside_fake, storage_key, torch

FAN = "_calculate_fan_in_and_fan_out"


@contextmanager
def without_initialisation() -> Iterator[None]:
    """Weights are never read, so that nothing need fill them: ``torch.nn.init`` does nothing inside."""
    init = torch.nn.init
    names = [
        name for name in dir(init) if name.endswith("_") and not name.startswith("_") and callable(getattr(init, name))
    ]
    before = {name: getattr(init, name) for name in (*names, FAN)}
    try:
        for name in names:
            setattr(init, name, lambda tensor, *args, **kwargs: tensor)
        # Its root would be taken of a symbolic size, and fix it.
        setattr(init, FAN, lambda tensor: (1, 1))
        yield
    finally:
        for name, function in before.items():
            setattr(init, name, function)


def built_on_meta(make: Callable[[], Any]) -> Any:
    """What ``make`` builds under the fake mode that is active, in a tenth of the time.

    PyTorch makes a tensor on the meta device by itself; a fake one it makes in Python. So the module is built on meta,
    and each of its tensors is then called a fake one of the device that was wanted. A constructor that looks at values,
    or leaves tensors where nobody would look for them, is run under the fake mode instead.
    """
    device, mode = torch.get_default_device(), active_fake_mode()
    try:
        with outside_fake():
            with torch.device("meta"):
                module = make()
            _call_fake(module, lambda tensor: fake_like(tensor, mode, device))
    except Exception:  # whatever a constructor does with values; under the fake mode it says so itself
        return make()
    return module


class _Elsewhere(Exception):
    """A tensor that is no parameter, buffer or attribute of its own, or is not on meta."""


NO_TENSORS = frozenset(name for name in vars(torch.nn.Module()) if name not in ("_parameters", "_buffers"))
"""What every module has, and no tensor in it: flags, hooks, and the modules inside, which come themselves."""


def _call_fake(module: Any, fake_of: Callable[[Any], Any]) -> None:
    """Put a fake tensor in the place of each tensor of a module; one that is in several places stays one."""
    made: dict[int, Any] = {}
    storages: set[int] = set()
    alive: list[Any] = []  # their addresses are compared

    def fake(tensor: Any) -> Any:
        found = made.get(id(tensor))
        if found is None:
            storage = storage_key(tensor)
            if storage in storages or tensor.device.type != "meta":
                raise _Elsewhere  # a view of another: one storage, counted once
            storages.add(storage)
            alive.append(tensor)
            found = made[id(tensor)] = fake_of(tensor)
        return found

    for each in module.modules():
        for name, value in each.__dict__.items():
            if name in NO_TENSORS:
                continue
            if name in ("_parameters", "_buffers"):
                for key, tensor in value.items():
                    if tensor is not None:
                        value[key] = fake(tensor)
            elif isinstance(value, torch.Tensor):
                each.__dict__[name] = fake(value)
            elif isinstance(value, (list, tuple, set, dict)):
                inner = value.values() if isinstance(value, dict) else value
                if any(isinstance(one, torch.Tensor) for one in inner):
                    raise _Elsewhere
