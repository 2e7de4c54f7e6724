"""Whole memory on one device: what is stored per weight, what is kept for backward, and the moment when most is alive.

Sums of what is kept or stored have closed forms; the largest of several moments (``total_bytes``) has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from tfcost.devices import Device, device
from tfcost.graph import Op, Repeat, Saved, Size, Tensor, div, round_up
from tfcost.kv import cache_bytes, caches
from tfcost.liveness import Backward, Buffers, Kept, forward_peak
from tfcost.ops import FP32_BYTES
from tfcost.policy import MIN_8BIT, RECIPES, TABLE_8BIT
from tfcost.recompute import Region, keeping, kept, made_again, regions
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


def _makes_logits(op: Op) -> bool:
    """Whether an op is the product that the logits come from."""
    return op.kind == "linear" and op.output.axes == ("b", "n", "v")


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
        how = self.running
        return regions(self.graph, how.recompute, how.every, how.chosen) if self.trains else []

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
        found += self._backward()
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

    def _backward(self) -> list[Moment]:
        """The fullest moment at the head, in the last and the first layer of each stack, and between them."""
        ops, buffers = self.graph.ops, Buffers()
        done: dict[int, Tensor] = {}
        found, stop = [], len(ops)
        product = next((op for op in reversed(self.head_ops) if _makes_logits(op)), None)
        if product is not None:
            stop = ops.index(product)
            found.append(self._moment("backward at the head", activations=self.figures["activation_bytes"],
                                      **self._at_head(product)))  # fmt: skip
            done |= {id(weight): weight for weight in product.weights}
            buffers.put(product.inputs[0], product.inputs[0].bytes)
        for repeat in reversed(self.graph.repeats):
            found += self._between(repeat.stop, stop, buffers, done)
            found += self._in_layers(repeat, buffers, done)
            stop = repeat.start
        return found + self._between(0, stop, buffers, done)

    @cached_property
    def _walker(self) -> Backward:
        """How this recipe runs a backward."""
        sizes = {id(weight): each.gradient for weight, each in self.stored}
        in_place = self.graph.implementation.sums_in_place
        return Backward(lambda weight: sizes[id(weight)], not self.recipe.in_backward, in_place)

    def _all_gradients(self, weights: Iterable[Tensor]) -> int:
        """Bytes of the gradients of all copies of some weights; 0 where they go at once."""
        return 0 if self.recipe.in_backward else sum([w.copies * self._walker.gradient(w) for w in weights])

    def _at_head(self, product: Op) -> dict[str, int]:
        """What backward through loss and head adds: the loss's gradients, or then those of the product's operands."""
        _, head = self.kept_by
        logits = sum(s.copies * s.tensor.bytes for s in head)
        whole = next((s for s in head if s.tensor.path.endswith("fp32_log_probabilities")), None)
        scale = 0 if whole is None or self.running.loss == "fused" else whole.tensor.bytes
        chosen = self.running.logit_copies is not None
        first = {"logits": logits, "logit_gradients": 0 if chosen else LOSS_GRADIENTS * scale}
        # Then the log-probabilities are gone, and the product's two gradients are made from that of the logits.
        tokens = whole.tensor.numel if whole is not None and scale else 0
        second = {
            "logits": logits - (0 if whole is None else whole.copies * whole.tensor.bytes),
            "logit_gradients": tokens * product.output.itemsize, "temporary": product.inputs[0].bytes,
            "gradients": sum(self._walker.gradient(weight) for weight in product.weights),
        }  # fmt: skip
        return max(first, second, key=lambda alive: sum(alive.values()))

    @cached_property
    def _held_logits(self) -> int:
        """Bytes of the logits themselves, which the caller holds until backward is done (``loss = f(logits)``)."""
        if self.running.loss != "eager":
            return 0
        return sum(op.inputs[0].bytes for op in self.head_ops if op.kind == "cross_entropy")

    @property
    def head_ops(self) -> list[Op]:
        """The ops of head and loss."""
        return [] if self.graph.head_start is None else self.graph.ops[self.graph.head_start :]

    @cached_property
    def _place(self) -> dict[int, int]:
        return {id(op): index for index, op in enumerate(self.graph.ops)}

    def _between(self, start: int, stop: int, buffers: Buffers, done: dict[int, Tensor]) -> list[Moment]:
        """Backward through ops that stand before, between or after the stacks."""
        ops = self.graph.ops[start:stop]
        before, kept = 0, Kept()
        for saved in self.saved:
            at, size = self._place[id(saved.op)], saved.copies * saved.tensor.bytes
            if at < start:
                before += size
            elif at < stop:
                kept.add(saved.tensor, at - start, size)
        alive = self._walker.walk(ops, kept.ends, self._again(start, ops, kept), buffers, done)
        gradients = self._all_gradients(done.values()) + alive.gradients
        done |= {id(weight): weight for op in ops for weight in op.weights}
        if not alive.total:
            return []
        return [self._moment(f"backward at {alive.path}", activations=before + alive.kept, temporary=alive.temporary,
                             gradients=gradients, logits=self._held_logits)]  # fmt: skip

    def _in_layers(self, repeat: Repeat, buffers: Buffers, done: dict[int, Tensor]) -> list[Moment]:
        """Backward in the last and in the first layer of a stack."""
        ops = self.graph.ops[repeat.start : repeat.stop]
        within = repeat.path + "/"
        others = before = 0
        outside = []  # what layers keep of what stands outside: until the first layer's backward has passed its keeper
        for saved in self.kept_by[0]:
            at, size = self._place[id(saved.op)], saved.copies * saved.tensor.bytes
            if at < repeat.start:
                before += size
            elif at < repeat.stop and not saved.tensor.path.startswith(within):
                outside.append((saved.tensor, at - repeat.start, size))
            elif at < repeat.stop:
                others += size
        kept = Kept()
        for index, op in enumerate(keeping(self.graph, self.regions)[repeat.start : repeat.stop]):
            for tensor in op.saves:
                if tensor.path.startswith(within):
                    kept.add(tensor, index, tensor.bytes)
        others += sum(size for *_, size in outside) - sum(kept.ends.values())
        again = self._again(repeat.start, ops, kept, within)
        weights = {id(w): w for op in ops for w in op.weights}
        name = "layer" if len(self.graph.repeats) == 1 else repeat.path
        found = []
        buffers.rename(repeat.output, repeat.left)
        stages = ("last", "first") if repeat.times != 1 else ("last",)
        for which in stages:
            if which == stages[-1]:
                others = 0
                for tensor, place, size in outside:
                    kept.add(tensor, place, size)
            alive = self._walker.walk(ops, kept.ends, again, buffers, done)
            gradients = self._all_gradients(done.values()) + alive.gradients
            if which == "first" and not repeat.shares_weights:
                own = [w for key, w in weights.items() if key not in done]
                gradients += self._all_gradients(own) - sum([self._walker.gradient(w) for w in own])
            found.append(self._moment(
                f"backward at the {which} {name}", activations=before + others + alive.kept,
                temporary=alive.temporary, gradients=gradients, logits=self._held_logits,
            ))  # fmt: skip
            if which == "last" and repeat.times != 1:
                buffers.rename(repeat.entered, repeat.left)
                if repeat.shares_weights:
                    done |= weights
        if repeat.times == 1:  # the last layer is the first
            found.append(found[0]._replace(name=f"backward at the first {name}"))
        if repeat.entered.first is not None:
            buffers.rename(repeat.entered, repeat.entered.first)
        done |= weights
        return found

    @cached_property
    def _made_again(self) -> list[tuple[Tensor, int, int]]:
        return made_again(self.graph, self.regions)

    def _again(self, start: int, ops: Sequence[Op], kept: Kept, within: str = "") -> dict[int, int]:
        """What is made again and not kept, and alive while the backward of an op runs, by the op's place."""
        held: dict[int, int] = {}
        for tensor, first, last in self._made_again:
            if start <= first < start + len(ops) and tensor.path.startswith(within):
                # What is kept as well is counted there, from its first keeper on.
                until = min(last - start + 1, kept.since.get(id(tensor), len(ops)))
                for index in range(first - start, until):
                    held[index] = held.get(index, 0) + tensor.bytes
        return held

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
