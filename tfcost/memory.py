"""Whole memory on one device: what is stored per weight, what is kept for backward, and the moment when most is alive.

Sums of what is kept or stored have closed forms; the largest of several moments (``total_bytes``) has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from tfcost.devices import Device, device
from tfcost.graph import Op, Repeat, Saved, Size, Tensor, div, round_up
from tfcost.kv import cache_bytes, caches
from tfcost.liveness import Alive, backward_peak, forward_peak
from tfcost.ops import FP32_BYTES
from tfcost.policy import MIN_8BIT, RECIPES, TABLE_8BIT
from tfcost.recompute import Region, keeping, kept, regions
from tfcost.stored import Stored, below, stored

if TYPE_CHECKING:
    from tfcost.analysis import Analysis

CATEGORIES = (
    "weights", "reference_weights", "master_weights", "optimizer", "gradients", "activations", "temporary", "logits",
    "logit_gradients", "kv_cache", "overhead",
)  # fmt: skip
"""What memory is for, at any moment; ``temporary`` are gradients of activations, and a forward's own tensors."""

LOSS_GRADIENTS = 2
"""fp32 tensors of the logits' shape that cross-entropy's backward adds to the log-probabilities: the gradient of those
and that of its input (aten::nll_loss_backward, aten::_log_softmax_backward_data), alive together."""


class Moment(NamedTuple):
    """A moment and the bytes alive then, by category."""

    name: str
    bytes: dict[str, Size]

    @property
    def total(self) -> Size:
        """All that is alive."""
        return sum(self.bytes.values())


