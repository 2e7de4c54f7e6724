"""CLIP: a tower over text and one over images, whose outputs meet in one space.

Radford et al. 2021, arXiv:2103.00020.
"""

from __future__ import annotations

from tfcost import blocks, families, ops
from tfcost.blocks import Run
from tfcost.config import ModelConfig
from tfcost.errors import GraphError
from tfcost.graph import Graph, Tensor
from tfcost.heads import head
from tfcost.images import patch_tokens


def towers(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """b texts of N tokens and b images, each to one vector, and the b x b products of the two: 2b²P FLOPs."""
    if cfg.tower is None:
        raise GraphError("a model of two towers has one")
    with g.scope("text"):
        text = text_vector(g, cfg, run)
    with g.scope("image"):
        image = image_vector(g, cfg.tower, run._replace(seq_len=cfg.tower.patches + cfg.tower.prefix_tokens))
    g.head_start = len(g.ops)
    ops.unused(g, "logit_scale", (g.weight("logit_scale", (), ()),))
    ops.contract(g, "similarity", "b n p, c n p -> b c", text, image)


def text_vector(g: Graph, cfg: ModelConfig, run: Run) -> Tensor:
    """The text tower: a causal stack, a norm, and the last token's vector in the common width."""
    x = families.embed(g, cfg, run, run.seq_len, families.token_table(g, cfg, cfg.vocab))
    x = families.stack(g, cfg, run, x, cfg.layers, causal=True)
    return project(g, cfg, ops.gather_tokens(g, "last_token", x, 1))


def image_vector(g: Graph, cfg: ModelConfig, run: Run) -> Tensor:
    """The image tower: a stack over patches, and the class token's vector, normed, in the common width."""
    x = families.stack(g, cfg, run, patch_tokens(g, cfg, run), cfg.layers, causal=False)
    x = ops.gather_tokens(g, "class_token", x, 1)
    if cfg.pooled_norm:
        x = blocks.norm(g, "pooled_norm", x, cfg)
    return project(g, cfg, x)


def project(g: Graph, cfg: ModelConfig, x: Tensor) -> Tensor:
    """To the common width P, without a bias: d P parameters; nothing where the class has no projection."""
    if cfg.projection_size is None:
        return x
    shape = (cfg.hidden, cfg.projection_size)
    return ops.linear(g, "projection", "b n d, d p -> b n p", x, shape, False, "head")


def text_tower(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """The text tower alone."""
    text_vector(g, cfg, run)


def image_tower(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """The image tower alone. Where it classifies, by the mean of its patches: the class token's norm is unused."""
    if not cfg.classes:
        image_vector(g, cfg, run)
        return
    x = families.stack(g, cfg, run, patch_tokens(g, cfg, run), cfg.layers, causal=False)
    ops.unused(g, "pooled_norm", g.weights_of(lambda: blocks.norm(g, "pooled_norm", x, cfg)))
    head(g, cfg, x, None)
