"""Multi-head latent attention: queries, keys and values by way of narrow vectors.

DeepSeek-AI 2024 (DeepSeek-V2), arXiv:2405.04434, section 2.1. What a cache holds is d_c + d_r elements per token and
layer: the compressed keys and values, and one key that turns with the position and that all heads share. Axis letters
beyond those of :mod:`tfcost.blocks`: r a compressed width.
"""

from __future__ import annotations

from tfcost import blocks, ops
from tfcost.blocks import Run, Square
from tfcost.config import ModelConfig
from tfcost.graph import Graph, Tensor


def heads(g: Graph, x: Tensor, source: Tensor, values: Tensor, cfg: ModelConfig, run: Run, square: Square) -> Tensor:
    """The heads of latent attention, b n h 1 v: one function of the input, and two ways to compute it.

    Expanded: the keys and values of every head are made of the compressed vector, 2bN d_c h(d_n + d_v) FLOPs, and the
    square costs 2bN² h(d_n + d_r + d_v). Absorbed: the expansion is multiplied into queries and onto the heads'
    output, which costs as much, and the square runs over compressed vectors, 2bN² h(2d_c + d_r).
    """
    query = queries(g, x, cfg)
    latent, turned = compressed(g, source, cfg)
    if run.context != 0 and x is source and square.causal:
        latent = ops.cached(g, "latent_cache", latent, run.context)
        turned = ops.cached(g, "turned_cache", turned, run.context)
    plain, h = cfg.head_dim - cfg.rope_dim, cfg.heads
    with g.scope("expand_key"):
        up_key = g.weight("weight", ("r", "h", "k"), (cfg.kv_rank, h, plain))
    with g.scope("expand_value"):
        up_value = g.weight("weight", ("r", "h", "k"), (cfg.kv_rank, h, cfg.value_dim))
    if not cfg.absorbed:
        query = ops.rotary(g, "rotary_query", query, rotary_table(g, x, cfg))
        key = ops.contract(g, "expand_key", "b m r, r h k -> b m h k", latent, up_key, kind="linear")
        value = ops.contract(g, "expand_value", "b m r, r h k -> b m h k", latent, up_value, kind="linear")
        return blocks.attend(g, query, ops.join(g, "key", key, turned), value, cfg, run, square)
    still = ops.part(g, "query_still", query, plain)
    moved = ops.rotary(g, "rotary_query", ops.part(g, "query_turned", query, cfg.rope_dim), rotary_table(g, x, cfg))
    still = ops.contract(g, "expand_key", "b n h g k, r h k -> b n h g r", still, up_key, kind="linear")
    query = ops.join(g, "query_latent", still, moved)
    out = blocks.attend(g, query, ops.join(g, "key", latent, turned), latent, cfg, run, square)
    return ops.contract(g, "expand_value", "b n h g r, r h k -> b n h g k", out, up_value, kind="linear")


def queries(g: Graph, x: Tensor, cfg: ModelConfig) -> Tensor:
    """Queries b n h 1 k, by one projection, or by way of d_q and a norm: d d_q + d_q h d_k parameters."""
    shape = (cfg.heads, 1, cfg.head_dim)
    if cfg.query_rank is None:
        return ops.linear(g, "query", "b n d, d h g k -> b n h g k", x, (x.shape[-1], *shape), False)
    rank = cfg.query_rank
    narrow = ops.linear(g, "compress_query", "b n d, d r -> b n r", x, (x.shape[-1], rank), cfg.attention_bias)
    narrow = ops.norm(g, "query_norm", narrow, "rmsnorm", False)
    return ops.linear(g, "query", "b n r, r h g k -> b n h g k", narrow, (rank, *shape), False)


def compressed(g: Graph, x: Tensor, cfg: ModelConfig) -> tuple[Tensor, Tensor]:
    """The compressed keys and values, normed (b m r), and the shared key that turns (b m k): d(d_c + d_r)."""
    d, bias = x.shape[-1], cfg.attention_bias
    latent = ops.linear(g, "compress_key_value", "b m d, d r -> b m r", x, (d, cfg.kv_rank), bias)
    latent = ops.norm(g, "key_value_norm", latent, "rmsnorm", False)
    turned = ops.linear(g, "key_turned", "b m d, d k -> b m k", x, (d, cfg.rope_dim), bias)
    return latent, ops.rotary(g, "rotary_key", turned, rotary_table(g, x, cfg))


def rotary_table(g: Graph, x: Tensor, cfg: ModelConfig) -> Tensor | None:
    """The angles' sines and cosines, where the implementation keeps them."""
    if not g.implementation.rotary_table:
        return None
    return g.tensor("rotary_table", ("n", "k"), (x.shape[1], cfg.rope_dim), grad=False)
