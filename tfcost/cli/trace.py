"""``tfcost trace``: closed forms derived from the running PyTorch program."""

from __future__ import annotations

from typing import Any

from tfcost.cli.options import OUTPUT, PASS, STRUCTURE, AppFor, Argument, Flag, command_app
from tfcost.cli.output import emit, format_of
from tfcost.errors import InputError, MissingExtra

FLAGS = (
    *[flag for flag in PASS if flag.kind == "counts"],
    *STRUCTURE,
    Flag("attention", ("--attention",), "choice", "kernel that runs [default: eager]", ("eager", "flash", "math")),
    Flag("dtype", ("--dtype",), "choice", "element type [default: bf16; a callable's own]", ("bf16", "fp16", "fp32")),
    Flag("autocast", ("--autocast",), "choice", "run under autocast to this type", ("bf16", "fp16")),
    Flag("train", ("--train/--eval",), "switch", "training (dropout, backward), or a forward pass [default: train]"),
    Flag("semantics", ("--semantics",), "choice", "whose kernels: a GPU's or a CPU's [default: cuda]", ("cuda", "cpu")),
    Flag("torch_device", ("--torch-device",), "choice", "device of the fake tensors [default: cpu]", ("cpu", "cuda")),
    Flag("by", ("--by",), "choice", "depth of the rows [default: component]", ("total", "component", "module", "op")),
    Flag("formula", ("--formula/--no-formula",), "switch", "closed forms [default: yes in tables, no in JSON and CSV]"),
    Flag("peak", ("--peak",), "switch", "peak memory of a training step by category"),
    Flag("allow_incomplete", ("--allow-incomplete",), "switch", "exit with 0 although some op has no price"),
    *OUTPUT,
)  # fmt: skip

MODEL = Argument(
    "[MODEL]",
    "a preset, a config.json of any architecture that transformers has, or package.module:callable, which returns "
    "(module, inputs, {input: {axis: letter}}); importing it runs its code. Without it: the document's model, "
    "d, h and V letters too",
)

HELP = (
    "Run a PyTorch program once on symbolic shapes, without data, weights or a GPU, and print its cost as formulas. "
    "Exit status 1 where an op has no price."
)

OWN = ("format", "json", "csv", "output", "quiet", "peak", "allow_incomplete")


def trace(model: str | None, values: dict[str, Any]) -> int:
    """Trace a program and print its report; 1 where it is incomplete."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("trace needs torch: pip install '.[torch]' in tfcost's folder") from None
    from tfcost.tracing.report import trace as run
    from tfcost.tracing.table import table_text

    torch.set_num_threads(1)
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key in OWN:
            continue
        if isinstance(value, list):
            if len(value) > 1:
                raise InputError(f"--{key.replace('_', '-')} takes one value here, not a list")
            value = value[0]
        given[key] = value
    given.setdefault("formula", format_of(values) == "table")
    report = run(model, **given, peak=bool(values.get("peak")), progress=not values.get("quiet"))
    emit(report, values, table_text)
    return 1 if report.totals["incomplete"] and not values.get("allow_incomplete") else 0


def app(name: str) -> AppFor:
    """The app of the command."""
    return command_app(name, HELP, FLAGS, trace, MODEL)
