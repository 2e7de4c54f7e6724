"""Multiply-accumulates of every PyTorch op that multiplies matrices, forward and backward, from its shapes alone.

A product has one multiply-accumulate per point of its index space, which is how :mod:`tfcost.ops` counts too. Ops with
no product are listed in :mod:`tfcost.tracing.products_none`; an op in neither list is reported as unpriced, never as
zero. Argument order and layouts are those of ATen's ``native_functions.yaml`` (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from tfcost.graph import Size


class Spec(NamedTuple):
    """A tensor as an op sees it: its sizes (ints or expressions), the bytes of an element, its type's name."""

    shape: tuple[Size, ...]
    itemsize: int
    dtype: str
    needs_grad: bool = False


class Macs(NamedTuple):
    """Multiply-accumulates of one op; ``recompute`` is what a fused backward makes again beyond the gradients.

    ``square`` says that both operands are activations of a fused attention kernel.
    """

    macs: Size
    recompute: Size = 0
    square: bool = False


Formula = Callable[[Sequence[Any], Any], Macs]
"""From an op's arguments and result, tensors as :class:`Spec`, to its work."""


def _mm(args: Sequence[Any], out: Any) -> Macs:
    """m k, k n -> m n"""
    (m, k), n = args[0].shape, args[1].shape[1]
    return Macs(m * k * n)


def _addmm(args: Sequence[Any], out: Any) -> Macs:
    """a sum and: m k, k n -> m n"""
    return _mm(args[1:], out)


def _bmm(args: Sequence[Any], out: Any) -> Macs:
    """b m k, b k n -> b m n"""
    (b, m, k), n = args[0].shape, args[1].shape[2]
    return Macs(b * m * k * n)


def _baddbmm(args: Sequence[Any], out: Any) -> Macs:
    """a sum and: b m k, b k n -> b m n"""
    return _bmm(args[1:], out)


def _mv(args: Sequence[Any], out: Any) -> Macs:
    """m k, k -> m"""
    m, k = args[0].shape
    return Macs(m * k)


def _addmv(args: Sequence[Any], out: Any) -> Macs:
    return _mv(args[1:], out)


def _dot(args: Sequence[Any], out: Any) -> Macs:
    """k, k -> one number"""
    return Macs(args[0].shape[0])


def _linear(args: Sequence[Any], out: Any) -> Macs:
    """... k, n k -> ... n"""
    return Macs(prod(args[0].shape) * args[1].shape[0])


def _grouped_mm(args: Sequence[Any], out: Any) -> Macs:
    """Products of a mixture's experts; groups lie one after another along the tokens t, and each token has one.

    t k, e k n -> t n (a linear layer per expert); k t, t n -> e k n (its weight's gradient); e m k, k t -> m t;
    e m k, e k n -> e m n.
    """
    a, b = args[0].shape, args[1].shape
    if len(a) == 2 and len(b) == 3:
        return Macs(a[0] * a[1] * b[2])
    if len(a) == 2:
        return Macs(a[0] * a[1] * b[1])
    if len(b) == 2:
        return Macs(a[1] * a[2] * b[1])
    return Macs(a[0] * a[1] * a[2] * b[2])


def _grouped_mm_backward(args: Sequence[Any], out: Any) -> Macs:
    """Of t k, e k n -> t n: the gradients of both operands, each as much as forward."""
    return Macs(2 * prod(args[0].shape) * args[1].shape[2])


def _convolution(args: Sequence[Any], out: Any) -> Macs:
    """Each output element is a sum over a channel group and the kernel; transposed, each input element spreads so."""
    x, weight, transposed = args[0], args[1], bool(args[6]) if len(args) > 6 else False
    return Macs(prod((x if transposed else out).shape) * prod(weight.shape[1:]))


def _convolution_backward(args: Sequence[Any], out: Any) -> Macs:
    """As much as forward for the input's gradient, and for the weight's; each only where it is asked for."""
    grad, x, weight, transposed, asked = args[0], args[1], args[2], bool(args[7]), args[10]
    return Macs((asked[0] + asked[1]) * prod((x if transposed else grad).shape) * prod(weight.shape[1:]))


def _attention(query: Spec, key: Spec, value: Spec, heads_first: bool = True) -> Macs:
    """QKᵀ: b h n k, b h m k -> b h n m, and PV: b h n m, b h m v -> b h n v, h the query heads; recompute is QKᵀ's."""
    if heads_first:
        b, h, n, k = query.shape
        m = key.shape[-2]
    else:
        b, n, h, k = query.shape
        m = key.shape[-3]
    square = b * h * n * m
    return Macs(square * (k + value.shape[-1]), square * k, True)


def _attention_forward(args: Sequence[Any], out: Any) -> Macs:
    return _attention(args[0], args[1], args[2])._replace(recompute=0)


def _attention_backward(args: Sequence[Any], out: Any) -> Macs:
    """Four products: dV = PᵀdO, dP = dO Vᵀ, dQ = dS K, dK = dSᵀQ. The scores are made again: a row of its own."""
    work = _attention(args[1], args[2], args[3])
    return work._replace(macs=2 * work.macs)


