"""``tfcost validate``: every figure held against PyTorch, on the person's own machine."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

from tfcost.cli.options import OUTPUT, PASS, STRUCTURE, AppFor, Flag, command_app
from tfcost.cli.output import emit
from tfcost.errors import InputError, MissingExtra
from tfcost.models import load
from tfcost.point import point_of

FLAGS = (
    *PASS,
    *STRUCTURE,
    Flag("dtype", ("--dtype",), "choice", "activations and weights [default: bf16]", ("bf16", "fp16", "fp32")),
    Flag("quick", ("--quick",), "switch", "the beginning of the standard grid"),
    Flag("trace", ("--trace",), "switch", "with MODEL: its graph minus the traced program of transformers' class"),
    Flag("torch_device", ("--torch-device",), "choice", "where to run [default: cpu]", ("cpu", "cuda")),
    *OUTPUT,
)

OWN = ("quick", "trace", "torch_device", "format", "json", "csv", "output", "quiet")


def validate(model: str | None, values: dict[str, Any]) -> int:
    """Run the model, the sizes given or the standard grid; 1 where a figure differs."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("validate needs torch: pip install '.[torch]' in tfcost's folder") from None
    given = {key: value for key, value in values.items() if key not in OWN}
    if values.get("torch_device") == "cuda":
        if model is not None or given:
            raise InputError("--torch-device cuda records a fixed grid; it takes neither a MODEL nor sizes")
        from tfcost.validate.gpu import record

        emit(record(), values)
        return 0
    if values.get("trace"):
        return against_program(model, values, given)
    from tfcost.validate import run
    from tfcost.validate.table import table_text

    torch.set_num_threads(1)  # the cases are small: one thread is faster, and leaves the machine usable
    notes: dict[str, Any] = {}
    if model is None and not given:
        cases = run.standard_cases(bool(values.get("quick")))
    elif values.get("quick"):
        raise InputError("--quick is the beginning of the standard grid; it takes neither a MODEL nor sizes")
    else:
        cases, notes = chosen_cases(model, given)
    report = run.validate(cases, notes, progress=True)
    emit(report, values, table_text)
    return 1 if report.totals["different"] else 0


TRACED = ("attention", "dtype", "batch", "seq_len", "src_len")


def against_program(model: str | None, values: dict[str, Any], given: dict[str, Any]) -> int:
    """Subtract the traced program from the config's graph; 1 where parameters or FLOPs differ."""
    from tfcost.tracing.against import compare, table_text

    if model is None:
        raise InputError("--trace needs a MODEL: a preset or a config.json")
    if other := [key for key in given if key not in TRACED]:
        raise InputError(f"--trace takes a MODEL as it is, without --{other[0].replace('_', '-')}")
    keywords = {key: value[0] if isinstance(value, list) else value for key, value in given.items()}
    report = compare(model, **keywords, progress=not values.get("quiet"))
    emit(report, values, table_text)
    return 1 if report.totals["different"] else 0


MAX_CASES = 2_000
MAX_BYTES = 8 * 2**30
"""What a case may need here, by tfcost's own count of weights, gradients and kept tensors."""

MAX_LAYERS = 200


def runnable(case: Any) -> None:
    """Raise :class:`InputError` for a case that would not fit on a person's machine, or not end."""
    from tfcost.validate.compare import predict

    memory = predict(case).memory
    needed = 2 * memory["weight_bytes"] + memory["activation_bytes"] + memory["logits_bytes"]
    if needed > MAX_BYTES:
        raise InputError(f"validate runs the model: this one needs {needed:,} bytes, more than {MAX_BYTES:,}")
    if case.cfg.encoder_layers + case.cfg.decoder_layers > MAX_LAYERS:
        raise InputError(f"validate runs the model: at most {MAX_LAYERS} layers, all of which are alike")


def chosen_cases(model: str | None, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The cases of a model scaled down to run here, or of the sizes that were given (each combination of lists)."""
    from tfcost.validate.compare import Case, nearest, scaled_down

    source = None if model is None else load(model)
    dtype = given.pop("dtype", "bf16")
    lists = {key: value for key, value in given.items() if isinstance(value, list)}
    cases: list[Any] = []
    notes: dict[str, Any] = {}
    if (count := prod(len(value) for value in lists.values())) > MAX_CASES:
        raise InputError(f"the lists span {count:,} combinations; validate runs at most {MAX_CASES:,}")
    for point in product(*lists.values()):
        keywords = given | dict(zip(lists, point, strict=True))
        if source is None:
            keywords.setdefault("layers", 1)
        found = point_of(source, **keywords, dtype=dtype).analysis
        plain, left_out = nearest(found.cfg)
        run = found.run
        if source is not None:
            plain, run = scaled_down(plain, run)
            notes = {"scaled_down": True, "left_out": left_out}
        case = Case(plain, run, dtype, fvcore=dtype == "fp32" and run.attention == "eager")
        runnable(case)
        if case not in cases:  # scaled down, several may be one
            cases.append(case)
    return cases, notes


def app(name: str) -> AppFor:
    """The app of the command."""
    help = "Hold predictions against PyTorch: your sizes, a model scaled down, or (with neither) the standard grid."
    return command_app(name, help, FLAGS, validate)
