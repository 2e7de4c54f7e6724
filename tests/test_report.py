"""Reports as machines read them: the schema, exact integers, numeric cells, Markdown and LaTeX that parse."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

import tfcost
from tfcost.cli.formulas import explain, formula
from tfcost.report import SCHEMA, Report, assumptions_line, crossover
from tfcost.units import binary_and_decimal, parse_count, parse_counts, parse_probability, scaled

KEYS = {
    "flops": """parameters forward_flops forward_macs backward_flops train_flops recompute_flops hardware_flops
        forward_flops_causal attention_flops flops_per_token train_flops_per_token""",
    "params": """parameters active_parameters active_non_input_embedding_parameters embedding_parameters
        head_parameters non_embedding_parameters trainable_parameters""",
    "memory": """activation_bytes activation_bytes_per_layer logits_bytes weight_bytes gradient_bytes optimizer_bytes
        master_weight_bytes communication_buffer_bytes overhead_bytes total_bytes peak_moment fits""",
}
"""The keys of ``totals`` that the contract promises."""

FIGURE = {"flops": "flops", "params": "parameters", "memory": "bytes"}
TOTAL = {"flops": "forward_flops", "params": "parameters", "memory": "end_of_forward_bytes"}
MODELS = ["gpt2", "llama-3-8b", "bert-base", "transformer-base"]
RATIOS = ("flops_per_token", "train_flops_per_token")


def made(command: str, model: str = "gpt2", **options) -> Report:
    return tfcost.analyze(model, command=command, **options)


# --- The schema -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("command", KEYS)
def test_the_shape_of_a_report(command, model):
    report = json.loads(made(command, model).to_json())
    extra = ["moments"] if command == "memory" else []
    assert list(report) == ["schema", "command", "model", "inputs", "assumptions", "totals", *extra, "rows"]
    assert report["schema"] == SCHEMA == "tfcost.report/1"
    assert report["command"] == command
    assert set(KEYS[command].split()) <= set(report["totals"])
    named = {"convention", "implementation", "attention", "dtype", "causal", "counts", "leaves_out", "ignored_keys"}
    assert named <= set(report["assumptions"])
    assert {"batch", "seq_len"} <= set(report["inputs"])
    for row in report["rows"]:
        assert {"path", "count", f"{FIGURE[command]}_each", FIGURE[command]} <= set(row)


def test_without_a_command_all_totals_are_there():
    totals = tfcost.analyze("gpt2").totals
    assert set(" ".join(KEYS.values()).split()) <= set(totals)


@pytest.mark.parametrize("by", ["total", "component", "op", "layer"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("command", KEYS)
def test_rows_are_count_times_each_and_sum_to_the_total(command, model, by):
    report = made(command, model, by=by)
    key = FIGURE[command]
    for row in report.rows:
        assert row[key] == row["count"] * row[f"{key}_each"]
    assert sum(row[key] for row in report.rows) == report.totals[TOTAL[command]]
    paths = [row["path"] for row in report.rows]
    assert len(set(paths)) == len(paths)


def kinds(value):
    """Every number in a report, with where it stands."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ((f"{key}.{path}".rstrip("."), number) for path, number in kinds(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from kinds(inner)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield "", value


@pytest.mark.parametrize("command", KEYS)
def test_integers_stay_integers_in_json(command):
    big = {"batch": 1536, "seq_len": 2**20, "hidden": 10**6, "heads": 1000, "layers": 10**4, "vocab": 10**6}
    report = tfcost.analyze(None, command=command, **big)
    read = json.loads(report.to_json())
    for path, number in kinds(read):
        ratio = path.endswith("dropout") or path.split(".")[-1] in RATIOS
        assert isinstance(number, float if ratio else int), path
    assert read["totals"] == report.totals  # to the digit, beyond 2**64
    assert read["rows"] == report.rows
    assert max(number for _, number in kinds(read)) > (2**64 if command != "params" else 2**40)


def test_no_row_and_no_total_is_a_bool_or_a_string_of_digits():
    for command in KEYS:
        report = json.loads(made(command).to_json())
        for key, value in report["totals"].items():
            assert type(value) in (int, float) or key in ("peak_moment", "fits")


