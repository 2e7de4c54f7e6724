"""How work becomes FLOPs: the named conventions, the only place where a MAC is worth two FLOPs.

Two kinds. An :class:`OpConvention` prices the ops of a graph one by one; a :class:`FormulaConvention` is a published
formula over parameters, layers and lengths. Both yield :class:`Line` s, so every report reads them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from tfcost.blocks import Run
from tfcost.config import ModelConfig
from tfcost.errors import InputError, UnknownName
from tfcost.graph import Graph, Op, Size, div, least

FLOPS_PER_MAC = 2  # one multiplication and one addition

BADDBMM = "baddbmm"
"""QKᵀ and the position bias in one call (BLOOM), which some counters do not know."""

ATTENTION_KINDS = frozenset({"scores", BADDBMM, "weighted_sum"})
"""The products over the score square: QKᵀ and PV."""

MIXING_KINDS = ATTENTION_KINDS | {"mixing"}
"""These, and the products that take their place where there is no square."""

GRADIENTS = 2  # both operands of QKᵀ and PV are activations with a gradient, each a product of the same size


class Line(NamedTuple):
    """Priced work: one op (or one term of a formula), run ``copies`` times; the figures are for one of them.

    ``recompute`` is counted beyond forward and backward: activations computed again, not a gradient.
    """

    path: str
    copies: Size
    macs: Size
    forward: Size
    backward: Size
    recompute: Size = 0
    attention: bool = False


class Facts(NamedTuple):
    """What a formula convention may use: the model, the pass, and the parameter counts by their report keys."""

    cfg: ModelConfig
    run: Run
    parameters: Mapping[str, Size]

    @property
    def tokens(self) -> Size:
        """Tokens of a pass, source and target."""
        source = 0 if self.run.src_len is None or self.cfg.arch != "encoder-decoder" else self.run.src_len
        return self.run.batch * (self.run.seq_len + source)

    def one_stack(self, convention: str) -> Size:
        """The layers of the one stack; an :class:`InputError` for a model that has two."""
        if self.cfg.arch == "encoder-decoder":
            raise InputError(f"--convention {convention} is defined for models of one stack, not for encoder-decoders")
        if self.cfg.family not in ("", "image") or self.cfg.attention_kind in ("linear", "lsh"):
            raise InputError(f"--convention {convention} is defined for layers that attend to all tokens or a window")
        return self.cfg.layers

    def one_dense_stack(self, convention: str) -> Size:
        """:meth:`one_stack` of a model without experts, whose feed-forwards all do the same work."""
        if self.cfg.experts is not None:
            raise InputError(f"--convention {convention} is defined for dense models, not for mixtures of experts")
        return self.one_stack(convention)

    @property
    def keys(self) -> Size:
        """Keys that a token attends to in all layers together: N in each, at most w in those with a window."""
        cfg, n = self.cfg, self.run.seq_len
        if cfg.window is None:
            return cfg.layers * n
        local = cfg.layers if cfg.local_layers is None else cfg.local_layers
        return local * least(n, cfg.window) + (cfg.layers - local) * n


class OpConvention(NamedTuple):
    """Prices each op: ``per_mac`` per multiply-accumulate, plus ``pointwise[kind]`` per element of other ops.

    ``counts`` and ``leaves_out`` say it in words; ``source`` says whose way to count it is.
    """

    name: str
    counts: str
    leaves_out: str
    source: str
    per_mac: int = FLOPS_PER_MAC
    pointwise: Mapping[str, int] = MappingProxyType({})
    causal_half: bool = False
    fused_attention: bool = True
    baddbmm: bool = True
    kernel_recompute: bool = False
    backward: bool = True

    def lines(self, graph: Graph, facts: Facts) -> list[Line]:
        """One line per op that this convention counts at all."""
        return [line for op in graph.ops if (line := self.price(op, facts.run.attention != "eager")) is not None]

    def price(self, op: Op, fused: bool = False) -> Line | None:
        """The line of one op; None where the convention does not count it. ``fused``: attention is one call."""
        each = self.pointwise.get(op.kind, 0)
        attention = op.kind in ATTENTION_KINDS
        recompute: Size = self.per_mac * op.recompute.macs if self.kernel_recompute else 0
        uncounted = (attention and fused and not self.fused_attention) or (op.kind == BADDBMM and not self.baddbmm)
        if op.forward.macs == 0 or uncounted:
            if not each and not recompute:
                return None
            work = each * op.forward.elements
            return Line(op.path, op.copies, 0, work, each * op.backward.elements + recompute if self.backward else 0)
        macs = op.forward.macs
        forward, backward = self.per_mac * macs, self.per_mac * op.backward.macs
        if self.causal_half and op.causal is not None:
            # Half of the points at FLOPS_PER_MAC each: one FLOP per point, so that an odd square stays an integer.
            # Half of an odd number of points has no whole number of MACs: None, not rounded.
            forward = op.causal
            backward = GRADIENTS * forward
            macs = half(forward)
        forward += each * op.forward.elements
        backward += each * op.backward.elements
        mixing = op.kind in MIXING_KINDS
        return Line(op.path, op.copies, macs, forward, backward if self.backward else 0, 0, mixing)


class FormulaConvention(NamedTuple):
    """A published formula: ``formula(facts)`` gives its terms as (name, forward, backward, recompute)."""

    name: str
    counts: str
    leaves_out: str
    source: str
    formula: Callable[[Facts], list[tuple[str, Size, Size, Size]]]

    def lines(self, graph: Graph, facts: Facts) -> list[Line]:
        """One line per term of the formula."""
        return [
            Line(name, 1, 0, forward, backward, recompute, name == "attention")
            for name, forward, backward, recompute in self.formula(facts)
        ]


Convention: TypeAlias = "OpConvention | FormulaConvention"


def _six_p(name: str, key: str, words: str) -> FormulaConvention:
    def formula(facts: Facts) -> list[tuple[str, Size, Size, Size]]:
        work = 2 * facts.parameters[key] * facts.tokens  # one MAC per parameter and token
        return [("parameters", work, 2 * work, 0)]

    return FormulaConvention(
        name,
        f"6 P per token, P = {words}",
        "attention's score square",
        "Kaplan et al. 2020, arXiv:2001.08361, section 2.1",
        formula,
    )


def _palm(name: str, key: str, words: str) -> FormulaConvention:
    def formula(facts: Facts) -> list[tuple[str, Size, Size, Size]]:
        cfg = facts.cfg
        facts.one_stack(name)
        work = 2 * facts.parameters[key] * facts.tokens
        value_dim = cfg.head_dim if cfg.value_dim is None else cfg.value_dim
        square = 2 * cfg.heads * (cfg.head_dim + value_dim) * facts.keys * facts.tokens
        return [("parameters", work, 2 * work, 0), ("attention", square, 2 * square, 0)]

    return FormulaConvention(
        name,
        f"6 P + 12 l h d_k N per token (at most w for N in a layer with a window), P = {words}",
        "nothing of the matmuls (counts biases and norms as matmuls)",
        "Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B",
        formula,
    )


def _megatron_terms(facts: Facts, name: str) -> tuple[Size, Size, Size]:
    """Forward layers 24blNd², attention 4blN²d and logits 2bNdV: a third of 72blNd²(1 + N/6d + V/12ld)."""
    cfg, run = facts.cfg, facts.run
    tokens, layers = run.batch * run.seq_len, facts.one_dense_stack(name)
    vocab = 0 if cfg.vocab is None else cfg.vocab
    return (
        24 * tokens * layers * cfg.hidden**2,
        4 * tokens * layers * run.seq_len * cfg.hidden,
        2 * tokens * cfg.hidden * vocab,
    )


def _megatron(facts: Facts) -> list[tuple[str, Size, Size, Size]]:
    linear, square, logits = _megatron_terms(facts, "megatron")
    return [("layers", linear, 2 * linear, 0), ("attention", square, 2 * square, 0), ("logits", logits, 2 * logits, 0)]


def _megatron_recompute(facts: Facts) -> list[tuple[str, Size, Size, Size]]:
    linear, square, logits = _megatron_terms(facts, "megatron-recompute")
    return [
        ("layers", linear, 2 * linear, linear),
        ("attention", square, 2 * square, square),
        ("logits", logits, 2 * logits, 0),
    ]


def _korthikanti(facts: Facts) -> list[tuple[str, Size, Size, Size]]:
    linear, square, logits = _megatron_terms(facts, "korthikanti-eq8")
    # Printed: 72bLsh²(1 + s/3h + v/12hL) hardware against 1 + s/6h for the model, so recomputation is s/6h of 72bLsh²,
    # three times attention's forward. (The text's own sum, s/6h + s/18h, would be once.)
    return [
        ("layers", linear, 2 * linear, 0),
        ("attention", square, 2 * square, 3 * square),
        ("logits", logits, 2 * logits, 0),
    ]


def _mosaic(facts: Facts) -> list[tuple[str, Size, Size, Size]]:
    work = 2 * facts.parameters["active_parameters"] * facts.tokens
    square = 4 * facts.one_stack("mosaic") * facts.cfg.hidden * facts.run.seq_len * facts.tokens
    return [("parameters", work, 2 * work, work), ("attention", square, 2 * square, square)]


def _chinchilla(facts: Facts, name: str = "chinchilla") -> list[tuple[str, Size, Size, Size]]:
    """Appendix F, forward per sequence; backward is twice that."""
    cfg, run = facts.cfg, facts.run
    n, d, width = run.seq_len, cfg.hidden, cfg.heads * cfg.head_dim
    times, vocab = run.batch * facts.one_dense_stack(name), 0 if cfg.vocab is None else cfg.vocab
    terms = [
        ("embedding", run.batch * 2 * n * vocab * d),
        ("query_key_value", times * 2 * 3 * n * d * width),
        ("attention", times * (2 * n * n * width + 2 * n * n * width)),
        ("softmax", times * 3 * cfg.heads * n * n),
        ("output", times * 2 * n * width * d),
        ("mlp", times * 2 * n * (d * cfg.ffn_hidden + d * cfg.ffn_hidden)),
        ("logits", run.batch * 2 * n * d * vocab),
    ]
    return [(name, forward, 2 * forward, 0) for name, forward in terms]


def _chinchilla_a4(facts: Facts) -> list[tuple[str, Size, Size, Size]]:
    return [term for term in _chinchilla(facts, "chinchilla-a4") if term[0] not in ("embedding", "logits")]


def _bigscience(facts: Facts) -> list[tuple[str, Size, Size, Size]]:
    # P is l(12d² + 13d): the throughputs that BigScience printed come out only without embeddings.
    work = 2 * facts.parameters["active_non_embedding_parameters"] * facts.tokens
    return [("parameters", work, 2 * work, work)]


def _gpt3(facts: Facts) -> list[tuple[str, Size, Size, Size]]:
    # In an encoder-decoder a token passes through one of the two stacks: half of the parameters, so 3 P per token.
    work = 2 * facts.parameters["active_parameters"] * facts.tokens
    if facts.cfg.arch == "encoder-decoder":
        work = div(work, 2, "parameters times tokens", "2")
    return [("parameters", work, 2 * work, 0)]


DOCUMENT = OpConvention(
    "document",
    "2 FLOPs per multiply-accumulate of every matmul, full score square; backward twice forward",
    "norms, softmax, activations, biases, residual sums, embedding lookups",
    "24bNd² + 4bN²d per layer + 2bNdV; Narayanan et al. 2021, arXiv:2104.04473, appendix",
)

_CONVENTIONS: tuple[Convention, ...] = (
    DOCUMENT,
    OpConvention(
        "causal",
        "as document, with exactly half of each causal score square (N²/2 products)",
        "as document, and what the causal mask hides",
        "Dao 2023 (FlashAttention-2), arXiv:2307.08691, section 4.1",
        causal_half=True,
    ),
    OpConvention(
        "pointwise",
        "as document, and per element: softmax 5, norm 5, activation 8, dropout 4",
        "biases, residual sums, embedding lookups",
        "Clark et al. 2020 (ELECTRA), google-research/electra, flops_computation.py",
        pointwise={
            "softmax": 5,
            "layernorm": 5,
            "rmsnorm": 5,
            "dropout": 4,
            **dict.fromkeys(("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh"), 8),
        },
    ),
    _six_p("6p-all", "parameters", "all parameters"),
    _six_p("6p-no-input-embedding", "active_non_input_embedding_parameters", "without tables that are only looked up"),
    _six_p("6p-non-embedding", "active_non_embedding_parameters", "without embeddings and head"),
    _six_p("6p-active", "active_parameters", "the parameters that a token uses (of experts, the chosen ones)"),
    _palm("palm-all", "active_parameters", "all parameters that a token uses"),
    _palm("palm-no-input-embedding", "active_non_input_embedding_parameters", "without tables that are only looked up"),
    _palm("palm-non-embedding", "active_non_embedding_parameters", "without embeddings and head"),
    FormulaConvention(
        "megatron",
        "72 b l N d² (1 + N/6d + V/12ld) per step",
        "norms; any other shape than d_ff = 4d, h d_k = d",
        "Narayanan et al. 2021, arXiv:2104.04473, equation 3, without recomputation",
        _megatron,
    ),
    FormulaConvention(
        "megatron-recompute",
        "96 b l N d² (1 + N/6d + V/16ld) per step: layers computed twice, logits once",
        "norms; any other shape than d_ff = 4d, h d_k = d",
        "Narayanan et al. 2021, arXiv:2104.04473, equation 3",
        _megatron_recompute,
    ),
    FormulaConvention(
        "korthikanti-eq8",
        "72 b l N d² (1 + N/3d + V/12ld): selective recomputation, as printed",
        "norms (its own text sums to N/6d + N/18d)",
        "Korthikanti et al. 2022, arXiv:2205.05198, equation 8",
        _korthikanti,
    ),
    FormulaConvention(
        "mosaic",
        "6 P + 12 l d N per token; hardware 4/3 of it, logits too",
        "nothing of the matmuls (counts embeddings as matmuls)",
        "MosaicML llm-foundry, scripts/train/benchmarking",
        _mosaic,
    ),
    FormulaConvention(
        "chinchilla",
        "appendix F: matmuls, embedding as a matmul, softmax 3 per score; backward twice forward",
        "norms, activations; a gated third matrix",
        "Hoffmann et al. 2022, arXiv:2203.15556, appendix F",
        _chinchilla,
    ),
    FormulaConvention(
        "chinchilla-a4",
        "as chinchilla, without embedding and logits: what the paper's table A4 shows",
        "embedding, logits, norms, activations",
        "Hoffmann et al. 2022, arXiv:2203.15556, table A4",
        _chinchilla_a4,
    ),
    FormulaConvention(
        "bigscience-8p",
        "8 P per token: 6 P and 2 P for recomputation, P without embeddings",
        "attention's score square",
        "BigScience, Megatron-DeepSpeed README (BLOOM)",
        _bigscience,
    ),
    FormulaConvention(
        "gpt3-d1",
        "6 P per token (3 P in an encoder-decoder)",
        "attention's score square",
        "Brown et al. 2020, arXiv:2005.14165, appendix D",
        _gpt3,
    ),
    OpConvention(
        "fvcore",
        "MACs of matmuls, and 5 per element of a LayerNorm; forward only",
        "softmax, RMSNorm, activations; fused attention, baddbmm and the encoder fast path (no handler)",
        "fvcore 0.1.5, FlopCountAnalysis",
        per_mac=1,
        pointwise={"layernorm": 5},
        fused_attention=False,
        baddbmm=False,
        backward=False,
    ),
    OpConvention(
        "torch",
        "2 FLOPs per multiply-accumulate of matmuls; flash backward 2.5x (it recomputes QKᵀ)",
        "everything but matmuls and convolutions; CPU flash attention",
        "torch.utils.flop_counter.FlopCounterMode, torch 2.13",
        kernel_recompute=True,
    ),
)

CONVENTIONS: dict[str, Convention] = {convention.name: convention for convention in _CONVENTIONS}


PLAIN_SHAPE = ("megatron", "megatron-recompute", "korthikanti-eq8")
"""The conventions that are formulas in d alone."""


def misfit(convention: Convention, cfg: ModelConfig) -> str:
    """Why a formula in d alone is not this model's cost; empty where it is."""
    if convention.name not in PLAIN_SHAPE:
        return ""
    other = []
    if cfg.ffn != "mlp" or cfg.ffn_hidden != 4 * cfg.hidden:
        other.append(f"feed-forward {cfg.ffn} of {cfg.ffn_hidden}")
    if cfg.heads * cfg.head_dim != cfg.hidden:
        other.append(f"h d_k of {cfg.heads * cfg.head_dim}")
    if cfg.kv_heads != cfg.heads:
        other.append(f"{cfg.kv_heads} key/value heads")
    if not other:
        return ""
    return f"--convention {convention.name} is a formula for d_ff = 4d and h d_k = d; this model has " + ", ".join(
        other
    )


def half(flops: Size) -> Size | None:
    """FLOPs as MACs; None where an odd number of them is no whole number of MACs."""
    if not isinstance(flops, int):
        return div(flops, FLOPS_PER_MAC, "FLOPs", "2")
    macs, rest = divmod(flops, FLOPS_PER_MAC)
    return None if rest else macs


def convention(name: str) -> Convention:
    """The convention of this name; :class:`UnknownName` with close matches where there is none."""
    if not isinstance(name, str) or name not in CONVENTIONS:
        raise UnknownName("--convention", str(name), CONVENTIONS)
    return CONVENTIONS[name]
