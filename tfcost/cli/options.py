"""Every flag, once: its names, how its text is read, and its help. Commands take groups of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import typer

from tfcost.config import CHOICES
from tfcost.errors import InputError
from tfcost.units import parse_counts, parse_probability


class Flag(NamedTuple):
    """A flag: the keyword it becomes, its spellings, its kind, its help and the values it takes (where they are named).

    Kinds: ``counts`` (one size, or a list of them), ``probability``, ``choice``, ``switch``, ``text``.
    """

    keyword: str
    names: tuple[str, ...]
    kind: str
    help: str
    choices: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The flag as messages name it: ``-N/--seq-len``."""
        return "/".join(self.names[:2]) if len(self.names[0]) == 2 else self.names[0]


def _counts(keyword: str, *names: str, help: str) -> Flag:
    return Flag(keyword, names, "counts", help)


def _choice(keyword: str, help: str, choices: tuple[str, ...] | None = None) -> Flag:
    return Flag(keyword, (f"--{keyword}",), "choice", help, CHOICES[keyword] if choices is None else choices)


PASS = (
    _counts("batch", "-b", "--batch", help="sequences (b) [default: 1]"),
    _counts("seq_len", "-N", "--seq-len", help="tokens per sequence (N) [default: 2048, or the model's own maximum]"),
    _counts("src_len", "--src-len", help="source tokens of an encoder-decoder (S) [default: N]"),
    _choice(
        "attention", "kernel: what is computed and kept [default: eager; with MODEL: flash]", ("eager", "flash", "math")
    ),
)
STRUCTURE = (
    _counts("hidden", "-d", "--hidden", "--d-model", help="model width (d)"),
    _counts("heads", "-h", "--heads", help="query heads (h)"),
    _counts("layers", "-l", "--layers", help="layers (l), of each stack"),
    _counts("vocab", "-V", "--vocab", help="vocabulary rows (V); without it no embedding and no logits"),
    _counts("kv_heads", "--kv-heads", help="key/value heads [default: h]"),
    _counts("head_dim", "--head-dim", help="width of a head (d_k) [default: d/h]"),
    _counts("ffn_hidden", "--ffn-hidden", "--d-ff", help="feed-forward width [default: 4d]"),
    _choice("arch", "stacks [default: decoder]"),
    _counts("encoder_layers", "--encoder-layers", help="encoder layers, where they differ"),
    _counts("decoder_layers", "--decoder-layers", help="decoder layers, where they differ"),
    _counts("src_vocab", "--src-vocab", help="source vocabulary [default: shared]"),
    _choice("ffn", "feed-forward: two matrices, or a gated three [default: mlp]"),
    _choice("activation", "[default: gelu]"),
    _choice("norm", "[default: layernorm]"),
    Flag("pre_norm", ("--pre-norm/--post-norm",), "switch", "where the norms are [default: pre]"),
    Flag("final_norm", ("--final-norm/--no-final-norm",), "switch", "a norm after each stack [default: none]"),
    Flag("bias", ("--bias/--no-bias",), "switch", "biases [default: yes]"),
    Flag("tied", ("--tied/--untied",), "switch", "head shares the embedding [default: tied]"),
    Flag("head", ("--head/--no-head",), "switch", "logits [default: yes]"),
    _choice("positions", "[default: sinusoidal]"),
    _counts("max_positions", "--max-positions", help="rows of a learned position table"),
    Flag("dropout", ("--dropout",), "probability", "residual (and attention) dropout [default: 0.1]"),
    Flag("ffn_dropout", ("--ffn-dropout",), "probability", "inner feed-forward dropout [default: 0]"),
    Flag(
        "attention_dropout",
        ("--attention-dropout",),
        "probability",
        "dropout of attention weights [default: as dropout]",
    ),
)
COUNTING = (
    Flag(
        "causal", ("--causal",), "choice", "price the full score square or half of it [default: full]", ("full", "half")
    ),
    Flag("convention", ("--convention",), "text", "how FLOPs are counted [default: document]"),
)
STORAGE = (
    Flag("dtype", ("--dtype",), "choice", "activations and weights [default: bf16]", ("bf16", "fp16", "fp32", "fp8")),
    Flag(
        "implementation",
        ("--implementation",),
        "choice",
        "what is kept for backward [default: document]",
        ("document",),
    ),
)
ROWS = (
    Flag("by", ("--by",), "choice", "how deep the rows go [default: component]", ("total", "component", "op", "layer")),
    Flag("formula", ("--formula/--no-formula",), "switch", "closed forms [default: in tables]"),
)
OUTPUT = (
    Flag("format", ("--format",), "choice", "[default: table]", ("table", "json", "csv", "markdown", "latex")),
    Flag("json", ("--json",), "switch", "short for --format json"),
    Flag("csv", ("--csv",), "switch", "short for --format csv"),
    Flag("output", ("-o", "--output"), "text", "write to FILE, whose ending picks the format; - is stdout"),
    Flag("quiet", ("--quiet",), "switch", "no warnings"),
)


def parse(flags: tuple[Flag, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were given, read: lists of ints for counts, floats for probabilities, the rest as it is."""
    values: dict[str, Any] = {}
    for flag in flags:
        value = given.get(flag.keyword)
        if value is None:
            continue
        if flag.kind == "counts":
            value = parse_counts(value, flag.label)
        elif flag.kind == "probability":
            value = parse_probability(value, flag.label)
        elif flag.kind == "choice" and value not in flag.choices:
            raise InputError(f"{flag.label} must be one of {', '.join(flag.choices)}, not {value[:40]!r}")
        values[flag.keyword] = value
    return values


MODEL_HELP = "preset, config.json or its folder; none: the flags describe the model"


def command_app(
    name: str, help: str, flags: tuple[Flag, ...], action: Callable[[str | None, dict[str, Any]], None]
) -> typer.Typer:
    """The app of one command: an optional MODEL and these flags, read by :func:`parse` and handed to ``action``.

    The signature that typer reads is made from the table, so that a flag's names, kind and help stand in one place.
    """

    def command(**given: Any) -> None:
        model = given.pop("model")
        action(model, parse(flags, given))

    parameters = [_parameter("model", Annotated[str | None, typer.Argument(help=MODEL_HELP, metavar="[MODEL]")])]
    for flag in flags:
        if flag.kind == "switch":
            kind: Any = Annotated[bool | None, typer.Option(*flag.names, help=flag.help)]
        else:
            shown = (
                "|".join(flag.choices) if flag.choices else {"counts": "N", "probability": "P"}.get(flag.kind, "NAME")
            )
            kind = Annotated[str | None, typer.Option(*flag.names, help=flag.help, metavar=shown)]
        parameters.append(_parameter(flag.keyword, kind))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False)
    app.command(name, help=help)(command)
    return app


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
