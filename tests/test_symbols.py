"""Closed forms against numbers: building on symbols and then substituting is substituting and then building.

Formulas as text are read back by a small reader of this file, so that what a person reads is what was meant.
"""

import re
from fractions import Fraction

import pytest
import sympy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import LAW, Case, cases

from tfcost import analyze, closed_form
from tfcost.errors import InputError, UnknownName
from tfcost.notation import plain, symbol, written
from tfcost.symbols import closed_forms, crossovers, ranges

RATIOS = ("flops_per_token", "train_flops_per_token")
FIGURE = {"flops": "flops", "params": "parameters", "memory": "bytes"}
COMMAND = st.sampled_from(sorted(FIGURE))
BY = st.sampled_from(("total", "component", "op", "layer"))


def value_of(text: str, values) -> Fraction:
    """A formula's text as Python reads it, in exact arithmetic."""
    names = {str(letter): Fraction(value) for letter, value in values.items()}
    return eval(str(text), {"__builtins__": {}}, {**names, "Min": lambda *sizes: sorted(sizes)[0]})


# --- Build, then substitute -----------------------------------------------------------------------------------------


@LAW
@given(cases(), COMMAND)
def test_each_total_is_its_closed_form_at_its_sizes(case, command):
    report = case.analyze(command, formula=True)
    formulas = report.formulas
    left_out = {key for key, value in report.totals.items() if value is None} | {"total_bytes", "peak_moment"}
    left_out &= set(report.totals)  # the largest of several sums has no closed form
    assert set(formulas) == set(report.totals) - left_out
    for key, formula in formulas.items():
        exact = value_of(formula, report.closed.values)
        if key in RATIOS:
            assert report.totals[key] == float(exact)
        else:
            assert report.totals[key] == exact


PLAIN = {"hidden": 4, "heads": 2}


@LAW
@given(cases(), COMMAND, BY)
# Counts that happen to be equal: as many sets of weights as layers, one layer, as many local layers as global ones.
@example(Case({**PLAIN, "layers": 2, "layer_sets": 2}, {}), "params", "layer")
@example(Case({**PLAIN, "layers": 3, "layer_sets": 2}, {}), "params", "layer")
@example(Case({**PLAIN, "layers": 1, "arch": "encoder-decoder"}, {"seq_len": 5}), "memory", "layer")
@example(Case({**PLAIN, "layers": 4, "window": 3, "local_layers": 2}, {"attention": "flash"}), "flops", "total")
def test_each_row_is_its_closed_form_at_its_sizes(case, command, by):
    report = case.analyze(command, formula=True, by=by)
    for row in report.rows:
        assert row[f"{FIGURE[command]}_each"] == value_of(row["formula"], report.closed.values), row


@LAW
@given(cases("decoder"), st.sampled_from(("causal", "pointwise", "6p-all", "palm-all", "megatron-recompute", "mosaic",
                                          "chinchilla", "bigscience-8p", "fvcore", "torch")))  # fmt: skip
def test_closed_forms_hold_for_every_convention(case, convention):
    report = case.analyze("flops", formula=True, convention=convention)
    for key, formula in report.formulas.items():
        if key not in RATIOS and report.totals[key] is not None:
            assert report.totals[key] == value_of(formula, report.closed.values), key


SIZES = {
    "hidden": "d", "heads": "h", "kv_heads": "h_kv", "head_dim": "d_k", "ffn_hidden": "d_ff", "vocab": "V",
    "src_vocab": "V_src", "max_positions": "N_max", "layers": "l", "encoder_layers": "l_enc", "decoder_layers": "l_dec",
    "embedding_size": "e", "window": "w", "layer_sets": "l_w", "local_layers": "l_local",
}  # fmt: skip
QUANTITIES = (
    "parameters", "embedding_parameters", "head_parameters", "non_embedding_parameters", "forward_flops",
    "forward_macs", "backward_flops", "train_flops", "attention_flops", "activation_bytes", "logits_bytes",
    "weight_bytes", "end_of_forward_bytes",
)  # fmt: skip


