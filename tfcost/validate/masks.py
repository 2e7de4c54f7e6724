"""Attention masks: who may look at whom, in each of the senses that people meet.

================================================  ======================  ==============================
where                                             boolean mask            floating-point mask
================================================  ======================  ==============================
this package, ``nn.MultiheadAttention``,          True = **hidden**       added to the scaled scores
``nn.Transformer`` (``attn_mask``,
``*_mask``, ``*_key_padding_mask``)
``F.scaled_dot_product_attention``                True = **visible**      added to the scaled scores
many hand-written blocks                          0 = **hidden**          (0/1 numbers, not added)
================================================  ======================  ==============================

So ``visible_mask(m)`` is what ``F.scaled_dot_product_attention`` wants for our ``m``, and ``hand_written == 0`` is our
mask for a hand-written one. Attention is ``softmax(Q K^T / sqrt(d_k) + M) V`` with ``M`` = 0 where a key is visible and
``-inf`` where it is hidden: a *product* with a 0/1 mask would leave weight on hidden keys, and a large finite number
(``-1e9``) overflows in fp16. A query from which every key is hidden attends to nothing: its weights are zero, not NaN.

Shapes (b sequences, h heads, N queries, M keys): ``[N, M]``, ``[b*h, N, M]`` or anything that broadcasts to
``[b, h, N, M]`` for a mask; ``[b, M]`` for a key padding mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tfcost.errors import InputError


def causal_mask(queries: int, keys: int | None = None, *, device: torch.device | str | None = None) -> Tensor:
    """The mask under which no query sees a later key: boolean ``[queries, keys]``, True = hidden.

    Hidden where ``key > query + (keys - queries)``: the last query sees every key, whether or not the first keys come
    from a cache. ``additive_mask(causal_mask(n))`` is ``nn.Transformer.generate_square_subsequent_mask(n)``.
    """
    keys = queries if keys is None else keys
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)


def padding_mask(tokens: Tensor, padding: int) -> Tensor:
    """The key padding mask of token ids ``[b, M]``: boolean ``[b, M]``, True = hidden where the id is ``padding``."""
    return tokens == padding


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """The key padding mask of ``lengths`` ``[b]`` in rows of ``size``: boolean ``[b, size]``, True = hidden."""
    return torch.arange(size, device=lengths.device) >= lengths[:, None]


def visible_mask(mask: Tensor) -> Tensor:
    """The boolean mask in the sense of ``F.scaled_dot_product_attention``: True = visible.

    Raises ``InputError`` for a mask that is not boolean (a floating-point mask has one sense only).
    """
    if mask.dtype is not torch.bool:
        raise InputError(f"only a boolean mask has two senses, got {mask.dtype}")
    return ~mask


def additive_mask(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mask as numbers to add to the scaled scores: 0 where visible, ``-inf`` where hidden.

    A floating-point mask is only converted to ``dtype`` (``-1e9`` becomes ``-inf`` in fp16, which is what it meant).
    Raises ``InputError`` for an integer mask, whose sense cannot be known.
    """
    if mask.dtype is torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
    if not mask.dtype.is_floating_point:
        raise InputError(
            f"a mask is boolean (True = hidden) or floating point (added), got {mask.dtype}; "
            "for 0/1 numbers where 0 hides, pass mask == 0"
        )
    return mask.to(dtype)


def merge_masks(
    mask: Tensor | None,
    key_padding_mask: Tensor | None,
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    causal: bool = False,
    device: torch.device | None = None,
) -> Tensor | None:
    """One additive mask that broadcasts to ``[b, h, N, M]``, or None where nothing is hidden.

    Masks are added, so a key is hidden if any of them hides it. The result is small (``[N, M]`` for a causal mask): it
    is not expanded over sequences or heads, and adding it to the scores keeps nothing for the backward pass.

    Raises ``InputError`` for a shape that fits neither form in the module's docstring.
    """
    total = None
    if mask is not None:
        total = _four_axes(additive_mask(mask, dtype), (batch, heads, queries, keys))
    if key_padding_mask is not None:
        if tuple(key_padding_mask.shape) != (batch, keys):
            raise InputError(f"key_padding_mask is {list(key_padding_mask.shape)}, expected [b, M] = {[batch, keys]}")
        padding = additive_mask(key_padding_mask, dtype)[:, None, None, :]
        total = padding if total is None else total + padding
    if causal:
        future = additive_mask(causal_mask(queries, keys, device=device), dtype)
        total = future if total is None else total + future
    return total


def _four_axes(mask: Tensor, full: tuple[int, int, int, int]) -> Tensor:
    """``mask`` so that it broadcasts to ``full`` = [b, h, N, M]; a ``[b*h, N, M]`` mask has its first axis split."""
    batch, heads, queries, keys = full
    shape = tuple(mask.shape)
    if shape == (queries, keys):
        return mask
    if shape == (batch * heads, queries, keys):
        return mask.view(full)
    if len(shape) == 4 and all(size in (1, whole) for size, whole in zip(shape, full, strict=True)):
        return mask
    raise InputError(
        f"mask is {list(shape)}, expected [N, M] = {[queries, keys]}, [b*h, N, M] = {[batch * heads, queries, keys]} "
        f"or a shape that broadcasts to [b, h, N, M] = {list(full)}"
    )
