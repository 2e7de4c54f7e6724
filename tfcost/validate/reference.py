"""The reference Transformer: every structure that tfcost prices, as one complete and readable PyTorch program.

Notation (shapes in brackets): b sequences, N tokens (T in a decoder, S in an encoder), M keys, d hidden width, h query
heads, h_kv key/value heads, d_k width of a head, d_ff feed-forward width, V vocabulary rows.

Module names are the cost graph's paths, once layer indices are removed: ``layer.0.attention.scores`` here is
``layer/attention/scores`` there. Even the smallest steps are modules for that reason: counters report per module.

What is kept for the backward pass is exactly what the formulas say, and no more. Per plain layer (GELU, d_ff = 4d,
eager attention, dropout on, bf16, 1-byte masks): ``34 b N d + 5 b N^2 h`` bytes, and ``8 b N`` for the two norms'
statistics on a CPU. It takes care: scores are scaled by scaling the queries with a number (a product with a number
keeps nothing), masks are added (a sum keeps nothing), and heads are split and merged by views.

Masks follow ``nn.Transformer``: a boolean True hides, a floating-point mask is added (`tfcost.validate.masks` has the
table of senses).

Sources: Vaswani et al. 2017 (the model); Xiong et al. 2020 (pre-norm); Shazeer 2019 and Ainslie et al. 2023 (fewer
key/value heads); Shazeer 2020 (gated feed-forward); Zhang and Sennrich 2019 (RMSNorm).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tfcost.errors import InputError
from tfcost.validate.attention import (
    Dropout,
    FusedAttention,
    MultiHeadAttention,
    Scores,
    Softmax,
    WeightedSum,
    batch_major,
    check_choice,
    check_hidden,
    check_sizes,
    linear,
)
from tfcost.validate.layers import (
    POSITIONS,
    DecoderLayer,
    Embedding,
    EncoderLayer,
    FeedForward,
    Product,
    TransformerLayer,
    make_norm,
)
from tfcost.validate.masks import additive_mask, causal_mask, length_mask, merge_masks, padding_mask, visible_mask
from tfcost.validate.positions import LearnedPositions, RotaryPositions, SinusoidalPositions, sinusoidal_table

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Dropout",
    "Embedding",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "FusedAttention",
    "LearnedPositions",
    "MultiHeadAttention",
    "Product",
    "RotaryPositions",
    "Scores",
    "SinusoidalPositions",
    "Softmax",
    "Transformer",
    "WeightedSum",
    "additive_mask",
    "attention_maps",
    "causal_mask",
    "length_mask",
    "padding_mask",
    "sinusoidal_table",
    "visible_mask",
]

ARCHITECTURES = ("decoder", "encoder", "encoder-decoder")


class _Stack(nn.Module):
    """What encoder, decoder and the single-stack models share: embedding, layers and final norm, each where asked."""

    embedding: Embedding | None
    layer: nn.ModuleList
    final_norm: nn.Module | None

    def _build(
        self,
        make: type[TransformerLayer],
        layers: int,
        hidden: int,
        heads: int,
        *,
        causal: bool,
        vocab: int | None = None,
        positions: str = "sinusoidal",
        max_positions: int | None = None,
        scale_embedding: bool | None = None,
        embedding_dropout: float = 0.0,
        norm: str = "layernorm",
        final_norm: bool = False,
        bias: bool = True,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        check_sizes(layers=layers)
        check_choice("positions", positions, POSITIONS)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.hidden, self.heads, self.causal, self.batch_first = hidden, heads, causal, batch_first
        self.embedding = None
        if vocab is not None:
            self.embedding = Embedding(
                vocab,
                hidden,
                positions=positions,
                max_positions=max_positions,
                scale=positions == "sinusoidal" if scale_embedding is None else scale_embedding,
                dropout=embedding_dropout,
                **factory,
            )
        options |= {"norm": norm, "bias": bias, "rotary": positions == "rotary", "max_positions": max_positions}
        self.layer = nn.ModuleList(make(hidden, heads, **options, **factory) for _ in range(layers))
        self.final_norm = make_norm(norm, hidden, bias=bias, **factory) if final_norm else None

    def _run(
        self,
        inputs: Tensor,
        mask: Tensor | None,
        key_padding_mask: Tensor | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        x = batch_major(inputs, self.batch_first)
        if self.embedding is not None:
            x = self.embedding(x)
        check_hidden("input", x, self.hidden)
        # Masks are merged once, for all layers; a causal mask alone stays a flag, which fused kernels understand.
        own: dict[str, Any] = {"is_causal": self.causal}
        if mask is not None or key_padding_mask is not None:
            own = {"mask": self._merge(mask, key_padding_mask, x, x, self.causal)}
        other: dict[str, Any] = {}
        if memory is not None:
            memory = batch_major(memory, self.batch_first)
            check_hidden("memory", memory, self.hidden)
            if memory.shape[0] != x.shape[0]:
                raise InputError(f"batches differ: target {x.shape[0]}, memory {memory.shape[0]}")
            other = {
                "memory": memory,
                "memory_mask": self._merge(memory_mask, memory_key_padding_mask, x, memory, False),
            }
        for layer in self.layer:
            x = layer(x, **own, **other)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if self.batch_first else x.transpose(0, 1)

    def _merge(
        self, mask: Tensor | None, padding: Tensor | None, x: Tensor, memory: Tensor, causal: bool
    ) -> Tensor | None:
        sizes = {"batch": x.shape[0], "heads": self.heads, "queries": x.shape[1], "keys": memory.shape[1]}
        return merge_masks(mask, padding, **sizes, dtype=x.dtype, causal=causal, device=x.device)


class Encoder(_Stack):
    """``layers`` encoder layers: ids ``[b, S]`` (with ``vocab``) or vectors ``[b, S, d]`` -> ``[b, S, d]``.

    Other options are `EncoderLayer`'s and `Transformer`'s. Submodules: embedding, layer.<i>, final_norm. FLOPs
    ``l (24bSd^2 + 4bS^2d)``. Sees everything unless ``causal=True``.
    """

    def __init__(self, layers: int, hidden: int, heads: int, *, causal: bool = False, **options: Any) -> None:
        super().__init__()
        self._build(EncoderLayer, layers, hidden, heads, causal=causal, **options)

    def forward(self, inputs: Tensor, *, mask: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        return self._run(inputs, mask, key_padding_mask)


class Decoder(_Stack):
    """``layers`` decoder layers over a memory ``[b, S, d]``: ids ``[b, T]`` or vectors ``[b, T, d]`` -> ``[b, T, d]``.

    Other options are `DecoderLayer`'s and `Transformer`'s. Submodules: embedding, layer.<i>, final_norm. FLOPs
    ``l (28bTd^2 + 4bSd^2 + 4bT^2d + 4bTSd)``. Causal unless ``causal=False``.
    """

    def __init__(self, layers: int, hidden: int, heads: int, *, causal: bool = True, **options: Any) -> None:
        super().__init__()
        self._build(DecoderLayer, layers, hidden, heads, causal=causal, **options)

    def forward(
        self,
        inputs: Tensor,
        memory: Tensor,
        *,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        return self._run(inputs, mask, key_padding_mask, memory, memory_mask, memory_key_padding_mask)


class Transformer(_Stack):
    """A whole model: decoder-only, encoder-only or encoder-decoder.

    With ``vocab`` the inputs are ids ``[b, N]`` and, with ``head``, the output is logits ``[b, N, V]``. Without it
    there is neither embedding nor head: inputs and output are vectors ``[b, N, d]``, taken as they are (no positions
    are added; rotary ones still turn queries and keys). In an encoder-decoder ``src_vocab=None`` means one table for
    both sides.

    Arguments are named as the fields of a tfcost config. Where they are None: ``encoder_layers`` and
    ``decoder_layers`` are ``layers``; ``kv_heads`` is ``heads``; ``head_dim`` is ``hidden / heads``; ``ffn_hidden`` is
    ``4 hidden``; ``attention_dropout`` is ``dropout`` (which acts on every residual branch); ``causal`` is True for
    decoder stacks; ``scale_embedding`` (rows times sqrt(d)) is True with sinusoidal positions, as Vaswani et al. have
    it, and False otherwise, as BERT, GPT-2 and Llama have it. The head has no bias, and shares the (target) table
    where ``tied``.

    Submodules: embedding (token, position, dropout), layer.<i>, final_norm, head; an encoder-decoder has the first
    three below encoder and below decoder. FLOPs ``l (24bNd^2 + 4bN^2d) + 2bNdV``, parameters ``l (12d^2 + 13d) + Vd``
    (tied; untied another ``Vd``). Matrices are Xavier-uniform, biases zero, embeddings normal with variance 1/d.

    Raises ``InputError`` (one line) for sizes, names and inputs that do not fit.
    """

    def __init__(
        self,
        *,
        arch: str = "decoder",
        hidden: int,
        heads: int,
        layers: int | None = None,
        encoder_layers: int | None = None,
        decoder_layers: int | None = None,
        vocab: int | None = None,
        src_vocab: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn_hidden: int | None = None,
        ffn: str = "mlp",
        activation: str = "gelu",
        norm: str = "layernorm",
        pre_norm: bool = True,
        final_norm: bool = False,
        bias: bool = True,
        tied: bool = True,
        head: bool = True,
        positions: str = "sinusoidal",
        max_positions: int | None = None,
        scale_embedding: bool | None = None,
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        ffn_dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        attention: str = "eager",
        causal: bool | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("arch", arch, ARCHITECTURES)
        common: dict[str, Any] = {
            "hidden": hidden,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "ffn_hidden": ffn_hidden,
            "ffn": ffn,
            "activation": activation,
            "norm": norm,
            "pre_norm": pre_norm,
            "final_norm": final_norm,
            "bias": bias,
            "positions": positions,
            "max_positions": max_positions,
            "scale_embedding": scale_embedding,
            "dropout": dropout,
            "attention_dropout": attention_dropout,
            "ffn_dropout": ffn_dropout,
            "embedding_dropout": embedding_dropout,
            "attention": attention,
            "device": device,
            "dtype": dtype,
        }
        self.hidden, self.batch_first = hidden, batch_first
        self.encoder: Encoder | None = None
        self.decoder: Decoder | None = None
        if arch == "encoder-decoder":
            sides = {"layers or encoder_layers": encoder_layers, "layers or decoder_layers": decoder_layers}
            depths = [_given(name, layers if depth is None else depth) for name, depth in sides.items()]
            if src_vocab is not None and vocab is None:
                raise InputError("src_vocab needs vocab, the target's vocabulary")
            self.encoder = Encoder(depths[0], vocab=vocab if src_vocab is None else src_vocab, **common)
            self.decoder = Decoder(depths[1], vocab=vocab, causal=causal is not False, **common)
            table = self.decoder.embedding
            if table is not None and self.encoder.embedding is not None and src_vocab is None:
                self.encoder.embedding.token.weight = table.token.weight
        else:
            for name, given in (
                ("encoder_layers", encoder_layers),
                ("decoder_layers", decoder_layers),
                ("src_vocab", src_vocab),
            ):
                if given is not None:
                    raise InputError(f"{name} is for arch='encoder-decoder', not {arch!r}")
            causal = arch == "decoder" if causal is None else causal
            self._build(
                EncoderLayer, _given("layers", layers), vocab=vocab, causal=causal, batch_first=batch_first, **common
            )
            table = self.embedding
        self.head: nn.Linear | nn.Conv1d | None = None
        if head and table is not None and vocab is not None:
            self.head = linear(hidden, vocab, bias=False, device=device, dtype=dtype)
            if tied:
                self.head.weight = table.token.weight

    def forward(
        self,
        source: Tensor,
        target: Tensor | None = None,
        *,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits or vectors. Arguments are ``nn.Transformer``'s; a single stack takes the ``source`` ones only.

        Unlike there, ``memory_key_padding_mask=None`` means ``src_key_padding_mask``: padding of the source is padding
        for whoever reads it.
        """
        if self.encoder is None or self.decoder is None:
            for given in (target, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask):
                if given is not None:
                    raise InputError("a single stack has no target and no memory; it takes source and its masks")
            return self._project(self._run(source, src_mask, src_key_padding_mask))
        if target is None:
            raise InputError("an encoder-decoder needs source and target")
        source, target = (batch_major(t, self.batch_first) for t in (source, target))
        if source.shape[0] != target.shape[0]:
            raise InputError(f"batches differ: source {source.shape[0]}, target {target.shape[0]}")
        if memory_key_padding_mask is None:
            memory_key_padding_mask = src_key_padding_mask
        memory = self.encoder(source, mask=src_mask, key_padding_mask=src_key_padding_mask)
        x = self.decoder(
            target,
            memory,
            mask=tgt_mask,
            key_padding_mask=tgt_key_padding_mask,
            memory_mask=memory_mask,
            memory_key_padding_mask=memory_key_padding_mask,
        )
        x = self._project(x)
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, x: Tensor) -> Tensor:
        if self.head is None:
            return x
        logits: Tensor = self.head(x)
        return logits


def attention_maps(model: nn.Module, *inputs: Tensor, **masks: Tensor) -> dict[str, Tensor]:
    """Every attention map of one pass: the module's name (``"decoder.layer.0.cross_attention"``) -> ``[b, h, N, M]``.

    Taken in eval mode and before dropout, so that every row sums to one (a row that sees nothing, to zero).
    Raises ``InputError`` for ``attention="sdpa"``: fused kernels never form the map. The weights fit an eager model.
    """
    maps: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, given, output: maps.update({name: output.detach()})

    names = {name: module for name, module in model.named_modules() if isinstance(module, Softmax)}
    if not names:
        raise InputError("attention maps exist only with attention='eager'; load the weights into such a model")
    handles = [module.register_forward_hook(keep(name.rpartition(".")[0])) for name, module in names.items()]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(*inputs, **masks)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return maps


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise InputError(f"{name} is missing")
    return value
