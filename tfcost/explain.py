"""A walk through one layer, as the documents do it: each step's shapes, FLOPs and what it keeps for backward."""

from __future__ import annotations

from typing import Any

from tfcost.analysis import Analysis
from tfcost.config import ModelConfig
from tfcost.convention import ATTENTION_KINDS, BADDBMM, DOCUMENT, OpConvention
from tfcost.graph import Op, Saved, Size, Tensor

WORDS = {
    "attention_norm": "each token's vector is normalised, then scaled (and shifted) per coordinate",
    "cross_attention_norm": "normalised again before (pre-norm) or after (post-norm) attending to the encoder",
    "mlp_norm": "normalised again around the feed-forward",
    "query": "what each token looks for: one projection for all heads",
    "key": "what each token offers to be found by",
    "value": "what each token hands over when it is found",
    "rotary_query": "queries turn by an angle that grows with their position",
    "rotary_key": "keys turn alike, so that a score depends on the distance",
    "scores": "QKᵀ/√d_k + mask: how well each query fits each key; the mask adds -inf to what must stay hidden",
    "position_bias": "a learned bias per distance and head is added to the scores",
    "softmax": "each row of scores becomes weights that sum to one; the gradient needs the weights",
    "weighted_sum": "PV: each token takes the weighted mean of the values, by the weights after dropout",
    "flash": "the fused kernel keeps Q, K, V, its output and a log-sum-exp per row; backward makes the scores again",
    "output": "the heads, side by side again, are mixed by one more projection",
    "output_dropout": "dropout on the branch, before it joins the residual stream",
    "attention_residual": "the branch is added to what came in",
    "cross_attention_residual": "the branch is added to what came in",
    "mlp_residual": "the branch is added to what came in",
    "up": "each token on its own: up to the feed-forward width",
    "gate": "the gate's projection; its activation multiplies the other branch",
    "activation": "the non-linearity; its gradient needs its input",
    "product": "gate times branch, element by element; each gradient needs the other factor",
    "down": "and down to the model's width",
    "logits": "how well each token fits each expert",
    "choose": "the experts that fit best, and what they are weighted by",
    "dispatch": "each token's vector, once for each expert that it goes to",
    "combine": "what the experts make of a token, weighted and summed",
    "compress_query": "down to a narrow vector, of which all heads' queries are made",
    "compress_key_value": "down to the narrow vector that a cache holds, of which keys and values are made",
    "key_turned": "one key for all heads, which turns with the position",
    "expand_key": "keys out of the narrow vector; absorbed, the product that brings queries to it instead",
    "expand_value": "values out of the narrow vector; absorbed, the product that follows the weighted sum instead",
    "key_values": "K'ᵀV: all tokens in one matrix of features by width",
    "read": "each query reads that matrix: no score of any pair",
    "normaliser": "the sum of each query's weights, which it is divided by",
    "prefix_sums": "the same up to each token, for a causal model",
    "buckets": "which bucket each token falls into, by random directions",
    "sort": "tokens in the order of their buckets: comparisons, no FLOPs",
    "split": "the grid as windows, shifted in every other layer, padded to whole ones",
    "join": "and the windows as a grid again",
    "state": "the same projection of the state before: one step after another",
    "cells": "what is forgotten and what is written",
}
"""What each step does, by the last name of its path."""

DROPOUT_WORDS = {"attention": "dropout on the attention weights", "mlp": "dropout inside the feed-forward"}


def words(op: Op) -> str:
    """One line on what a step does."""
    *_, block, name = ["", *op.path.split("/")]
    if name == "dropout":
        kept = "keeps a one-byte mask" if op.saves else "the kernel draws its mask again in backward"
        return f"{DROPOUT_WORDS.get(block, 'dropout')}; {kept}"
    return WORDS.get(name, op.kind)


def shown_shape(tensor: Tensor, per_head: bool) -> list[Size]:
    """A tensor's shape as the documents write it: heads merged into the width, or beside it as ``[b, h, N, d_k]``."""
    sizes = dict(zip(tensor.axes, tensor.shape, strict=True))
    heads = _product([sizes.pop(axis) for axis in ("h", "g") if axis in sizes])
    if heads is None:
        return list(sizes.values())
    batch = [sizes.pop("b")] if "b" in sizes else []
    if per_head:
        return [*batch, heads, *sizes.values()]
    width = sizes.pop("k", None)
    merged = heads if width is None else heads * width
    # A weight of the output projection has its head axes first, every other tensor last.
    return [merged, *sizes.values()] if tensor.axes[0] == "h" else [*batch, *sizes.values(), merged]


