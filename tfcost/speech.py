"""Whisper: convolutions over the frames of a spectrogram, an encoder, and a decoder of text.

Radford et al. 2022, arXiv:2212.04356, section 2.2.
"""

from __future__ import annotations

from tfcost import families, ops
from tfcost.blocks import Run
from tfcost.config import ModelConfig
from tfcost.graph import Graph, Tensor
from tfcost.heads import classifier


def speech(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """An encoder over S positions of two frames each, and a decoder over T tokens that reads it in each layer."""
    with g.scope("encoder"):
        memory = families.stack(g, cfg, run, frames(g, cfg, run), cfg.encoder_layers, causal=False)
    with g.scope("decoder"):
        table = families.token_table(g, cfg, cfg.vocab)
        x = families.embed(g, cfg, run, run.seq_len, table)
        decoder = families.decoder_config(cfg)
        x = families.stack(g, decoder, run, x, cfg.decoder_layers, causal=True, memory=memory)
    families.finish(g, cfg, x, table)


def speech_encoder(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """The encoder alone (N positions), a projection of each to width P, 2bN d P FLOPs, and a classifier of the mean."""
    x = frames(g, cfg, run._replace(src_len=run.seq_len))
    x = families.stack(g, cfg, run, x, cfg.encoder_layers, causal=False)
    g.head_start = len(g.ops)
    x = ops.linear(g, "projection", "b n d, d p -> b n p", x, (cfg.hidden, cfg.projection_size), True, "head")
    classifier(g, cfg, x)


def frames(g: Graph, cfg: ModelConfig, run: Run) -> Tensor:
    """Two convolutions of three frames, the second of stride two, each with a GELU, and fixed positions.

    6bF·c d + 6bS·d² FLOPs for F frames of c mel bins. The table of sines is a parameter that is not trained. Keeps the
    spectrogram, what goes into both GELUs and what comes out of the first.
    """
    with g.scope("embedding"):
        x = g.tensor("frames", ("b", "n", "c"), (run.batch, run.frames, cfg.channels), grad=False)
        for index, positions in ((1, run.frames), (2, run.src_len)):
            x = ops.convolution(g, f"convolution_{index}", x, positions, 3, cfg.hidden)
            x = ops.activation(g, f"activation_{index}", x, "gelu")
        shape = ("n", "d"), (cfg.source_positions, cfg.hidden)
        table = g.weight("position/weight", *shape, "embedding", grad=False)
        positions_used = ops.whole_table(g, "position", table)
        positions_used.grad = False
        x = ops.add(g, "position_sum", x, positions_used)
        return ops.dropout(g, "dropout", x, cfg.embedding_dropout)
