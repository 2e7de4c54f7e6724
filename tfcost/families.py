"""Whole models: embeddings, stacks and heads around the layers of :mod:`tfcost.blocks`. One function per family."""

from __future__ import annotations

from collections.abc import Callable

from tfcost import blocks, ops
from tfcost.blocks import Run
from tfcost.config import ModelConfig
from tfcost.errors import GraphError
from tfcost.graph import Graph, Size, Tensor


def token_table(g: Graph, cfg: ModelConfig, vocab: Size | None) -> Tensor | None:
    """The token embedding, ``V x d``; None without a vocabulary."""
    if vocab is None:
        return None
    with g.scope("embedding"), g.scope("token"):
        return g.weight("weight", ("v", "d"), (vocab, cfg.hidden), "embedding")


def embed(g: Graph, cfg: ModelConfig, run: Run, length: Size, table: Tensor | None) -> Tensor:
    """Token, position and type embeddings summed, then the norm and dropout that the model has on them.

    Without a table (no ``-V``) the input is a tensor of hidden vectors that needs a gradient, as it would inside a
    larger model.
    """
    shape = (run.batch, length, cfg.hidden)
    with g.scope("embedding"):
        if table is None:
            x = g.tensor("input", ("b", "n", "d"), shape)
        else:
            x = ops.embedding(g, "token", ("b", "n", "d"), shape, table)
        if cfg.positions == "learned" and cfg.max_positions is not None:
            rows = g.weight("position/weight", ("p", "d"), (cfg.max_positions + cfg.position_offset, cfg.hidden), "embedding")
            x = ops.add(g, "position_sum", x, ops.embedding(g, "position", ("b", "n", "d"), shape, rows))
        elif cfg.positions == "sinusoidal" and table is not None:
            x = ops.add(g, "position_sum", x, g.tensor("position", ("n", "d"), shape[1:], grad=False))
        if cfg.type_vocab:
            types = g.weight("type/weight", ("t", "d"), (cfg.type_vocab, cfg.hidden), "embedding")
            x = ops.add(g, "type_sum", x, ops.embedding(g, "type", ("b", "n", "d"), shape, types))
        if cfg.embedding_norm:
            x = blocks.norm(g, "norm", x, cfg)
        return ops.dropout(g, "dropout", x, cfg.embedding_dropout)


def stack(g: Graph, cfg: ModelConfig, run: Run, x: Tensor, layers: Size, causal: bool, memory: Tensor | None = None) -> Tensor:
    """``layers`` equal layers, and the final norm where the model has one."""
    bias = None
    if cfg.positions == "relative":
        bias = relative_bias(g, cfg, x.shape[1])
    x = g.repeat(
        "layer", layers, x,
        lambda y: blocks.layer(g, y, cfg, run, causal=causal, memory=memory, position_bias=bias),
    )  # fmt: skip
    return blocks.norm(g, "final_norm", x, cfg) if cfg.final_norm else x


def relative_bias(g: Graph, cfg: ModelConfig, length: Size) -> Tensor:
    """T5's relative position bias (Raffel et al. 2020, arXiv:1910.10683, section 2.1): a learned scalar per bucket and
    head, added to the scores; one table per stack, shared by its layers."""
    table = g.weight("relative_bias/weight", ("p", "h"), (cfg.relative_buckets, cfg.heads), "embedding")
    return ops.embedding(g, "relative_bias", ("h", "n", "m"), (cfg.heads, length, length), table)


def head(g: Graph, cfg: ModelConfig, x: Tensor, table: Tensor | None) -> None:
    """The language-model head and its loss, a pooler, a classifier: whatever the model ends in."""
    g.head_start = len(g.ops)
    d = cfg.hidden
    if cfg.pooler:
        with g.scope("pooler"):
            first = ops.gather_tokens(g, "first_token", x, 1)
            pooled = ops.linear(g, "dense", "b n d, d c -> b n c", first, (d, d))
            pooled = ops.activation(g, "activation", pooled, "tanh")
        if cfg.next_sentence:
            ops.linear(g, "next_sentence", "b n d, d c -> b n c", pooled, (d, 2))
    if cfg.classes:
        read = x
        if cfg.pooler:
            read = ops.dropout(g, "classifier_dropout", pooled, cfg.dropout)
        ops.linear(g, "classifier", "b n d, d c -> b n c", read, (d, cfg.classes), cfg.classifier_bias, "head")
    if not cfg.head or table is None:
        return
    if cfg.head_transform:
        with g.scope("head_transform"):
            x = ops.linear(g, "dense", "b n d, d c -> b n c", x, (d, d))
            x = ops.activation(g, "activation", x, cfg.activation)
            x = ops.norm(g, "norm", x, "layernorm")
    vocab = table.shape[0]
    with g.scope("head"):
        weight = table if cfg.tied else g.weight("weight", ("v", "d"), (vocab, d), "head")
        bias = g.weight("bias", ("v",), (vocab,), "head") if cfg.head_bias else None
    logits = ops.contract(g, "head", "b n d, v d -> b n v", x, weight, kind="linear", bias=bias)
    ops.cross_entropy(g, "loss", logits)


def single_stack(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """Decoder-only (causal) and encoder-only models: one stack of layers."""
    causal = cfg.arch == "decoder"
    table = token_table(g, cfg, cfg.vocab)
    x = embed(g, cfg, run, run.seq_len, table)
    memory = None
    if cfg.cross_attention:
        # The encoder is another model: its output is a tensor of this one, which needs no gradient here.
        memory = g.tensor("encoder_output", ("b", "m", "d"), (run.batch, run.src_len, cfg.hidden), grad=False)
    layers = cfg.decoder_layers if causal else cfg.encoder_layers
    x = stack(g, cfg, run, x, layers, causal, memory)
    head(g, cfg, x, table)


def encoder_decoder(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """Vaswani et al. 2017: an encoder over S source tokens, and a decoder over T that reads its output in each layer.

    With one vocabulary the embedding is one table for source, target and (tied) head, as in the paper's section 3.4.
    """
    shared = cfg.src_vocab is None
    table = token_table(g, cfg, cfg.vocab) if shared else None
    with g.scope("encoder"):
        source = table if shared else token_table(g, cfg, cfg.src_vocab)
        memory = embed(g, cfg, run, run.src_len, source)
        memory = stack(g, cfg, run, memory, cfg.encoder_layers, causal=False)
    with g.scope("decoder"):
        target = table if shared else token_table(g, cfg, cfg.vocab)
        x = embed(g, cfg, run, run.seq_len, target)
        x = stack(g, cfg, run, x, cfg.decoder_layers, causal=True, memory=memory)
    head(g, cfg, x, target)


FAMILIES: dict[str, Callable[[Graph, ModelConfig, Run], None]] = {
    "decoder": single_stack,
    "encoder": single_stack,
    "encoder-decoder": encoder_decoder,
}
"""The function that builds each ``arch``."""


def build(cfg: ModelConfig, run: Run, itemsize: Size = 2) -> Graph:
    """The op graph of one forward pass of a model."""
    if cfg.arch not in FAMILIES:
        raise GraphError(f"no family builds arch {cfg.arch!r}")
    g = Graph(itemsize)
    FAMILIES[cfg.arch](g, cfg, run)
    return g
