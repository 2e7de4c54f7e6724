"""Each named convention against its formula, typed by hand from its source, and against the counter of its name."""

import pytest
import sympy
from hypothesis import given
from strategies import QUICK, cases

from tfcost import analyze
from tfcost.convention import CONVENTIONS, convention
from tfcost.errors import InputError, UnknownName
from tfcost.symbols import closed_form

b, N, T, S, d, h, V, l = sympy.symbols("b N T S d h V l", positive=True, integer=True)  # noqa: E741  layers
d_k, d_ff, N_max = sympy.symbols("d_k d_ff N_max", positive=True, integer=True)

LAYERS = l * (24 * b * N * d**2 + 4 * b * N**2 * d)  # forward
LOGITS = 2 * b * N * d * V
P_LAYERS = l * (12 * d**2 + 13 * d)
P = P_LAYERS + V * d

NAMES = (
    "document", "causal", "pointwise", "6p-all", "6p-no-input-embedding", "6p-non-embedding", "6p-active", "palm-all",
    "palm-no-input-embedding", "palm-non-embedding", "megatron", "megatron-recompute", "korthikanti-eq8", "mosaic",
    "chinchilla", "chinchilla-a4", "bigscience-8p", "gpt3-d1", "fvcore", "torch",
)  # fmt: skip


def equal(name, quantity, expected, **fields):
    return sympy.expand(closed_form(None, quantity, convention=name, **fields) - expected) == 0


# --- Conventions over ops -------------------------------------------------------------------------------------------


def test_document():
    """3 (l(24bNd² + 4bN²d) + 2bNdV) per step; nothing is computed twice."""
    assert equal("document", "forward_flops", LAYERS + LOGITS)
    assert equal("document", "train_flops", 3 * (LAYERS + LOGITS))
    assert equal("document", "hardware_flops", 3 * (LAYERS + LOGITS))
    assert equal("document", "recompute_flops", 0)


def test_document_prices_the_models_own_matmuls():
    forward = l * (4 * b * N * d * h * d_k + 4 * b * N * d * h * d_k + 6 * b * N * d * d_ff + 4 * b * N**2 * h * d_k)
    assert equal("document", "forward_flops", forward + LOGITS, head_dim=d_k, ffn_hidden=d_ff, ffn="glu")


def test_causal():
    """As document, with exactly half of the score square: N²/2 products, 2bN²d FLOPs for QKᵀ and PV together."""
    half = l * (24 * b * N * d**2 + 2 * b * N**2 * d) + LOGITS
    assert equal("causal", "forward_flops", half)
    assert equal("causal", "train_flops", 3 * half)
    assert equal("causal", "forward_flops", LAYERS + LOGITS, arch="encoder")


def test_causal_on_an_encoder_decoder_halves_the_decoders_self_attention_only():
    full = closed_form(None, "forward_flops", arch="encoder-decoder")
    assert equal("causal", "forward_flops", full - l * 2 * b * T**2 * d, arch="encoder-decoder")


@pytest.mark.parametrize("seq_len", [1, 2, 7, 1024, 1025])
def test_causal_half_is_exact_for_odd_lengths_too(seq_len):
    fields = {"hidden": 6, "heads": 2, "layers": 3, "vocab": 5, "batch": 3, "seq_len": seq_len}
    full, half = analyze(**fields).totals, analyze(**fields, causal="half").totals
    assert full["forward_flops"] - half["forward_flops"] == 3 * 2 * 3 * seq_len**2 * 6
    assert type(half["forward_flops"]) is int
    named = analyze(**fields, convention="causal").totals
    assert {key: value for key, value in half.items() if "flops" in key} == {
        key: value for key, value in named.items() if "flops" in key
    }


def test_pointwise():
    """Clark et al. 2020's constants: softmax 5, norm 5, activation 8, dropout 4 per element, beside document's."""
    softmax, norms = 5 * b * h * N**2, 2 * 5 * b * N * d
    activation, dropout = 8 * b * N * 4 * d, 4 * (b * h * N**2 + 2 * b * N * d)
    assert equal("pointwise", "forward_flops", LAYERS + LOGITS + l * (softmax + norms + activation + dropout))
    assert equal("pointwise", "forward_flops", LAYERS + LOGITS + l * (softmax + norms + activation), dropout=0.0)
    assert equal(
        "pointwise", "forward_flops", LAYERS + LOGITS + l * (softmax + norms + activation) + 5 * b * N * d,
        dropout=0.0, final_norm=True, norm="rmsnorm",
    )  # fmt: skip


