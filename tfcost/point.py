"""From what a person gives to a report: a model, its pass and its options, checked, analysed and reported.

:func:`analyze` is the way in; commands that look further take the :class:`Point` of :func:`point_of`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from tfcost.analysis import ITEMSIZE, TOTALS, Analysis, Options
from tfcost.blocks import Run, kernel
from tfcost.config import ModelConfig, as_dict, choice, size
from tfcost.convention import Convention, misfit
from tfcost.convention import convention as convention_named
from tfcost.errors import InputError
from tfcost.implementation import NAMES as IMPLEMENTATIONS
from tfcost.implementation import SEMANTICS
from tfcost.implementation import implementation as implementation_named
from tfcost.models import DOCUMENT_MODEL, Model, load
from tfcost.policy import KEYWORDS, Running, as_run, check_adapters, running
from tfcost.report import Report
from tfcost.rows import BY

ATTENTION = ("eager", "flash", "math")
DEFAULT_SEQ_LEN = 2048


def _inputs(
    cfg: ModelConfig,
    model: Model,
    batch: int,
    seq_len: int | None,
    src_len: int | None,
    frames: int | None,
    running: Running,
) -> tuple[Run, list[str]]:
    """The pass: lengths checked, and defaults derived from the model's own maximum (one token where it decodes).

    And what there is to warn of.
    """
    size("-b/--batch", batch)
    if cfg.patches is not None or cfg.source_positions is not None:
        from tfcost.inputs import run_of

        return run_of(cfg, batch, seq_len, src_len, frames)
    if frames is not None:
        raise InputError("--frames needs a model of sound")
    longest = cfg.max_positions
    if seq_len is None and running.mode == "decode":
        seq_len = 1
    if seq_len is None:
        seq_len = DEFAULT_SEQ_LEN if longest is None or not model.from_config else min(DEFAULT_SEQ_LEN, longest)
    for name, value in (("-N/--seq-len", seq_len), ("--src-len", src_len)):
        if value is not None:
            size(name, value)
    if cfg.arch == "encoder-decoder":
        src_len = seq_len if src_len is None else src_len
    elif src_len is not None and not cfg.cross_attention:
        raise InputError(f"--src-len needs an encoder and a decoder; this model is --arch {cfg.arch}")
    return Run(batch, seq_len, src_len, context=running.context), []


def _labels(labels: int | None, cfg: ModelConfig, run: Run, how: Running) -> int | None:
    """How many tokens of a sequence have labels, checked."""
    if labels is None:
        return None
    size("--labels", labels)
    if cfg.vocab is None or not cfg.head or how.mode != "train":
        raise InputError("--labels is for training with a language-model head (-V, --head), which reads those tokens")
    if labels > run.seq_len:
        raise InputError(f"--labels {labels}: a sequence has {run.seq_len} tokens (-N/--seq-len)")
    return labels


def options_of(
    dtype: str, convention: str, causal: str, implementation: str, semantics: str | None, fields: dict[str, Any]
) -> Options:
    """Read the flags that say how a graph is priced, and how the model is run; those are taken out of ``fields``."""
    given = {key: fields.pop(key) for key in KEYWORDS if key in fields}
    if semantics is not None:
        choice("--semantics", semantics, SEMANTICS)
    return Options(
        choice("--dtype", dtype, ITEMSIZE),
        convention_named(convention),
        choice("--causal", causal, ("full", "half")),
        implementation_named(choice("--implementation", implementation, IMPLEMENTATIONS), semantics),
        running(given, dtype),
    )


class Point(NamedTuple):
    """A model in one pass, analysed: what :func:`analyze` reports, and commands of their own look into."""

    model: Model
    analysis: Analysis
    assumptions: dict[str, Any]
    warnings: list[str]

    def priced_by(self, convention: Convention) -> dict[str, Any]:
        """FLOPs, MACs and per-token figures by another convention."""
        return self.analysis.with_ratios(self.analysis.priced_by(convention), convention)

    def report(self, command: str | None, by: str, formula: bool) -> Report:
        """The report of a command; None is all of them, with the rows of ``flops``."""
        analysis, run = self.analysis, self.analysis.run
        inputs: dict[str, Any] = {"batch": run.batch, "seq_len": run.seq_len}
        if run.src_len is not None:
            inputs["src_len"] = run.src_len
        if run.frames is not None:
            inputs["frames"] = run.frames
        if run.labels is not None:
            inputs["labels"] = run.labels
        shown = command if command in TOTALS else None
        totals = analysis.totals((shown,) if shown else tuple(TOTALS))
        if shown in (None, "flops") and run.attention == "flash":
            totals["flash_recompute_flops"] = analysis.kernel_recompute
        if shown in (None, "flops") and analysis.comparisons != 0:
            totals["sort_comparisons"] = analysis.comparisons
        rows_of = shown or "flops"
        return Report(
            command or "analyze", {"name": self.model.name or None} | as_dict(analysis.cfg), inputs, self.assumptions,
            totals, lambda: analysis.rows(rows_of, by),
            (lambda: closed_forms_of(analysis, rows_of, by)) if formula else None, self.warnings, (),
            analysis.whole.notes() if shown == "memory" else None,
        )  # fmt: skip


def kernel_asked(attention: str | None, source: Model) -> str:
    """The checked ``--attention``; unless given, flash for a config and eager for the document's model."""
    if attention is None:
        attention = "flash" if source.from_config else "eager"
    return choice("--attention", attention, ATTENTION)


