"""The folds: from one graph to FLOPs, parameters and bytes, and from those to a :class:`~tfcost.report.Report`.

:class:`Analysis` works on ints and on symbols alike; :func:`analyze` is the way in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from tfcost.blocks import Run, kernel
from tfcost.config import ModelConfig, as_dict, choice, size
from tfcost.convention import DOCUMENT, FLOPS_PER_MAC, Convention, Facts, Line, OpConvention, half, misfit
from tfcost.convention import convention as convention_named
from tfcost.errors import InputError
from tfcost.families import build
from tfcost.graph import ADAPTER, Graph, Saved, Size, Tensor, weights_of
from tfcost.implementation import DOCUMENT as DOCUMENT_KEEPS
from tfcost.implementation import NAMES as IMPLEMENTATIONS
from tfcost.implementation import SEMANTICS, Implementation
from tfcost.implementation import implementation as implementation_named
from tfcost.models import DOCUMENT_MODEL, Model, load
from tfcost.ops import EXPERT_AXIS
from tfcost.policy import KEYWORDS, PLAIN, Running, as_run, check_adapters, running
from tfcost.report import Report
from tfcost.rows import BY, Item, items, rows

if TYPE_CHECKING:
    from tfcost.memory import Memory

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
"""Bytes of an activation or weight element per ``--dtype``."""

ATTENTION = ("eager", "flash", "math")
DEFAULT_SEQ_LEN = 2048

FLOPS_TOTALS = (
    "parameters", "forward_flops", "forward_macs", "backward_flops", "train_flops", "recompute_flops", "hardware_flops",
    "forward_flops_causal", "attention_flops", "flops_per_token", "train_flops_per_token",
)  # fmt: skip
PARAMS_TOTALS = (
    "parameters", "active_parameters", "active_non_input_embedding_parameters", "embedding_parameters",
    "head_parameters", "non_embedding_parameters", "trainable_parameters",
)  # fmt: skip
MEMORY_TOTALS = (
    "activation_bytes", "activation_bytes_per_layer", "logits_bytes", "weight_bytes", "gradient_bytes",
    "optimizer_bytes", "master_weight_bytes", "kv_cache_bytes", "communication_buffer_bytes", "overhead_bytes",
    "end_of_forward_bytes", "total_bytes", "peak_moment", "fits",
)  # fmt: skip
TOTALS = {"flops": FLOPS_TOTALS, "params": PARAMS_TOTALS, "memory": MEMORY_TOTALS}
"""The keys of ``totals`` for each command, in the order in which they are printed."""

OPTIONAL_TOTALS = {"paged_optimizer_bytes"}
"""Totals of ``memory`` that stand there where they are no zero by definition: bytes on the host."""

FORWARD_ONLY = ("backward_flops", "train_flops", "recompute_flops", "hardware_flops", "train_flops_per_token")
"""What a convention that counts forward passes only has no figure for."""

PER_TOKEN = ("flops_per_token", "train_flops_per_token")
"""Ratios, per target token; the only totals that are floats."""


class Options(NamedTuple):
    """How a graph is priced: the element type, the convention, causal squares, and what the kernels keep."""

    dtype: str = "bf16"
    convention: Convention = DOCUMENT
    causal: str = "full"
    implementation: Implementation = DOCUMENT_KEEPS
    running: Running = PLAIN

    @property
    def itemsize(self) -> int:
        """Bytes of an activation or weight element."""
        return ITEMSIZE[self.dtype]


class Analysis:
    """Every figure of one model in one pass, from one graph; sizes are ints, or symbols for closed forms."""

    def __init__(self, cfg: ModelConfig, run: Run, options: Options) -> None:
        self.cfg = cfg
        self.run = run
        self.options = options
        self.at: Callable[[Size], Size] = lambda size: size
        """The value of a size at the point that is asked for; a symbol that has none stays."""
        self.graph: Graph = build(cfg, run, options.itemsize, options.implementation, options.running.adapters)

    @cached_property
    def weights(self) -> list[Tensor]:
        """The distinct parameters."""
        return weights_of(self.graph.ops)

    @cached_property
    def saved(self) -> list[Saved]:
        """The distinct tensors kept for backward."""
        return self.whole.saved

    @cached_property
    def whole(self) -> Memory:
        """The whole memory: what is stored and kept, and when most is alive."""
        from tfcost.memory import Memory  # what FLOPs and parameters do not need

        return Memory(self)

    @cached_property
    def parameters(self) -> dict[str, Size]:
        """Parameter counts. ``parameters = embedding + head + non_embedding``; a tied table is an embedding, once.

        ``active`` counts of the experts only as many as a token uses. ``active_non_input_embedding`` leaves out the
        tables that are only looked up: a tied one is also multiplied by, so it stays in. ``trainable`` leaves out what
        has no gradient.
        """
        return {key: self.counts[key] for key in PARAMS_TOTALS}

    @cached_property
    def counts(self) -> dict[str, Size]:
        """The counts of :attr:`parameters`, and ``active_non_embedding_parameters``, which conventions use."""
        multiplied = {id(w) for op in self.graph.ops if op.kind not in ("embedding", "unused") for w in op.weights}
        total: Size = 0
        idle: Size = 0
        embedding: Size = 0
        looked_up: Size = 0
        trained: Size = 0
        adapters: Size = 0
        head: Size = 0
        for weight in self.weights:
            count = weight.numel * weight.copies
            total += count
            if weight.grad:
                trained += count
            if weight.role == ADAPTER:
                adapters += count
            if weight.role == "embedding":
                embedding += count
                if id(weight) not in multiplied:
                    looked_up += count
            elif weight.role == "head":
                head += count
            elif weight.axes[:1] == EXPERT_AXIS:
                idle += count - self.cfg.experts_per_token * prod(weight.shape[1:]) * weight.copies
        return {
            "parameters": total,
            "active_parameters": total - idle,
            "active_non_input_embedding_parameters": total - idle - looked_up,
            "embedding_parameters": embedding,
            "head_parameters": head,
            "non_embedding_parameters": total - embedding - head,
            "trainable_parameters": trained,
            "base_parameters": total - adapters,
            "active_non_embedding_parameters": total - idle - embedding - head,
        }

    def lines(self, convention: Convention, half: bool) -> list[Line]:
        """The work of a pass priced by a convention, with causal squares by half or in full."""
        if half:
            if not isinstance(convention, OpConvention) or convention.per_mac != FLOPS_PER_MAC:
                raise InputError(
                    f"--causal half does not apply to --convention {convention.name}, which fixes its own count"
                )
            convention = convention._replace(causal_half=True)
        return convention.lines(self.graph, Facts(self.cfg, self.run, self.counts))

    @cached_property
    def flops(self) -> dict[str, Size]:
        """FLOPs of a pass by the convention that was asked for."""
        chosen = self.options.convention
        half = self.options.causal == "half"
        priced = self.priced_by(chosen, half)
        causal = None  # where the convention fixes its own count, half a square is no question
        if isinstance(chosen, OpConvention) and chosen.per_mac == FLOPS_PER_MAC:
            causal = priced["forward_flops"]
            if not half and not chosen.causal_half:
                hidden = [
                    op.copies * (FLOPS_PER_MAC * op.forward.macs - op.causal)
                    for op in self.graph.ops
                    if op.causal is not None and op.forward.macs != 0
                ]
                causal -= sum(hidden)
        return {"parameters": self.parameters["parameters"]} | priced | {"forward_flops_causal": causal}

    def priced_by(self, convention: Convention, half: bool = False) -> dict[str, Size]:
        """FLOPs of a pass by a convention; ``backward`` is two products per matmul whose operands both need one."""
        forward: Size = 0
        backward: Size = 0
        recompute: Size = 0
        attention: Size = 0
        for line in self.lines(convention, half):
            forward += line.copies * line.forward
            backward += line.copies * line.backward
            recompute += line.copies * line.recompute
            if line.attention:
                attention += line.copies * line.forward
        if isinstance(convention, OpConvention):
            recompute += self.run_again(convention, half)
        return {
            "forward_flops": forward,
            "backward_flops": backward,
            "train_flops": forward + backward,
            "recompute_flops": recompute,
            "hardware_flops": forward + backward + recompute,
            "attention_flops": attention,
        }

    def run_again(self, convention: OpConvention, half: bool) -> Size:
        """FLOPs of forward work that recomputation does once more: its regions, and logits that are not held."""
        work: Size = 0
        how = self.options.running
        if how.mode != "train" or (how.recompute == "none" and how.loss == "eager"):
            return work
        forward = {line.path: line.forward for line in self.lines(convention, half)}
        for region in self.whole.regions:
            work += region.copies * sum([forward.get(self.graph.ops[place].path, 0) for place in region.again])
        if how.loss != "eager":
            logits = [op for op in self.whole.head_ops if op.kind == "linear" and op.output.axes == ("b", "n", "v")]
            work += sum([op.copies * forward.get(op.path, 0) for op in logits])
        return work

    def with_ratios(self, figures: dict[str, Size], convention: Convention) -> dict[str, Any]:
        """Numeric FLOPs with their MACs and what they are per target token."""
        tokens, forward = self.run.batch * self.run.seq_len, figures["forward_flops"]
        macs = forward if isinstance(convention, OpConvention) and convention.per_mac == 1 else half(forward)
        ratios = {
            "forward_macs": macs,
            "flops_per_token": forward / tokens,
            "train_flops_per_token": figures["train_flops"] / tokens,
        }
        if isinstance(convention, OpConvention) and not convention.backward:
            # It counts forward passes only, and says nothing of the rest: null, not zero.
            ratios |= dict.fromkeys(FORWARD_ONLY)
        return figures | ratios

    @property
    def kernel_recompute(self) -> Size:
        """FLOPs of fused attention's backward on making the scores again: 2bN²d per layer (half of it by half squares).

        In no other total, except by a convention that counts what the kernel runs (``torch``).
        """
        chosen = self.options.convention
        half = self.options.causal == "half" or (isinstance(chosen, OpConvention) and chosen.causal_half)
        return sum([
            op.copies * (op.causal if half and op.causal is not None else FLOPS_PER_MAC * op.recompute.macs)
            for op in self.graph.ops
            if op.kind == "fused_attention"
        ])  # fmt: skip

    @property
    def comparisons(self) -> Size:
        """Comparisons of a forward pass's sorts (LSH attention), which are no FLOPs."""
        return sum([op.copies * op.forward.elements for op in self.graph.ops if op.kind == "sort"])

    @cached_property
    def memory(self) -> dict[str, Size]:
        """Bytes kept by the layers, by head and loss, and stored for the weights: what has a closed form."""
        return self.whole.figures

    def split_saved(self) -> tuple[list[Saved], list[Saved]]:
        """The saved tensors that the model keeps first, and those that only head and loss keep."""
        return self.split(self.saved)

    def split(self, saved: list[Saved]) -> tuple[list[Saved], list[Saved]]:
        """Saved tensors by who keeps them first: the model, or head and loss."""
        stop = len(self.graph.ops) if self.graph.head_start is None else self.graph.head_start
        in_head = {id(op) for op in self.graph.ops[stop:]}
        layers = [each for each in saved if id(each.op) not in in_head]
        return layers, [each for each in saved if id(each.op) in in_head]

    def bytes_per_layer(self, saved: list[Saved]) -> Size | None:
        """What one layer keeps, where all layers keep the same; None where they differ."""
        sums: list[Size] = []
        for repeat in self.graph.repeats:
            inside = {id(op) for op in self.graph.ops[repeat.start : repeat.stop]}
            # A tensor from outside (an encoder's output) is no layer's own, whichever layer keeps it.
            own = [each for each in saved if id(each.op) in inside and each.tensor.path.startswith(repeat.path + "/")]
            sums.append(sum([each.tensor.bytes for each in own]))
        return sums[0] if sums and all(each == sums[0] for each in sums) else None

    def totals(self, commands: Iterable[str] = ("flops", "params", "memory")) -> dict[str, Any]:
        """The totals of some commands, as numbers; a symbolic analysis has no per-token ratios."""
        figures: dict[str, Any] = {}
        for command in commands:
            figures |= {"flops": self._flops_totals, "params": self._params_totals, "memory": self._memory_totals}[
                command
            ]()
        keys = [key for command in commands for key in TOTALS[command]]
        return {key: figures[key] for key in (*keys, *figures.keys() & OPTIONAL_TOTALS)}

    def _params_totals(self) -> dict[str, Any]:
        return self.parameters

    def _memory_totals(self) -> dict[str, Any]:
        return self.whole.totals()

    def _flops_totals(self) -> dict[str, Any]:
        return self.with_ratios(self.flops, self.options.convention)

    def items(self, command: str) -> list[Item]:
        """What the rows of a command sum (:mod:`tfcost.rows`)."""
        return items(self, command)

    def rows(self, command: str, by: str) -> list[dict[str, Any]]:
        """The rows of a report, grouped by total, component, op or layer; they sum to the command's total."""
        return rows(self, command, by)


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
    if attention is None:
        attention = "flash" if source.from_config else "eager"
    kernel = choice("--attention", attention, ATTENTION)
    run, cautions = _inputs(cfg, source, batch, seq_len, src_len, frames, options.running)
    run = run._replace(attention=kernel, labels=_labels(labels, cfg, run, options.running))
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