def test_fvcore():
    """MACs, and 5 per element of a LayerNorm; forward only."""
    macs = (LAYERS + LOGITS) / 2
    assert equal("fvcore", "forward_flops", macs + l * 2 * 5 * b * N * d)
    for key in ("backward_flops", "train_flops", "hardware_flops", "train_flops_per_token"):
        assert analyze(hidden=8, heads=2, layers=3, convention="fvcore").totals[key] is None
    assert equal("fvcore", "forward_flops", macs, norm="rmsnorm")


def test_fvcore_has_no_handler_for_fused_attention():
    without = (l * 24 * b * N * d**2 + LOGITS) / 2
    assert equal("fvcore", "forward_flops", without + l * 2 * 5 * b * N * d, attention="flash")
    assert equal("fvcore", "attention_flops", 0, attention="flash")


def test_torch():
    """Matmuls only; the backward of flash attention is 2.5 times its forward, since it makes the scores again."""
    assert equal("torch", "train_flops", 3 * (LAYERS + LOGITS))
    attention = l * 4 * b * N**2 * d
    assert equal("torch", "forward_flops", LAYERS + LOGITS, attention="flash")
    expected = 2 * (LAYERS + LOGITS - attention) + sympy.Rational(5, 2) * attention
    assert equal("torch", "backward_flops", expected, attention="flash")


# --- Conventions over parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["6p-all", "6p-active", "gpt3-d1"])
def test_six_p(name):
    """Kaplan et al. 2020, and Brown et al. 2020, appendix D: 6 P per token, attention ignored."""
    assert equal(name, "train_flops", 6 * P * b * N)
    assert equal(name, "forward_flops", 2 * P * b * N)
    assert equal(name, "train_flops", 6 * (P + V * d) * b * N, tied=False)


def test_six_p_without_tables_that_are_only_looked_up():
    """A tied table is multiplied by in the head, so it stays; an untied one, and positions, go."""
    fields = {"positions": "learned", "max_positions": N_max}
    assert equal("6p-all", "train_flops", 6 * (P + N_max * d) * b * N, **fields)
    assert equal("6p-no-input-embedding", "train_flops", 6 * P * b * N, **fields)
    assert equal("6p-no-input-embedding", "train_flops", 6 * P * b * N, tied=False, **fields)
    assert equal("6p-no-input-embedding", "train_flops", 6 * P_LAYERS * b * N, head=False, **fields)


def test_six_p_without_embeddings():
    for fields in ({}, {"tied": False}, {"positions": "learned", "max_positions": N_max}):
        assert equal("6p-non-embedding", "train_flops", 6 * P_LAYERS * b * N, **fields)


@pytest.mark.parametrize(("name", "parameters"), [
    ("palm-all", P + V * d), ("palm-no-input-embedding", P), ("palm-non-embedding", P_LAYERS),
])  # fmt: skip
def test_palm(name, parameters):
    """Chowdhery et al. 2022, appendix B: 6N + 12 L H Q T per token."""
    assert equal(name, "train_flops", (6 * parameters + 12 * l * d * N) * b * N, tied=False)
    wide = closed_form(None, "train_flops", convention=name, tied=False, head_dim=d_k)
    square = wide - closed_form(None, "train_flops", convention=name.replace("palm", "6p"), tied=False, head_dim=d_k)
    assert sympy.expand(square - 12 * l * h * d_k * N * b * N) == 0


def test_palm_counts_the_keys_that_a_window_leaves():
    """As people price gpt-oss: 12 h d_k N for each full layer and 12 h d_k w for each with a window, per token."""
    form = {"hidden": 8, "heads": 2, "layers": 5, "vocab": 9, "batch": 3, "convention": "palm-all"}
    for seq_len, keys in ((3, 5 * 3), (4, 5 * 4), (7, 2 * 4 + 3 * 7)):
        totals = analyze(**form, seq_len=seq_len, window=4, local_layers=2).totals
        square = 12 * 8 * keys * 3 * seq_len
        assert totals["train_flops"] == 6 * totals["parameters"] * 3 * seq_len + square
        assert 3 * totals["attention_flops"] == square
    every = analyze(**form, seq_len=7, window=4).totals
    assert 3 * every["attention_flops"] == 12 * 8 * (5 * 4) * 3 * 7


def test_mosaic():
    """llm-foundry: 6P + 12 l d N per token; hardware 4/3 of that, logits too."""
    per_token = 6 * P + 12 * l * d * N
    assert equal("mosaic", "train_flops", per_token * b * N)
    assert equal("mosaic", "hardware_flops", sympy.Rational(4, 3) * per_token * b * N)


def test_bigscience():
    """8 l(12d² + 13d) per token: 6 for the model and 2 to recompute it, embeddings left out."""
    assert equal("bigscience-8p", "hardware_flops", 8 * P_LAYERS * b * N)
    assert equal("bigscience-8p", "train_flops", 6 * P_LAYERS * b * N)