def point_of(
    model: str | os.PathLike[str] | Model | None = None,
    *,
    batch: int = 1,
    seq_len: int | None = None,
    src_len: int | None = None,
    frames: int | None = None,
    labels: int | None = None,
    attention: str | None = None,
    causal: str = "full",
    dtype: str = "bf16",
    convention: str = "document",
    implementation: str = "document",
    semantics: str | None = None,
    **fields: Any,
) -> Point:
    """Read what was given and build the graph; the arguments are those of :func:`analyze`."""
    source = DOCUMENT_MODEL if model is None else model if isinstance(model, Model) else load(model)
    options = options_of(dtype, convention, causal, implementation, semantics, fields)
    cfg = as_run(source.config(**fields), options.running)
    run, cautions = _inputs(cfg, source, batch, seq_len, src_len, frames, options.running)
    run = run._replace(attention=kernel_asked(attention, source), labels=_labels(labels, cfg, run, options.running))
    analysis = Analysis(cfg, run, options)
    check_adapters(options.running.adapters, analysis.graph, analysis.counts["trainable_parameters"])
    assumptions = assumptions_of(analysis, source.ignored_keys)
    if source.stored_dtype:
        assumptions["stored_dtype"] = f"{source.stored_dtype}, ignored"
    warnings = cautions + _warnings(cfg, source, run)
    if note := misfit(options.convention, cfg):
        warnings.append(note)
    return Point(source, analysis, assumptions, warnings)


def assumptions_of(analysis: Analysis, ignored_keys: Iterable[str] = ()) -> dict[str, Any]:
    """What a report assumes: the ``assumptions`` of ``tfcost.report/1``."""
    options, cfg = analysis.options, analysis.cfg
    asked = analysis.run.attention
    assumptions = {
        "convention": options.convention.name, "implementation": options.implementation.name,
        "semantics": options.implementation.semantics or None, "attention": asked,
        "kernel": kernel(asked, cfg, options.implementation, options.itemsize), "dtype": options.dtype,
        "causal": options.causal, "counts": options.convention.counts, "leaves_out": options.convention.leaves_out,
        "ignored_keys": list(ignored_keys), "running": options.running.words(),
    }  # fmt: skip
    if cfg.experts is not None:
        assumptions["routing"] = (
            "each token to its experts, however they spread; none dropped"
            if cfg.capacity_factor is None
            else f"capacity factor {cfg.capacity_factor}: as many slots for each expert, filled or not"
        )
    if cfg.vocab is None and cfg.patches is None:
        assumptions["vocabulary"] = "none given: no embedding, no logits"
    if cfg.window is not None:
        which = "all layers" if cfg.local_layers is None else f"{cfg.local_layers} layers"
        visited = (
            "at most that many keys per query" if asked == "flash" else "priced as the full square, as PyTorch runs"
        )
        assumptions["window"] = f"{cfg.window} in {which}, {visited}"
    return assumptions


def analyze(
    model: str | os.PathLike[str] | Model | None = None,
    *,
    command: str | None = None,
    by: str = "component",
    formula: bool = False,
    **given: Any,
) -> Report:
    """FLOPs, parameters and memory of a model in one pass.

    ``model`` is a preset's name, a path to a ``config.json``, a :class:`~tfcost.models.Model`, or None for the model
    that fields describe (``hidden=``, ``heads=``, ``layers=``, ``vocab=`` ...); with a model they are a what-if.
    ``batch`` b and ``seq_len`` N are sequences and tokens per sequence, ``src_len`` an encoder-decoder's source tokens,
    ``labels`` those of a sequence that reach the language-model head (all unless given);
    ``attention``, ``causal``, ``dtype``, ``convention``, ``implementation`` are the flags of those names.

    The report's ``totals`` are those of ``command`` ("flops", "params", "memory"), or of all three; its ``rows`` are
    grouped ``by`` total, component, op or layer. With ``formula`` each carries its closed form. FLOPs and bytes are
    exact ints. Raises :class:`~tfcost.errors.InputError` with one line for anything that cannot be used.
    """
    choice("--by", by, BY)
    if command is not None:
        choice("command", command, TOTALS)
    return point_of(model, **given).report(command, by, formula)


def closed_forms_of(analysis: Analysis, command: str, by: str) -> Any:
    """The closed forms of a numeric analysis (:class:`tfcost.symbols.ClosedForms`). Imports sympy."""
    from tfcost.symbols import ClosedForms

    return ClosedForms(analysis.cfg, analysis.run, analysis.options, command, by)


def _warnings(cfg: ModelConfig, model: Model, run: Run) -> list[str]:
    warnings = []
    if model.ignored_keys:
        warnings.append("keys that tfcost does not know, left out: " + ", ".join(model.ignored_keys))
    if cfg.positions == "learned" and cfg.max_positions is not None:
        source = None if run.frames is not None else run.src_len
        for name, length in (("-N/--seq-len", run.seq_len), ("--src-len", source)):
            if length is not None and length > cfg.max_positions:
                warnings.append(f"{name} {length:,} is beyond the model's {cfg.max_positions:,} learned positions")
    return warnings
