"""Tables for people: nothing cut at any width, shares, bars, readings, grids that continue below."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

import tfcost
from tfcost.cli import figures, formulas
from tfcost.cli.main import main
from tfcost.render import PIPE_WIDTH, Column, Page, add_table, bar, cell, folded, reading, share_of, table_text, title
from tfcost.report import Report, assumptions_line

WIDTHS = [20, 40, 60, 80, 100, 132, 200]
MODELS = ["gpt2", "llama-3-8b", "gpt3-175b", "transformer-base"]
FIGURE = {"flops": "flops", "params": "parameters", "memory": "bytes"}


def report_of(command: str, model: str | None = "gpt2", **options) -> Report:
    return tfcost.analyze(model, command=command, formula=True, **options)


def grid(command: str, model: str = "gpt2", **lists) -> Report:
    return figures.reports(command, model, {"formula": True, **lists}, figures.FLAGS)


def shown(report: Report, width: int) -> str:
    return table_text(report, width, colour=False)


def one_line(text: str) -> str:
    return " ".join(text.split())


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w,.])\d{1,3}(?:,\d{3})*(?:\.\d+)?(?![\d%])", text)


# --- Nothing is cut ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["total", "component", "op", "layer"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["flops", "params", "memory"])
def test_every_figure_is_whole_at_every_width(command, width, by):
    report = report_of(command, by=by)
    text = shown(report, width)
    found = numbers(text)
    for row in report.rows:
        assert f"{row[FIGURE[command]]:,}" in found
        assert row["path"] in text
    for key, value in report.totals.items():
        assert cell(value) in (one_line(text) if isinstance(value, str | None) else found)
        assert key in text
    assert "…" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 132, 200])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("command", ["flops", "params", "memory"])
def test_no_line_is_longer_than_the_terminal(command, model, width):
    for report in (report_of(command, model), grid(command, model, seq_len=[1000, 2000], batch=[1, 64])):
        assert max(map(len, shown(report, width).splitlines())) <= width


@pytest.mark.parametrize("command", ["flops", "params", "memory"])
def test_at_forty_columns_only_what_has_no_space_in_it_may_stand_out(command):
    for line in shown(report_of(command, "llama-3-8b"), 40).splitlines():
        assert len(line) <= 40 or " " not in line.strip()


def test_thirty_digits_on_a_narrow_terminal():
    big = {"batch": 1536, "seq_len": 2**20, "hidden": 10**6, "heads": 1000, "layers": 10**4, "vocab": 10**6}
    report = report_of("flops", None, **big)
    for width in WIDTHS:
        assert f"{report.totals['train_flops']:,}" in shown(report, width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["flops", "params", "memory"])
def test_every_closed_form_is_there_at_every_width(command, width):
    report = report_of(command)
    text = one_line(shown(report, width))
    for form in report.formulas.values():
        assert form.written() in text
    for row in report.rows:
        assert row["formula"].written() in text


@pytest.mark.parametrize("width", WIDTHS)
def test_the_assumptions_stand_under_every_table(width):
    for report in (report_of("flops"), grid("memory", seq_len=[1, 2]), formulas.formula("gpt2", {}),
                   formulas.explain("gpt2", {}), formulas.explain(None, {})):  # fmt: skip
        assert one_line(shown(report, width)).endswith(assumptions_line(report))


@pytest.mark.parametrize("width", WIDTHS)
def test_no_trailing_spaces_and_one_newline_at_the_end(width):
    for report in (report_of("memory"), grid("flops", seq_len=[1, 2]), formulas.formula("gpt2", {})):
        text = shown(report, width)
        assert text == "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        assert not text.endswith("\n\n")
        assert "\n\n\n" not in text


# --- What is left out where it is narrow ------------------------------------------------------------------------------


def test_bar_share_and_count_go_in_this_order():
    report = report_of("flops")
    for earlier, later in pairwise(range(30, 120)):
        wide, narrow = shown(report, later), shown(report, earlier)
        for part in ("█", "share", "count"):
            assert (part in wide) or (part not in narrow)  # what a narrow page has, a wider one has
    for width in range(30, 120):
        text = shown(report, width)
        assert "share" in text or "█" not in text
        assert "count" in text or "share" not in text


def test_closed_forms_stand_beside_where_there_is_room_and_below_where_there_is_not():
    wide, narrow = shown(report_of("flops"), 132), shown(report_of("flops"), 60)
    assert re.search(r"^layer/mlp +12 .* 16bNd²$", wide, re.MULTILINE)
    assert re.search(r"^layer/mlp: 16bNd²$", narrow, re.MULTILINE)


# --- Grids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["flops", "params", "memory"])
def test_a_grid_shows_every_figure_of_every_point(command, width):
    report = grid(command, seq_len=[64, 1000], batch=[1, 3])
    text = shown(report, width)
    for row in report.rows:
        for value in row.values():
            assert cell(value) in (one_line(text) if isinstance(value, str | None) else numbers(text))
    for key in report.columns():
        assert key in text or all(line in text for line in folded(key, [""]).split("\n")), key


def test_a_grid_that_fits_is_one_table_of_one_row_each():
    lines = shown(grid("memory", seq_len=[64, 1000, 1024]), 500).splitlines()
    start = lines.index("") + 1
    assert lines[start].split()[:2] == ["seq_len", "activation_bytes"]
    assert [line.split()[0] for line in lines[start + 1 : start + 4]] == ["64", "1,000", "1,024"]
    assert lines[start + 4] == ""
    assert len(re.findall("[KMG]iB", lines[start + 3])) == 9  # each figure of bytes has its reading beside it


def test_a_grid_that_does_not_fit_continues_below_with_its_keys():
    text = shown(grid("flops", seq_len=[64, 1000]), 80)
    tables = [block for block in text.split("\n\n") if re.search(r"^ +64 ", block, re.MULTILINE)]
    assert len(tables) > 1
    for block in tables:
        assert "seq_len" in block
        assert re.search(r"^ *1,000 ", block, re.MULTILINE)


def test_a_header_is_folded_after_underscores():
    assert folded("activation_bytes_per_layer", ["26,787,840"]) == "activation_\nbytes_per_\nlayer"
    assert folded("activation_bytes", ["1" * 20]) == "activation_bytes"
    assert folded("batch", ["1"]) == "batch"


# --- Single cells -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(1, 3, "33.3%"), (0, 5, "0.0%"), (5, 5, "100.0%"), (1, 2000, "0.1%"), (1, 2001, "<0.1%"), (1, 10**30, "<0.1%"),
     (0, 0, "-"), (10**40, 2 * 10**40, "50.0%")],
)  # fmt: skip
def test_shares(part, whole, text):
    assert share_of(part, whole) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [(0, ""), (80, "██████████"), (40, "█████"), (1, "▏"), (7, "▉"), (9, "█▏"), (76, "█████████▌")],
)
def test_bars_in_eighths(part, text):
    assert bar(part, 80) == text


def test_a_bar_of_nothing_and_of_enormous_numbers():
    assert bar(0, 0) == ""
    assert bar(10**40, 2 * 10**40) == "█████"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (True, "yes"), (False, "no"), (1234567, "1,234,567"), (0, "0"), (284812800.0, "284,812,800.0"),
     (0.0, "0.0"), (0.1, "0.1"), (2.8513, "2.851"), ([3, 4], "3 x 4"), ("glu", "glu")],
)  # fmt: skip
def test_cells(value, text):
    assert cell(value) == text


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [("forward_flops", 291648307200, "291.6 GFLOPs"), ("forward_macs", 145824153600, "145.8 GMACs"),
     ("parameters", 8030261248, "8.030 B"), ("weight_bytes", 2**31, "2.00 GiB (2.15 GB)"),
     ("activation_bytes_per_layer", 2**20, "1.00 MiB (1.05 MB)"), ("head_parameters", 0, ""), ("x", None, ""),
     ("flops_per_token", 284812800.0, "284.8 MFLOPs")],
)  # fmt: skip
def test_readings(key, value, text):
    assert reading(key, value) == text


def test_titles():
    assert title(report_of("flops")) == "tfcost flops gpt2: b=1, N=1,024"
    assert title(report_of("params")) == "tfcost params gpt2"
    assert title(report_of("memory", "transformer-base", seq_len=20, src_len=10)) == (
        "tfcost memory transformer-base: b=1, T=20, S=10"
    )
    assert title(grid("memory", seq_len=[1, 2])) == "tfcost memory gpt2: b=1"
    assert title(report_of("flops", None, hidden=8, heads=1, layers=1)) == "tfcost flops: b=1, N=2,048"


def test_a_table_that_cannot_fit_becomes_lines():
    page = Page(20)
    add_table(page, [Column("total"), Column("value", right=True)], [["a_very_long_name", "1,234,567,890,123"]])
    assert page.text() == "a_very_long_name\n  1,234,567,890,123\n"


def test_figures_that_become_lines_keep_their_headers():
    page = Page(20)
    columns = [Column("moment"), Column("gradi_\nents", right=True), Column("in all", right=True), Column("")]
    add_table(page, columns, [["end of a forward pass", "", "1.39 GiB", "██"], ["optimizer step", "2 B", "3 B", ""]])
    assert page.text() == (
        "end of a forward pass\n  in all: 1.39 GiB\n  ██\noptimizer step\n  gradi_ents: 2 B\n  in all: 3 B\n"
    )


def test_markup_and_emoji_in_a_name_are_shown_as_they_are():
    page = Page(80)
    page.write("[bold]x[/bold] :smile:")
    add_table(page, [Column("a")], [["[red]y[/red]"]])
    assert page.text() == "[bold]x[/bold] :smile:\na\n[red]y[/red]\n"


def test_a_pipe_is_as_wide_as_it_says(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    main(["flops", "gpt2"])
    assert capsys.readouterr().out == shown(report_of("flops"), PIPE_WIDTH)
    monkeypatch.setenv("COLUMNS", "70")
    main(["flops", "gpt2"])
    assert capsys.readouterr().out == shown(report_of("flops"), 70)
    for nonsense in ("0", "-5", "wide", ""):
        monkeypatch.setenv("COLUMNS", nonsense)
        main(["flops", "gpt2"])
        assert capsys.readouterr().out == shown(report_of("flops"), PIPE_WIDTH)
