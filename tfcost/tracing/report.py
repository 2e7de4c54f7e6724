"""A traced program as a :class:`~tfcost.report.Report`, and :func:`trace`, the way in from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from tfcost.config import choice, flag
from tfcost.convention import DOCUMENT, FLOPS_PER_MAC
from tfcost.errors import InputError
from tfcost.notation import Formula, plain, symbol
from tfcost.report import Report
from tfcost.tracing.document import from_document
from tfcost.tracing.modules import Dynamic, from_callable, from_module
from tfcost.tracing.peak import peak_of
from tfcost.tracing.quiet import quiet
from tfcost.tracing.sources import DTYPES, Source, from_transformers
from tfcost.tracing.torch_private import check_cuda, torch
from tfcost.tracing.trace import Result, Settings, conditions_in_words, figures, traced
from tfcost.tracing.traced import Traced, TracedOp

ATTENTION = ("eager", "flash", "math")
BY = ("total", "component", "module", "op")

LEAVES_OUT = "norms, softmax, activations, biases, residual sums, embedding lookups"


class TraceForms:
    """The closed forms of a trace, as :class:`~tfcost.report.Report` asks for them."""

    def __init__(self, result: Result) -> None:
        self._forms = figures(result.forms)
        sizes = {**result.source.letters, **result.source.derived, **result.chosen}
        self.values = {symbol(letter): size for letter, size in sizes.items()}

    def formulas(self, keys: Any = None) -> dict[str, Formula]:
        """The closed form of each total that has one."""
        wanted = self._forms if keys is None else keys
        return {key: plain(self._forms[key]) for key in wanted if key in self._forms}


def group_key(by: str) -> Callable[[str], str]:
    """How a module's path becomes a row's: cut to three steps, whole, or nothing."""
    if by == "total":
        return lambda path: "total"
    if by == "component":
        return lambda path: "/".join(path.split("/")[:3]) or "program"
    return lambda path: path or "program"


COLUMNS = ("flops", "backward_flops", "parameters", "saved_bytes", "read_bytes", "written_bytes")
"""What a row sums: forward and backward FLOPs, parameters, bytes kept for backward, bytes moved in both passes."""


def op_figures(op: TracedOp) -> dict[str, Any]:
    """The figures of one run of an op."""
    return {
        "flops": FLOPS_PER_MAC * op.forward.macs,
        "backward_flops": FLOPS_PER_MAC * op.backward.macs,
        "read_bytes": op.read + op.backward_read,
        "written_bytes": op.written + op.backward_written,
    }


def rows_of(graph: Traced, by: str) -> dict[str, dict[str, Any]]:
    """Rows by path: sums over the model, of ops, parameters and kept tensors."""
    key = group_key(by)
    rows: dict[str, dict[str, Any]] = {}

    def add(path: str, figure: str, value: Any) -> None:
        row = rows.setdefault(path, dict.fromkeys(COLUMNS, 0))
        row[figure] = row[figure] + value

    for op in graph.traced:
        path = op.path if by == "op" else key(op.component)
        for figure, each in op_figures(op).items():
            add(path, figure, op.copies * each)
        if op.recompute.macs and not isinstance(op.recompute.macs, bool):
            add(f"{op.path if by == 'op' else key(op.component)} (flash recompute)", "backward_flops", 0)
    for weight in graph.recorded.weights:
        if not weight.buffer:
            path = "/".join(part for part in weight.path.split(".") if not part.isdigit())
            add(f"{path}/{weight.name}" if by == "op" else key(path), "parameters", graph.value(weight.numel))
    for where, record, tensor in graph.kept:
        if record.floating:
            component = where.rpartition("/")[0]
            add(
                f"{where} keeps" if by == "op" else key(component),
                "saved_bytes",
                tensor.copies * graph.value(record.bytes),
            )
    return rows


def recompute_rows(graph: Traced, by: str, rows: dict[str, dict[str, Any]]) -> None:
    """What fused attention's backward makes again: rows of their own, in no total of backward FLOPs."""
    key = group_key(by)
    for path in [name for name in rows if name.endswith(" (flash recompute)")]:
        rows[path]["recompute_flops"] = 0
    for op in graph.traced:
        if op.recompute.macs:
            path = f"{op.path if by == 'op' else key(op.component)} (flash recompute)"
            rows[path]["recompute_flops"] += op.copies * FLOPS_PER_MAC * op.recompute.macs