@LAW
@given(cases(), st.sampled_from(QUANTITIES), st.data())
def test_one_closed_form_holds_at_all_sizes(case, quantity, data):
    """A form built on symbols alone, at sizes of which it knew nothing."""
    fields = {**case.fields}
    depths = [field for field in ("layers", "encoder_layers", "decoder_layers") if field in fields]
    if len(depths) > 1:
        fields = {key: value for key, value in fields.items() if key not in ("encoder_layers", "decoder_layers")}
        fields["layers"] = case.fields.get("layers", 2)
    fields.setdefault("vocab", 5)
    free = {field: symbol(letter) for field, letter in SIZES.items() if field in fields}
    run = {key: case.run[key] for key in ("attention", "dtype")}
    form = closed_form(None, quantity, **{**fields, **free}, **run)
    numbers = {**fields}
    for field in free:
        if field not in ("hidden", "heads", "kv_heads"):
            numbers[field] = data.draw(st.integers(1, 40))
    if "local_layers" in fields:
        numbers["layers"] += numbers["local_layers"]  # the rest are global ones
    kv_heads = data.draw(st.integers(1, 4))
    numbers["heads"] = kv_heads * data.draw(st.integers(1, 4))
    numbers["hidden"] = numbers["heads"] * data.draw(st.integers(1, 9))
    if numbers["hidden"] == numbers.get("embedding_size"):
        numbers["hidden"] *= 2  # an embedding as wide as the model is not projected: another structure
    if "kv_heads" in fields:
        numbers["kv_heads"] = kv_heads
    lengths = {key: data.draw(st.integers(1, 50)) for key in ("batch", "seq_len", "src_len") if key in case.run}
    letters = {free[field]: numbers[field] for field in free}
    letters |= {symbol("b"): lengths["batch"]}
    letters |= {symbol("T" if "src_len" in lengths else "N"): lengths["seq_len"]}
    if fields.get("classes"):
        letters[symbol("C")] = fields["classes"]
    if "local_layers" in fields:
        letters[symbol("l_global")] = numbers["layers"] - numbers["local_layers"]
    if "src_len" in lengths:
        letters[symbol("S")] = lengths["src_len"]
    assert form.subs(letters) == Case(numbers, {**run, **lengths}).totals()[quantity]


def test_a_symbol_of_the_wrong_kind_would_not_pass_unnoticed():
    """The substitution above can fail: a form that is off by one layer is not equal."""
    form = closed_form(None, "parameters") + symbol("d")
    sizes = {"hidden": 6, "heads": 2, "layers": 3, "vocab": 5}
    values = {symbol(letter): size for letter, size in zip("dhlV", sizes.values(), strict=True)}
    assert form.subs(values) != analyze(**sizes).totals["parameters"]


# --- Which letters, and which quantities ----------------------------------------------------------------------------


def letters_of(quantity, **fields):
    return {str(letter) for letter in closed_form(None, quantity, **fields).free_symbols}


@pytest.mark.parametrize("quantity", ["parameters", "weight_bytes", "embedding_parameters", "non_embedding_parameters"])
@pytest.mark.parametrize("arch", ["decoder", "encoder-decoder"])
def test_parameters_know_nothing_of_the_pass(quantity, arch):
    assert not letters_of(quantity, arch=arch) & {"b", "N", "T", "S"}


def test_flops_know_nothing_of_the_number_of_heads():
    """For d = h d_k; what is kept does: one square per head."""
    assert letters_of("forward_flops") == {"b", "N", "d", "l", "V"}
    assert letters_of("activation_bytes") == {"b", "N", "d", "l", "h"}


def test_sizes_that_follow_from_others_have_no_letter_and_others_do():
    letters = {"kv_heads": symbol("h_kv"), "head_dim": symbol("d_k"), "ffn_hidden": symbol("d_ff")}
    assert letters_of("parameters", **letters) == {"d", "h", "h_kv", "d_k", "d_ff", "l", "V"}
    assert letters_of("parameters") == {"d", "l", "V"}


def test_closed_form_takes_a_models_name():
    d, length, vocab = symbol("d"), symbol("l"), symbol("V")
    forward = closed_form("gpt2", "forward_flops")
    b, n = symbol("b"), symbol("N")
    assert sympy.expand(forward - length * (24 * b * n * d**2 + 4 * b * n**2 * d) - 2 * b * n * d * vocab) == 0


def test_closed_form_takes_a_what_if():
    tied, untied = (closed_form("llama-2-7b", "parameters", tied=tied) for tied in (True, False))
    assert sympy.expand(untied - tied - symbol("V") * symbol("d")) == 0


@pytest.mark.parametrize("quantity", ["forward_flop", "", "FLOPS", "rows", "x" * 500])
def test_an_unknown_quantity_brings_a_suggestion_or_the_list(quantity):
    with pytest.raises(UnknownName) as caught:
        closed_form(None, quantity)
    assert "forward_flops" in str(caught.value) or "did you mean" in str(caught.value)


