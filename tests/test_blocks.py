"""Blocks against the documents' formulas, item by item and symbolically: the right-hand sides are typed by hand.

After Vaswani et al. 2017 (shapes), Narayanan et al. 2021, arXiv:2104.04473 (FLOPs), and Korthikanti et al. 2022,
arXiv:2205.05198, section 4.1 (bytes kept), in the notation of the README.
"""

import pytest
import sympy

import tfcost.symbols  # noqa: F401  registers the symbolic case of least()
from tfcost import blocks
from tfcost.blocks import Run
from tfcost.config import complete
from tfcost.graph import Graph, saved_tensors, weights_of

b, N, T, S, d, h, w = sympy.symbols("b N T S d h w", positive=True, integer=True)
h_kv, d_k, f = sympy.symbols("h_kv d_k d_ff", positive=True, integer=True)


def config(**fields):
    return complete({"hidden": d, "heads": h, "layers": 1, **fields})


def run(attention="eager"):
    return Run(b, N, None, attention)


def flops(g):
    """2 FLOPs per multiply-accumulate, by path; ops without any are left out."""
    return {op.path: sympy.expand(2 * op.forward.macs) for op in g.ops if op.forward.macs != 0}


def kept(g):
    """Bytes kept for backward, by the tensor's path."""
    return {saved.tensor.path: sympy.expand(saved.copies * saved.tensor.bytes) for saved in saved_tensors(g)}


def parameters(g):
    return sympy.expand(sum(weight.numel for weight in weights_of(g.ops)))


def built(block, length=N, itemsize=2):
    """The graph of one block on an input of b sequences."""
    g = Graph(itemsize)
    block(g, g.tensor("x", ("b", "n", "d"), (b, length, d)))
    return g


def self_attention(cfg, attention="eager", **options):
    return built(lambda g, x: blocks.attention(g, "attention", x, x, cfg, run(attention), **options))


def same(found, expected):
    return {key: sympy.expand(value) for key, value in expected.items()} == found


def equal(found, expected):
    return sympy.expand(found - expected) == 0


# --- Self-attention -------------------------------------------------------------------------------------------------


def test_attention_flops_step_by_step():
    """QKV 6bNd², QKᵀ 2bN²d, PV 2bN²d, out-projection 2bNd²."""
    assert same(flops(self_attention(config())), {
        "attention/query": 2 * b * N * d**2,
        "attention/key": 2 * b * N * d**2,
        "attention/value": 2 * b * N * d**2,
        "attention/scores": 2 * b * N**2 * d,
        "attention/weighted_sum": 2 * b * N**2 * d,
        "attention/output": 2 * b * N * d**2,
    })  # fmt: skip


def test_attention_keeps_what_the_document_lists():
    """X 2bNd; Q and K 4bNd; softmax output 2bN²h; mask bN²h; PV 2bN²h + 2bNd; out-projection 2bNd + bNd."""
    found = kept(self_attention(config()))
    assert same(found, {
        "x": 2 * b * N * d,
        "attention/query": 2 * b * N * d,
        "attention/key": 2 * b * N * d,
        "attention/softmax": 2 * b * N**2 * h,
        "attention/dropout/mask": b * N**2 * h,
        "attention/dropout": 2 * b * N**2 * h,
        "attention/value": 2 * b * N * d,
        "attention/weighted_sum": 2 * b * N * d,
        "attention/output_dropout/mask": b * N * d,
    })  # fmt: skip
    assert equal(sum(found.values()), 11 * b * N * d + 5 * b * N**2 * h)


def test_attention_without_dropout_keeps_one_square():
    """The softmax output is PV's operand, one tensor: 10bNd + 2bN²h."""
    found = kept(self_attention(config(dropout=0.0)))
    assert equal(sum(found.values()), 10 * b * N * d + 2 * b * N**2 * h)
    assert "attention/softmax" in found


@pytest.mark.parametrize(("dropout", "attention_dropout", "linear", "square"), [
    (0.1, 0.1, 11, 5), (0.1, 0.0, 11, 2), (0.0, 0.1, 10, 5), (0.0, 0.0, 10, 2),
])  # fmt: skip
def test_each_attention_dropout_has_its_own_masks(dropout, attention_dropout, linear, square):
    found = kept(self_attention(config(dropout=dropout, attention_dropout=attention_dropout)))
    assert equal(sum(found.values()), linear * b * N * d + square * b * N**2 * h)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flash_attention_keeps_a_log_sum_exp_and_no_square(dropout):
    """X, Q, K, V and the output 10bNd, 4bNh of log-sum-exp, and the residual dropout's mask; no mask of the square."""
    found = kept(self_attention(config(dropout=dropout), "flash"))
    assert equal(sum(found.values()), 10 * b * N * d + (b * N * d if dropout else 0) + 4 * b * N * h)
    assert not any(value.has(N**2) for value in found.values())