def counts_of(graph: Traced, by: str) -> dict[str, int]:
    """How often a row's op runs: of ops, their number; of groups, one."""
    return {op.path: op.copies for op in graph.traced} if by == "op" else {}


def report_rows(result: Result, by: str, formula: bool) -> list[dict[str, Any]]:
    """The rows at the chosen sizes, each figure with its closed form where asked for."""
    numbers = rows_of(result.numbers, by)
    recompute_rows(result.numbers, by, numbers)
    forms = rows_of(result.forms, by) if formula else {}
    counts = counts_of(result.numbers, by)
    found = []
    for path, row in numbers.items():
        if not any(row.values()):
            continue
        count = counts.get(path, 1)
        entry: dict[str, Any] = {"path": path, "count": count}
        for figure, value in row.items():
            if figure == "flops":
                entry["flops_each"] = int(value) // count
            entry[figure] = int(value)
        if formula and path in forms:
            entry["formula"] = plain(forms[path]["flops"] / count if count != 1 else forms[path]["flops"])
        found.append(entry)
    return found


def saved_rows(result: Result) -> list[dict[str, Any]]:
    """Every kept tensor: the module and op that keep it, its sizes, type, how many there are, their bytes."""
    found = []
    for (where, record, tensor), (_, _, form) in _pairs(result):
        module, _, op = where.rpartition("/")
        found.append({
            "module": module, "op": op, "shape": [str(size) for size in form.shape], "dtype": record.dtype,
            "count": int(tensor.copies), "bytes_each": int(result.numbers.value(record.bytes)),
            "bytes": int(tensor.copies * result.numbers.value(record.bytes)),
        })  # fmt: skip
    return found


def _pairs(result: Result) -> list[Any]:
    numbers, forms = result.numbers.kept, result.forms.kept
    if len(numbers) == len(forms):
        return list(zip(numbers, forms, strict=True))
    return [(each, each) for each in numbers]


def totals_of(result: Result) -> dict[str, Any]:
    """The totals of CONTRACT's commands as far as a program has them."""
    here = {key: int(value) for key, value in figures(result.numbers).items()}
    forward = here["forward_flops"]
    order = ("parameters", "forward_flops")
    totals: dict[str, Any] = {key: here[key] for key in order}
    totals["forward_macs"] = forward // FLOPS_PER_MAC
    totals |= {key: value for key, value in here.items() if key not in totals}
    tokens = 1
    for letter in ("b", "N", "T"):
        tokens *= result.source.letters.get(letter, 1)
    totals["flops_per_token"] = forward / tokens
    totals["train_flops_per_token"] = here["train_flops"] / tokens
    if not result.settings.train:
        for key in ("backward_flops", "train_flops", "hardware_flops", "train_flops_per_token", "activation_bytes",
                    "id_bytes", "backward_read_bytes", "backward_written_bytes", "flash_recompute_flops"):  # fmt: skip
            totals.pop(key, None)
    totals["incomplete"] = bool(result.numbers.unpriced)
    return totals


def report_of(result: Result, by: str = "component", formula: bool = True) -> Report:
    """The report of a traced program: ``tfcost.report/1`` with rows by module or op, kept tensors and range."""
    source, settings = result.source, result.settings
    inputs = {source.inputs[letter]: size for letter, size in source.letters.items()}
    if source.derived:
        inputs["hidden"] = source.derived["d"]
    kernels = settings.semantics if settings.torch_device == "cpu" else settings.torch_device
    assumptions: dict[str, Any] = {
        "convention": DOCUMENT.name, "implementation": source.kind, "semantics": kernels,
        "attention": settings.attention, "kernel": settings.attention, "dtype": settings.dtype, "causal": "full",
        "mode": "train" if settings.train else "eval", "autocast": settings.autocast,
        "counts": "2 FLOPs per multiply-accumulate of every product that the program runs, forward and backward",
        "leaves_out": LEAVES_OUT, "ignored_keys": [], "method": result.method,
        "traffic": "tensors that each op reads and writes, none in a cache; backward from a gradient of each output, "
        "with the sums of gradients of what several ops read",
    }  # fmt: skip
    extra = {
        "valid": conditions_in_words(result), "notes": result.notes,
        "unpriced": [{"op": name, "count": int(count)} for name, count in sorted(result.numbers.unpriced.items())],
        "saved_tensors": saved_rows(result), "seconds": round(result.forms.recorded.seconds, 3),
    }  # fmt: skip
    warnings = []
    if result.numbers.unpriced:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(result.numbers.unpriced.items()))
        warnings.append(f"the totals are incomplete: no price for {names}")
    model = {"name": source.name, "class": source.kind}
    return Report(
        "trace", model, inputs, assumptions, totals_of(result), lambda: report_rows(result, by, formula),
        (lambda: TraceForms(result)) if formula else None, warnings, (), extra,
    )  # fmt: skip