class Memory:
    """The memory of one analysis: categories on ints or symbols, moments on ints."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.graph = analysis.graph
        self.running = analysis.options.running
        self.recipe = RECIPES[self.running.recipe]
        self.itemsize = analysis.options.itemsize
        self.trains = self.running.mode == "train"

    @cached_property
    def regions(self) -> list[Region]:
        """What is run again in backward."""
        return regions(self.graph, self.running.recompute, self.running.every) if self.trains else []

    @cached_property
    def saved(self) -> list[Saved]:
        """The tensors kept for backward, by layers, head and loss, as the recomputation and the loss leave them."""
        if not self.trains:
            return []
        return [self._of_loss(saved) for saved in kept(self.graph, self.regions, self.running.every)]

    @cached_property
    def kept_by(self) -> tuple[list[Saved], list[Saved]]:
        """:attr:`saved`, by who keeps it first: the model, or head and loss."""
        return self.analysis.split(self.saved)

    def _of_loss(self, saved: Saved) -> Saved:
        """A tensor of the logits' shape, as the loss holds it: whole, a chunk of it, or a number per token."""
        running, tensor = self.running, saved.tensor
        if tensor.axes != ("b", "n", "v"):
            return saved
        batch, tokens, vocab = tensor.shape
        if running.loss == "fused":
            # One fp32 log-sum-exp per token: Wijmans et al. 2024 (Cut Cross-Entropy), arXiv:2411.09009.
            rows = Tensor(tensor.path, ("b", "n"), (batch, tokens), FP32_BYTES, tensor.copies)
            return Saved(saved.op, rows, saved.copies if tensor.path.endswith("fp32_log_probabilities") else 0)
        if running.loss == "chunked":
            tokens = div(round_up(tokens, running.chunks), running.chunks, "tokens", "chunks")
            shape = (batch, tokens, vocab)
            return Saved(saved.op, Tensor(tensor.path, tensor.axes, shape, tensor.itemsize, 1), saved.copies)
        if running.logit_copies is not None and tensor.path.endswith("fp32_log_probabilities"):
            return saved._replace(copies=running.logit_copies)
        return saved

    @cached_property
    def stored(self) -> list[tuple[Tensor, Stored]]:
        """Each distinct weight with what is stored for one copy of it."""
        at = self.analysis.at
        return [(w, stored(self.graph, w, self.running, self.itemsize, at)) for w in self.analysis.weights]

    @cached_property
    def states(self) -> dict[str, Size]:
        """Bytes stored per weight, by category; ``main_gradients`` are always there, ``gradients`` after backward."""
        sums: dict[str, Size] = dict.fromkeys(
            ("weights", "gradients", "main_gradients", "master_weights", "optimizer", "paged"), 0
        )
        tables = 0
        for weight, each in self.stored:
            copies = weight.copies
            for name, size in zip(sums, each, strict=True):
                sums[name] += copies * size
            if self.trains and weight.grad and not below(weight.numel, MIN_8BIT, self.analysis.at):
                tables = self.recipe.states_8bit * TABLE_8BIT
        sums["optimizer"] += tables
        if self.recipe.in_backward:
            sums["gradients"] = self._largest_gradient()
        reference = self.analysis.counts["base_parameters"] * self.itemsize if self.running.reference_model else 0
        return sums | {"reference_weights": reference}

    def _largest_gradient(self) -> Size | None:
        """The largest gradient, alone alive where each weight is updated at once; None on symbols without values."""
        at = self.analysis.at
        found = [each.gradient for _, each in self.stored]
        if all(isinstance(at(each), int) for each in found):
            return max(found, key=at, default=0)
        return None

    @cached_property
    def static(self) -> dict[str, Size]:
        """What is there at every moment."""
        states = self.states
        return {
            "weights": states["weights"], "reference_weights": states["reference_weights"],
            "master_weights": states["master_weights"], "optimizer": states["optimizer"],
            "gradients": states["main_gradients"], "kv_cache": self.cache, "overhead": self.running.overhead,
        }  # fmt: skip

    @cached_property
    def cache(self) -> Size:
        """The KV cache while generating: of the prompt (prefill), or of the context and the new tokens."""
        if self.trains:
            return 0
        run = self.analysis.run
        found = caches(self.analysis.cfg, run, self.running.kv_dtype)
        return run.batch * cache_bytes(found, run.context + run.seq_len)

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The totals of ``tfcost memory`` that are sums."""
        layers, head = self.kept_by
        states = self.states
        sums = {
            "activation_bytes": sum([s.copies * s.tensor.bytes for s in layers]),
            "activation_bytes_per_layer": self.analysis.bytes_per_layer(layers),
            "logits_bytes": sum([s.copies * s.tensor.bytes for s in head]),
            "weight_bytes": states["weights"] + states["reference_weights"],
            "gradient_bytes": None if states["gradients"] is None else states["gradients"] + states["main_gradients"],
            "optimizer_bytes": states["optimizer"], "master_weight_bytes": states["master_weights"],
            "kv_cache_bytes": self.cache, "communication_buffer_bytes": 0, "overhead_bytes": self.running.overhead,
        }  # fmt: skip
        if self.recipe.paged:
            sums["paged_optimizer_bytes"] = states["paged"]
        return sums | {
            "end_of_forward_bytes": sum(self.static.values()) + sums["activation_bytes"] + sums["logits_bytes"]
        }

    # --- Moments, on ints ---------------------------------------------------------------------------------------------

    @cached_property
    def moments(self) -> list[Moment]:
        """The moments that can be the peak, each with what is alive."""
        if not self.trains:
            return self._generating()
        activations, logits = self.figures["activation_bytes"], self.figures["logits_bytes"]
        found = [self._moment("end of forward", activations=activations, logits=logits)]
        head = self._at_head()
        if head is not None:
            found.append(self._moment("backward at the head", activations=activations, **head))
        for index in reversed(range(len(self.graph.repeats))):
            found += self._in_layers(index)
        found.append(self._moment("optimizer step", gradients=self.states["gradients"]))
        return found

    def _moment(self, name: str, **more: Size) -> Moment:
        alive = self.static | dict.fromkeys(("activations", "temporary", "logits", "logit_gradients"), 0)
        for category, size in more.items():
            alive[category] += size
        return Moment(name, {category: alive[category] for category in CATEGORIES})

    @property
    def peak(self) -> Moment:
        """The moment when most is alive; the first of equals."""
        return max(self.moments, key=lambda moment: moment.total)

    def _at_head(self) -> dict[str, int] | None:
        """What backward through loss and head adds: the loss's gradients, or then that of the head's weight."""
        _, head = self.kept_by
        products = [op for op in self.head_ops if op.output.axes == ("b", "n", "v") and op.kind == "linear"]
        if not products:
            return None
        logits = sum(s.copies * s.tensor.bytes for s in head)
        whole = next((s for s in head if s.tensor.path.endswith("fp32_log_probabilities")), None)
        product = products[-1]
        scale = 0 if whole is None or self.running.loss == "fused" else whole.tensor.bytes
        chosen = self.running.logit_copies is not None
        first = {"logits": logits, "logit_gradients": 0 if chosen else LOSS_GRADIENTS * scale}
        # Then the log-probabilities are gone, and the product's two gradients are made from that of the logits.
        tokens = whole.tensor.numel if whole is not None and scale else 0
        second = {
            "logits": logits - (0 if whole is None else whole.copies * whole.tensor.bytes),
            "logit_gradients": tokens * product.output.itemsize, "temporary": product.inputs[0].bytes,
            "gradients": self._gradient(product),
        }  # fmt: skip
        return max(first, second, key=lambda alive: sum(alive.values()))

    @property
    def head_ops(self) -> list[Op]:
        """The ops of head and loss."""
        return [] if self.graph.head_start is None else self.graph.ops[self.graph.head_start :]

    def _gradient(self, op: Op) -> int:
        """Bytes of the weight gradients that an op's backward makes, of one copy."""
        sizes = self._gradients
        return sum(sizes[id(weight)] for weight in op.weights)

    @cached_property
    def _gradients(self) -> dict[int, int]:
        return {id(weight): each.gradient for weight, each in self.stored}

    def _in_layers(self, which: int) -> list[Moment]:
        """Backward in the last and in the first layer of a stack."""
        repeat = self.graph.repeats[which]
        layer, boundary = self._layer(repeat)
        place = {id(op): index for index, op in enumerate(self.graph.ops)}
        before = own = shared = 0
        for saved in self.kept_by[0]:
            at, size = place[id(saved.op)], saved.copies * saved.tensor.bytes
            if at < repeat.start:
                before += size
            elif at < repeat.stop:
                if saved.tensor.path.startswith(repeat.path + "/"):
                    own += size
                else:
                    shared += size
        done = 0
        if not self.recipe.in_backward:
            later = {id(w): w for op in self.graph.ops[repeat.stop :] for w in op.weights}
            done = sum(w.copies * self._gradients[key] for key, w in later.items())
        here = sum([self._gradient(op) for op in self.graph.ops[repeat.start : repeat.stop] if op.weights])
        rest = 0 if self.recipe.in_backward else here * (repeat.times - 1)
        name = "layer" if len(self.graph.repeats) == 1 else repeat.path
        at_last = self._moment(
            f"backward at the last {name}", activations=before + shared + own - boundary + layer.kept,
            temporary=layer.temporary, gradients=done + layer.gradients,
        )  # fmt: skip
        at_first = self._moment(
            f"backward at the first {name}", activations=before + shared + layer.kept, temporary=layer.temporary,
            gradients=done + rest + layer.gradients,
        )  # fmt: skip
        return [at_last, at_first]

    def _layer(self, repeat: Repeat) -> tuple[Alive, int]:
        """The fullest moment of one layer's backward, and what the layer keeps until then."""
        ops = self.graph.ops[repeat.start : repeat.stop]

        def own(tensor: Tensor) -> bool:
            return tensor.path.startswith(repeat.path + "/")

        keeps = [op.saves for op in keeping(self.graph, self.regions)[repeat.start : repeat.stop]]
        again: dict[int, Sequence[tuple[Tensor, int]]] = {}
        for region in self.regions:
            if not repeat.start <= region.start < repeat.stop:
                continue
            first: dict[int, tuple[Tensor, int]] = {}
            span = range(region.start - repeat.start, region.stop - repeat.start)
            for index in span:
                for tensor in ops[index].saves:
                    if own(tensor):
                        first.setdefault(id(tensor), (tensor, index))
            again |= {index: list(first.values()) for index in span}
        return backward_peak(ops, keeps, again, own, self._gradient, not self.recipe.in_backward)

    def _generating(self) -> list[Moment]:
        """A forward pass without gradients: inside a layer, and at the logits of the last token of each sequence."""
        layers = [forward_peak(self.graph.ops[repeat.start : repeat.stop]) for repeat in self.graph.repeats]
        name = self.running.mode
        found = [self._moment(f"{name} in a layer", temporary=max(layers, default=0))]
        for op in self.head_ops:
            if op.output.axes == ("b", "n", "v") and op.kind == "linear":
                batch, _, vocab = op.output.shape
                # Generation reads the last token's logits alone, and samples from an fp32 copy of them.
                rows = batch * vocab * (op.output.itemsize + FP32_BYTES)
                found.append(self._moment(f"{name} at the head", temporary=op.inputs[0].bytes, logits=rows))
        return found

    def totals(self) -> dict[str, Any]:
        """The totals of ``tfcost memory``."""
        found = self.device
        peak = self.peak
        total = peak.total
        return self.figures | {
            "total_bytes": total, "peak_moment": peak.name,
            "fits": None if found is None else total <= found.memory_bytes,
        }  # fmt: skip

    @cached_property
    def device(self) -> Device | None:
        """The device that was asked about."""
        return device(self.running.device) if self.running.device else None

    def notes(self) -> dict[str, Any]:
        """What the report says beside its totals: the moments, and the device's capacity."""
        moments = [
            {"moment": m.name} | {k: v for k, v in m.bytes.items() if v} | {"total": m.total} for m in self.moments
        ]
        found = self.device
        return {"moments": moments} | ({} if found is None else {"device": found._asdict()})