def test_flash_attention_computes_the_same_products():
    assert flops(self_attention(config(), "flash")) == flops(self_attention(config(), "eager"))


def test_flash_attention_recomputes_the_scores_in_backward_once():
    """Dao et al. 2022, arXiv:2205.14135: 2bN²d FLOPs beyond the gradients."""
    g = self_attention(config(), "flash")
    assert equal(sum(2 * op.recompute.macs for op in g.ops), 2 * b * N**2 * d)
    assert sum(2 * op.recompute.macs for op in self_attention(config(), "eager").ops) == 0


def test_backward_is_twice_forward_for_every_product_of_a_layer():
    for attention in ("eager", "flash"):
        g = self_attention(config(), attention)
        assert all(equal(op.backward.macs, 2 * op.forward.macs) for op in g.ops)


def test_attention_has_four_square_matrices_and_their_biases():
    """4d² + 4d, and 4d² without biases."""
    assert equal(parameters(self_attention(config())), 4 * d**2 + 4 * d)
    assert equal(parameters(self_attention(config(bias=False))), 4 * d**2)


def test_grouped_queries_narrow_the_keys_and_values_only():
    """Ainslie et al. 2023, arXiv:2305.13245: W_K and W_V are d x h_kv d_k; scores still have one row per query head."""
    g = self_attention(config(kv_heads=h_kv, head_dim=d_k))
    assert same(flops(g), {
        "attention/query": 2 * b * N * d * h * d_k,
        "attention/key": 2 * b * N * d * h_kv * d_k,
        "attention/value": 2 * b * N * d * h_kv * d_k,
        "attention/scores": 2 * b * N**2 * h * d_k,
        "attention/weighted_sum": 2 * b * N**2 * h * d_k,
        "attention/output": 2 * b * N * h * d_k * d,
    })  # fmt: skip
    assert equal(parameters(g), 2 * d * h * d_k + 2 * d * h_kv * d_k + h * d_k + 2 * h_kv * d_k + d)
    found = kept(g)
    assert equal(found["attention/key"], 2 * b * N * h_kv * d_k)
    assert equal(found["attention/value"], 2 * b * N * h_kv * d_k)
    assert equal(found["attention/softmax"], 2 * b * N**2 * h)
    assert equal(found["attention/query"], 2 * b * N * h * d_k)


def test_flash_with_grouped_queries_keeps_a_log_sum_exp_per_query_head():
    found = kept(self_attention(config(kv_heads=h_kv, head_dim=d_k), "flash"))
    assert equal(found["attention/flash/log_sum_exp"], 4 * b * N * h)


def test_rotary_positions_change_no_figure():
    """The rotated Q and K take the places of the plain ones; the angles are no activation."""
    plain, rotated = (self_attention(config(positions=name)) for name in ("none", "rotary"))
    assert flops(rotated) == flops(plain)
    assert parameters(rotated) == parameters(plain)
    assert sorted(kept(rotated).values(), key=str) == sorted(kept(plain).values(), key=str)


def test_an_eager_window_computes_and_keeps_the_whole_square():
    plain, windowed = self_attention(config()), self_attention(config(), window=w)
    assert flops(windowed) == flops(plain)
    assert kept(windowed) == kept(plain)


def test_a_flash_window_visits_min_n_w_keys_per_query():
    """Forward, backward and recomputation alike; what is kept does not change."""
    g = self_attention(config(), "flash", window=w)
    found = flops(g)
    for name in ("attention/scores", "attention/weighted_sum"):
        assert equal(found[name], 2 * b * N * sympy.Min(N, w) * d)
    assert equal(sum(2 * op.recompute.macs for op in g.ops), 2 * b * N * sympy.Min(N, w) * d)
    assert kept(g) == kept(self_attention(config(), "flash"))


