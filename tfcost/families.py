"""Whole models: embeddings, stacks and heads around the layers of :mod:`tfcost.blocks`. One function per family."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from tfcost import blocks, ops
from tfcost.blocks import Run
from tfcost.config import ModelConfig
from tfcost.errors import GraphError
from tfcost.graph import Adapters, Graph, Size, Tensor, div
from tfcost.heads import head
from tfcost.implementation import DOCUMENT, Implementation

Layer = Callable[[Tensor], Tensor]
"""The body that a stack repeats."""


def table_width(cfg: ModelConfig) -> Size:
    """The width E of the token table: the hidden width, unless a projection leads from one to the other."""
    return cfg.hidden if cfg.embedding_projection in ("none", "unused") else cfg.embedding_size


def token_table(g: Graph, cfg: ModelConfig, vocab: Size | None) -> Tensor | None:
    """The token embedding, ``V x d`` (``V x E`` where it is projected); None without a vocabulary."""
    if vocab is None:
        return None
    with g.scope("embedding"), g.scope("token"):
        return g.weight("weight", ("v", "d"), (vocab, table_width(cfg)), "embedding")


def embed(g: Graph, cfg: ModelConfig, run: Run, length: Size, table: Tensor | None) -> Tensor:
    """Token, position and type embeddings summed, then the norm and dropout that the model has on them.

    Without a table (no ``-V``) the input is a tensor of hidden vectors that needs a gradient, as it would inside a
    larger model. An embedding of width E is projected to d before the sum (OPT-350m, MobileBERT) or at the very end
    (ALBERT, Lan et al. 2020, arXiv:1909.11942, section 3.1; ELECTRA).
    """
    late = cfg.embedding_projection == "after"
    width = table_width(cfg) if late else cfg.hidden
    shape = (run.batch, length, width)
    with g.scope("embedding"):
        if table is None:
            return g.tensor("input", ("b", "n", "d"), (run.batch, length, cfg.hidden))
        x = ops.embedding(g, "token", ("b", "n", "d"), (run.batch, length, table.shape[1]), table)
        if not late:
            x = project(g, cfg, x)
        if cfg.positions == "learned" and cfg.max_positions is not None:
            rows = g.weight(
                "position/weight", ("p", "d"), (cfg.max_positions + cfg.position_offset, width), "embedding"
            )
            # All sequences read the same rows: their gradient is summed over the batch first.
            summed = 0 if run.batch == 1 else length * width * g.itemsize
            read = ops.embedding(g, "position", ("b", "n", "d"), shape, rows, summed)
            x = ops.add(g, "position_sum", x, read)
        elif cfg.positions == "sinusoidal":
            x = ops.add(g, "position_sum", x, g.tensor("position", ("n", "d"), shape[1:], grad=False))
        if cfg.type_vocab:
            types = g.weight("type/weight", ("t", "d"), (cfg.type_vocab, width), "embedding")
            x = ops.add(g, "type_sum", x, ops.embedding(g, "type", ("b", "n", "d"), shape, types))
        if cfg.embedding_norm:
            x = blocks.norm(g, "norm", x, cfg)
        x = ops.dropout(g, "dropout", x, cfg.embedding_dropout)
        return project(g, cfg, x) if late else x


def project(g: Graph, cfg: ModelConfig, x: Tensor) -> Tensor:
    """From the embedding's width to the model's, by trigrams where the model joins neighbours; 2bNEd FLOPs."""
    if cfg.embedding_projection == "none":
        return x
    if cfg.embedding_projection == "unused":
        ops.unused(g, "projection", g.weights_of(lambda: projection(g, cfg, x)))
        return x
    if cfg.embedding_context != 1:
        x = ops.join_tokens(g, "neighbours", x, cfg.embedding_context)
    return projection(g, cfg, x)


def projection(g: Graph, cfg: ModelConfig, x: Tensor) -> Tensor:
    """The projection itself."""
    spec, shape = "b n e, e d -> b n d", (x.shape[-1], cfg.hidden)
    return ops.linear(g, "projection", spec, x, shape, cfg.embedding_projection_bias)


def stack(
    g: Graph, cfg: ModelConfig, run: Run, x: Tensor, layers: Size, causal: bool, memory: Tensor | None = None
) -> Tensor:
    """``layers`` layers, and the final norm where the model has one.

    Where some layers have a sliding window and some have none, they are repeated as ``local_layer`` and
    ``global_layer``; where some are dense and some have experts, as ``dense_layer`` and ``sparse_layer``.
    """
    bias = position_bias(g, cfg, x.shape[1])
    for name, times, window, layer in kinds(cfg, layers):
        x = g.repeat(name, times, x, layer_of(g, layer, run, causal, window, memory, bias), cfg.layer_sets)
    return blocks.norm(g, "final_norm", x, cfg) if cfg.final_norm else x


class Kind(NamedTuple):
    """Layers of a stack that are alike: their name, how many there are, their window and their config."""

    name: str
    times: Size
    window: Size | None
    cfg: ModelConfig


def kinds(cfg: ModelConfig, layers: Size) -> list[Kind]:
    """The kinds of layers of a stack: with a window or without, dense or with experts."""
    if cfg.local_layers is None and cfg.dense_layers is None:
        return [Kind("layer", layers, cfg.window, cfg)]
    plain = cfg._replace(experts=None)
    if cfg.local_layers is None:
        dense = cfg.dense_layers
        found = [
            Kind("dense_layer", dense, cfg.window, plain),
            Kind("sparse_layer", layers - dense, cfg.window, cfg),
        ]
    elif cfg.dense_layers is None:
        local = cfg.local_layers
        found = [Kind("local_layer", local, cfg.window, cfg), Kind("global_layer", layers - local, None, cfg)]
    else:
        local, dense, both = cfg.local_layers, cfg.dense_layers, cfg.local_dense_layers
        found = [
            Kind("local_dense_layer", both, cfg.window, plain),
            Kind("global_dense_layer", dense - both, None, plain),
            Kind("local_sparse_layer", local - both, cfg.window, cfg),
            Kind("global_sparse_layer", layers - local - dense + both, None, cfg),
        ]
    return [kind for kind in found if kind.times != 0]


def layer_of(
    g: Graph, cfg: ModelConfig, run: Run, causal: bool, window: Size | None, memory: Tensor | None, bias: Tensor | None
) -> Layer:
    """The body of a stack of Transformer layers."""
    return lambda y: blocks.layer(
        g, y, cfg, run, causal=causal, window=window, memory=memory, position_bias=bias
    )  # fmt: skip


def position_bias(g: Graph, cfg: ModelConfig, length: Size) -> Tensor | None:
    """What a model adds to its scores for positions: one per stack, shared by its layers.

    ALiBi (Press et al. 2022, arXiv:2108.12409): a fixed slope per head times the distance. T5 (Raffel et al. 2020,
    arXiv:1910.10683, section 2.1): a learned scalar per bucket of distances and head.
    """
    if cfg.positions == "alibi":
        return g.tensor("alibi", ("h", "m"), (cfg.heads, length), grad=False)
    if cfg.positions != "relative":
        return None
    table = g.weight("relative_bias/weight", ("p", "h"), (cfg.relative_buckets, cfg.heads), "embedding")
    return ops.embedding(g, "relative_bias", ("h", "n", "m"), (cfg.heads, length, length), table)


def single_stack(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """Decoder-only (causal) and encoder-only models: one stack of layers."""
    decoder = cfg.arch == "decoder"
    table = token_table(g, cfg, cfg.vocab)
    x = embed(g, cfg, run, run.seq_len, table)
    memory = None
    if cfg.cross_attention and run.src_len is not None:
        # The encoder is another model: its output is a tensor of this one, which needs no gradient here.
        memory = g.tensor("encoder_output", ("b", "m", "d"), (run.batch, run.src_len, cfg.hidden), grad=False)
    layers = cfg.decoder_layers if decoder else cfg.encoder_layers
    x = stack(g, cfg, run, x, layers, decoder and not cfg.bidirectional, memory)
    finish(g, cfg, x, table)


def encoder_decoder(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """Vaswani et al. 2017: an encoder over S source tokens, and a decoder over T that reads its output in each layer.

    With one vocabulary the embedding is one table for source, target and (tied) head, as in the paper's section 3.4.
    BART untied (``separate_tables``) has a table per stack and keeps the shared one without a use.
    """
    shared = cfg.src_vocab is None and (cfg.tied or not cfg.separate_tables)
    common = token_table(g, cfg, cfg.vocab) if cfg.src_vocab is None else None
    with g.scope("encoder"):
        source = common if shared else token_table(g, cfg, cfg.vocab if cfg.src_vocab is None else cfg.src_vocab)
        memory = embed(g, cfg, run, run.src_len, source)
        memory = stack(g, cfg, run, memory, cfg.encoder_layers, causal=False)
        memory = ops.dropout(g, "final_dropout", memory, cfg.final_dropout)
    with g.scope("decoder"):
        target = common if shared else token_table(g, cfg, cfg.vocab)
        x = embed(g, cfg, run, run.seq_len, target)
        x = stack(g, decoder_config(cfg), run, x, cfg.decoder_layers, causal=True, memory=memory)
    if common is not None and not shared:
        ops.unused(g, "embedding/shared", (common,))
    finish(g, cfg, x, target)


def decoder_config(cfg: ModelConfig) -> ModelConfig:
    """The decoder's own heads and feed-forward, where they differ from the encoder's (BART)."""
    changes: dict[str, Any] = {}
    if cfg.decoder_heads is not None:
        width = div(cfg.hidden, cfg.decoder_heads, "-d/--hidden", "decoder heads")
        changes = {"heads": cfg.decoder_heads, "kv_heads": cfg.decoder_heads, "head_dim": width}
    if cfg.decoder_ffn_hidden is not None:
        changes["ffn_hidden"] = cfg.decoder_ffn_hidden
    return cfg._replace(**changes) if changes else cfg


def finish(g: Graph, cfg: ModelConfig, x: Tensor, table: Tensor | None) -> None:
    """What a bare model does after its last layer, and then its head."""
    x = ops.dropout(g, "final_dropout", x, cfg.final_dropout)
    if cfg.output_projection:
        spec, shape = "b n d, d e -> b n e", (cfg.hidden, table_width(cfg))
        x = ops.linear(g, "output_projection", spec, x, shape, cfg.embedding_projection_bias)
    head(g, cfg, x, table)


Family = Callable[[Graph, ModelConfig, Run], None]

FAMILIES: dict[str, Family | tuple[str, str]] = {
    "decoder": single_stack,
    "encoder": single_stack,
    "encoder-decoder": encoder_decoder,
    "image": ("tfcost.images", "image"),
    "windows": ("tfcost.images", "windows"),
    "diffusion": ("tfcost.diffusion", "diffusion"),
    "towers": ("tfcost.towers", "towers"),
    "text-tower": ("tfcost.towers", "text_tower"),
    "image-tower": ("tfcost.towers", "image_tower"),
    "speech": ("tfcost.speech", "speech"),
    "speech-encoder": ("tfcost.speech", "speech_encoder"),
    "recurrent": ("tfcost.recurrent", "recurrent"),
    "convolutions": ("tfcost.recurrent", "convolutions"),
}
"""The function that builds each family (a model without one is of its ``arch``), or where it is: module and name."""


def family(name: str) -> Family:
    """The function of a family; its module is imported when a model first needs it."""
    if name not in FAMILIES:
        raise GraphError(f"no family builds {name!r}")
    found = FAMILIES[name]
    if isinstance(found, tuple):
        module, function = found
        found = FAMILIES[name] = getattr(import_module(module), function)
    return found


def build(
    cfg: ModelConfig,
    run: Run,
    itemsize: Size = 2,
    implementation: Implementation = DOCUMENT,
    adapters: Adapters | None = None,
) -> Graph:
    """The op graph of one forward pass of a model, with what this implementation keeps and what trains."""
    g = Graph(itemsize, implementation, adapters)
    g.labels = run.labels
    family(cfg.family or cfg.arch)(g, cfg, run)
    return g