def source_of(
    model: Any, inputs: Any, dynamic: Dynamic | None, attention: str, dtype: str | None, sizes: Mapping[str, Any]
) -> Source:
    """What to trace, from what a person names or hands over."""
    if isinstance(model, torch.nn.Module):
        if inputs is None:
            raise InputError("trace needs inputs= for a module: example tensors, and dynamic= to name their axes")
        return with_sizes(from_module(model, inputs, dynamic or {}, dtype), sizes)
    if inputs is not None or dynamic is not None:
        raise InputError("inputs= and dynamic= go with a torch.nn.Module, not with a model's name")
    spec = os.fspath(model)
    path, colon, _ = spec.partition(":")
    if colon and not os.path.exists(spec) and all(part.isidentifier() for part in path.split(".")):
        return with_sizes(from_callable(spec, dtype), sizes)
    return from_transformers(spec, attention, dtype or "bf16", sizes)


def with_sizes(source: Source, sizes: Mapping[str, Any]) -> Source:
    """A source at other sizes than its example's."""
    letters = dict(source.letters)
    for name, value in sizes.items():
        if value is None:
            continue
        found = next((letter for letter, key in source.inputs.items() if key == name), None)
        if found is None:
            raise InputError(
                f"{source.name} has no dynamic axis for --{name.replace('_', '-')}; it has "
                f"{', '.join(letters) or 'none'}"
            )
        letters[found] = value
    return source._replace(letters=letters)


def trace(
    model: Any = None,
    inputs: Any = None,
    *,
    dynamic: Dynamic | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    src_len: int | None = None,
    attention: str = "eager",
    dtype: str | None = None,
    train: bool = True,
    semantics: str = "cuda",
    autocast: str | None = None,
    torch_device: str = "cpu",
    by: str = "component",
    formula: bool = True,
    peak: bool = False,
    progress: bool = False,
    **fields: Any,
) -> Report:
    """Run a program once on symbolic shapes and report its cost as formulas: no data, weights or GPU.

    ``model`` is a preset's name, a path to a ``config.json`` (built by transformers from the config alone),
    ``"package.module:callable"`` (returns a module, its inputs and dynamic axes), or a ``torch.nn.Module`` with
    ``inputs`` (tensors by position or name) and ``dynamic``, which names their axes by letters:
    ``{0: {0: "b", 1: "N"}}``. A module is not changed, and its weights are not read. ``dtype`` is that of weights and
    floating-point inputs: bf16 unless said, of a module or callable its own. Without a model, ``fields``
    (``hidden=``, ``heads=``, ``vocab=``, ``arch=`` ...) describe the document's, whose d, h and V are letters too.

    Totals: parameters; forward and backward FLOPs (2 per multiply-accumulate of every product that runs), fused
    attention's recomputation apart; bytes kept for backward, each storage once; bytes that ops read and write.
    ``report.extra`` has the kept tensors, the range of the formulas (``valid``) and the ops without a price
    (``unpriced``; then ``totals["incomplete"]`` is true). Raises :class:`~tfcost.errors.InputError`, one line.
    """
    choice("--attention", attention, ATTENTION)
    if dtype is not None:
        choice("--dtype", dtype, DTYPES)
    choice("--semantics", semantics, ("cuda", "cpu"))
    choice("--by", by, BY)
    if autocast is not None:
        choice("--autocast", autocast, DTYPES)
    choice("--torch-device", torch_device, ("cpu", "cuda"))
    sizes = {"batch": batch, "seq_len": seq_len, "src_len": src_len}
    if peak and not train:
        raise InputError("--peak is of a training step; it does not go with --eval")
    if torch_device == "cuda":
        check_cuda()
    with quiet():
        if model is None:
            source = from_document(fields, attention, dtype or "bf16", sizes)
        elif fields:
            raise InputError(f"{flag(next(iter(fields)))} describes a model, and does not go with a MODEL")
        else:
            source = source_of(model, inputs, dynamic, attention, dtype, sizes)
        settings = Settings(train, attention, source.dtype, semantics, autocast, torch_device, progress=progress)
        report = report_of(traced(source, settings), by, formula)
        if peak:
            report.extra["peak"] = peak_of(source, settings)
    return report


__all__ = ["report_of", "trace"]