def _attention_forward_tokens_first(args: Sequence[Any], out: Any) -> Macs:
    return _attention(args[0], args[1], args[2], False)._replace(recompute=0)


def _attention_backward_tokens_first(args: Sequence[Any], out: Any) -> Macs:
    work = _attention(args[1], args[2], args[3], False)
    return work._replace(macs=2 * work.macs)


def _multi_head(x: Spec, projection: Spec) -> Size:
    b, n, d = x.shape
    return b * n * d * projection.shape[0] + 2 * b * n * n * d + b * n * d * d


def _native_multi_head_attention(args: Sequence[Any], out: Any) -> Macs:
    """Of nn.MultiheadAttention without gradients: Q, K, V together (b n d, 3d d), QKᵀ and PV (b n n d each), output."""
    return Macs(_multi_head(args[0], args[5]))


def _transformer_encoder_layer(args: Sequence[Any], out: Any) -> Macs:
    """The fast path of nn.TransformerEncoderLayer: its attention, and b n d, d f -> b n f and back."""
    x, first, second = args[0], args[14], args[16]
    tokens = prod(x.shape[:-1])
    return Macs(_multi_head(x, args[3]) + tokens * (prod(first.shape) + prod(second.shape)))


def _rnn(weights: Sequence[Any], x: Spec) -> Size:
    """Each time step multiplies by each weight matrix; x is t b k or b t k."""
    return prod(x.shape[:-1]) * sum([prod(w.shape) for w in weights if w is not None and len(w.shape) == 2])


def _mkldnn_rnn_layer(args: Sequence[Any], out: Any) -> Macs:
    return Macs(_rnn(args[1:3], args[0]))


def _mkldnn_rnn_layer_backward(args: Sequence[Any], out: Any) -> Macs:
    return Macs(2 * _rnn(args[1:3], args[0]))


def _cudnn_rnn(args: Sequence[Any], out: Any) -> Macs:
    return Macs(_rnn(args[1], args[0]))


def _cudnn_rnn_backward(args: Sequence[Any], out: Any) -> Macs:
    return Macs(2 * _rnn(args[1], args[0]))


FORMULAS: dict[str, Formula] = {
    "aten.mm": _mm,
    "aten._scaled_mm": _mm,
    "aten._int_mm": _mm,
    "aten.addmm": _addmm,
    "aten._addmm_activation": _addmm,
    "aten.bmm": _bmm,
    "aten.baddbmm": _baddbmm,
    "aten.addbmm": _baddbmm,
    "aten.mv": _mv,
    "aten.addmv": _addmv,
    "aten.dot": _dot,
    "aten.vdot": _dot,
    "aten.linear": _linear,
    "aten.mkldnn_linear": _linear,
    "mkldnn._linear_pointwise": _linear,
    "aten._grouped_mm": _grouped_mm,
    "transformers.grouped_mm_fallback": _grouped_mm,
    "transformers.grouped_mm_fallback_backward": _grouped_mm_backward,
    "aten._scaled_grouped_mm": _grouped_mm,
    **dict.fromkeys(
        (
            "aten.convolution", "aten._convolution", "aten.cudnn_convolution", "aten.convolution_overrideable",
            "aten.mkldnn_convolution", "aten._slow_conv2d_forward",
        ),
        _convolution,
    ),
    **dict.fromkeys(("aten.convolution_backward", "aten.convolution_backward_overrideable"), _convolution_backward),
    **dict.fromkeys(
        (
            "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
            "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
            "aten._scaled_dot_product_fused_attention_overrideable",
        ),
        _attention_forward,
    ),
    **dict.fromkeys(
        (
            "aten._scaled_dot_product_flash_attention_backward",
            "aten._scaled_dot_product_flash_attention_for_cpu_backward",
            "aten._scaled_dot_product_efficient_attention_backward",
            "aten._scaled_dot_product_cudnn_attention_backward",
            "aten._scaled_dot_product_fused_attention_overrideable_backward",
        ),
        _attention_backward,
    ),
    "aten._flash_attention_forward": _attention_forward_tokens_first,
    "aten._efficient_attention_forward": _attention_forward_tokens_first,
    "aten._flash_attention_backward": _attention_backward_tokens_first,
    "aten._efficient_attention_backward": _attention_backward_tokens_first,
    "aten._native_multi_head_attention": _native_multi_head_attention,
    "aten._transformer_encoder_layer_fwd": _transformer_encoder_layer,
    "aten.mkldnn_rnn_layer": _mkldnn_rnn_layer,
    "aten.mkldnn_rnn_layer_backward": _mkldnn_rnn_layer_backward,
    "aten._cudnn_rnn": _cudnn_rnn,
    "aten._cudnn_rnn_backward": _cudnn_rnn_backward,
}  # fmt: skip
"""The formula of each op, by its name without its overload."""
