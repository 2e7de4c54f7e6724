"""Real GPU memory for a fixed grid: recorded once on a machine that has one, and held against the model ever after.

``tfcost validate --torch-device cuda -o data/measured/NAME.json`` writes the record; the test suite reads every file
there, compares saved activations and the memory after a forward pass with the graph, and needs no GPU for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from tfcost.errors import InputError
from tfcost.point import point_of
from tfcost.report import Report
from tfcost.validate import counters
from tfcost.validate.compare import Case, build, inputs_of, predict, without_loss
from tfcost.validate.run import environment


def grid() -> Iterator[Case]:
    """Sizes at which rounding is small beside the tensors, and every kernel that a GPU has."""
    sizes = ((4, 512, 512, 8, 4), (2, 1024, 1024, 16, 2), (8, 256, 768, 12, 2))
    for (batch, length, hidden, heads, layers), attention, dropout, activation, norm, ffn, dtype in product(
        sizes,
        ("eager", "flash"),
        (0.0, 0.1),
        ("gelu", "relu"),
        ("layernorm", "rmsnorm"),
        ("mlp", "glu"),
        ("bf16", "fp32"),
    ):
        if dtype == "fp32" and attention == "flash":
            continue  # no flash kernel takes fp32: PyTorch would run the memory-efficient one
        point = point_of(
            None,
            batch=batch,
            seq_len=length,
            hidden=hidden,
            heads=heads,
            layers=layers,
            vocab=8192,
            attention=attention,
            dropout=dropout,
            activation=activation,
            norm=norm,
            ffn=ffn,
            final_norm=True,
            dtype=dtype,
        )
        yield Case(point.analysis.cfg, point.analysis.run, dtype)


def record() -> Report:
    """Measure the grid on this machine's GPU. Raises :class:`InputError` where none is found or it is full."""
    if not torch.cuda.is_available():
        raise InputError("--torch-device cuda: no GPU was found; --torch-device cpu needs none")
    rows = [measure(case) for case in grid()]
    return Report("measured", {}, {}, {}, {"cases": len(rows)}, lambda: rows, extra={"environment": environment()})


def measure(case: Case) -> dict[str, Any]:
    """One case: what autograd keeps, and the allocator's figures around a training step with AdamW."""
    try:
        torch.manual_seed(0)
        module = build(case, "cuda")
        inputs = inputs_of(case, "cuda")
        saved = counters.saved_activations(module, inputs)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)

        def step() -> torch.Tensor:
            loss: torch.Tensor = module(*inputs).float().sum()
            return loss

        def optimise() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        memory = counters.cuda_memory(step, optimise)
    except torch.cuda.OutOfMemoryError:
        raise InputError(f"the GPU is out of memory in the case {case.label}") from None
    return {
        "case": case.label,
        "inputs": description(case),
        "predicted_saved_bytes": predicted(case),
        "saved_bytes": sum(each.bytes for each in saved),
        **memory._asdict(),
    }


def predicted(case: Case) -> int:
    """What the graph says that autograd keeps on a GPU."""
    return int(sum(without_loss(predict(case, "cuda")).values()))


def description(case: Case) -> dict[str, Any]:
    """The keywords of :func:`tfcost.point.point_of` that make the case again."""
    cfg, run = case.cfg, case.run
    names = ("hidden", "heads", "layers", "vocab", "activation", "norm", "ffn", "final_norm", "dropout")
    return {name: getattr(cfg, name) for name in names} | {
        "batch": run.batch,
        "seq_len": run.seq_len,
        "attention": run.attention,
        "dtype": case.dtype,
    }