def test_a_total_without_a_closed_form_is_said_so():
    """An encoder's and a decoder's layer keep different amounts."""
    with pytest.raises(UnknownName, match="activation_bytes_per_layer"):
        closed_form(None, "activation_bytes_per_layer", arch="encoder-decoder")


@pytest.mark.parametrize("fields", [{"dtype": "bf17"}, {"attention": "fast"}, {"heads": 0}, {"convention": "none"},
                                    {"positions": "learned"}, {"causal": "x"}])  # fmt: skip
def test_bad_input_is_refused_here_too(fields):
    with pytest.raises(InputError):
        closed_form(None, "forward_flops", **fields)


def test_a_formula_never_evaluates_a_persons_text():
    with pytest.raises(InputError):
        closed_form(None, "forward_flops", hidden="__import__('os').system('true')")


# --- Crossovers -----------------------------------------------------------------------------------------------------


def lengths(**fields):
    return {each.what: each.length for each in crossovers(closed_forms(None, **fields))}


def test_where_the_square_passes_the_rest():
    """FLOPs at N = 6d; kept bytes at N = 34d/(5h)."""
    d, h = symbol("d"), symbol("h")
    found = lengths()
    assert len(found) == 2
    assert sympy.simplify(found["forward FLOPs"] - 6 * d) == 0
    assert sympy.simplify(found["bytes kept for backward"] - 34 * d / (5 * h)) == 0


def test_crossovers_of_other_layers():
    d, h, d_ff = symbol("d"), symbol("h"), symbol("d_ff")
    found = lengths(dropout=0.0)
    assert sympy.simplify(found["bytes kept for backward"] - 32 * d / (2 * h)) == 0
    found = lengths(arch="encoder", window=64)  # eager: the window is computed in full
    assert sympy.simplify(found["forward FLOPs"] - 6 * d) == 0
    found = lengths(ffn="glu", ffn_hidden=d_ff)
    assert sympy.simplify(found["forward FLOPs"] - (8 * d**2 + 6 * d * d_ff) / (4 * d)) == 0


def test_flash_attention_keeps_no_square():
    found = lengths(attention="flash")
    assert found["bytes kept for backward"] is None
    assert sympy.simplify(found["forward FLOPs"] - 6 * symbol("d")) == 0


def test_a_window_has_no_crossover_and_a_mixed_stack_one_without_the_length_in_it():
    """Past the window a local layer's FLOPs grow as its linear ones do."""
    assert lengths(attention="flash", window=64)["forward FLOPs"] is None
    mixed = lengths(attention="flash", window=64, local_layers=2, layers=4)["forward FLOPs"]
    assert mixed is None or symbol("N") not in mixed.free_symbols


def test_a_windows_closed_form_is_given_for_each_range():
    """N <= w: the square; N > w: a band of w keys per query."""
    b, n, d, w, length, vocab = (symbol(name) for name in ("b", "N", "d", "w", "l", "V"))
    found = ranges(closed_form(None, "forward_flops", attention="flash", window=w))
    assert list(found) == ["N <= w", "N > w"]
    linear = length * 24 * b * n * d**2 + 2 * b * n * d * vocab
    assert sympy.expand(found["N <= w"] - linear - length * 4 * b * n**2 * d) == 0
    assert sympy.expand(found["N > w"] - linear - length * 4 * b * n * w * d) == 0
    assert ranges(closed_form(None, "forward_flops", window=w)) == {}  # eager: the full square


def test_an_encoder_decoders_crossover_is_where_both_lengths_are_equal():
    """24d² + 28d² + 4d² per token against 4d + 4d + 4d per token and length."""
    assert sympy.simplify(lengths(arch="encoder-decoder")["forward FLOPs"] - sympy.Rational(56, 12) * symbol("d")) == 0


# --- Formulas as text -----------------------------------------------------------------------------------------------

TOKEN = re.compile(r"\s*(min\(|[A-Za-z](?:_[A-Za-z]+)?|[0-9]+|[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+|[()+\-/·,])")
SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