def test_gpt3_gives_each_token_of_an_encoder_decoder_half_of_the_parameters():
    """3 P per token, source and target."""
    parameters = l * (12 * d**2 + 13 * d) + l * (16 * d**2 + 19 * d) + V * d
    assert equal("gpt3-d1", "train_flops", 3 * parameters * b * (S + T), arch="encoder-decoder")


# --- Published formulas ---------------------------------------------------------------------------------------------


def test_megatron():
    """Narayanan et al. 2021, equation 3 without recomputation: 72 b l N d² (1 + N/6d + V/12ld)."""
    expected = 72 * b * l * N * d**2 * (1 + N / (6 * d) + V / (12 * l * d))
    assert equal("megatron", "train_flops", expected)
    assert equal("megatron", "hardware_flops", expected)


def test_megatron_with_recomputation():
    """Equation 3 as printed: 96 B s l h² (1 + s/6h + V/16lh); the logits are not recomputed."""
    assert equal("megatron-recompute", "train_flops", 72 * b * l * N * d**2 * (1 + N / (6 * d) + V / (12 * l * d)))
    assert equal("megatron-recompute", "hardware_flops", 96 * b * l * N * d**2 * (1 + N / (6 * d) + V / (16 * l * d)))


def test_korthikanti():
    """Korthikanti et al. 2022: equation 7, 72(1 + s/6h + v/12hL) model; equation 8, 72(1 + s/3h + v/12hL) hardware."""
    assert equal("korthikanti-eq8", "train_flops", 72 * b * l * N * d**2 * (1 + N / (6 * d) + V / (12 * l * d)))
    assert equal("korthikanti-eq8", "hardware_flops", 72 * b * l * N * d**2 * (1 + N / (3 * d) + V / (12 * l * d)))


@pytest.mark.parametrize("name", ["megatron", "megatron-recompute", "korthikanti-eq8"])
def test_megatrons_formulas_are_printed_for_one_shape_and_do_not_follow_another(name):
    plain = closed_form(None, "hardware_flops", convention=name)
    assert equal(name, "hardware_flops", plain, ffn_hidden=d_ff, head_dim=d_k, ffn="glu")


def test_chinchilla():
    """Hoffmann et al. 2022, appendix F, per sequence: embedding 2NVd, QKV 2·3·N·d·(d_k h), QKᵀ 2N²(d_k h), softmax
    3hN², PV 2N²(d_k h), out 2N(d_k h)d, dense 2N(d d_ff + d d_ff), logits 2NdV; backward twice that."""
    width = d_k * h
    attention = 2 * N**2 * width + 3 * h * N**2 + 2 * N**2 * width
    layer = 6 * N * d * width + attention + 2 * N * width * d + 2 * N * (d * d_ff + d * d_ff)
    forward = b * (2 * N * V * d + l * layer + 2 * N * d * V)
    fields = {"head_dim": d_k, "ffn_hidden": d_ff}
    assert equal("chinchilla", "forward_flops", forward, **fields)
    assert equal("chinchilla", "train_flops", 3 * forward, **fields)
    assert equal("chinchilla-a4", "train_flops", 3 * b * l * layer, **fields)


ONE_STACK = (
    "palm-all", "palm-no-input-embedding", "palm-non-embedding", "megatron", "megatron-recompute", "korthikanti-eq8",
    "mosaic", "chinchilla", "chinchilla-a4",
)  # fmt: skip


@pytest.mark.parametrize("name", ONE_STACK)
def test_a_formula_for_one_stack_is_refused_for_two_by_its_name(name):
    with pytest.raises(InputError, match=f"--convention {name} is defined for models of one stack"):
        analyze(hidden=8, heads=2, layers=1, vocab=9, arch="encoder-decoder", convention=name)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(ONE_STACK)))
def test_every_other_convention_prices_an_encoder_decoder(name):
    report = analyze(hidden=8, heads=2, layers=1, vocab=9, arch="encoder-decoder", convention=name)
    assert report.totals["forward_flops"] > 0


# --- Names ----------------------------------------------------------------------------------------------------------


def test_the_conventions_of_the_design_are_there():
    assert set(NAMES) <= set(CONVENTIONS)


@pytest.mark.parametrize("name", sorted(CONVENTIONS))
def test_a_convention_says_what_it_counts_what_it_leaves_out_and_whose_it_is(name):
    found = convention(name)
    assert found.name == name
    assert min(len(found.counts), len(found.source)) > 10
    assert found.leaves_out


@pytest.mark.parametrize(("given_", "meant"), [
    ("megatorn", "megatron"), ("6p", "6p-all"), ("documnet", "document"), ("fv-core", "fvcore"), ("palm", "palm-all"),
])  # fmt: skip
def test_a_name_that_is_nearly_one_brings_a_suggestion(given_, meant):
    with pytest.raises(UnknownName, match="did you mean") as caught:
        convention(given_)
    assert meant in str(caught.value)