@pytest.mark.parametrize("by", ["component", "op", "layer", "total"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("command", KEYS)
def test_every_closed_form_evaluates_to_its_number(command, model, by):
    report = made(command, model, by=by, formula=True, batch=3, seq_len=40)
    read = json.loads(report.to_json())
    letters = dict(read["letters"])

    def value(text: str):
        return eval(text, {"__builtins__": {}, "Min": min}, letters)

    formless = ("total_bytes", "peak_moment")  # the largest of several sums
    given = [key for key, number in read["totals"].items() if number is not None and key not in formless]
    assert list(read["formulas"]) == given
    for key, text in read["formulas"].items():
        assert value(text) == read["totals"][key], key
    for row in read["rows"]:
        assert value(row["formula"]) == row[f"{FIGURE[command]}_each"], row["path"]


def test_letters_are_those_that_the_forms_use_in_the_order_of_products():
    assert made("flops", formula=True).letters == {"b": 1, "N": 1024, "d": 768, "V": 50257, "N_max": 1024, "l": 12}
    assert made("params", "llama-3-8b", formula=True).letters == {
        "d": 4096, "d_ff": 14336, "h": 32, "h_kv": 8, "V": 128256, "l": 32,
    }  # fmt: skip
    assert made("flops").letters == {}


# --- CSV --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["component", "op", "layer", "total"])
@pytest.mark.parametrize("command", KEYS)
def test_csv_has_one_row_per_path_and_numeric_cells(command, by):
    report = made(command, by=by)
    header, *lines = list(csv.reader(io.StringIO(report.to_csv())))
    assert header == report.columns()
    assert len(lines) == len(report.rows)
    for line, row in zip(lines, report.rows, strict=True):
        for name, text in zip(header, line, strict=True):
            value = row.get(name)
            if isinstance(value, int):
                assert text == str(value)  # no separators, no unit, no exponent
            elif isinstance(value, list):
                assert [int(part) for part in text.split("x")] == value
            else:
                assert text == ("" if value is None else value)


def test_csv_quotes_what_needs_it():
    report = Report("flops", {}, {}, {}, {}, lambda: [{"path": 'a,"b"', "flops": 1}, {"path": "c", "formula": "x"}])
    assert list(csv.reader(io.StringIO(report.to_csv()))) == [["path", "flops", "formula"], ['a,"b"', "1", ""],
                                                              ["c", "", "x"]]  # fmt: skip


# --- Markdown and LaTeX -----------------------------------------------------------------------------------------------


def pipe_tables(text: str) -> list[list[list[str]]]:
    """The tables of a Markdown text as cells."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    return [[[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block] for block in blocks]


@pytest.mark.parametrize("command", KEYS)
def test_markdown_tables_hold_the_rows_and_totals(command):
    report = made(command, formula=True)
    rows, totals = pipe_tables(report.to_markdown())
    for table in (rows, totals):
        assert len({len(line) for line in table}) == 1
        assert set("".join(table[1])) <= set("-:")
    assert rows[0] == report.columns()
    figure, forms = rows[0].index(FIGURE[command]), report.formulas
    assert [line[figure] for line in rows[2:]] == [str(row[FIGURE[command]]) for row in report.rows]
    assert {line[0]: line[1] for line in totals[2:]} == {
        key: "" if value is None else str(value) for key, value in report.totals.items()
    }
    shown = {line[0]: line[2] for line in totals[2:] if line[2]}
    assert shown == {key: f"`{form.written()}`" for key, form in forms.items()}
    assert rows[1][0] == "---"
    assert rows[1][1] == "---:"
    assert report.to_markdown().rstrip().endswith(assumptions_line(report))


def test_markdown_escapes_what_would_break_a_table():
    report = Report("flops", {}, {}, made("flops").assumptions, {}, lambda: [{"path": "a|b", "flops": 1}])
    assert pipe_tables(report.to_markdown())[0][2] == [r"a\|b", "1"]


@pytest.mark.parametrize("command", [*KEYS, "formula", "explain"])
@pytest.mark.parametrize("model", MODELS)
def test_latex_is_well_formed(command, model):
    if command in KEYS:
        report = made(command, model, formula=True)
    else:
        report = {"formula": formula, "explain": explain}[command](model, {})
    text = report.to_latex()
    for block in re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", text, re.DOTALL):
        opening, top, head, middle, *body, bottom, end = block.splitlines()
        assert (top, middle, bottom, end) == (r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}")
        count = len(re.fullmatch(r"\\begin\{tabular\}\{([lr]+)\}", opening)[1])
        for line in [head, *body]:
            assert line.endswith(r" \\")
            assert len(re.split(r"(?<!\\)&", line)) == count
            assert line.replace(r"\$", "").count("$") % 2 == 0
            assert line.replace(r"\{", "").count("{") == line.replace(r"\}", "").count("}")
            outside = "".join(re.split(r"\$[^$]*\$", line.replace(r"\$", "")))
            assert not re.search(r"(?<!\\)[_^#%]|[<>~]", outside), line
            assert line.isascii(), line
    for line in text.splitlines():
        if "tabular" not in line and not line.endswith(r"\\") and "rule" not in line and line:
            assert line.startswith("%")


def test_latex_escapes_every_character_that_it_would_read():
    report = Report("flops", {}, {}, made("flops").assumptions, {}, lambda: [{"path": "\\_&%#$^{}~<>|*", "flops": 1}])
    line = report.to_latex().splitlines()[4]
    escaped = r"\textbackslash{}\_\&\%\#\$\^{}\{\}\textasciitilde{}$<$$>$$|$$*$ & 1 \\"
    assert line == escaped


def test_latex_writes_closed_forms_as_mathematics():
    assert r"$8 b N d^{2} + 4 b N^{2} d$" in made("flops", formula=True).to_latex()
    assert r"$3 d d_{\mathrm{ff}}$" in made("params", "llama-3-8b", formula=True).to_latex()


@pytest.mark.parametrize("form", ["markdown", "latex", "json"])
def test_the_formula_command_gives_totals_components_and_crossovers_in_every_format(form):
    text = formula(None, {}).render(form)
    assert ("forward_flops" in text) or (r"forward\_flops" in text)
    assert ("layer/attention_norm" in text) or (r"layer/attention\_norm" in text)
    wanted = {"markdown": ["l(24bNd² + 4bN²d) + 2bNdV", "N = 6d", "N = 34d/(5h)"],
              "latex": [r"l\left(24 b N d^{2} + 4 b N^{2} d\right) + 2 b N d V", "N = 6d", "N = 34d/(5h)"],
              "json": ["24*N*b*d**2", '"length": "6*d"', '"length": "34*d/(5*h)"']}  # fmt: skip
    for each in wanted[form]:
        assert each in text


# --- Assumptions ------------------------------------------------------------------------------------------------------


def test_the_assumptions_line_says_what_is_counted_and_how():
    line = assumptions_line(made("flops", attention="eager", dtype="fp32", causal="half"))
    for part in ("counts 2 FLOPs per multiply-accumulate", "leaves out norms", "convention document",
                 "implementation document", "attention eager", "dtype fp32", "causal half"):  # fmt: skip
        assert part in line
    for part in ("kept for backward", "recipe zero-16", "implementation document", "attention flash", "dtype bf16"):
        assert part in assumptions_line(made("memory"))
    assert "every parameter" in assumptions_line(made("params"))
    assert "no logits" in assumptions_line(tfcost.analyze(None, command="flops", hidden=8, heads=1, layers=1))


def test_a_crossover_in_words():
    assert crossover({"length": None, "at": None}) == "none, nothing in a layer grows as N²"
    crossings = formula("bert-base", {"attention": "eager"}).extra["crossovers"]
    assert [each["at"] for each in crossings] == [6 * 768, 34 * 768 / (5 * 12)]
    assert crossover(crossings[0]).endswith("N = 6d = 4,608")
    assert crossover(crossings[1]).endswith("N = 34d/(5h) = 435.2")


# --- Units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0, "FLOPs", "0 FLOPs"), (999, "FLOPs", "999 FLOPs"), (1000, "FLOPs", "1.000 kFLOPs"),
     (291_648_307_200, "FLOPs", "291.6 GFLOPs"), (142 * 10**9, "MACs", "142.0 GMACs"), (8_030_261_248, "", "8.030 B"),
     (124_439_808, "", "124.4 M"), (1_800_000_000_000, "", "1.800 T"), (10**21, "FLOPs", "1.000e+21 FLOPs"),
     (999_960_000, "", "1000 M"), (2**100, "", "1.268e+30"), (12.5, "FLOPs", "12.5 FLOPs")],
)  # fmt: skip
def test_scaled_figures(value, unit, text):
    assert scaled(value, unit) == text


@pytest.mark.parametrize("value", [10**9, 8_030_261_248, 124_439_808, 5 * 10**12, 12_000])
def test_a_scaled_count_reads_back_as_about_itself(value):
    assert parse_count(scaled(value).replace(" ", ""), "-V") == pytest.approx(value, rel=5e-4)  # four digits are shown


def test_bytes_both_ways():
    assert binary_and_decimal(80 * 2**30) == "80.00 GiB (85.90 GB)"
    assert binary_and_decimal(1023) == "1,023 B"
    assert binary_and_decimal(3 * 2**40) == "3.00 TiB (3.30 TB)"
    assert binary_and_decimal(2**20) == "1.00 MiB (1.05 MB)"


def test_counts_are_read_without_floats():
    assert parse_count("0.1k", "-N") == 100
    assert parse_counts("1,2k,3Ki", "-N") == [1, 2000, 3072]
    assert parse_count("123456789012345678901234567890", "-N") == 123456789012345678901234567890
    with pytest.raises(tfcost.InputError, match="-N"):
        parse_count("0.0001k", "-N")


@pytest.mark.parametrize("text", ["0", "0.0", "0.1", "0.999", ".5", "1e-3"])
def test_probabilities(text):
    assert parse_probability(text, "--dropout") == float(text)


@pytest.mark.parametrize("text", ["1", "-0.1", "nan", "inf", "x", ""])
def test_no_probabilities(text):
    with pytest.raises(tfcost.InputError, match="--dropout"):
        parse_probability(text, "--dropout")


def test_the_python_docstring_example_is_right():
    totals = tfcost.analyze(None, hidden=512, heads=8, layers=6, vocab=1000, seq_len=64, batch=2).totals
    b, n, d, h, layers, vocab = 2, 64, 512, 8, 6, 1000
    assert totals["forward_flops"] == layers * (24 * b * n * d**2 + 4 * b * n**2 * d) + 2 * b * n * d * vocab
    assert totals["activation_bytes"] == layers * (34 * b * n * d + 5 * b * n**2 * h)
    assert totals["parameters"] == layers * (12 * d**2 + 13 * d) + vocab * d
    assert 2 * totals["forward_macs"] == totals["forward_flops"]