class Reader:
    """Reads ``l(24bNd² + 4bN²d) + 2bNdV`` as a person does: letters side by side are a product."""

    def __init__(self, text, values):
        self.tokens = TOKEN.findall(text)
        assert "".join(self.tokens) == text.replace(" ", ""), text
        self.values = values
        self.at = 0

    def peek(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self):
        self.at += 1
        return self.tokens[self.at - 1]

    def total(self):
        value = self.product()
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value += sign * self.product()
        return value

    def product(self):
        if self.peek() == "-":
            self.take()
            return -self.product()
        value = self.factors()
        while self.peek() == "/":
            self.take()
            # "34d/(5h)": what stands below is one factor or in brackets.
            value /= self.factor()
        return value

    def factors(self):
        value = self.factor()
        while self.peek() and self.peek() not in "+-/),":
            if self.peek() == "·":
                self.take()
            value *= self.factor()
        return value

    def factor(self):
        token = self.take()
        if token == "(":
            value = self.total()
            assert self.take() == ")"
        elif token == "min(":
            value = self.total()
            while self.peek() == ",":
                self.take()
                value = sorted((value, self.total()))[0]
            assert self.take() == ")"
        else:
            value = Fraction(token) if token.isdigit() and token.isascii() else self.values[token]
        if self.peek() and self.peek()[0] in "⁰¹²³⁴⁵⁶⁷⁸⁹⁻":
            value = value ** int(self.take().translate(SUPER))
        return value


def read(text, values):
    reader = Reader(text, {str(letter): Fraction(value) for letter, value in values.items()})
    value = reader.total()
    assert reader.at == len(reader.tokens), text
    return value


@settings(LAW, max_examples=30)
@given(cases(), COMMAND)
def test_a_written_formula_reads_as_its_value(case, command):
    report = case.analyze(command, formula=True)
    for formula in [*report.formulas.values(), *(row["formula"] for row in report.rows)]:
        values = report.closed.values
        assert read(formula.written(), values) == value_of(formula, values), formula.written()


LETTER = st.sampled_from([symbol(name) for name in ("b", "N", "S", "d", "d_ff", "d_k", "h", "h_kv", "V", "l", "l_enc")])


@st.composite
def polynomials(draw):
    """Sums of products with whole or broken coefficients, and a window."""
    window = sympy.Min(symbol("N"), draw(st.sampled_from((symbol("w"), sympy.Integer(7)))))
    value = sympy.Integer(0)
    for _ in range(draw(st.integers(0, 5))):
        term = sympy.Rational(draw(st.integers(-40, 40)), draw(st.integers(1, 6)))
        for _ in range(draw(st.integers(0, 4))):
            term *= draw(LETTER) ** draw(st.sampled_from((1, 1, 1, 2, 3, -1)))
        value += term * (window if draw(st.integers(0, 4)) == 0 else 1)
    return value


@LAW
@given(polynomials())
def test_whatever_is_written_reads_as_what_was_meant(value):
    values = {letter: index + 2 for index, letter in enumerate(sorted(value.free_symbols, key=str))}
    exact = value.subs(values)
    assert read(written(value), values) == Fraction(int(exact.p), int(exact.q)), written(value)


@pytest.mark.parametrize(("quantity", "fields", "text"), [
    ("forward_flops", {}, "l(24bNd² + 4bN²d) + 2bNdV"),
    ("parameters", {}, "l(13d + 12d²) + dV"),
    ("activation_bytes_per_layer", {}, "34bNd + 5bN²h"),
    ("activation_bytes_per_layer", {"attention": "flash"}, "34bNd + 4bNh"),
    ("logits_bytes", {}, "2bNd + 6bNV"),
    ("attention_flops", {}, "l·4bN²d"),
])  # fmt: skip
def test_formulas_are_written_as_the_documents_write_them(quantity, fields, text):
    found = written(closed_form(None, quantity, **fields))
    assert sorted(re.split(r" \+ |[()]", found)) == sorted(re.split(r" \+ |[()]", text))  # whatever the order of a sum


def test_a_formula_is_a_string_that_python_reads():
    d = symbol("d")
    formula = plain(12 * d**2 + 13 * d)
    assert eval(formula, {"d": 4}) == 12 * 16 + 13 * 4
    assert formula.expr == 12 * d**2 + 13 * d


@LAW
@given(polynomials())
def test_latex_has_balanced_brackets_and_no_python(value):
    text = written(value, "latex")
    assert text.count("{") == text.count("}")
    assert text.count(r"\left(") == text.count(r"\right)")
    assert "*" not in text
    assert not re.search("[⁰¹²³⁴⁵⁶⁷⁸⁹·]", text)


@pytest.mark.parametrize("kernel", ["", "fused"])
def test_a_kernel_that_is_none_is_refused_by_closed_forms_too(kernel):
    with pytest.raises(InputError, match="--attention must be one of eager, flash, math"):
        closed_forms(None, attention=kernel)
