"""DiT: a Transformer over patches of a noisy latent, steered by the time step and a label.

Peebles & Xie 2023, arXiv:2212.09748, section 3.2 (adaLN-Zero).
"""

from __future__ import annotations

from tfcost import blocks, families, ops
from tfcost.blocks import Run
from tfcost.config import ModelConfig
from tfcost.graph import Graph, Size, Tensor
from tfcost.images import patches

BLOCK_PARTS, FINAL_PARTS = 6, 2
"""Vectors that a block and the last layer make of the condition: shift and scale of a norm, gate of a branch."""


def diffusion(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """Layers of 24bNd² + 4bN²d FLOPs and 12bd² for the condition; the output has as many pixels as the input.

    A layer has 18d² + 15d parameters: its norms have none, and 6d² + 6d make their shifts, scales and gates.
    """
    with g.scope("embedding"):
        x = patches(g, cfg, run)
        table = g.weight("position/weight", ("n", "d"), (run.seq_len, cfg.hidden), "embedding", grad=False)
        position = ops.whole_table(g, "position", table)
        position.grad = False
        x = ops.add(g, "position_sum", x, position)
    state = condition(g, cfg, run)
    x = g.repeat("layer", cfg.encoder_layers, x, lambda y: layer(g, y, cfg, run, state))
    with g.scope("final"):
        vectors = modulation(g, cfg, state, FINAL_PARTS)
        x = modulated(g, "norm", x, vectors, cfg)
        width = cfg.output_channels * cfg.patch_size**2
        ops.linear(g, "output", "b n d, d c -> b n c", x, (cfg.hidden, width), True, "head")
    families.finish(g, cfg, x, None)


def condition(g: Graph, cfg: ModelConfig, run: Run) -> Tensor:
    """The time step's 256 frequencies through two layers, and the label's vector: b 1 d."""
    with g.scope("condition"):
        waves = g.tensor("frequencies", ("b", "n", "c"), (run.batch, 1, cfg.frequencies), grad=False)
        time = ops.linear(g, "time_in", "b n c, c d -> b n d", waves, (cfg.frequencies, cfg.hidden))
        time = ops.activation(g, "time_activation", time, "silu")
        time = ops.linear(g, "time_out", "b n d, d e -> b n e", time, (cfg.hidden, cfg.hidden))
        table = g.weight("label/weight", ("v", "d"), (cfg.labels, cfg.hidden), "embedding")
        label = ops.embedding(g, "label", ("b", "n", "d"), (run.batch, 1, cfg.hidden), table)
        return ops.add(g, "sum", time, label)


def modulation(g: Graph, cfg: ModelConfig, state: Tensor, parts: Size) -> Tensor:
    """Shifts, scales and gates, ``parts`` vectors of width d, of the condition: 2b·parts·d² FLOPs."""
    active = ops.activation(g, "condition_activation", state, "silu")
    return ops.linear(g, "modulation", "b n d, d e -> b n e", active, (cfg.hidden, parts * cfg.hidden))


def modulated(g: Graph, name: str, x: Tensor, vectors: Tensor, cfg: ModelConfig) -> Tensor:
    """norm(x)·(1 + scale) + shift: a product whose gradients need both factors, and a sum."""
    inner = blocks.norm(g, name, x, cfg)
    with g.scope(name):
        factor = ops.part(g, "factor", vectors, cfg.hidden)
        return ops.add(g, "shifted", ops.multiply(g, "scaled", inner, factor), vectors)


def layer(g: Graph, x: Tensor, cfg: ModelConfig, run: Run, state: Tensor) -> Tensor:
    """Attention and feed-forward, each behind a modulated norm and times a gate."""
    vectors = modulation(g, cfg, state, BLOCK_PARTS)
    out = modulated(g, "attention_norm", x, vectors, cfg)
    out = blocks.attention(g, "attention", out, out, cfg, run)
    x = ops.add(g, "attention_residual", x, ops.multiply(g, "attention_gate", out, vectors))
    out = modulated(g, "mlp_norm", x, vectors, cfg)
    out = blocks.feed_forward(g, "mlp", out, cfg)
    return ops.add(g, "mlp_residual", x, ops.multiply(g, "mlp_gate", out, vectors))
