"""Mixture of experts: a router, the experts that it chooses for each token, and those that every token shares.

Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021 (Switch), arXiv:2101.03961; Dai et al. 2024 (DeepSeekMoE),
arXiv:2401.06066. Axis letters beyond those of :mod:`tfcost.blocks`: x experts, t experts chosen per token, s slots
(token and chosen expert).
"""

from __future__ import annotations

from fractions import Fraction

from tfcost import blocks, ops
from tfcost.config import ModelConfig
from tfcost.errors import InputError
from tfcost.graph import Graph, Size, Tensor, div


def slots(cfg: ModelConfig, tokens: Size) -> Size:
    """Slots that the experts work on: k per token where every token is served, whoever serves it.

    With a capacity factor c (Switch, section 2.2) an expert has c k tokens / E slots, filled or not: c k per token.
    """
    routed = tokens * cfg.experts_per_token
    if cfg.capacity_factor is None:
        return routed
    whole, _, part = cfg.capacity_factor.partition(".")
    scaled, parts = int(whole + part) * routed, 10 ** len(part)
    if isinstance(scaled, int) and isinstance(cfg.experts, int) and scaled % (parts * cfg.experts):
        share = Fraction(scaled, parts * cfg.experts)
        raise InputError(
            f"--capacity-factor {cfg.capacity_factor} of {routed:,} routed tokens is {float(share):,.6g} slots for "
            f"each of --experts {cfg.experts}: give a factor (or batch and length) that makes it a whole number"
        )
    return div(scaled, parts * cfg.experts, "routed tokens", "--experts") * cfg.experts


def mixture(g: Graph, x: Tensor, cfg: ModelConfig) -> Tensor:
    """Each token through k of E experts, weighted by the router, and through the shared experts.

    FLOPs 2bNdE + 2bNk·3d·d_e (gated experts of width d_e) and 6bNd·d_s for shared ones; parameters
    dE + 3E d d_e + 3d d_s, of which a token uses k/E of the experts'. Keeps the router's output, each slot's copy of
    its token, an MLP's tensors per slot, and each slot's output with its weight, which multiply one another. Which
    experts a token goes to changes no figure; ids are not counted.
    """
    weights = route(g, x, cfg)
    with g.scope("experts"):
        routed = ops.dispatch(g, "dispatch", x, slots(cfg, x.shape[0] * x.shape[1]))
        out = expert(g, routed, cfg)
        out = ops.combine(g, "combine", out, weights, x)
        out = ops.dropout(g, "output_dropout", out, cfg.ffn_output_dropout)
    if cfg.shared_expert_hidden != 0:
        shared = blocks.feed_forward_of(g, "shared_expert", x, cfg, cfg.shared_expert_hidden)
        with g.scope("shared_expert"):
            if cfg.shared_expert_gate:
                gate = ops.linear(g, "shared_gate", "b n d, d c -> b n c", x, (x.shape[-1], 1), False)
                gate = ops.squash(g, "shared_gate_activation", gate, "sigmoid")
                shared = ops.multiply(g, "gated", shared, gate)
            out = ops.add(g, "sum", out, shared)
    return out


def route(g: Graph, x: Tensor, cfg: ModelConfig) -> Tensor:
    """The weights of a token's k experts, b n t: by a softmax over all experts, over the chosen, or by sigmoids."""
    with g.scope("router"):
        logits = ops.linear(g, "logits", "b n d, d c -> b n c", x, (x.shape[-1], cfg.experts), cfg.router_bias)
        if cfg.router == "chosen":
            return ops.softmax(g, "softmax", ops.choose(g, "choose", logits, cfg.experts_per_token))
        if cfg.router == "sigmoid":
            scores = ops.squash(g, "sigmoid", logits, "sigmoid")
        else:
            scores = ops.softmax(g, "softmax", logits)
        return ops.choose(g, "choose", scores, cfg.experts_per_token)


def expert(g: Graph, x: Tensor, cfg: ModelConfig) -> Tensor:
    """The feed-forward of :func:`tfcost.blocks.feed_forward` on slots (s d), each by the weights of its expert."""
    d, f, bias = x.shape[-1], cfg.expert_hidden, cfg.expert_bias
    if cfg.ffn == "glu":
        gate = ops.expert_linear(g, "gate", "s d, d f -> s f", x, cfg.experts, (d, f), bias)
        gate = ops.activation(g, "activation", gate, cfg.activation)
        inner = ops.expert_linear(g, "up", "s d, d f -> s f", x, cfg.experts, (d, f), bias)
        inner = ops.multiply(g, "product", gate, inner)
    else:
        inner = ops.expert_linear(g, "up", "s d, d f -> s f", x, cfg.experts, (d, f), bias)
        inner = ops.activation(g, "activation", inner, cfg.activation)
    inner = ops.dropout(g, "dropout", inner, cfg.ffn_dropout)
    return ops.expert_linear(g, "down", "s f, f d -> s d", inner, cfg.experts, (f, d), bias)
