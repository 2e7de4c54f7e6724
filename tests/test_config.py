"""How stated fields become a complete model: each derivation against the README's table, each refusal by its words."""

import math

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from strategies import QUICK

from tfcost import analyze
from tfcost.config import FIELDS, ModelConfig, check, complete
from tfcost.errors import InputError

SIZES = (
    "hidden", "heads", "layers", "vocab", "kv_heads", "head_dim", "ffn_hidden", "encoder_layers", "decoder_layers",
    "src_vocab", "max_positions",
)  # fmt: skip
FLAGS = {"hidden": "-d/--hidden", "heads": "-h/--heads", "layers": "-l/--layers", "vocab": "-V/--vocab"}
DROPOUTS = ("dropout", "attention_dropout", "ffn_dropout", "embedding_dropout")
YES_OR_NO = ("bias", "tied", "head", "pre_norm", "final_norm")
NAMES = ("arch", "ffn", "activation", "norm", "positions")

BASE = {"hidden": 12, "heads": 4, "layers": 3}


def flag(field):
    return FLAGS.get(field, "--" + field.replace("_", "-"))


# --- What is derived ------------------------------------------------------------------------------------------------


@QUICK
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 99))
def test_sizes_left_out_are_derived(heads, width, layers):
    """h_kv = h, d_k = d/h, d_ff = 4d; a decoder of l layers."""
    cfg = complete({"hidden": heads * width, "heads": heads, "layers": layers})
    assert (cfg.kv_heads, cfg.head_dim, cfg.ffn_hidden) == (heads, width, 4 * heads * width)
    assert (cfg.encoder_layers, cfg.decoder_layers, cfg.layers) == (0, layers, layers)


def test_sizes_stated_are_kept():
    cfg = complete({**BASE, "kv_heads": 2, "head_dim": 7, "ffn_hidden": 5})
    assert (cfg.kv_heads, cfg.head_dim, cfg.ffn_hidden) == (2, 7, 5)


def test_the_documents_defaults():
    cfg = complete(BASE)
    assert (cfg.arch, cfg.ffn, cfg.activation, cfg.norm, cfg.positions) == (
        "decoder", "mlp", "gelu", "layernorm", "sinusoidal",
    )  # fmt: skip
    assert (cfg.pre_norm, cfg.final_norm, cfg.bias, cfg.tied, cfg.head) == (True, False, True, True, True)
    assert (cfg.dropout, cfg.attention_dropout, cfg.ffn_dropout, cfg.embedding_dropout) == (0.1, 0.1, 0.0, 0.0)
    assert cfg.vocab is None
    assert cfg.src_vocab is None


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attentions_dropout_follows_dropout_unless_stated(dropout):
    assert complete({**BASE, "dropout": dropout}).attention_dropout == dropout
    assert complete({**BASE, "dropout": dropout, "attention_dropout": 0.2}).attention_dropout == 0.2
    assert complete({**BASE, "dropout": dropout}).ffn_dropout == 0.0


@pytest.mark.parametrize(("stated", "encoder", "decoder"), [
    ({"arch": "encoder", "layers": 5}, 5, 0),
    ({"arch": "decoder", "layers": 5}, 0, 5),
    ({"arch": "encoder-decoder", "layers": 5}, 5, 5),
    ({"arch": "encoder-decoder", "encoder_layers": 2, "decoder_layers": 7}, 2, 7),
    ({"arch": "encoder-decoder", "layers": 5, "decoder_layers": 7}, 5, 7),
    ({"arch": "encoder-decoder", "layers": 5, "encoder_layers": 2}, 2, 5),
    ({"arch": "encoder", "encoder_layers": 4}, 4, 0),
    ({"arch": "decoder", "decoder_layers": 4}, 0, 4),
])  # fmt: skip
def test_layers_of_each_stack(stated, encoder, decoder):
    cfg = complete({"hidden": 12, "heads": 4, **stated})
    assert (cfg.encoder_layers, cfg.decoder_layers) == (encoder, decoder)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("bias", [True, False])
