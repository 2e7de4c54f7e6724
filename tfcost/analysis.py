"""The folds: from one graph to FLOPs, parameters and bytes, and from those to a :class:`~tfcost.report.Report`.

:class:`Analysis` works on ints and on symbols alike; :func:`tfcost.point.analyze` is the way in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from tfcost.blocks import Run
from tfcost.config import ModelConfig
from tfcost.convention import DOCUMENT, FLOPS_PER_MAC, Convention, Facts, Line, OpConvention, half
from tfcost.errors import InputError
from tfcost.families import build
from tfcost.graph import ADAPTER, Graph, Saved, Size, Tensor, weights_of
from tfcost.implementation import DOCUMENT as DOCUMENT_KEEPS
from tfcost.implementation import Implementation
from tfcost.ops import EXPERT_AXIS
from tfcost.policy import PLAIN, Running
from tfcost.rows import Item, items, rows

if TYPE_CHECKING:
    from tfcost.memory import Memory

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
"""Bytes of an activation or weight element per ``--dtype``."""


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
