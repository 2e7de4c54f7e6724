"""Layers of the reference Transformer: embedding, feed-forward, norms, and the encoder's and decoder's layer.

`tfcost.validate.reference` builds the model from them and has the notation, the naming and the sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tfcost.errors import InputError
from tfcost.validate.attention import (
    Dropout,
    MultiHeadAttention,
    batch_major,
    check_choice,
    check_hidden,
    check_sizes,
    linear,
)
from tfcost.validate.positions import LearnedPositions, SinusoidalPositions

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}
POSITIONS = ("sinusoidal", "learned", "rotary", "none")
NORMS = ("layernorm", "rmsnorm")
NORM_EPSILON = 1e-5
"""What both norms add before the square root; the default of ``nn.LayerNorm``."""


def make_norm(
    norm: str,
    hidden: int,
    *,
    bias: bool,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """``(x - mean) / sqrt(var + eps) * w + b`` (2d parameters) or ``x / sqrt(mean(x^2) + eps) * w`` (d)."""
    check_sizes(hidden=hidden)
    check_choice("norm", norm, NORMS)
    if norm == "rmsnorm":
        return nn.RMSNorm((hidden,), eps=NORM_EPSILON, device=device, dtype=dtype)
    return nn.LayerNorm((hidden,), eps=NORM_EPSILON, bias=bias, device=device, dtype=dtype)


class Product(nn.Module):
    """Element by element ``a * b``; keeps both."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


class FeedForward(nn.Module):
    """``W_down f(W_up x)`` (mlp) or ``W_down (f(W_gate x) * W_up x)`` (glu): ``[b, N, d] -> [b, N, d]``.

    FLOPs ``4 b N d d_ff`` (glu ``6 b N d d_ff``), parameters ``2 d d_ff + d_ff + d``. ``ffn_dropout`` acts before the
    last projection, ``dropout`` after it (a residual branch's). ``conv=True`` writes each projection as a convolution
    of width 1 over the sequence: the same function, parameters and FLOPs. Submodules: up, gate (glu), activation,
    product (glu), dropout, down, output_dropout.

    Raises ``InputError`` for a wrong width. Source: Vaswani et al. 2017, section 3.3; Shazeer 2020 for glu.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int | None = None,
        *,
        ffn: str = "mlp",
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        ffn_dropout: float = 0.0,
        conv: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ffn_hidden = 4 * hidden if ffn_hidden is None else ffn_hidden
        check_sizes(hidden=hidden, ffn_hidden=ffn_hidden)
        check_choice("ffn", ffn, ("mlp", "glu"))
        check_choice("activation", activation, ACTIVATIONS)
        self.hidden, self.conv = hidden, conv
        factory: dict[str, Any] = {"bias": bias, "conv": conv, "device": device, "dtype": dtype}
        self.up = linear(hidden, ffn_hidden, **factory)
        self.gate = linear(hidden, ffn_hidden, **factory) if ffn == "glu" else None
        self.activation = ACTIVATIONS[activation]()
        self.product = Product() if ffn == "glu" else None
        self.dropout = Dropout(ffn_dropout)
        self.down = linear(ffn_hidden, hidden, **factory)
        self.output_dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        check_hidden("input", x, self.hidden)
        if self.conv:
            x = x.transpose(1, 2)
        if self.gate is None or self.product is None:
            inner = self.activation(self.up(x))
        else:
            inner = self.product(self.activation(self.gate(x)), self.up(x))
        out: Tensor = self.output_dropout(self.down(self.dropout(inner)))
        return out.transpose(1, 2) if self.conv else out


class Embedding(nn.Module):
    """Token rows, times ``sqrt(d)`` where asked, plus positions, then dropout: ids ``[b, N] -> [b, N, d]``.

    A look-up, so no matmul FLOPs; parameters ``V d`` (and ``max_positions d`` where positions are learned).
    Submodules: token, position (sinusoidal or learned), dropout. Rows start normal with variance ``1/d``.
    Raises ``InputError`` for ids that are not integers ``[b, N]``. Source: Vaswani et al. 2017, section 3.4.
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        *,
        positions: str = "sinusoidal",
        max_positions: int | None = None,
        scale: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(vocab=vocab, hidden=hidden)
        check_choice("positions", positions, POSITIONS)
        self.scale = math.sqrt(hidden) if scale else 1.0
        self.token = nn.Embedding(vocab, hidden, device=device, dtype=dtype)
        nn.init.normal_(self.token.weight, std=hidden**-0.5)
        self.position: SinusoidalPositions | LearnedPositions | None = None
        if positions == "sinusoidal":
            self.position = SinusoidalPositions(hidden, max_positions)
        elif positions == "learned":
            if max_positions is None:
                raise InputError("positions='learned' needs max_positions, the number of rows of its table")
            self.position = LearnedPositions(hidden, max_positions, device=device, dtype=dtype)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2 or tokens.dtype.is_floating_point:
            raise InputError(f"tokens must be integers [b, N], got {tokens.dtype} {list(tokens.shape)}")
        x = self.token(tokens)
        if self.scale != 1:
            x = x * self.scale
        if self.position is not None:
            x = self.position(x)
        out: Tensor = self.dropout(x)
        return out


