"""What a model ends in: a pooler, a classifier, the language-model head and its loss."""

from __future__ import annotations

from tfcost import ops
from tfcost.config import ModelConfig
from tfcost.errors import InputError
from tfcost.graph import Graph, Size, Tensor


def head(g: Graph, cfg: ModelConfig, x: Tensor, table: Tensor | None) -> None:
    """The language-model head and its loss, a pooler, a classifier: whatever the model ends in."""
    g.head_start = len(g.ops)
    pooled = pooler(g, cfg, x) if cfg.pooler else None
    if cfg.next_sentence and pooled is not None:
        ops.linear(g, "next_sentence", "b n d, d c -> b n c", pooled, (cfg.hidden, cfg.next_sentence))
    if cfg.classes:
        classifier(g, cfg, x if pooled is None else pooled)
    if cfg.pixel_stride:
        pixels(g, cfg, x)
    if cfg.head and table is not None:
        logits = language_model(g, cfg, x, table)
        ops.cross_entropy(g, "loss", logits)


def pooler(g: Graph, cfg: ModelConfig, x: Tensor) -> Tensor:
    """BERT's pooler (Devlin et al. 2019, arXiv:1810.04805): tanh of a dense layer on the first token, 2bd² FLOPs."""
    d = cfg.hidden
    with g.scope("pooler"):
        first = ops.gather_tokens(g, "first_token", x, 1)
        if not cfg.pooler_dense:
            return first
        width = d if cfg.pooler_size is None else cfg.pooler_size
        pooled = ops.linear(g, "dense", "b n d, d c -> b n c", first, (d, width))
        return ops.activation(g, "activation", pooled, cfg.pooler_activation)


def pixels(g: Graph, cfg: ModelConfig, x: Tensor) -> None:
    """The pixels of masked patches (SimMIM, Xie et al. 2022, arXiv:2111.09886): a convolution of one patch.

    s² c channels for squares of s pixels: 2bN d s² c FLOPs for N patches, d s² c + s² c parameters.
    """
    if cfg.prefix_tokens != 0:
        x = ops.gather_tokens(g, "patch_tokens", x, x.shape[1] - cfg.prefix_tokens)
    shape = (x.shape[-1], cfg.pixel_stride**2 * cfg.channels)
    ops.linear(g, "pixels", "b n d, d c -> b n c", x, shape, True, "head")


def classifier(g: Graph, cfg: ModelConfig, x: Tensor) -> None:
    """A linear classifier, on each token or on one, after a dense layer with an activation where the class has one.

    ``classes`` and a score per token are what the decoder-only ``ForSequenceClassification`` classes compute: they
    choose the last token afterwards.
    """
    if not cfg.pooler:
        x = classified(g, cfg, x)
    d = x.shape[-1]
    if cfg.classifier_dense:
        if cfg.classifier_input_dropout:
            x = ops.dropout(g, "classifier_input_dropout", x, cfg.classifier_dropout)
        with g.scope("classifier_dense"):
            x = ops.linear(g, "dense", "b n d, d c -> b n c", x, (d, d))
            x = ops.activation(g, "activation", x, cfg.classifier_dense)
    x = ops.dropout(g, "classifier_dropout", x, cfg.classifier_dropout)
    for index in range(cfg.classifiers):  # DeiT's class token and its distillation token have one each
        name = f"classifier_{index + 1}" if index else "classifier"
        ops.linear(g, name, "b n d, d c -> b n c", x, (d, cfg.classes), cfg.classifier_bias, "head")


def classified(g: Graph, cfg: ModelConfig, x: Tensor) -> Tensor:
    """What a classifier reads: all tokens, the first, the mean of all or of those after the first, or both."""
    if cfg.classifier_tokens == "all":
        return x
    if cfg.classifier_tokens == "mean":
        return ops.mean_tokens(g, "mean_token", x, x.shape[1])
    if cfg.classifier_tokens == "mean_after_first":
        return ops.mean_tokens(g, "mean_token", x, x.shape[1] - 1)
    first = ops.gather_tokens(g, "classifier_token", x, 1)
    if cfg.classifier_tokens == "first":
        return first
    return ops.join(g, "classifier_input", first, ops.mean_tokens(g, "mean_token", x, x.shape[1] - cfg.prefix_tokens))


def language_model(g: Graph, cfg: ModelConfig, x: Tensor, table: Tensor) -> Tensor:
    """Logits, 2bNdV FLOPs, by the token table where it is tied; before them BERT's transform.

    The transform is dense, activation and LayerNorm of the width of the table (of the hidden width where
    ``head_factored``: MobileBERT's logits use the table's E columns and a d - E by V matrix of their own). Where only
    some tokens have labels, these alone are read (``--labels``).
    """
    vocab, width = table.shape
    if g.labels is not None:
        x = ops.select_tokens(g, "labelled", x, g.labels)
    if cfg.head_transform:
        inner: Size = cfg.hidden if cfg.head_factored else width
        with g.scope("head_transform"):
            x = ops.linear(g, "dense", "b n d, d c -> b n c", x, (x.shape[-1], inner))
            x = ops.activation(g, "activation", x, cfg.head_activation or cfg.activation)
            x = ops.norm(g, "norm", x, "layernorm")
    factored = cfg.head_factored and cfg.embedding_projection not in ("none", "unused")
    if not factored and x.shape[-1] != width:
        raise InputError(
            f"--head: the token table is {width} wide and the model {x.shape[-1]}, with no projection back"
        )
    with g.scope("head"):
        weight = table if cfg.tied else g.weight("weight", ("v", "d"), (vocab, width), "head")
        bias = g.weight("bias", ("v",), (vocab,), "head") if cfg.head_bias else None
        if cfg.head_spare_bias and not cfg.tied:
            ops.unused(g, "spare", (g.weight("spare_bias", ("v",), (vocab,), "head"),))
        if factored:
            rest = g.weight("extra_weight", ("v", "d"), (vocab, cfg.hidden - width), "head")
            weight = ops.join_weights(g, "joined", weight, rest)
    logits = ops.contract(g, "head", "b n d, v d -> b n v", x, weight, kind="linear", bias=bias)
    return ops.activation(g, "logit_softcap", logits, "tanh") if cfg.logit_softcap else logits
