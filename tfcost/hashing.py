"""Attention among tokens that fall into the same bucket: LSH attention of the Reformer.

Kitaev et al. 2020, arXiv:2001.04451, section 2. Axis letters beyond those of :mod:`tfcost.blocks`: r rounds of hashing,
z chunks.
"""

from __future__ import annotations

from tfcost import ops
from tfcost.blocks import Run, Square
from tfcost.config import ModelConfig
from tfcost.errors import InputError
from tfcost.graph import Graph, Size, Tensor, Work, div, doublings


def heads(g: Graph, x: Tensor, source: Tensor, values: Tensor, cfg: ModelConfig, run: Run, square: Square) -> Tensor:
    """In each of r rounds tokens are sorted by bucket and attend within their chunk of c and the one before.

    One projection makes queries and keys. FLOPs: bNh r·d_k n_b of hashing (n_b/2 random directions, no gradient) and
    2bNh r·2c·2d_k of attention, linear in N; sorting is r N⌈log₂ N⌉ comparisons per head and sequence, a unit of its
    own. Keeps, per round, the sorted queries, keys and values of two chunks, and 2c weights per query.
    """
    if x is not source or square.window is not None or square.position_bias is not None:
        raise InputError("--attention-kind lsh is self-attention without --window or a bias of positions")
    if cfg.kv_heads != cfg.heads or cfg.attention_sinks or cfg.qk_norm:
        raise InputError("--attention-kind lsh has as many key as query heads, no sinks and no norm of its own")
    batch, length, d = x.shape
    h, width, rounds = cfg.heads, cfg.head_dim, cfg.hashes
    chunk: Size = cfg.chunk_length
    chunks = div(length, chunk, "-N/--seq-len", "--chunk-length")
    shared = ops.linear(g, "query_key", "b n d, d h k -> b n h k", x, (d, h, width), cfg.attention_bias)
    value = ops.linear(g, "value", "b n d, d h k -> b n h k", values, (d, h, width), cfg.attention_bias)
    directions = rounds * div(cfg.buckets, 2, "--buckets", "2")
    buckets = g.tensor("buckets", ("b", "n", "h", "r"), (batch, length, h, rounds), grad=False)
    g.add("mixing", "buckets", (shared,), buckets, Work(shared.numel * directions))
    order = g.tensor("sort", buckets.axes, buckets.shape, grad=False)
    g.add("sort", "sort", (buckets,), order, Work(0, batch * h * rounds * length * doublings(length)))
    inside = ("b", "h", "r", "z", "n", "k"), (batch, h, rounds, chunks, chunk, width)
    beside = ("b", "h", "r", "z", "m", "k"), (batch, h, rounds, chunks, 2 * chunk, width)
    query = ops.rearrange(g, "sorted_query", shared, *inside)
    key = ops.rearrange(g, "key", ops.norm(g, "unit_length", query, "unit_length", affine=False), *beside)
    value = ops.rearrange(g, "sorted_value", value, *beside)
    scores = ops.contract(g, "scores", "b h r z n k, b h r z m k -> b h r z n m", query, key, kind="mixing")
    weights = ops.softmax(g, "softmax", scores)
    weights = ops.dropout(g, "dropout", weights, cfg.attention_dropout)
    out = ops.contract(
        g, "weighted_sum", "b h r z n m, b h r z m k -> b h r z n k", weights, value, kind="mixing"
    )  # fmt: skip
    unsorted = ("b", "n", "h", "r", "k"), (batch, length, h, rounds, width)
    out = ops.rearrange(g, "unsorted", out, *unsorted)
    if rounds != 1:
        logits = ops.rearrange(g, "round_logits", scores, unsorted[0][:-1], unsorted[1][:-1])
        out = ops.multiply(g, "weighted_rounds", out, ops.softmax(g, "round_softmax", logits))
    # A sum over the rounds, each token in its place again.
    return ops.rearrange(g, "rounds_sum", out, ("b", "n", "h", "g", "k"), (batch, length, h, 1, width))