def _product(sizes: list[Size]) -> Size | None:
    total = None
    for size in sizes:
        total = size if total is None else total * size
    return total


def shapes(op: Op) -> str:
    """``[b, N, d] x [d, d] -> [b, N, d]``; the keys of QKᵀ transposed, ``[b, h, N, d/h] x [b, h, d/h, N]``."""
    per_head = op.kind in (*ATTENTION_KINDS, "softmax", "fused_attention") or op.path.endswith("attention/dropout")
    operands = [shown_shape(tensor, per_head) for tensor in op.inputs]
    if op.kind in ("scores", BADDBMM):
        *leading, keys, width = operands[1]
        operands[1] = [*leading, width, keys]
    sign = {"add": " + ", "multiply": " * "}.get(op.kind, " x ")
    return f"{sign.join(map(_text, operands))} -> {_text(shown_shape(op.output, per_head))}"


def _text(shape: list[Size]) -> str:
    return "[" + ", ".join(map(_size, shape)) + "]"


def _size(size: Size) -> str:
    if isinstance(size, int):
        return str(size)
    from tfcost.notation import written

    return written(size)


def steps(analysis: Analysis) -> list[dict[str, Any]]:
    """The steps of one layer of each stack, in order: path, words, shapes, FLOPs, kept bytes and which tensors.

    A tensor from outside the layer (an encoder's output) is kept once for all layers, and stands apart.
    """
    chosen = analysis.options.convention
    convention = chosen if isinstance(chosen, OpConvention) else DOCUMENT
    flash = analysis.run.attention == "flash"
    kept: dict[int, list[Saved]] = {}
    for saved in analysis.saved:
        kept.setdefault(id(saved.op), []).append(saved)
    found = []
    for repeat in analysis.graph.repeats:
        for op in analysis.graph.ops[repeat.start : repeat.stop]:
            line = convention.price(op, flash)
            tensors = [saved.tensor for saved in kept.get(id(op), [])]
            own = [tensor for tensor in tensors if tensor.path.startswith(repeat.path + "/")]
            step = {
                "path": op.path, "what": words(op), "shapes": shapes(op),
                "flops_each": 0 if line is None else line.forward,
                "keeps": ", ".join(tensor.path.rpartition("/")[2] for tensor in own),
                "bytes_each": sum([tensor.bytes for tensor in own]),
            }  # fmt: skip
            if shared := [tensor for tensor in tensors if tensor not in own]:
                step |= {"keeps_once": ", ".join(tensor.path for tensor in shared)}
                step |= {"bytes_once": sum([tensor.bytes for tensor in shared])}
            found.append(step)
    return found


def sums(analysis: Analysis, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The FLOPs and kept bytes of one layer of each stack: the sums of its steps."""
    return [
        {
            "path": repeat.path,
            **{
                figure: sum([step[figure] for step in found if step["path"].startswith(repeat.path + "/")])
                for figure in ("flops_each", "bytes_each")
            },
        }
        for repeat in analysis.graph.repeats
    ]


def remarks(cfg: ModelConfig, seq_len: int) -> list[str]:
    """What is unusual in a model's sizes, each with its reason."""
    found = []
    if cfg.head_dim < 64:
        found.append(f"d_k = {cfg.head_dim} is below 64: QKᵀ and PV are then small products that use a GPU badly")
    if cfg.heads * cfg.head_dim != cfg.hidden:
        found.append(f"h d_k = {cfg.heads * cfg.head_dim:,} is not d = {cfg.hidden:,}: scores cost by h d_k, not by d")
    if cfg.kv_heads != cfg.heads:
        found.append(f"{cfg.kv_heads} key/value heads for {cfg.heads} query heads: smaller K and V, the same scores")
    if cfg.ffn == "mlp" and cfg.ffn_hidden != 4 * cfg.hidden:
        found.append(f"d_ff = {cfg.ffn_hidden:,} is {cfg.ffn_hidden / cfg.hidden:.4g} d, not the usual 4 d")
    if cfg.vocab is not None and cfg.vocab % 64:
        found.append(
            f"V = {cfg.vocab:,} is no multiple of 64: frameworks often pad it, which adds parameters and FLOPs"
        )
    crossing = 6 * cfg.hidden
    if cfg.family not in ("", "image") or cfg.attention_kind in ("linear", "lsh"):
        return found
    if seq_len > crossing and cfg.ffn == "mlp" and cfg.ffn_hidden == 4 * cfg.hidden and cfg.kv_heads == cfg.heads:
        found.append(f"N = {seq_len:,} is beyond 6d = {crossing:,}: the score square costs more than all projections")
    return found
