"""The peak memory of a whole training step by category, through PyTorch's ``MemTracker`` on fake tensors."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

from tfcost.errors import InputError
from tfcost.tracing.program import restore
from tfcost.tracing.recorder import tensors_of
from tfcost.tracing.semantics import Semantics
from tfcost.tracing.sources import DTYPES, Source
from tfcost.tracing.torch_private import fake_mode, memory_tracker, torch
from tfcost.tracing.trace import Settings

OPTIMIZER = "torch.optim.Adam, one parameter after another: two states per parameter, in its type"

NAMES = {
    "Parameter": "parameters", "Buffer": "buffers", "Gradient": "gradients", "Activation": "activations",
    "Temp": "temporaries", "Optstate": "optimizer_states", "Other": "inputs", "Total": "total",
}  # fmt: skip


def peak_of(source: Source, settings: Settings) -> dict[str, Any]:
    """Bytes alive at the peak of a second step: forward, backward from the sum of all outputs, Adam.

    A first step makes the optimizer's states. Every layer runs: what is alive together cannot be counted from one.
    The moment is the first phase that reaches the peak: before the second step only the first one's optimizer can have.
    """
    semantics = Semantics(settings.semantics, settings.attention)
    with ExitStack() as stack:
        stack.enter_context(fake_mode(False))
        stack.enter_context(semantics.results())
        built = source.build(source.letters)
        module = stack.enter_context(built) if hasattr(built, "__enter__") else built
        stack.callback(restore, {each: each.training for each in module.modules()})
        module.train()
        args, kwargs = source.feed(source.letters)
        optimizer = torch.optim.Adam(module.parameters(), foreach=False)
        tracker = memory_tracker()
        inputs = tensors_of((args, kwargs))
        tracker.track_external(module, optimizer, *inputs)
        stack.enter_context(semantics.functions(None))
        stack.enter_context(source.around())
        with tracker:
            first = _step(module, args, kwargs, optimizer, tracker, settings)
            tracker.reset_mod_stats()
            phases = _step(module, args, kwargs, optimizer, tracker, settings)
        peak = _sum(tracker.get_tracker_snapshot("peak"))
    moment = next(name for name, top, _ in [first[-1], *phases] if top == peak["total"])
    return {
        "optimizer": OPTIMIZER, "moment": moment, "bytes": peak,
        "after_forward": phases[0][2], "after_backward": phases[1][2],
    }  # fmt: skip


def _step(
    module: Any, args: Any, kwargs: Any, optimizer: Any, tracker: Any, settings: Settings
) -> list[tuple[str, int, dict[str, int]]]:
    """One training step; for each phase its name, the peak until its end, and what is alive then."""
    phases: list[tuple[str, int, dict[str, int]]] = []

    def ended(name: str) -> None:
        top = _sum(tracker.get_tracker_snapshot("peak"))["total"]
        phases.append((name, top, _sum(tracker.get_tracker_snapshot("current"))))

    with nullcontext() if settings.autocast is None else torch.autocast("cpu", dtype=DTYPES[settings.autocast]):
        out = module(*args, **kwargs)
    sums = [each.sum() for each in tensors_of(out) if each.requires_grad]
    if not sums:
        raise InputError("--peak: no output needs a gradient")
    loss = sum(sums[1:], sums[0])
    del out, sums
    ended("forward")
    loss.backward()
    del loss
    ended("backward")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    ended("the optimizer's step")
    return phases


def _sum(snapshot: dict[Any, dict[str, int]]) -> dict[str, int]:
    """Bytes by category over all devices."""
    found = dict.fromkeys(NAMES.values(), 0)
    for categories in snapshot.values():
        for name, value in categories.items():
            found[NAMES[str(getattr(name, "value", name))]] += int(value)
    return found
