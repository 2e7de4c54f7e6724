"""The command line as a person meets it: flags, formats, files, errors, closed pipes, narrow terminals."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tfcost
from tfcost.cli import figures, output
from tfcost.cli.main import COMMANDS, main
from tfcost.errors import OutputError

PACKAGE = Path(tfcost.__file__).parents[1]
DOCUMENT = ("-d", "512", "-h", "8", "-l", "6", "-N", "128")


def environment(**changes: str) -> dict[str, str]:
    """The environment of a fresh process that runs the package under test."""
    kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "PYTHONIOENCODING")}
    return {**kept, "PYTHONPATH": str(PACKAGE), "PYTHONUTF8": "1", **changes}


def process(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """``tfcost`` in a real process, with its streams in pipes."""
    options = {"capture_output": True, "text": True, "timeout": 120, "env": environment(), **options}
    return subprocess.run([sys.executable, "-m", "tfcost", *arguments], check=False, **options)


def shell(line: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """A line of shell in which ``tfcost`` is the package under test."""
    script = f'set -o pipefail; tfcost() {{ "{sys.executable}" -m tfcost "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", script], check=False, capture_output=True, text=True, timeout=120, env=environment(**changes)
    )


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line in this process: status, stdout and stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def refused(result: tuple[int, str, str]) -> str:
    """The one line of a refusal; asserts that it is all there is."""
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.startswith("tfcost: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert "Usage" not in err
    assert "Traceback" not in err
    return err.removeprefix("tfcost: ").rstrip("\n")


# --- Overview, help, version ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["help"]])
def test_the_overview_names_every_command(run, arguments):
    status, out, err = run(*arguments)
    assert (status, err) == (0, "")
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", out, re.MULTILINE)


def test_the_version_is_the_package_s(run):
    assert run("--version") == (0, f"tfcost {tfcost.__version__}\n", "")


@pytest.mark.parametrize("width", ["40", "60", "80", "200"])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_flag_whole_at_every_width(run, monkeypatch, name, width):
    from importlib import import_module

    from typer.main import get_command

    monkeypatch.setenv("COLUMNS", width)
    status, out, err = run(name, "--help")
    assert (status, err) == (0, "")
    assert re.match(rf"Usage: tfcost {name} \S.* \[options\]\n", out)
    assert max(map(len, out.splitlines())) <= max(int(width), 55)  # the longest list of choices is never cut
    words = re.split(r"[\s,]+", out)
    for option in get_command(import_module(COMMANDS[name][0]).app(name)(["--every-flag"])).params:
        if option.param_type_name == "option":
            assert {*option.opts, *option.secondary_opts} <= set(words), option.name
    assert "table|json|csv|markdown|latex" in words
    assert run("help", name)[1] == out


def test_help_is_found_anywhere_on_the_line(run):
    assert run("flops", "gpt2", "-N", "4", "--help") == run("flops", "--help")


def test_h_without_a_number_says_where_help_is(run):
    for arguments in (["-h"], ["flops", "-h"], ["flops", "gpt2", "-h"]):
        assert refused(run(*arguments)) == "-h is heads and needs a number; help is --help"


# --- Names with a "did you mean" --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named", "meant"),
    [
        (["flop", "gpt2"], "'flop'", "flops"),
        (["parms"], "'parms'", "params"),
        (["flops", "gpt2", "--layer", "3"], "'--layer'", "--layers"),
        (["flops", "gpt2", "--hiden", "3"], "'--hiden'", "--hidden"),
        (["flops", "gpt3"], "'gpt3'", "gpt3-175b"),
        (["flops", "lama-3-8b"], "'lama-3-8b'", "llama-3-8b"),
        (["flops", "gpt2", "--convention", "documents"], "'documents'", "document"),
        (["flops", "gpt2", "--attention", "falsh"], "'falsh'", "flash"),
        (["flops", "gpt2", "--format", "jsn"], "'jsn'", "json"),
        (["flops", "gpt2", "--by", "ops"], "'ops'", "op"),
    ],
)
def test_a_wrong_name_is_named_with_what_was_meant(run, arguments, named, meant):
    line = refused(run(*arguments))
    before, _, after = line.partition(named)
    assert meant in re.split(r"[\s,;?]+", before if meant in before else after)


def test_an_option_that_resembles_none_points_to_help(run):
    assert refused(run("flops", "gpt2", "--xyzzy")) == "unknown option '--xyzzy'; tfcost flops --help lists them"
    assert "tfcost flops --help" in refused(run("flops", "gpt2", "-z"))


def test_a_command_stands_first(run):
    assert refused(run("gpt2")) == "'gpt2' is a model; a command stands before it: tfcost flops gpt2"
    assert "tfcost flops config.json" in refused(run("config.json"))
    assert "tfcost flops -N" in refused(run("-N", "4"))


def test_one_model_at_most(run):
    assert refused(run("flops", "gpt2", "bert-base")) == "unexpected argument bert-base: a command takes one MODEL"


@pytest.mark.parametrize("flag", ["-N", "--seq-len", "--attention", "-o", "--convention"])
def test_a_flag_without_its_value_is_named(run, flag):
    assert flag in refused(run("flops", "gpt2", flag))
    assert "--json" in refused(run("flops", "gpt2", flag, "--json"))


# --- Bad input, in a real process -------------------------------------------------------------------------------------

SIZES = {
    "zero": (["flops", "gpt2", "-N", "0"], ["-N/--seq-len", "'0'", "at least 1"]),
    "negative": (["flops", "gpt2", "-b", "-3"], ["-b/--batch", "'-3'"]),
    "fraction": (["flops", "gpt2", "-l", "1.5"], ["-l/--layers", "'1.5'"]),
    "words": (["flops", "gpt2", "-V", "many"], ["-V/--vocab", "'many'"]),
    "empty": (["flops", "gpt2", "-N", ""], ["-N/--seq-len", "''"]),
    "gap in a list": (["flops", "gpt2", "-N", "1k,,2k"], ["-N/--seq-len", "''"]),
    "unit": (["flops", "gpt2", "-N", "4kB"], ["-N/--seq-len", "'4kB'"]),
    "expression": (["flops", "gpt2", "-N", "__import__('os').getpid()"], ["-N/--seq-len", "__import__"]),
    "infinite": (["flops", "gpt2", "-N", "inf"], ["-N/--seq-len", "'inf'"]),
    "exponent": (["flops", "gpt2", "-N", "1e999"], ["-N/--seq-len", "'1e999'"]),
    "other digits": (["flops", "gpt2", "-N", "٤"], ["-N/--seq-len"]),
    "10,000 digits": (["flops", "gpt2", "-N", "9" * 10_000], ["-N/--seq-len", "10000 digits"]),
    "missing": (["flops", "-d", "512"], ["-h/--heads", "-l/--layers"]),
    "all missing": (["memory"], ["-d/--hidden", "-h/--heads", "-l/--layers"]),
    "d by h": (["flops", "-d", "512", "-h", "7", "-l", "1"], ["-d/--hidden 512", "-h/--heads 7"]),
    "h by h_kv": (["params", "gpt2", "--kv-heads", "5"], ["-h/--heads 12", "--kv-heads 5"]),
    "zero heads": (["flops", "-d", "512", "-h", "0", "-l", "1"], ["-h/--heads", "'0'"]),
    "probability": (["memory", "gpt2", "--dropout", "1"], ["--dropout", "'1'"]),
    "no number": (["memory", "gpt2", "--dropout", "nan"], ["--dropout", "'nan'"]),
    "layers of no stack": (["flops", *DOCUMENT, "--encoder-layers", "3"], ["--encoder-layers", "decoder"]),
    "source of no encoder": (["flops", *DOCUMENT, "--src-len", "3"], ["--src-len"]),
    "learned without rows": (["flops", *DOCUMENT, "--positions", "learned"], ["--max-positions"]),
    "too many points": (["flops", "gpt2", "-N", ",".join(["1"] * 200), "-b", ",".join(["1"] * 200)], ["40,000"]),
    "too many layers": (["flops", "gpt2", "-l", "20k", "--by", "layer"], ["--by layer", "20,000"]),
    "a list by op": (["flops", "gpt2", "-N", "1,2", "--by", "op"], ["--by"]),
    "a list to explain": (["explain", "gpt2", "-N", "1,2"], ["-N/--seq-len", "not a list"]),
    "no such model": (["flops", "/no/such/config.json"], ["/no/such/config.json"]),
    "a name of control characters": (["flops", "./\x1b[31m\nred"], [r"\x1b[31m"]),
    "empty name": (["flops", ""], ["empty"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_bad_sizes_are_one_line_and_status_2(name):
    arguments, mentioned = SIZES[name]
    done = process(*arguments)
    line = refused((done.returncode, done.stdout, done.stderr))
    for each in mentioned:
        assert each in line
    assert len(line) < 400


GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}

CONFIGS = {
    "not JSON": (b"model_type: gpt2", ["JSON"]),
    "truncated": (b'{"model_type": "gpt2", "n_em', ["JSON", "line 1"]),
    "empty": (b"", ["JSON"]),
    "an array": (b"[1, 2]", ["object", "array"]),
    "a number": (b"12", ["object"]),
    "null": (b"null", ["object", "null"]),
    "no model_type": (b"{}", ["model_type"]),
    "unknown model_type": (b'{"model_type": "gpt-2"}', ["model_type", "'gpt-2'", "gpt2"]),
    "model_type of a wrong kind": (b'{"model_type": 7}', ["model_type", "7"]),
    "a string for a size": (json.dumps({**GPT2, "n_embd": "768"}).encode(), ["n_embd", '"768"']),
    "a fraction": (json.dumps({**GPT2, "n_layer": 12.0}).encode(), ["n_layer", "12.0"]),
    "true for a size": (json.dumps({**GPT2, "n_head": True}).encode(), ["n_head", "true"]),
    "zero": (json.dumps({**GPT2, "n_layer": 0}).encode(), ["n_layer", "0"]),
    "negative": (json.dumps({**GPT2, "n_embd": -768}).encode(), ["n_embd", "-768"]),
    "does not divide": (json.dumps({**GPT2, "n_embd": 770}).encode(), ["770", "12"]),
    "NaN": (b'{"model_type": "gpt2", "n_embd": NaN}', ["NaN"]),
    "Infinity": (b'{"model_type": "gpt2", "n_embd": -Infinity}', ["-Infinity"]),
    "1e999": (b'{"model_type": "gpt2", "n_embd": 1e999}', ["1e999"]),
    "10,000 digits": (b'{"model_type": "gpt2", "n_embd": ' + b"9" * 10_000 + b"}", ["10000 digits"]),
    "200,000 brackets": (b"[" * 200_000 + b"]" * 200_000, ["nested"]),
    "200,000 braces": (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, ["nested"]),
    "duplicate keys": (b'{"model_type": "gpt2", "n_embd": 768, "n_embd": 1024}', ["n_embd", "twice"]),
    "binary": (bytes(range(256)) * 8, ["UTF-8"]),
    "zeros": (b"\0" * 1000, ["JSON"]),
    "unknown architecture": (b'{"model_type": "gpt2", "architectures": ["Evil"]}', ["architectures", "Evil"]),
    "architectures of a wrong kind": (b'{"model_type": "gpt2", "architectures": "GPT2Model"}', ["architectures"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_bad_configs_are_one_line_and_status_2(tmp_path, name):
    content, mentioned = CONFIGS[name]
    path, wanted = tmp_path / "config.json", tmp_path / "out.json"
    path.write_bytes(content)
    done = process("flops", str(path), "-o", str(wanted))
    line = refused((done.returncode, done.stdout, done.stderr))
    for each in mentioned:
        assert each in line
    assert len(line) < 1500
    assert sorted(tmp_path.iterdir()) == [path]  # nothing half written


def test_a_config_may_be_its_folder_and_must_be_in_it(run, tmp_path):
    assert "config.json" in refused(run("flops", str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(GPT2), encoding="utf-8")
    by_folder = run("flops", str(tmp_path), "--csv")
    assert by_folder == run("flops", str(tmp_path / "config.json"), "--csv") == run("flops", "gpt2", "--csv")
    assert by_folder[0] == 0


def test_a_name_wins_over_a_folder_unless_it_is_a_path(run, tmp_path, monkeypatch):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({**GPT2, "n_layer": 1}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    layers = [json.loads(run("flops", name, "--json")[1])["model"]["decoder_layers"] for name in ("gpt2", "./gpt2")]
    assert layers == [12, 1]


def test_a_pipe_a_device_or_a_huge_file_is_no_config(run, tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    assert "regular file" in refused(run("flops", str(tmp_path / "pipe.json")))
    assert "regular file" in refused(run("flops", "/dev/zero"))
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "too large" in refused(run("flops", str(tmp_path / "huge.json")))


def test_keys_that_are_not_known_are_warned_of_and_listed(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GPT2, "n_emdb": 7, "zeta": 1}), encoding="utf-8")
    status, out, err = run("flops", str(path), "--json")
    assert status == 0
    assert json.loads(out)["assumptions"]["ignored_keys"] == ["n_emdb", "zeta"]
    assert err.splitlines() == [f"tfcost: warning: {line}" for line in [err.split("warning: ")[1].rstrip()]]
    assert "n_emdb" in err
    assert "zeta" in err
    assert run("flops", str(path), "--json", "--quiet") == (0, out, "")
    assert "ignored keys n_emdb, zeta" in run("flops", str(path))[1]


def test_beyond_the_learned_positions_is_a_warning_and_an_answer(run):
    status, out, err = run("flops", "gpt2", "-N", "2048", "--json")
    assert (status, err.count("\n")) == (0, 1)
    assert "2,048" in err
    assert "1,024" in err
    assert json.loads(out)["inputs"]["seq_len"] == 2048


# --- Numbers as people write them -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("4_096", 4096), ("4k", 4000), ("4K", 4000), ("4Ki", 4096), ("2M", 2 * 10**6), ("1.5k", 1500),
     ("10B", 10**10), ("2T", 2 * 10**12), ("1Mi", 2**20), ("+7", 7), ("0.5Ki", 512)],
)  # fmt: skip
def test_sizes_may_have_suffixes(run, text, value):
    for flag in ("-N", "--seq-len"):
        status, out, _ = run("flops", *DOCUMENT[:6], flag, text, "--json")
        assert (status, json.loads(out)["inputs"]["seq_len"]) == (0, value)
    assert json.loads(run("flops", *DOCUMENT[:6], f"-N{text}", "--json")[1])["inputs"]["seq_len"] == value


def test_the_named_defaults(run):
    report = json.loads(run("flops", *DOCUMENT[:6], "--json")[1])
    assert report["inputs"] == {"batch": 1, "seq_len": 2048}
    assert report["assumptions"]["attention"] == "eager"
    model = json.loads(run("flops", "gpt2", "--json")[1])
    assert model["inputs"] == {"batch": 1, "seq_len": 1024}
    assert model["assumptions"]["attention"] == "flash"
    assert json.loads(run("flops", "llama-3-8b", "--json")[1])["inputs"]["seq_len"] == 2048


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["-d", "1024"], "hidden", 1024), (["--hidden", "1024"], "hidden", 1024), (["-h", "4"], "heads", 4),
        (["--d-model", "1024"], "hidden", 1024), (["--heads", "4"], "heads", 4), (["-l", "2"], "decoder_layers", 2),
        (["--layers", "2"], "decoder_layers", 2), (["-V", "100"], "vocab", 100), (["--vocab", "100"], "vocab", 100),
        (["--kv-heads", "2"], "kv_heads", 2), (["--head-dim", "32"], "head_dim", 32),
        (["--ffn-hidden", "96"], "ffn_hidden", 96), (["--d-ff", "96"], "ffn_hidden", 96),
        (["--activation", "relu"], "activation", "relu"), (["--norm", "rmsnorm"], "norm", "rmsnorm"),
        (["--post-norm"], "pre_norm", False), (["--pre-norm"], "pre_norm", True), (["--ffn", "glu"], "ffn", "glu"),
        (["--final-norm"], "final_norm", True), (["--no-final-norm"], "final_norm", False),
        (["--no-bias"], "bias", False), (["--untied"], "tied", False), (["--no-head"], "head", False),
        (["--positions", "alibi"], "positions", "alibi"), (["--dropout", "0.2"], "dropout", 0.2),
        (["--dropout", "0.2"], "attention_dropout", 0.2), (["--attention-dropout", "0.3"], "attention_dropout", 0.3),
        (["--ffn-dropout", "0.1"], "ffn_dropout", 0.1), (["--arch", "encoder"], "arch", "encoder"),
    ],
)  # fmt: skip
def test_a_flag_reaches_its_field(run, flags, field, value):
    status, out, err = run("flops", *DOCUMENT, *flags, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["model"][field] == value


def test_two_stacks_have_lengths_and_depths_of_their_own(run):
    flags = ["--arch", "encoder-decoder", "--src-len", "10", "--encoder-layers", "2", "--decoder-layers", "3"]
    report = json.loads(run("flops", "-d", "512", "-h", "8", "-N", "20", *flags, "--json")[1])
    assert report["inputs"] == {"batch": 1, "seq_len": 20, "src_len": 10}
    assert (report["model"]["encoder_layers"], report["model"]["decoder_layers"]) == (2, 3)


def test_exact_to_the_digit_at_sizes_beyond_64_bits(run):
    b, n, d, layers, vocab = 1536, 1048576, 1000000, 10000, 1000000
    out = run("flops", "-b", str(b), "-N", str(n), "-d", "1000000", "-h", "1000", "-l", "10000", "-V", str(vocab))[1]
    forward = layers * (24 * b * n * d**2 + 4 * b * n**2 * d) + 2 * b * n * d * vocab
    assert forward > 2**88
    assert f"{forward:,}" in out
    assert f"{3 * forward:,}" in out


# --- Lists: one row each ----------------------------------------------------------------------------------------------


def test_a_list_gives_one_row_each_and_is_no_total(run):
    report = json.loads(run("flops", "gpt2", "-N", "1k,1Ki", "-b", "1,2,3", "--json")[1])
    points = [(row["batch"], row["seq_len"]) for row in report["rows"]]
    assert points == [(b, n) for b in (1, 2, 3) for n in (1000, 1024)]
    assert report["grid"] == ["batch", "seq_len"]
    assert report["totals"] == {}
    for (b, n), row in zip(points, report["rows"], strict=True):
        single = json.loads(run("flops", "gpt2", "-N", str(n), "-b", str(b), "--json")[1])
        assert {key: value for key, value in row.items() if key not in report["grid"]} == single["totals"]


def test_a_list_of_one_is_one_point(run):
    report = json.loads(run("flops", "gpt2", "-N", "64", "--json")[1])
    assert "grid" not in report
    assert report["inputs"]["seq_len"] == 64


@pytest.mark.parametrize("command", ["flops", "params", "memory"])
@pytest.mark.parametrize("form", ["csv", "markdown", "latex", "table"])
def test_lists_in_every_format(run, command, form):
    status, out, err = run(command, "gpt2", "-l", "1,2,5", "--format", form, "--no-formula")
    assert (status, err) == (0, "")
    wanted = json.loads(run(command, "gpt2", "-l", "1,2,5", "--json")[1])["rows"]
    assert len(wanted) == 3
    for row in wanted:
        for key, value in row.items():
            assert re.sub(r"\\_", "_", out).count(key) >= 1 or form == "table"
            shown = "" if value is None else str(value)
            assert (f"{value:,}" if form == "table" and isinstance(value, int) else shown) in out or isinstance(
                value, float
            )


def test_listed_sizes_and_what_follows_from_them_are_lists_in_the_model(run):
    model = json.loads(run("flops", *DOCUMENT, "-d", "512,1024", "--json")[1])["model"]
    assert (model["hidden"], model["ffn_hidden"], model["head_dim"]) == ([512, 1024], [2048, 4096], [64, 128])
    assert model["heads"] == 8
    layers = json.loads(run("flops", *DOCUMENT, "-l", "1,2", "--json")[1])["model"]
    assert layers["decoder_layers"] == [1, 2]


@pytest.mark.parametrize(
    "flags",
    [["--kv-heads", "8,4"], ["--kv-heads", "4,8"], ["--ffn-hidden", "2048,100"], ["--ffn-hidden", "100,2048"],
     ["-d", "512,1024", "--ffn-hidden", "2048"], ["--head-dim", "64,32"], ["-d", "512,1024,2048"], ["-l", "1,2"],
     ["--arch", "encoder-decoder", "--encoder-layers", "6,2"]],
)  # fmt: skip
def test_the_closed_forms_of_a_grid_hold_at_each_of_its_points(run, flags):
    report = json.loads(run("flops", *DOCUMENT, "-V", "100", *flags, "--json", "--formula")[1])
    letters = {"hidden": "d", "kv_heads": "h_kv", "ffn_hidden": "d_ff", "head_dim": "d_k", "layers": "l",
               "encoder_layers": "l_enc"}  # fmt: skip
    assert report["formulas"]
    for row in report["rows"]:
        values = report["letters"] | {letters[key]: row[key] for key in report["grid"]}
        for key, formula in report["formulas"].items():
            assert eval(formula, {"__builtins__": {}}, dict(values)) == row[key], (key, formula)


def test_no_closed_form_is_shown_that_does_not_hold_everywhere(run):
    # At h = 8 h_kv = h, at h = 16 d_k = d/h: each form writes a size by another one that it does not equal elsewhere.
    flags = ["-d", "1024", "-h", "8,16", "--kv-heads", "8", "--head-dim", "64", "-l", "2", "-N", "16"]
    report = json.loads(run("flops", *flags, "--json", "--formula")[1])
    assert len(report["rows"]) == 2
    assert "formulas" not in report
    assert run("flops", *flags)[0] == 0


# --- Formats and files ------------------------------------------------------------------------------------------------

ENDINGS = {".json": "json", ".csv": "csv", ".md": "markdown", ".markdown": "markdown", ".tex": "latex", ".txt": "table"}


@pytest.mark.parametrize("command", ["flops", "params", "memory", "formula", "explain"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_s_ending_picks_what_stdout_would_print(run, tmp_path, command, ending):
    path = tmp_path / f"out{ending}"
    assert run(command, "gpt2", "-o", str(path)) == (0, "", "")
    assert path.read_text(encoding="utf-8") == run(command, "gpt2", "--format", ENDINGS[ending])[1]


def test_the_short_formats(run):
    assert run("flops", "gpt2", "--json") == run("flops", "gpt2", "--format", "json")
    assert run("flops", "gpt2", "--csv") == run("flops", "gpt2", "--format", "csv")
    assert run("flops", "gpt2", "--csv", "-o", "-") == run("flops", "gpt2", "--csv")


@pytest.mark.parametrize("flags", [["--json", "--csv"], ["--format", "table", "--json"], ["-o", "x.json", "--csv"],
                                   ["-o", "x.md", "--format", "latex"]])  # fmt: skip
def test_formats_that_disagree_are_refused(run, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    refused(run("flops", "gpt2", *flags))
    assert list(tmp_path.iterdir()) == []


def test_a_format_that_agrees_with_the_ending_is_fine(run, tmp_path):
    assert run("flops", "gpt2", "--csv", "-o", str(tmp_path / "a.CSV"))[0] == 0
    assert run("flops", "gpt2", "--csv", "-o", str(tmp_path / "noending"))[0] == 0
    assert (tmp_path / "a.CSV").read_bytes() == (tmp_path / "noending").read_bytes()


@pytest.mark.parametrize(
    ("name", "says"),
    [("", "name a file"), ("none", ".json"), ("a.xlsx", ".json"), ("folder", "folder"), ("folder.json", "folder"),
     ("no/such/a.json", "No such file"), ("file.json/a.json", "Not a directory"), ("x" * 300 + ".json", "too long"),
     ("/proc/tfcost.json", "cannot be written")],
)  # fmt: skip
def test_an_output_that_cannot_be_is_refused(run, tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    for folder in ("folder", "folder.json"):
        Path(folder).mkdir()
    Path("file.json").write_text("{}", encoding="utf-8")
    assert says in refused(run("flops", "gpt2", "-o", name))
    assert sorted(os.listdir()) == ["file.json", "folder", "folder.json"]
    assert Path("file.json").read_text(encoding="utf-8") == "{}"


def test_a_full_device_is_one_line(tmp_path):
    for line in ("tfcost flops gpt2 --json -o /dev/full", "tfcost flops gpt2 > /dev/full", "tfcost --help > /dev/full",
                 "tfcost flops --help > /dev/full", "tfcost --version > /dev/full"):  # fmt: skip
        done = shell(line)
        assert "No space left" in refused((done.returncode, done.stdout, done.stderr)), line


def test_a_device_and_a_pipe_are_written_not_replaced():
    json_to = "tfcost flops gpt2 --json -o"
    done = shell(f"{json_to} /dev/stdout | cat; {json_to} /dev/null; test -c /dev/null")
    assert done.returncode == 0
    assert json.loads(done.stdout)["command"] == "flops"


def test_a_read_only_file_or_folder_is_refused_and_left(run, tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old", encoding="utf-8")
    # Root may write anywhere: what the system would say to others is said here in its place.
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert "Permission denied" in refused(run("flops", "gpt2", "-o", str(path)))
    monkeypatch.undo()

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", denied)
    assert "Permission denied" in refused(run("flops", "gpt2", "-o", str(path)))
    assert (path.read_text(encoding="utf-8"), os.listdir(tmp_path)) == ("old", ["a.json"])


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_half_way_leaves_the_old_file_and_nothing_else(run, tmp_path, monkeypatch, failure):
    path = tmp_path / "a.json"
    path.write_text("old", encoding="utf-8")

    def broken(*_, **__):
        raise failure

    monkeypatch.setattr(os, "replace", broken)
    status, out, _ = run("flops", "gpt2", "-o", str(path))
    assert (status, out) == (130 if isinstance(failure, KeyboardInterrupt) else 2, "")
    assert (path.read_text(encoding="utf-8"), os.listdir(tmp_path)) == ("old", ["a.json"])


def test_permissions_are_kept_or_those_of_the_umask(run, tmp_path):
    old, new, link = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "link.json"
    old.touch(mode=0o600)
    old.chmod(0o640)
    link.symlink_to(old)
    umask = os.umask(0o027)
    try:
        assert run("flops", "gpt2", "-o", str(link))[0] == run("flops", "gpt2", "-o", str(new))[0] == 0
    finally:
        os.umask(umask)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert old.read_bytes() == new.read_bytes()


def test_concurrent_writers_leave_one_whole_file(tmp_path):
    path = str(tmp_path / "a.json")
    texts = [json.dumps([number] * 20_000) for number in range(4)]
    stop = threading.Event()
    bad: list[str] = []

    def read() -> None:
        while not stop.is_set():
            if (seen := Path(path).read_text(encoding="utf-8").rstrip("\n")) not in texts:
                bad.append(seen[:40])

    output.write(texts[0], path)
    reader = threading.Thread(target=read)
    reader.start()

    def write(text: str) -> None:
        for _ in range(25):
            output.write(text, path)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert bad == []
    assert os.listdir(tmp_path) == ["a.json"]


def test_two_processes_may_write_one_file(tmp_path):
    path = tmp_path / "a.json"
    command = [sys.executable, "-m", "tfcost", "flops", "gpt2", "-o", str(path), "-N"]
    writers = [subprocess.Popen([*command, length], env=environment()) for length in ("64", "128")]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert json.loads(path.read_text(encoding="utf-8"))["inputs"]["seq_len"] in (64, 128)


def test_a_nul_in_the_name_is_refused(tmp_path):
    with pytest.raises(OutputError, match="cannot be written"):
        output.write("x", str(tmp_path / "a\0b.json"))


# --- Pipes, streams, terminals, encodings -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["flops gpt2", "flops gpt2 --json --by layer", "formula", "--help", "flops --help"])
def test_a_reader_that_leaves_ends_it_quietly(command):
    line = "tfcost {} | {}; echo ${{PIPESTATUS[0]}};"
    done = shell(line.format(command, "head -n 1") + line.format(command, "true"))
    first, *statuses = done.stdout.splitlines()
    assert first
    assert statuses == ["0", "0"]
    assert done.stderr == ""


def test_closed_streams():
    done = shell("tfcost flops gpt2 >&-")
    assert "stdout" in refused((done.returncode, done.stdout, done.stderr))
    assert shell("tfcost flops nope 2>&-").returncode == 2
    assert shell("tfcost flops nope 2>/dev/full").returncode == 2
    assert shell("tfcost flops gpt2 -N 2k --csv 2>&- | tail -n 1").stdout.startswith("head,1,")


def test_stdout_and_stderr_do_not_mix():
    done = process("flops", "gpt2", "-N", "2048", "--json")
    assert json.loads(done.stdout)["command"] == "flops"
    assert done.stderr.startswith("tfcost: warning: ")
    assert done.stderr.count("\n") == 1


def test_what_is_told_is_one_printable_line(capsys):
    output.tell("a\nb\r\x1b[31m c\u2028d \x07 é")
    assert capsys.readouterr().err == "tfcost: a b \\x1b[31m c d \\x07 é\n"


def test_ctrl_c_is_130_and_nothing_else(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(figures, "analyze", interrupted)
    assert run("flops", "gpt2") == (130, "", "")


def test_ctrl_c_in_a_real_process():
    # A shell starts what it runs in the background with SIGINT ignored, and children inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    slow = "import time, tfcost.cli.figures as f; f.analyze = lambda *a, **k: (print('on', flush=True), time.sleep(60))"
    started = "from tfcost.cli.main import run; import sys; sys.argv = ['tfcost', 'flops', 'gpt2']; run()"
    script = f"{heard}; {slow}; {started}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", script], env=environment(), **pipes)
    assert child.stdout is not None
    assert child.stdout.readline() == b"on\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-16", "ascii:strict"])
def test_any_stdout_encoding_is_served(encoding):
    for command in ("flops", "explain") if encoding == "ascii" else ("explain",):
        done = process(command, "gpt2", env=environment(PYTHONIOENCODING=encoding), text=False)
        assert (done.returncode, done.stderr) == (0, b""), command
        text = done.stdout.decode(encoding.partition(":")[0])
        if encoding.startswith("ascii"):
            assert "4bN^2*d" in text, command
            assert "\\" not in text


def test_a_posix_locale_is_served():
    posix = environment(LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = process("flops", "gpt2", env=posix, text=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"4bN^2*d" in done.stdout
    assert b"###" in done.stdout


def test_json_stays_json_in_an_ascii_stdout(tmp_path):
    (tmp_path / "é\u2028").mkdir()
    (tmp_path / "é\u2028" / "config.json").write_text(json.dumps(GPT2), encoding="utf-8")
    done = process("explain", str(tmp_path / "é\u2028"), "--json", env=environment(PYTHONIOENCODING="ascii"))
    report = json.loads(done.stdout)
    assert done.stdout.isascii()
    assert report["model"]["name"] == str(tmp_path / "é\u2028")
    assert any("QKᵀ" in row["what"] for row in report["rows"])


def test_a_path_of_bytes_that_are_no_text(tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    Path(os.fsdecode(folder), "config.json").write_text(json.dumps(GPT2), encoding="utf-8")
    strict = environment(PYTHONIOENCODING="utf-8:strict")
    for flags in (["--json"], [], ["--csv"], ["-o", str(tmp_path / "a.json")], ["-o", str(tmp_path / "a.txt")]):
        done = process("flops", os.fsdecode(folder), *flags, env=strict)
        assert (done.returncode, done.stderr) == (0, ""), flags
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["model"]["name"].endswith("\udcff")


def terminal(command: str, width: int, **changes: str) -> str:
    """What ``tfcost`` prints on a terminal of this width."""
    import fcntl
    import pty
    import struct
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    env = environment(**{"TERM": "xterm-256color", **changes})
    running = subprocess.Popen([sys.executable, "-m", "tfcost", *command.split()], stdout=child, stderr=child, env=env)
    os.close(child)
    read = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:  # Linux says EIO when the other side has closed
            break
        if not part:
            break
        read += part
    os.close(parent)
    assert running.wait(60) == 0
    return read.decode().replace("\r\n", "\n")


ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_terminal_is_filled_and_never_overrun(width):
    text = terminal("flops gpt2", width)
    assert ESCAPE.search(text)
    plain = ESCAPE.sub("", text)
    assert max(map(len, plain.splitlines())) <= width
    assert "291,648,307,200" in plain
    assert ("█" in plain) == (width >= 60)


def test_no_color_and_dumb_terminals_get_no_colour():
    table = "flops gpt2 --no-formula"
    assert "\x1b" not in terminal(table, 80, NO_COLOR="1")
    assert "\x1b" not in terminal(table, 80, TERM="dumb")
    assert "\x1b" in terminal(table, 80, NO_COLOR="")


def test_a_pipe_gets_no_colour_whatever_the_terminal(run):
    assert "\x1b" not in run("flops", "gpt2")[1]
    assert "\x1b" not in run("explain", "gpt2")[1]
