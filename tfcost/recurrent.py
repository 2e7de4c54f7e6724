"""What the Transformer is compared with: RNN, LSTM and GRU layers, and convolutions, each in place of a whole layer.

Elman 1990; Hochreiter & Schmidhuber 1997; Cho et al. 2014, arXiv:1406.1078 (with the reset gate after the product, as
in PyTorch and cuDNN); Gehring et al. 2017, arXiv:1705.03122.
"""

from __future__ import annotations

from tfcost import families, ops
from tfcost.blocks import Run
from tfcost.config import ModelConfig
from tfcost.graph import Graph, Size, Tensor, Work

GATES = {"rnn": 1, "lstm": 4, "gru": 3}
"""Projections of the input, and as many of the state, in each kind of cell."""


def recurrent(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """Layers of cells, one step after another: 4Gbd² FLOPs per step and layer, G gates, whatever N is.

    A layer's states are what the next layer reads, and are kept as its input; the last layer's are kept for its own
    steps: all but the last one, which only the tanh of an RNN needs.
    """
    cell = {"rnn": rnn, "lstm": lstm, "gru": gru}[cfg.cell]

    def states(x: Tensor) -> Tensor:
        with g.scope("last"):
            kept = x if cfg.cell == "rnn" else g.tensor("states", x.axes, (x.shape[0], x.shape[1] - 1, *x.shape[2:]))
            g.add("select", "states", (x,), x, saves=(kept,))
        return x

    stacked(g, cfg, run, lambda y: ops.dropout(g, "dropout", cell(g, y, cfg), cfg.dropout), states)


def convolutions(g: Graph, cfg: ModelConfig, run: Run) -> None:
    """Layers of convolutions of k tokens, each with an activation: 2bNkd² FLOPs per layer, kd² + d parameters."""

    def layer(y: Tensor) -> Tensor:
        out = ops.convolution(g, "convolution", y, y.shape[1], cfg.kernel, cfg.hidden, cfg.bias)
        return ops.dropout(g, "dropout", ops.activation(g, "activation", out, cfg.activation), cfg.dropout)

    stacked(g, cfg, run, layer, lambda x: x)


def stacked(g: Graph, cfg: ModelConfig, run: Run, layer: families.Layer, after: families.Layer) -> None:
    """Embedding, layers, what the last of them keeps, and head, around a kind of layer."""
    table = families.token_table(g, cfg, cfg.vocab)
    x = families.embed(g, cfg, run, run.seq_len, table)
    families.finish(g, cfg, after(g.repeat("layer", cfg.layers, x, layer)), table)


def gates(g: Graph, x: Tensor, cfg: ModelConfig, count: Size) -> tuple[Tensor, Tensor]:
    """Projections of the input and of the state before each step, G·d wide: 2Gd² parameters and Gd of bias, or 2Gd.

    With two biases the state's projection has one of its own, as in PyTorch. It reads the layer's own output of the
    step before, which is kept as the next layer's input, and before the first step a state that is kept here.
    """
    d = x.shape[-1]
    inner = ops.linear(g, "input", "b n d, d f -> b n f", x, (d, count * d), cfg.bias)
    weights: tuple[Tensor, ...] = ()
    with g.scope("state"):
        weights = (g.weight("weight", ("d", "f"), (d, count * d)),)
        if cfg.bias and cfg.gate_biases == 2:
            weights += (g.weight("bias", ("f",), (count * d,)),)
        initial = g.tensor("initial", x.axes, (x.shape[0], 1, d), grad=False)
    out = g.tensor("state", inner.axes, inner.shape)
    macs = x.shape[0] * x.shape[1] * d * count * d
    return inner, g.add("linear", "state", (x,), out, Work(macs), Work(2 * macs), weights, (initial,))


def rnn(g: Graph, x: Tensor, cfg: ModelConfig) -> Tensor:
    """h = tanh(Wx + Uh + b): 4bNd² FLOPs, 2d² + d parameters. Keeps its input; the states are its tanh's outputs."""
    inner, state = gates(g, x, cfg, GATES["rnn"])
    summed = ops.add(g, "sum", inner, state)
    out = g.tensor("hidden", x.axes, x.shape)
    work = Work(0, out.numel)
    return g.add("tanh", "hidden", (summed,), out, work, work)


def lstm(g: Graph, x: Tensor, cfg: ModelConfig) -> Tensor:
    """c = f·c + i·g and h = o·tanh(c): 16bNd² FLOPs, 8d² + 4d parameters, 14bNd bytes kept beside its states.

    These are the input, three gates, the candidate, the cells, and tanh of the cells, each 2bNd.
    """
    inner, state = gates(g, x, cfg, GATES["lstm"])
    summed = ops.add(g, "sum", inner, state)
    d = x.shape[-1]
    gate = ops.squash(g, "gates", ops.part(g, "gate_part", summed, 3 * d), "sigmoid")
    candidate = ops.squash(g, "candidate", ops.part(g, "candidate_part", summed, d), "tanh")
    cells = g.tensor("cells", x.axes, x.shape)
    work = Work(0, 3 * cells.numel)
    g.add("multiply", "cells", (gate, candidate), cells, work, work, (), (gate, candidate, cells))
    squashed = ops.squash(g, "cell_tanh", cells, "tanh")
    out = g.tensor("hidden", x.axes, x.shape)
    work = Work(0, out.numel)
    return g.add("multiply", "hidden", (gate, squashed), out, work, work, (), (gate, squashed))


def gru(g: Graph, x: Tensor, cfg: ModelConfig) -> Tensor:
    """n = tanh(Wx + r·Uh) and h = (1 - z)n + z·h: 12bNd² FLOPs, 6d² + 3d parameters, 10bNd bytes beside its states.

    These are the input, two gates, the state's part of the candidate, and the candidate, each 2bNd.
    """
    inner, state = gates(g, x, cfg, GATES["gru"])
    d = x.shape[-1]
    summed = ops.add(g, "sum", ops.part(g, "input_gates", inner, 2 * d), ops.part(g, "state_gates", state, 2 * d))
    gate = ops.squash(g, "gates", summed, "sigmoid")
    reset = ops.part(g, "state_candidate", state, d)
    work = Work(0, reset.numel)
    held = g.tensor("reset", x.axes, x.shape)
    held = g.add("multiply", "reset", (gate, reset), held, work, work, (), (gate, reset))
    candidate = ops.add(g, "candidate_sum", ops.part(g, "input_candidate", inner, d), held)
    candidate = ops.squash(g, "candidate", candidate, "tanh")
    out = g.tensor("hidden", x.axes, x.shape)
    work = Work(0, 3 * out.numel)
    return g.add("multiply", "hidden", (gate, candidate), out, work, work, (), (gate, candidate))
