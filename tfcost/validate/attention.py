"""Attention of the reference Transformer, each step a module of its own, and the helpers that its other parts share.

`tfcost.validate.reference` builds the model from them and has the notation, the naming and the sources.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfcost.errors import InputError, UnknownName
from tfcost.validate.masks import merge_masks
from tfcost.validate.positions import RotaryPositions


def check_sizes(**sizes: int) -> None:
    """Raise ``InputError`` for a size below one."""
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} must be positive, got {size}")


def check_choice(what: str, given: str, known: Collection[str]) -> None:
    """Raise ``InputError`` (``UnknownName``) for a name that is not one of ``known``."""
    if given not in known:
        raise UnknownName(what, given, known)


def check_hidden(name: str, x: Tensor, hidden: int) -> None:
    """Raise ``InputError`` unless ``x`` is ``[b, N, hidden]``."""
    if x.dim() != 3:
        raise InputError(f"{name} must be [b, N, d], got {list(x.shape)}")
    if x.shape[-1] != hidden:
        raise InputError(f"{name} is {x.shape[-1]} wide, this model's hidden width is {hidden}")


def batch_major(x: Tensor, batch_first: bool) -> Tensor:
    """``x`` as ``[b, N, ...]``. One contiguous copy, as each projection would otherwise make, and keep, its own."""
    return x if batch_first else x.transpose(0, 1).contiguous()


def linear(
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    conv: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Linear | nn.Conv1d:
    """A projection, or the same as a convolution of width 1; the matrix Xavier-uniform, the bias zero.

    Xavier-uniform draws from ``+- sqrt(6 / (inputs + outputs))`` (Glorot and Bengio 2010).
    """
    made: nn.Linear | nn.Conv1d
    if conv:
        made = nn.Conv1d(inputs, outputs, 1, bias=bias, device=device, dtype=dtype)
    else:
        made = nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)
    nn.init.xavier_uniform_(made.weight)
    if made.bias is not None:
        nn.init.zeros_(made.bias)
    return made


class Dropout(nn.Module):
    """Zeroes elements with probability p and divides the rest by 1 - p, in training only; keeps a 1-byte mask.

    ``torch.native_dropout`` is the op that ``F.dropout`` runs on a GPU; on a CPU ``F.dropout`` would keep a mask in the
    activations' own type. With p = 0 nothing is done and nothing is kept. Raises ``InputError`` unless 0 <= p <= 1.
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise InputError(f"a dropout probability lies between 0 and 1, got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return torch.native_dropout(x, self.p, True)[0]

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Scores(nn.Module):
    """``Q K^T / sqrt(d_k) + mask``: ``[b, h, N, d_k], [b, h_kv, M, d_k] -> [b, h, N, M]``, 2 b h N M d_k FLOPs.

    Query head j uses key head ``j // (h / h_kv)``. The query heads of one key head are laid out as more queries rather
    than the keys repeated, so that keys are kept at h_kv heads. Keeps Q and K; not the scores.
    """

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, heads, queries, head_dim = query.shape
        kv_heads, keys = key.shape[1:3]
        scaled = (query * head_dim**-0.5).reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
        scores: Tensor = (scaled @ key.transpose(-2, -1)).reshape(batch, heads, queries, keys)
        return scores if mask is None else scores + mask


class Softmax(nn.Module):
    """``exp(x - max x) / sum`` over the keys: ``[b, h, N, M]``; keeps its output.

    With ``may_hide_all`` a row of -inf, whose sum is zero, becomes zeros and not NaN; so does its gradient.
    """

    def forward(self, scores: Tensor, may_hide_all: bool = False) -> Tensor:
        # The same softmax that F.scaled_dot_product_attention uses, and like softmax it keeps its output alone.
        return torch._safe_softmax(scores, -1) if may_hide_all else torch.softmax(scores, -1)


class WeightedSum(nn.Module):
    """``P V``: ``[b, h, N, M], [b, h_kv, M, d_k] -> [b, h, N, d_k]``, 2 b h N M d_k FLOPs; keeps both operands."""

    def forward(self, weights: Tensor, value: Tensor) -> Tensor:
        batch, heads, queries, keys = weights.shape
        kv_heads, head_dim = value.shape[1], value.shape[3]
        grouped = weights.reshape(batch, kv_heads, heads // kv_heads * queries, keys)
        return (grouped @ value).reshape(batch, heads, queries, head_dim)


class FusedAttention(nn.Module):
    """``softmax(Q K^T / sqrt(d_k) + mask) V`` through ``F.scaled_dot_product_attention``; shapes as `WeightedSum`'s.

    Fewer key/value heads go through ``enable_gqa`` and are not expanded: flash kernels (a CPU's too) then keep K and V
    at h_kv heads, as real models do. Only the math kernel, which a CPU takes when attention dropout is on, repeats
    them. Raises nothing of its own.
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.p = Dropout(p).p

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.p if self.training else 0.0,
            is_causal=causal,
            enable_gqa=bool(query.shape[1] != key.shape[1]),  # sizes may be symbolic
        )


class MultiHeadAttention(nn.Module):
    """``concat_j(softmax(Q_j K_j^T / sqrt(d_k) + mask) V_j) W_O``: ``[b, N, d], [b, M, d] -> [b, N, d]``.

    FLOPs: ``4bNdh d_k + 4bMd h_kv d_k + 4bNMh d_k``, which is ``8bNd^2 + 4bN^2d`` for plain self-attention. Parameters
    ``4d^2 + 4d``. ``dropout`` is on the attention weights, ``output_dropout`` on the result (a residual branch's).
    With ``batch_first=False`` sequences are ``[N, b, d]``. Submodules: query, key, value, rotary, then scores, softmax,
    dropout, weighted_sum (``attention="eager"``) or sdpa (``"sdpa"``), then output, output_dropout.

    Raises ``InputError`` for heads that do not divide the width or the key/value heads, unequal batches, wrong widths
    and mask shapes. Source: Vaswani et al. 2017, section 3.2.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        attention: str = "eager",
        rotary: bool = False,
        max_positions: int | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        check_sizes(hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=1 if head_dim is None else head_dim)
        if head_dim is None:
            if hidden % heads:
                raise InputError(f"heads={heads} does not divide hidden={hidden}; give head_dim")
            head_dim = hidden // heads
        if heads % kv_heads:
            raise InputError(f"kv_heads={kv_heads} does not divide heads={heads}")
        check_choice("attention", attention, ("eager", "sdpa"))
        self.hidden, self.heads, self.kv_heads, self.head_dim = hidden, heads, kv_heads, head_dim
        self.eager, self.batch_first = attention == "eager", batch_first
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.query = linear(hidden, heads * head_dim, **factory)
        self.key = linear(hidden, kv_heads * head_dim, **factory)
        self.value = linear(hidden, kv_heads * head_dim, **factory)
        self.rotary = RotaryPositions(head_dim, max_positions) if rotary else None
        if self.eager:
            self.scores = Scores()
            self.softmax = Softmax()
            self.dropout = Dropout(dropout)
            self.weighted_sum = WeightedSum()
        else:
            self.sdpa = FusedAttention(dropout)
        self.output = linear(heads * head_dim, hidden, **factory)
        self.output_dropout = Dropout(output_dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and with ``need_weights`` the weights ``[b, h, N, M]``, else None.

        ``key`` defaults to ``query`` (self-attention) and ``value`` to ``key``. The weights are those before dropout,
        so that every row sums to one (zero where everything is hidden); they need ``attention="eager"``.
        """
        if need_weights and not self.eager:
            raise InputError("attention weights exist only with attention='eager'; the fused kernel never forms them")
        key = query if key is None else key
        value = key if value is None else value
        x = batch_major(query, self.batch_first)
        keys = x if key is query else batch_major(key, self.batch_first)
        values = keys if value is key else batch_major(value, self.batch_first)
        self._check(x, keys, values)
        batch, queries = x.shape[:2]
        q = self.query(x).view(batch, queries, self.heads, self.head_dim)
        k = self.key(keys).view(batch, keys.shape[1], self.kv_heads, self.head_dim)
        v = self.value(values).view(batch, keys.shape[1], self.kv_heads, self.head_dim)
        if self.rotary is not None:
            q, k = self.rotary(q, k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        given = mask is not None or key_padding_mask is not None
        merged = merge_masks(
            mask,
            key_padding_mask,
            batch=batch,
            heads=self.heads,
            queries=queries,
            keys=keys.shape[1],
            dtype=q.dtype,
            causal=is_causal and (given or self.eager),
            device=q.device,
        )
        weights = None
        if self.eager:
            # A causal mask alone leaves every query its own position, so the plain softmax will do.
            weights = self.softmax(self.scores(q, k, merged), may_hide_all=given)
            summed = self.weighted_sum(self.dropout(weights), v)
        else:
            summed = self.sdpa(q, k, v, merged, is_causal and not given)
        out = self.output_dropout(self.output(summed.transpose(1, 2).reshape(batch, queries, -1)))
        return out if self.batch_first else out.transpose(0, 1), weights if need_weights else None

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_hidden(name, x, self.hidden)
        if not query.shape[0] == key.shape[0] == value.shape[0]:
            raise InputError(f"batches differ: query {query.shape[0]}, key {key.shape[0]}, value {value.shape[0]}")
        if key.shape[1] != value.shape[1]:
            raise InputError(f"key and value lengths differ: {key.shape[1]} and {value.shape[1]}")
        if self.rotary is not None and query.shape[1] != key.shape[1]:
            raise InputError("rotary positions are for self-attention: query and key lengths differ")
