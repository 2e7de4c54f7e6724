"""How a model is run: recipes of optimizers, recomputation, loss, adapters, quantised weights, which pass.

Nothing here counts; :mod:`tfcost.recompute`, :mod:`tfcost.memory` and :mod:`tfcost.kv` do, from the graph. A recipe is
a row of one table: what is stored beside each weight, in bytes per parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tfcost.config import ModelConfig, choice, size
from tfcost.errors import InputError, UnknownName
from tfcost.graph import Adapters, Graph
from tfcost.ops import EXPERT_AXIS
from tfcost.units import parse_probability

FP32 = 4
OWN = -1
"""A state whose elements have the size of the weights' own (``--dtype``)."""


class Recipe(NamedTuple):
    """What is stored beside each trained weight. Sizes are bytes per element; :data:`OWN` is the weights' own.

    ``gradient`` lives from a weight's backward to the optimizer step; ``main_gradient`` is a buffer that is always
    there. ``states`` are those that every weight has, ``states_8bit`` one-byte ones with an fp32 scale per
    :data:`BLOCK_8BIT`, ``matrix_states`` those of the layers' matrices alone (``other_states``: of all else);
    ``factored`` two fp32 vectors per matrix. ``in_backward``: each weight is updated as soon as its gradient is there.
    ``paged``: states of :data:`PAGED_FROM` elements and more are on the host.
    """

    name: str
    source: str
    gradient: int = OWN
    main_gradient: int = 0
    master: int = 0
    states: tuple[int, ...] = ()
    states_8bit: int = 0
    matrix_states: tuple[int, ...] = ()
    other_states: tuple[int, ...] = ()
    factored: bool = False
    weight: int = OWN
    in_backward: bool = False
    paged: bool = False

    @property
    def by_size(self) -> bool:
        """Whether what is stored depends on which side of a bound each weight's size is."""
        return bool(self.states_8bit) or self.in_backward

    def per_parameter(self, itemsize: int) -> dict[str, int]:
        """Bytes per parameter of a matrix, by category, at weights of ``itemsize`` bytes; scales and vectors apart."""

        def own(each: int) -> int:
            return itemsize if each == OWN else each

        states = (*self.states, *self.matrix_states)
        return {
            "weights": own(self.weight),
            "gradients": own(self.gradient) + self.main_gradient,
            "master_weights": self.master,
            "optimizer": sum([own(each) for each in states]) + (0 if self.paged else self.states_8bit),
        }


BLOCK_8BIT = 256
"""Elements that share an fp32 scale in an 8-bit state (bitsandbytes 0.50.2, ``optim/optimizer.py``: ``blocksize``)."""

MIN_8BIT = 4096
"""Tensors of fewer elements keep fp32 states (there: ``min_8bit_size``)."""

TABLE_8BIT = 256 * FP32
"""Bytes of the 256 values of an 8-bit state, a table that all weights share (there: ``qmap1``, ``qmap2``)."""

PAGED_FROM = 100_000
"""A paged optimizer's states of fewer elements stay on the device (there: ``get_state_buffer``), as scales do."""

ZERO = "Rajbhandari et al. 2019 (ZeRO), arXiv:1910.02054, section 3.1"
MEGATRON = "Megatron-LM, docs of the distributed optimizer: bf16 weights, fp32 main gradients, 18 bytes per parameter"
TORCH = "torch.optim: a state has its parameter's dtype"
DETTMERS = "Dettmers et al. 2022, arXiv:2110.02861"
LV = "Lv et al. 2023 (LOMO), arXiv:2306.09782; torch's register_post_accumulate_grad_hook"

PAGED = "Dettmers et al. 2023 (QLoRA), arXiv:2305.14314, section 3: states in pages that the driver keeps on the host"