def test_every_bias_follows_bias_and_rmsnorm_has_none(norm, bias):
    cfg = complete({**BASE, "norm": norm, "bias": bias})
    assert (cfg.attention_bias, cfg.attention_output_bias, cfg.ffn_bias) == (bias,) * 3
    assert cfg.norm_bias == (bias and norm == "layernorm")


def test_none_is_as_good_as_left_out():
    """A config's null for a size that is derived, and a flag that was not given."""
    nothing = dict.fromkeys(set(FIELDS) - set(BASE) - {"encoder_layers", "decoder_layers"})
    assert complete({**BASE, **nothing}) == complete(BASE)


def test_symbols_are_sizes():
    d, h, length, h_kv = sympy.symbols("d h l h_kv", positive=True, integer=True)
    stated = {"hidden": d, "heads": h, "layers": length, "kv_heads": h_kv}
    check(stated)
    cfg = complete(stated)
    assert (cfg.head_dim, cfg.ffn_hidden, cfg.decoder_layers) == (d / h, 4 * d, length)


# --- What is refused ------------------------------------------------------------------------------------------------


def message(**fields):
    with pytest.raises(InputError) as caught:
        analyze(**{**BASE, **fields})
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500  # what was given is cut, not echoed whole
    return text


@pytest.mark.parametrize("value", [0, -1, 1.5, 12.0, math.nan, math.inf, True, False, "12", "twelve", [12], {}, 10**31])
@pytest.mark.parametrize("field", SIZES)
def test_a_size_is_a_whole_number_of_at_least_one(field, value):
    arch = {"arch": "encoder-decoder"} if field in ("encoder_layers", "src_vocab") else {}
    vocab = {"vocab": 30} if field == "src_vocab" else {}
    assert flag(field) in message(**{**arch, **vocab, field: value})


@pytest.mark.parametrize("value", [-0.1, 1, 1.0, 2, math.nan, math.inf, -math.inf, "0.1", True, [0.1]])
@pytest.mark.parametrize("field", DROPOUTS)
def test_a_dropout_is_a_number_from_zero_to_below_one(field, value):
    assert flag(field) in message(**{field: value})


@pytest.mark.parametrize("value", [0, 1, "yes", "no", 0.5, [True]])
@pytest.mark.parametrize("field", YES_OR_NO)
def test_a_yes_or_no_is_a_bool(field, value):
    """A string that says "no" is not a no."""
    assert flag(field) in message(**{field: value})


@pytest.mark.parametrize("value", ["", "gleu", "GELU", 3, True, ["gelu"]])
@pytest.mark.parametrize("field", NAMES)
def test_a_name_is_one_of_those_allowed_and_the_message_lists_them(field, value):
    text = message(**{field: value})
    assert flag(field) in text
    allowed = {
        "arch": "encoder-decoder", "ffn": "glu", "activation": "silu", "norm": "rmsnorm", "positions": "rotary",
    }  # fmt: skip
    assert allowed[field] in text


@pytest.mark.parametrize("value", [0, -1, 1.0, "8", True])
@pytest.mark.parametrize(("name", "shown"), [("batch", "--batch"), ("seq_len", "--seq-len"), ("src_len", "--src-len")])
def test_a_pass_has_whole_lengths(name, shown, value):
    assert shown in message(arch="encoder-decoder", **{name: value})


def test_a_pass_has_a_batch():
    assert "--batch" in message(batch=None)


@pytest.mark.parametrize("missing", ["hidden", "heads", "layers"])
def test_a_missing_size_is_named(missing):
    with pytest.raises(InputError) as caught:
        analyze(**{key: value for key, value in BASE.items() if key != missing})
    assert str(caught.value) == f"missing {flag(missing)}"


def test_all_missing_sizes_are_named_at_once():
    with pytest.raises(InputError) as caught:
        analyze()
    assert str(caught.value) == "missing -d/--hidden, -h/--heads, -l/--layers"


@pytest.mark.parametrize(("given_", "missing"), [
    ("encoder_layers", "--decoder-layers"), ("decoder_layers", "--encoder-layers"),
])  # fmt: skip
def test_a_stack_without_layers_is_named(given_, missing):
    with pytest.raises(InputError, match=missing):
        analyze(hidden=12, heads=4, arch="encoder-decoder", **{given_: 2})