def test_a_position_bias_is_added_to_the_scores_at_no_cost_in_memory():
    g = Graph()
    x = g.tensor("x", ("b", "n", "d"), (b, N, d))
    bias = g.tensor("bias", ("h", "n", "m"), (h, N, N))
    blocks.attention(g, "attention", x, x, config(), run(), position_bias=bias)
    assert kept(g) == kept(self_attention(config()))
    assert flops(g) == flops(self_attention(config()))
    assert [op.path for op in g.ops if bias in op.inputs] == ["attention/position_bias"]


# --- Feed-forward ---------------------------------------------------------------------------------------------------


def mlp(**fields):
    return built(lambda g, x: blocks.feed_forward(g, "mlp", x, config(**fields)))


def test_mlp_flops_and_parameters():
    """8bNd² + 8bNd², 8d² + 5d parameters."""
    g = mlp()
    assert same(flops(g), {"mlp/up": 8 * b * N * d**2, "mlp/down": 8 * b * N * d**2})
    assert equal(parameters(g), 8 * d**2 + 5 * d)


def test_mlp_keeps_what_the_document_lists():
    """2, 8, 8, 1: its input, the activation's input, the activation's output, and the dropout's mask: 19bNd."""
    found = kept(mlp())
    assert same(found, {
        "x": 2 * b * N * d,
        "mlp/up": 8 * b * N * d,
        "mlp/activation": 8 * b * N * d,
        "mlp/output_dropout/mask": b * N * d,
    })  # fmt: skip
    assert equal(sum(found.values()), 19 * b * N * d)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_the_documents_accounting_is_the_same_for_every_activation(activation):
    assert equal(sum(kept(mlp(activation=activation)).values()), 19 * b * N * d)


def test_the_inner_dropout_adds_its_mask():
    """+4bNd: a byte for each of the 4d inner units; its output takes the place of the activation's."""
    assert equal(sum(kept(mlp(ffn_dropout=0.1)).values()), 19 * b * N * d + 4 * b * N * d)


def test_any_inner_width():
    g = mlp(ffn_hidden=f)
    assert equal(sum(flops(g).values()), 4 * b * N * d * f)
    assert equal(parameters(g), 2 * d * f + f + d)
    assert equal(sum(kept(g).values()), 3 * b * N * d + 4 * b * N * f)


def test_a_gated_mlp_has_three_matrices():
    """Shazeer 2020, arXiv:2002.05202: 6bNd d_ff FLOPs, 3d d_ff parameters; it keeps its input, gate, act(gate), up and
    their product."""
    g = mlp(ffn="glu", ffn_hidden=f, bias=False, dropout=0.0)
    assert same(flops(g), dict.fromkeys(("mlp/gate", "mlp/up", "mlp/down"), 2 * b * N * d * f))
    assert equal(parameters(g), 3 * d * f)
    assert equal(sum(kept(g).values()), 2 * b * N * d + 8 * b * N * f)


def test_a_gated_mlp_with_biases_and_inner_dropout():
    g = mlp(ffn="glu", ffn_hidden=f, ffn_dropout=0.1)
    assert equal(parameters(g), 3 * d * f + 2 * f + d)
    assert equal(sum(kept(g).values()), 3 * b * N * d + 9 * b * N * f)


# --- Whole layers ---------------------------------------------------------------------------------------------------


def layer(attention="eager", **fields):
    return built(lambda g, x: blocks.layer(g, x, config(**fields), run(attention), causal=True))


@pytest.mark.parametrize("pre_norm", [True, False])
def test_a_layer(pre_norm):
    """24bNd² + 4bN²d FLOPs, 12d² + 13d parameters, 34bNd + 5bN²h bytes, wherever the norms stand."""
    g = layer(pre_norm=pre_norm)
    assert equal(sum(flops(g).values()), 24 * b * N * d**2 + 4 * b * N**2 * d)
    assert equal(parameters(g), 12 * d**2 + 13 * d)
    assert equal(sum(kept(g).values()), 34 * b * N * d + 5 * b * N**2 * h)


@pytest.mark.parametrize("pre_norm", [True, False])
def test_the_two_norms_keep_their_inputs(pre_norm):
    """2bNd each, 4bNd together."""
    g = layer(pre_norm=pre_norm)
    inputs = [op.saves for op in g.ops if op.kind == "layernorm"]
    assert len(inputs) == 2
    assert all(equal(sum(tensor.bytes for tensor in each), 2 * b * N * d) for each in inputs)
    assert inputs[0] != inputs[1]