RECIPES: dict[str, Recipe] = {
    each.name: each
    for each in (
        Recipe("zero-16", ZERO, master=FP32, states=(FP32, FP32)),
        Recipe("megatron-18", MEGATRON, gradient=0, main_gradient=FP32, master=FP32, states=(FP32, FP32)),
        Recipe("grad-accum-20", "DeepSpeed, bf16 with fp32 gradient accumulation: 2 + 2 + 4 + 4 + 8",
               main_gradient=FP32, master=FP32, states=(FP32, FP32)),
        Recipe("fp32-adam", TORCH, weight=FP32, gradient=FP32, states=(FP32, FP32)),
        Recipe("bf16-adam", TORCH, states=(OWN, OWN)),
        Recipe("bf16-adam-in-backward", LV, states=(OWN, OWN), in_backward=True),
        Recipe("adam8bit", DETTMERS, states_8bit=2),
        Recipe("adam8bit-master", DETTMERS + ", with fp32 master weights", master=FP32, states_8bit=2),
        Recipe("adam8bit-in-backward", LV, states_8bit=2, in_backward=True),
        Recipe("paged-adam8bit", PAGED, states_8bit=2, paged=True),
        Recipe("paged-adam8bit-in-backward", f"{PAGED}; in backward: {LV}", states_8bit=2, in_backward=True,
               paged=True),
        Recipe("adafactor", "Shazeer & Stern 2018, arXiv:1804.04235: row and column means, no momentum", factored=True),
        Recipe("sgd", TORCH),
        Recipe("sgd-momentum", TORCH, states=(OWN,)),
        Recipe("sgd-in-backward", LV, in_backward=True),
        Recipe("rmsprop", TORCH, states=(OWN,)),
        Recipe("lion", "Chen et al. 2023, arXiv:2302.06675: momentum alone; fp32 master weights", master=FP32,
               states=(FP32,)),
        Recipe("muon", "Jordan et al. 2024 (kellerjordan.github.io/posts/muon): momentum of the layers' matrices, Adam "
               "for the rest; fp32 master weights", master=FP32, matrix_states=(FP32,), other_states=(FP32, FP32)),
        Recipe("fp8", "Peng et al. 2023 (FP8-LM), arXiv:2310.18313: 2 (fp16 master) + 1 + 1 + 2, and fp8 weights; "
               "scales, one per tensor, are left out",
               gradient=1, master=2, states=(1, 2)),
    )
}  # fmt: skip
"""Every recipe, by name: ``--recipe`` (or ``--optimizer``)."""

MIXED = frozenset({name for name, each in RECIPES.items() if each.master == FP32})
DEFAULT_RECIPE = {"bf16": "zero-16", "fp16": "zero-16", "fp32": "fp32-adam", "fp8": "fp8"}
"""The recipe that a ``--dtype`` takes unless another is named."""


class Quantized(NamedTuple):
    """Bytes of a quantised weight: ``bits`` per element, an fp32 scale per ``block`` elements (0: per output row, -1:
    per tensor), and the scales themselves in one byte with an fp32 scale per ``double`` of them (0: not). ``tables``
    are the bytes of the values that its codes stand for."""

    bits: int
    block: int
    double: int
    tables: int
    source: str


CODES_NF4, CODES_8BIT = 16 * FP32, 256 * FP32
"""Each nf4 weight has its own tables of the values (bitsandbytes 0.50.2, ``functional.py``: ``quantize_4bit`` makes one
of 16, and ``quantize_blockwise`` copies one of 256 for the scales)."""

QUANTIZED = {
    "nf4": Quantized(4, 64, 0, CODES_NF4, "Dettmers et al. 2023 (QLoRA), arXiv:2305.14314: 4 bits + 32/64"),
    "nf4-dq": Quantized(4, 64, 256, CODES_NF4 + CODES_8BIT, "QLoRA, double quantisation: 4 bits + 8/64 + 32/(64*256)"),
    "int8": Quantized(8, 0, 0, 0, "Dettmers et al. 2022 (LLM.int8), arXiv:2208.07339: a scale per output row"),
    "fp8": Quantized(8, -1, 0, 0, "Micikevicius et al. 2022, arXiv:2209.05433: a scale per tensor"),
}
"""Formats of frozen weights (``--quantize``): the matrices of the layers, as bitsandbytes replaces them."""

