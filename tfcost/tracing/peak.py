"""The peak memory of a whole training step by category, through PyTorch's ``MemTracker`` on fake tensors."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from tfcost.errors import InputError
from tfcost.tracing.program import is_tensor
from tfcost.tracing.semantics import Semantics
from tfcost.tracing.sources import DTYPES, Source
from tfcost.tracing.torch_private import fake_mode, memory_tracker, torch, tree_flatten
from tfcost.tracing.trace import Settings

OPTIMIZER = "Adam: two states per parameter, in its type"

NAMES = {
    "Parameter": "parameters", "Buffer": "buffers", "Gradient": "gradients", "Activation": "activations",
    "Temp": "temporaries", "Optstate": "optimizer_states", "Other": "inputs", "Total": "total",
}  # fmt: skip


def peak_of(source: Source, settings: Settings) -> dict[str, Any]:
    """Bytes alive at the peak of a second step: forward, backward from the sum of all outputs, Adam.

    A first step makes the optimizer's states. Every layer runs: what is alive together cannot be counted from one.
    """
    semantics = Semantics(settings.semantics, settings.attention)
    with ExitStack() as stack:
        stack.enter_context(fake_mode(False))
        built = source.build(source.letters)
        module = stack.enter_context(built) if hasattr(built, "__enter__") else built
        module.train()
        args, kwargs = source.feed(source.letters)
        optimizer = torch.optim.Adam(module.parameters(), foreach=False)
        tracker = memory_tracker()
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if is_tensor(leaf)]
        tracker.track_external(module, optimizer, *inputs)
        stack.enter_context(semantics.functions(None))
        stack.enter_context(source.around())
        if settings.autocast is not None:
            stack.enter_context(torch.autocast("cpu", dtype=DTYPES[settings.autocast]))
        moments: dict[str, dict[str, int]] = {}
        with tracker:
            for step in range(2):
                if step:
                    tracker.reset_mod_stats()
                out = module(*args, **kwargs)
                sums = [leaf.sum() for leaf in tree_flatten(out)[0] if is_tensor(leaf) and leaf.requires_grad]
                if not sums:
                    raise InputError("--peak: no output needs a gradient")
                del out
                moments["forward"] = _now(tracker)
                sum(sums[1:], sums[0]).backward()
                del sums
                moments["backward"] = _now(tracker)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        peak = _sum(tracker.get_tracker_snapshot("peak"))
    return {
        "optimizer": OPTIMIZER, "moment": _moment(peak, moments), "bytes": peak,
        "after_forward": moments["forward"], "after_backward": moments["backward"],
    }  # fmt: skip


def _now(tracker: Any) -> dict[str, int]:
    return _sum(tracker.get_tracker_snapshot("current"))


def _moment(peak: dict[str, int], moments: dict[str, dict[str, int]]) -> str:
    """The phase of the peak: where all gradients are there already, the optimizer's step."""
    if (
        peak["gradients"] >= moments["backward"]["gradients"]
        and peak["activations"] == moments["backward"]["activations"]
    ):
        return "the optimizer's step"
    return "backward" if peak["gradients"] or peak["temporaries"] else "forward"


def _sum(snapshot: dict[Any, dict[str, int]]) -> dict[str, int]:
    """Bytes by category over all devices."""
    found = dict.fromkeys(NAMES.values(), 0)
    for categories in snapshot.values():
        for name, value in categories.items():
            key = NAMES.get(str(getattr(name, "value", name)).rpartition(".")[2], "inputs")
            found[key] += int(value)
    return found