def test_where_the_norms_stand():
    """Pre-norm normalises the input of each branch, post-norm the sum."""
    def order(pre_norm):
        return [op.path for op in layer(pre_norm=pre_norm).ops if op.path.endswith(("_norm", "_residual", "/output"))]

    assert order(True) == [
        "attention_norm", "attention/output", "attention_residual", "mlp_norm", "mlp_residual",
    ]  # fmt: skip
    assert order(False) == [
        "attention/output", "attention_residual", "attention_norm", "mlp_residual", "mlp_norm",
    ]  # fmt: skip


def test_a_layer_without_dropout():
    """32bNd + 2bN²h."""
    assert equal(sum(kept(layer(dropout=0.0)).values()), 32 * b * N * d + 2 * b * N**2 * h)


def test_a_flash_layer():
    """34bNd + 4bNh."""
    assert equal(sum(kept(layer("flash")).values()), 34 * b * N * d + 4 * b * N * h)


def test_a_layer_with_inner_dropout():
    """As in nn.TransformerEncoderLayer: 38bNd + 5bN²h."""
    assert equal(sum(kept(layer(ffn_dropout=0.1)).values()), 38 * b * N * d + 5 * b * N**2 * h)


def test_a_layer_with_rmsnorm_and_no_biases():
    g = layer(norm="rmsnorm", bias=False)
    assert equal(parameters(g), 12 * d**2 + 2 * d)
    assert equal(sum(kept(g).values()), 34 * b * N * d + 5 * b * N**2 * h)


def test_no_bias_takes_the_norms_biases_too():
    """nn.TransformerEncoderLayer(bias=False)."""
    assert equal(parameters(layer(bias=False)), 12 * d**2 + 2 * d)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_masks_and_log_sum_exps_are_not_scaled_by_the_element_size(itemsize):
    """Of 34bNd + 5bN²h, 2bNd + bN²h are masks; a flash layer has 2bNd of them and 4bNh of fp32."""
    def kept_by(attention):
        g = built(lambda g, x: blocks.layer(g, x, config(), run(attention), causal=True), itemsize=itemsize)
        return sum(kept(g).values())

    assert equal(kept_by("eager"), itemsize * (16 * b * N * d + 2 * b * N**2 * h) + 2 * b * N * d + b * N**2 * h)
    assert equal(kept_by("flash"), itemsize * 16 * b * N * d + 2 * b * N * d + 4 * b * N * h)


def decoder_layer(**fields):
    """A layer on T tokens that reads S encoder tokens, inside nothing: the encoder's output counts here too."""
    g = Graph()
    x = g.tensor("x", ("b", "n", "d"), (b, T, d))
    memory = g.tensor("memory", ("b", "m", "d"), (b, S, d))
    blocks.layer(g, x, config(**fields), Run(b, T, S, "eager"), causal=True, memory=memory)
    return g


@pytest.mark.parametrize("pre_norm", [True, False])
def test_a_decoder_layer_with_cross_attention(pre_norm):
    """28bTd² + 4bSd² + 4bT²d + 4bTSd FLOPs; 16d² + 19d parameters; 43bTd + 4bSd + 5bT²h + 5bTSh, and 2bSd once."""
    g = decoder_layer(pre_norm=pre_norm)
    assert equal(sum(flops(g).values()), 28 * b * T * d**2 + 4 * b * S * d**2 + 4 * b * T**2 * d + 4 * b * T * S * d)
    assert equal(parameters(g), 16 * d**2 + 19 * d)
    found = kept(g)
    assert equal(found.pop("memory"), 2 * b * S * d)
    assert equal(sum(found.values()), 43 * b * T * d + 4 * b * S * d + 5 * b * T**2 * h + 5 * b * T * S * h)


def test_cross_attention_projects_keys_and_values_from_the_encoder():
    assert same({path: value for path, value in flops(decoder_layer()).items() if path.startswith("cross")}, {
        "cross_attention/query": 2 * b * T * d**2,
        "cross_attention/key": 2 * b * S * d**2,
        "cross_attention/value": 2 * b * S * d**2,
        "cross_attention/scores": 2 * b * T * S * d,
        "cross_attention/weighted_sum": 2 * b * T * S * d,
        "cross_attention/output": 2 * b * T * d**2,
    })  # fmt: skip


def test_only_self_attention_is_causal():
    causal = {op.path for op in decoder_layer().ops if op.causal is not None}
    assert causal == {"attention/scores", "attention/weighted_sum"}


def test_an_encoder_layer_has_no_causal_square():
    g = built(lambda g, x: blocks.layer(g, x, config(), run(), causal=False))
    assert all(op.causal is None for op in g.ops)