@pytest.mark.parametrize("name", ["zzz", "", "6P-ALL!", "?" * 500])
def test_a_name_like_no_other_brings_the_list(name):
    with pytest.raises(UnknownName) as caught:
        convention(name)
    assert "\n" not in str(caught.value)
    assert "document" in str(caught.value) or "6p-all" in str(caught.value)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"document", "causal", "pointwise", "torch"}))
def test_half_a_square_does_not_apply_to_a_convention_with_a_count_of_its_own(name):
    with pytest.raises(InputError, match="--causal half does not apply to --convention " + name):
        analyze(hidden=8, heads=2, layers=1, causal="half", convention=name)


@pytest.mark.parametrize("name", NAMES)
def test_a_convention_changes_flops_and_nothing_else(name):
    fields = {"hidden": 8, "heads": 2, "layers": 3, "vocab": 9, "seq_len": 5}
    plain, priced = analyze(**fields).totals, analyze(**fields, convention=name).totals
    same = ("parameters", "activation_bytes", "logits_bytes", "weight_bytes")
    assert {key: priced[key] for key in same} == {key: plain[key] for key in same}
    # A convention with a count of its own has no half square to speak of.
    halves = {"document", "causal", "pointwise", "torch"}
    assert (priced["forward_flops_causal"] is not None) == (name in halves)
    if name in halves - {"pointwise"}:
        assert priced["forward_flops_causal"] == plain["forward_flops_causal"]


@QUICK
@given(cases())
def test_only_pointwise_work_lies_between_document_and_pointwise(case):
    """Elements are at most 8 FLOPs each and never negative; matmuls are the same."""
    plain, priced = case.totals(), case.totals(convention="pointwise")
    assert priced["attention_flops"] >= plain["attention_flops"]
    assert priced["forward_flops"] > plain["forward_flops"]
    assert priced["backward_flops"] > plain["backward_flops"]


# --- The counters themselves ----------------------------------------------------------------------------------------

SHAPE = {"hidden": 16, "heads": 4, "layers": 2, "vocab": 11, "dropout": 0.0, "batch": 2, "seq_len": 6}


def textbook(fused: bool):
    """A pre-norm decoder in PyTorch, written out: what the counters count."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Layer(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def split(self, x):
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        def forward(self, x):
            y = self.norms[0](x)
            q, k, v = (self.split(part(y)) for part in (self.query, self.key, self.value))
            if fused:
                y = F.scaled_dot_product_attention(q, k, v)
            else:
                y = torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)), -1), v)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norms[1](x))))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(SHAPE["vocab"], SHAPE["hidden"])
            self.layers = nn.ModuleList(Layer(SHAPE["hidden"], SHAPE["heads"]) for _ in range(SHAPE["layers"]))

        def forward(self, ids):
            x = self.table(ids)
            for layer in self.layers:
                x = layer(x)
            return F.linear(x, self.table.weight)

    return Decoder(), torch.zeros(SHAPE["batch"], SHAPE["seq_len"], dtype=torch.long)


@pytest.mark.torch
def test_torch_is_what_pytorchs_counter_counts():
    from torch.utils.flop_counter import FlopCounterMode

    module, ids = textbook(fused=False)
    with FlopCounterMode(display=False) as forward:
        loss = module(ids).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    totals = analyze(**SHAPE, convention="torch").totals
    assert totals["forward_flops"] == forward.get_total_flops()
    assert totals["backward_flops"] == backward.get_total_flops()


@pytest.mark.torch
def test_torch_prices_fused_attention_as_pytorchs_counter_does():
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    shape = (SHAPE["batch"], SHAPE["heads"], SHAPE["seq_len"], SHAPE["hidden"] // SHAPE["heads"])
    totals = analyze(**SHAPE, convention="torch", attention="flash").totals
    forward = SHAPE["layers"] * sdpa_flop_count(shape, shape, shape)
    backward = SHAPE["layers"] * sdpa_backward_flop_count(shape, shape, shape, shape)
    assert totals["attention_flops"] == forward
    linear = totals["forward_flops"] - forward
    assert totals["backward_flops"] == 2 * linear + backward


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # fvcore's own way of tracing
@pytest.mark.parametrize("fused", [False, True])
def test_fvcore_is_what_fvcore_counts(fused):
    """Fused attention has no handler there, and counts for nothing."""
    from fvcore.nn import FlopCountAnalysis

    module, ids = textbook(fused)
    counted = FlopCountAnalysis(module.eval(), ids).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    totals = analyze(**SHAPE, convention="fvcore", attention="flash" if fused else "eager").totals
    assert totals["forward_flops"] == counted.total()