KV_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""Bytes of a cached element per ``--kv-dtype``; scales of int8 and fp8 caches are per tensor, and left out."""

TARGETS = ("query", "key", "value", "output", "gate", "up", "down")
ALIASES = {
    "q": "query", "k": "key", "v": "value", "o": "output", "q_proj": "query", "k_proj": "key", "v_proj": "value",
    "o_proj": "output", "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
ALL_LINEAR = "all"
DEFAULT_TARGETS = ("query", "value")
"""What LoRA adapts unless said: W_q and W_v (Hu et al. 2021, arXiv:2106.09685, section 4.2; PEFT's default)."""

MODES = ("train", "prefill", "decode")
RECOMPUTE = ("none", "selective", "full")
CHOSEN = ("ops", "save")
"""``--recompute ops:softmax,dropout``: run those again; ``save:query,up``: in each layer, run all but those again."""


class Running(NamedTuple):
    """How a model is run; the fields are the flags' long names."""

    mode: str = "train"
    context: Any = 0
    recompute: str = "none"
    every: int = 1
    recipe: str = "zero-16"
    loss: str = "eager"
    chunks: int = 1
    logit_copies: int | None = None
    adapters: Adapters | None = None
    quantize: str = ""
    reference_model: bool = False
    kv_dtype: str = ""
    overhead: int = 0
    device: str = ""
    chosen: tuple[str, ...] = ()

    def words(self) -> dict[str, Any]:
        """What a report says of it: the pass, the recipe and whatever was asked for."""
        every = f"every-{self.every}" if self.every != 1 else self.recompute
        if self.chosen:
            every = f"{self.recompute}:{','.join(self.chosen)}"
        said: dict[str, Any] = {"mode": self.mode}
        if self.mode == "train":
            said |= {"recipe": self.recipe, "recompute": every}
            said["loss"] = f"chunked={self.chunks}" if self.loss == "chunked" else self.loss
            if self.logit_copies is not None:
                said["logit_copies"] = self.logit_copies
            if self.adapters is not None:
                rank: dict[str, Any] = {
                    "lora_rank": self.adapters.rank, "lora_targets": list(self.adapters.targets),
                }  # fmt: skip
                if self.adapters.dropout:
                    rank["lora_dropout"] = self.adapters.dropout
                said |= rank if self.adapters.rank else {"frozen": True}
        else:
            said |= {"kv_dtype": self.kv_dtype, "context": self.context}
        said |= {key: getattr(self, key) for key in ("quantize", "reference_model", "device") if getattr(self, key)}
        return said


PLAIN = Running()

KEYWORDS = (
    "mode", "context", "recompute", "recipe", "optimizer", "loss", "logit_copies", "lora_rank", "lora_targets",
    "lora_dropout", "quantize", "frozen", "reference_model", "kv_dtype", "overhead", "device",
)  # fmt: skip
"""The keywords of :func:`running`."""

TRAINING = ("recompute", "recipe", "optimizer", "loss", "logit_copies", "frozen")
"""Those that say nothing of a pass without backward."""


def running(given: Mapping[str, Any], dtype: str) -> Running:
    """Read how a model is run from flags or keywords; :class:`InputError` for what cannot be."""
    mode = choice("--mode", given.get("mode") or "train", MODES)
    recompute, every, chosen = _recompute(given.get("recompute") or "none")
    loss, chunks = _loss(given.get("loss") or "eager")
    recipe = _recipe(given.get("recipe"), given.get("optimizer"), dtype)
    for name, label in (("context", "--context"), ("logit_copies", "--logit-copies")):
        if given.get(name) is not None:
            size(label, given[name], 0)
    for name in TRAINING if mode != "train" else ():
        if given.get(name):
            raise InputError(f"--{name.replace('_', '-')} goes with --mode train: nothing trains in --mode {mode}")
    if given.get("context") and mode != "decode":
        raise InputError("--context goes with --mode decode: tokens that are already cached")
    if loss != "eager" and given.get("logit_copies") is not None:
        raise InputError(f"--logit-copies goes with --loss eager: --loss {loss} never holds all logits")
    adapters = _adapters(given)
    quantize = given.get("quantize") or ""
    if quantize:
        choice("--quantize", quantize, QUANTIZED)
        if dtype == "fp8":
            raise InputError(f"--quantize {quantize} needs --dtype bf16, fp16 or fp32 to compute in, not 'fp8'")
        if mode == "train" and adapters is None:
            raise InputError(
                f"--quantize {quantize}: such weights do not train; add --lora-rank, --frozen or --mode prefill"
            )
    kv_dtype = given.get("kv_dtype") or dtype
    return Running(
        mode, given.get("context") or 0, recompute, every, recipe, loss, chunks, given.get("logit_copies"), adapters,
        quantize, bool(given.get("reference_model")), choice("--kv-dtype", kv_dtype, KV_ITEMSIZE),
        given.get("overhead") or 0, given.get("device") or "", chosen,
    )  # fmt: skip


def _recompute(text: str) -> tuple[str, int, tuple[str, ...]]:
    name, dash, number = text.partition("-")
    if name == "every" and dash and number.isdigit() and int(number) >= 1:
        return "full", int(number), ()
    name, colon, listed = text.partition(":")
    chosen = tuple(dict.fromkeys(each.strip() for each in listed.split(",")))
    if name in CHOSEN and colon and all(chosen):
        return name, 1, chosen
    if text not in RECOMPUTE:
        raise InputError(
            "--recompute must be one of none, selective, full, every-K (every-2), ops:A,B (ops:softmax,dropout) or "
            f"save:A,B, not {text[:40]!r}"
        )
    return text, 1, ()


def _loss(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if name == "chunked" and number.isdigit() and int(number) >= 1:
        return "chunked", int(number)
    if text not in ("eager", "fused"):
        raise InputError(f"--loss must be one of eager, fused, chunked=K (chunked=8), not {text[:40]!r}")
    return text, 1


def _recipe(recipe: str | None, optimizer: str | None, dtype: str) -> str:
    if recipe and optimizer and recipe != optimizer:
        raise InputError(f"--recipe {recipe[:40]} and --optimizer {optimizer[:40]} name two recipes; give one")
    name = recipe or optimizer or DEFAULT_RECIPE[dtype]
    if name not in RECIPES:
        raise UnknownName("recipe", name, RECIPES)
    if dtype == "fp32" and name in MIXED:
        raise InputError(f"--recipe {name} holds fp32 copies of 16-bit weights; with --dtype fp32 use fp32-adam")
    if name == "fp32-adam" and dtype != "fp32":
        raise InputError(f"--recipe fp32-adam trains in fp32; add --dtype fp32 (it is {dtype})")
    if (name == "fp8") != (dtype == "fp8"):
        raise InputError(f"--recipe {name} does not go with --dtype {dtype}; fp8 goes with fp8")
    return name


def _adapters(given: Mapping[str, Any]) -> Adapters | None:
    rank, text = given.get("lora_rank"), given.get("lora_targets")
    rate = given.get("lora_dropout")
    if rank is None:
        for flag, value in (("--lora-targets", text), ("--lora-dropout", rate)):
            if value:
                raise InputError(f"{flag} needs --lora-rank")
        return Adapters() if given.get("frozen") else None
    if given.get("frozen"):
        raise InputError("--lora-rank and --frozen both say what trains; give one")
    size("--lora-rank", rank)
    rate = 0.0 if rate is None else parse_probability(str(rate), "--lora-dropout")
    if (given.get("mode") or "train") != "train":
        rate = 0.0  # as every other dropout
    if not text:
        return Adapters(rank, DEFAULT_TARGETS, rate)
    if text == ALL_LINEAR:
        return Adapters(rank, TARGETS, rate)
    names = tuple(dict.fromkeys(ALIASES.get(each.strip(), each.strip()) for each in text.split(",")))
    for name in names:
        if name not in TARGETS:
            raise UnknownName("LoRA target", name, (*TARGETS, *ALIASES, ALL_LINEAR))
    return Adapters(rank, names, rate)


DROPOUTS = tuple(field for field in ModelConfig._fields if field.endswith("dropout"))


def as_run(cfg: ModelConfig, how: Running) -> ModelConfig:
    """The model as it is run: without dropout unless it trains."""
    changes: dict[str, Any] = dict.fromkeys(DROPOUTS, 0.0)
    return cfg if how.mode == "train" else cfg._replace(**changes)


def check_adapters(adapters: Adapters | None, graph: Graph, trainable: Any) -> None:
    """Raise :class:`InputError` where an adapter's target is no layer of the model, or nothing is left to train."""
    if adapters is None:
        return
    if adapters.rank == 0 and trainable == 0:
        raise InputError("--frozen leaves nothing to train: this model has no head of its own (--untied gives it one)")
    missing = [name for name in adapters.targets if name not in graph.adapted]
    if missing and adapters.targets != TARGETS:
        plain = [op for op in graph.ops if op.kind == "linear" and op.weights[0].axes[:1] != EXPERT_AXIS]
        has = sorted({op.path.rpartition("/")[2] for op in plain} & {*TARGETS})
        experts = any([w.axes[:1] == EXPERT_AXIS for op in graph.ops for w in op.weights])
        name = f"{missing[0]!r} that takes an adapter (experts take none)" if experts else repr(missing[0])
        raise InputError(f"--lora-targets: this model's layers have no {name}; they have {', '.join(has)}")