class TransformerLayer(nn.Module):
    """Sublayers in residual branches, normalised before (pre-norm) or after the sum (post-norm).

    pre-norm ``x + f(norm(x))``; post-norm ``norm(x + f(x))``, with f self-attention, cross-attention where there is a
    memory, and the feed-forward. Submodules: attention_norm, attention, (cross_attention_norm, cross_attention,)
    mlp_norm, mlp.
    """

    _cross: ClassVar[bool]

    def __init__(
        self,
        hidden: int,
        heads: int,
        ffn_hidden: int | None = None,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn: str = "mlp",
        activation: str = "gelu",
        norm: str = "layernorm",
        pre_norm: bool = True,
        bias: bool = True,
        rotary: bool = False,
        max_positions: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        ffn_dropout: float = 0.0,
        attention: str = "eager",
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        heads_of: dict[str, Any] = {
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "dropout": dropout if attention_dropout is None else attention_dropout,
            "output_dropout": dropout,
            "attention": attention,
            **factory,
        }
        self.pre_norm, self.batch_first = pre_norm, batch_first
        self.attention_norm = make_norm(norm, hidden, **factory)
        self.attention = MultiHeadAttention(hidden, heads, rotary=rotary, max_positions=max_positions, **heads_of)
        self.cross_attention_norm = make_norm(norm, hidden, **factory) if self._cross else None
        self.cross_attention = MultiHeadAttention(hidden, heads, **heads_of) if self._cross else None
        self.mlp_norm = make_norm(norm, hidden, **factory)
        self.mlp = FeedForward(
            hidden, ffn_hidden, ffn=ffn, activation=activation, dropout=dropout, ffn_dropout=ffn_dropout, **factory
        )

    def _residual(self, x: Tensor, norm: nn.Module, branch: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + branch(norm(x))
        out: Tensor = norm(x + branch(x))
        return out

    def _run(self, x: Tensor, memory: Tensor | None, own: dict[str, Any], other: dict[str, Any]) -> Tensor:
        """The layer on ``x``; ``own`` and ``other`` are the masks of self- and cross-attention."""
        x = batch_major(x, self.batch_first)
        x = self._residual(x, self.attention_norm, lambda y: self.attention(y, **own)[0])
        if self.cross_attention is not None and self.cross_attention_norm is not None and memory is not None:
            cross, seen = self.cross_attention, batch_major(memory, self.batch_first)
            x = self._residual(x, self.cross_attention_norm, lambda y: cross(y, seen, **other)[0])
        x = self._residual(x, self.mlp_norm, self.mlp)
        return x if self.batch_first else x.transpose(0, 1)


class EncoderLayer(TransformerLayer):
    """Self-attention and feed-forward, ``[b, N, d] -> [b, N, d]``; the layer of encoders and of decoder-only models.

    FLOPs ``24bNd^2 + 4bN^2d``, parameters ``12d^2 + 13d``, kept in bf16 with dropout ``34bNd + 5bN^2h`` bytes and the
    norms' statistics. Pre-norm ``x + f(norm(x))``, post-norm ``norm(x + f(x))``. With other settings:
    `MultiHeadAttention`, `FeedForward`. ``attention_dropout`` None means ``dropout``.
    """

    _cross = False

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        own = {"mask": mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        return self._run(x, None, own, {})


class DecoderLayer(TransformerLayer):
    """Self-attention, cross-attention to a memory and feed-forward: ``[b, T, d], [b, S, d] -> [b, T, d]``.

    FLOPs ``28bTd^2 + 4bSd^2 + 4bT^2d + 4bTSd``, parameters ``16d^2 + 19d``, kept in bf16 with dropout
    ``43bTd + 4bSd + 5bT^2h + 5bTSh`` bytes and the norms' statistics, and the memory itself, ``2bSd``, once for all
    layers. It is causal only where ``is_causal`` or a mask says so.
    """

    _cross = True

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        memory_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        own = {"mask": mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        return self._run(x, memory, own, {"mask": memory_mask, "key_padding_mask": memory_key_padding_mask})