@QUICK
@given(st.integers(1, 40), st.integers(2, 40))
def test_heads_that_do_not_divide_the_width_are_an_error_that_names_both(hidden, heads):
    fields = {"hidden": hidden, "heads": heads, "layers": 1}
    if hidden % heads == 0:
        assert complete(fields).head_dim * heads == hidden
        return
    with pytest.raises(InputError) as caught:
        complete(fields)
    assert str(caught.value) == f"-d/--hidden {hidden} does not divide by -h/--heads {heads}"


@QUICK
@given(st.integers(1, 24), st.integers(1, 30))
def test_key_heads_that_do_not_divide_the_heads_are_an_error_that_names_both(heads, kv_heads):
    fields = {"hidden": heads, "heads": heads, "layers": 1, "kv_heads": kv_heads}
    if heads % kv_heads == 0:
        assert complete(fields).kv_heads == kv_heads
        return
    with pytest.raises(InputError) as caught:
        complete(fields)
    assert str(caught.value) == f"-h/--heads {heads} does not divide by --kv-heads {kv_heads}"


def test_a_stated_head_dim_needs_no_division():
    assert complete({"hidden": 10, "heads": 3, "layers": 1, "head_dim": 4}).head_dim == 4


@pytest.mark.parametrize(("fields", "words"), [
    ({"encoder_layers": 2}, "--encoder-layers does not apply to --arch decoder"),
    ({"arch": "encoder", "decoder_layers": 2}, "--decoder-layers does not apply to --arch encoder"),
    ({"vocab": 9, "src_vocab": 7}, "--src-vocab needs --arch encoder-decoder"),
    ({"arch": "encoder-decoder", "src_vocab": 7}, "--src-vocab needs -V/--vocab"),
    ({"positions": "learned"}, "--positions learned needs --max-positions"),
    ({"src_len": 5}, "--src-len needs an encoder and a decoder"),
    ({"arch": "encoder", "src_len": 5}, "--src-len needs an encoder and a decoder"),
    ({"attention": "fast"}, "--attention must be one of eager, flash, math"),
    ({"causal": "none"}, "--causal must be one of full, half"),
    ({"dtype": "int3"}, "--dtype must be one of"),
    ({"by": "color"}, "--by must be one of total, component, op, layer"),
    ({"command": "flop"}, "must be one of flops, params, memory"),
    ({"colour": "red"}, "'colour'"),
])  # fmt: skip
def test_what_does_not_go_together_is_said_in_one_line(fields, words):
    assert words in message(**fields)


@pytest.mark.parametrize("name", ["attention", "causal", "dtype", "convention", "by", "implementation"])
@pytest.mark.parametrize("value", [None, 3, True, ["x"], "", "x" * 10_000])
def test_no_value_of_a_keyword_escapes_as_another_kind_of_error(name, value):
    if name == "attention" and value is None:
        assert analyze(**BASE, attention=None).assumptions["attention"] == "eager"  # left out
    else:
        assert "--" in message(**{name: value})


ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(-3, 40), st.floats(), st.text(max_size=8))


@QUICK
@given(st.sampled_from(SIZES + DROPOUTS + YES_OR_NO + NAMES), ANYTHING)
def test_any_value_of_any_flag_is_an_answer_or_a_one_line_error(field, value):
    """Whatever is put into one flag of a model, there are exact figures or a message, never another exception."""
    problem = parameters = None
    try:
        parameters = analyze(**{**BASE, "vocab": 30, "seq_len": 5, field: value}).totals["parameters"]
    except InputError as error:
        problem = str(error)
    assert (type(parameters) is int and parameters > 0) if problem is None else "\n" not in problem


def test_every_field_has_its_default_in_the_dataclass_or_is_derived():
    needed = set(FIELDS) - set(ModelConfig._field_defaults)
    assert needed == {"hidden", "heads", "kv_heads", "head_dim", "ffn_hidden"}
