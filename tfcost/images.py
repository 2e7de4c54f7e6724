"""Models of images: patches as tokens (ViT, DeiT, DINOv2, CLIP's image tower), and windows over them in stages (Swin).

Dosovitskiy et al. 2021, arXiv:2010.11929; Touvron et al. 2021, arXiv:2012.12877; Oquab et al. 2023, arXiv:2304.07193;
Liu et al. 2021, arXiv:2103.14030.
"""

from __future__ import annotations

from tfcost import blocks, families, ops
from tfcost.blocks import Run
from tfcost.config import ModelConfig, Stage
from tfcost.graph import Graph, Tensor, div


def image(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """A stack over patches: N tokens, of which ``prefix_tokens`` are no patches."""
    families.finish(g, cfg, families.stack(g, cfg, run, patch_tokens(g, cfg, run), cfg.encoder_layers, False), None)


def patches(g: Graph, cfg: ModelConfig, run: Run) -> Tensor:
    """Each patch of p² pixels and c channels to a vector: a convolution whose steps are as long as its kernel.

    2b(N-1)·c p² d FLOPs forward, and as many backward rather than twice: the image needs no gradient. Keeps the image,
    without what is beyond the last whole patch.
    """
    side = cfg.patch_size
    area = side * (side if cfg.patch_width is None else cfg.patch_width)
    count = run.seq_len - cfg.prefix_tokens
    pixels = g.tensor("pixels", ("b", "n", "c"), (run.batch, count * area, cfg.channels), grad=False)
    return ops.convolution(g, "patches", pixels, count, area, cfg.hidden, cfg.patch_bias)


def patch_tokens(g: Graph, cfg: ModelConfig, run: Run) -> Tensor:
    """Patches, the class token and others before them, and positions: what the first layer reads.

    Register tokens (Darcet et al. 2024, arXiv:2309.16588) come after positions are added, and have none.
    """
    placed = cfg.prefix_tokens - cfg.plain_tokens
    with g.scope("embedding"):
        x = patches(g, cfg, run)
        if cfg.mask_token:
            ops.unused(g, "mask", (g.weight("mask_token", ("t", "d"), (1, cfg.hidden), "embedding"),))
        if cfg.patch_norm:
            x = blocks.norm(g, "patch_norm", x, cfg)
        if placed != 0:
            x = ops.prepend(g, "first", x, placed)
        if cfg.positions == "learned":
            shape = ("n", "d"), (run.seq_len - cfg.plain_tokens, cfg.hidden)
            table = g.weight("position/weight", *shape, "embedding")
            x = ops.add(g, "position_sum", x, ops.whole_table(g, "position", table))
        if cfg.plain_tokens != 0:
            x = ops.prepend(g, "registers", x, cfg.plain_tokens)
        if cfg.embedding_norm:
            x = blocks.norm(g, "norm", x, cfg)
        return ops.dropout(g, "dropout", x, cfg.embedding_dropout)


def windows(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """Swin: stages of layers that attend within windows of w x w patches, with patches merged between stages.

    A layer costs 24bNd² + 4bNw²d FLOPs, linear in N, for a grid that windows cover; what is padded to whole windows is
    computed in attention. A merge of four tokens of width d into one of 2d is a norm and 2b(N/4)·8d² FLOPs.
    """
    x = patch_tokens(g, cfg, run)
    for index, stage in enumerate(cfg.stages):
        name = f"stage_{index + 1}"
        if index != 0:
            with g.scope(f"merge_{index}"):
                x = merge(g, x, cfg, stage)
        inner = cfg._replace(
            hidden=stage.hidden, heads=stage.heads, kv_heads=stage.heads, ffn_hidden=stage.ffn_hidden,
            head_dim=div(stage.hidden, stage.heads, "-d/--hidden", "-h/--heads"),
        )  # fmt: skip
        x = window_stage(g, name, x, inner, run, stage)
    families.finish(g, cfg, blocks.norm(g, "final_norm", x, cfg), None)


def merge(g: Graph, x: Tensor, cfg: ModelConfig, stage: Stage) -> Tensor:
    """Each square of 2 x 2 tokens as one vector (missing ones as zeros), normed and projected to half its width."""
    joined = ops.rearrange(g, "join", x, x.axes, (x.shape[0], stage.tokens, 4 * x.shape[-1]))
    joined = blocks.norm(g, "norm", joined, cfg)
    return ops.linear(g, "reduce", "b n e, e d -> b n d", joined, (joined.shape[-1], stage.hidden), False)


def window_stage(g: Graph, name: str, x: Tensor, cfg: ModelConfig, run: Run, stage: Stage) -> Tensor:
    """The layers of a stage. Shifted windows cost what unshifted ones do: a roll, and a mask added to the bias."""
    area = cfg.window_side**2
    count = div(stage.covered, area, "covered patches", "a window's")
    inside = (run.batch * count, area, cfg.hidden)
    rows = (2 * cfg.window_side - 1) ** 2

    def attend(y: Tensor) -> Tensor:
        with g.scope("windows"):
            table = g.weight("relative_bias/weight", ("p", "h"), (rows, cfg.heads), "embedding")
            bias = ops.embedding(g, "relative_bias", ("h", "n", "m"), (cfg.heads, area, area), table)
            parts = ops.rearrange(g, "split", y, y.axes, inside)
        out = blocks.attention(
            g, "attention", parts, parts, cfg, run._replace(batch=inside[0], seq_len=area), position_bias=bias
        )  # fmt: skip
        return ops.rearrange(g, "windows/join", out, y.axes, y.shape)

    def layer(y: Tensor) -> Tensor:
        return blocks.feed_forwards(g, blocks.residual(g, "attention", y, cfg, attend), cfg)

    return g.repeat(name, stage.layers, x, layer)
