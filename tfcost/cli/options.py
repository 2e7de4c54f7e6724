"""Every flag, once: its names, how its text is read, and its help. Commands take groups of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from tfcost.config import ATTENTION_KINDS, CHOICES
from tfcost.errors import InputError
from tfcost.policy import KV_ITEMSIZE, QUANTIZED, RECIPES
from tfcost.units import parse_bytes, parse_counts, parse_probability


class Flag(NamedTuple):
    """A flag: the keyword it becomes, its spellings, its kind, its help and the values it takes (where they are named).

    Kinds: ``counts`` (one size, or a list), ``bytes``, ``probability``, ``choice``, ``switch``, ``file``, ``text``.
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

    @property
    def takes(self) -> str:
        """What stands for its value in help: the names it takes, ``N``, ``P``, ``NAME``; empty for a switch."""
        if self.kind == "switch":
            return ""
        return "|".join(self.choices) or {"counts": "N", "probability": "P", "bytes": "BYTES", "file": "FILE"}.get(
            self.kind, "NAME"
        )

    @property
    def usage(self) -> str:
        """Its spellings and value, as help and the README show them: ``-N, --seq-len N``."""
        names = [each for name in self.names for each in name.split("/")]
        return f"{', '.join(names)} {self.takes}".rstrip()


def _counts(keyword: str, *names: str, help: str) -> Flag:
    return Flag(keyword, names, "counts", help)


def _choice(keyword: str, help: str, choices: tuple[str, ...] | None = None) -> Flag:
    names = (f"--{keyword.replace('_', '-')}",)
    return Flag(keyword, names, "choice", help, CHOICES[keyword] if choices is None else choices)


PASS = (
    _counts("batch", "-b", "--batch", help="sequences (b) [default: 1]"),
    _counts("seq_len", "-N", "--seq-len", help="tokens per sequence (N) [default: 2048, or the model's own maximum]"),
    _counts("src_len", "--src-len", help="source tokens of an encoder-decoder (S) [default: N]"),
    _counts("frames", "--frames", help="frames of sound (F) [default: two for each position of the encoder]"),
    _choice(
        "attention", "kernel: what is computed and kept [default: eager; with MODEL: flash]", ("eager", "flash", "math")
    ),
)
STRUCTURE = (
    _counts("hidden", "-d", "--hidden", "--d-model", help="model width (d)"),
    _counts("heads", "-h", "--heads", help="query heads (h)"),
    _counts("layers", "-l", "--layers", help="layers (l) of each stack"),
    _counts("vocab", "-V", "--vocab", help="vocabulary rows (V); without it no embedding and no logits"),
    _counts("kv_heads", "--kv-heads", help="key/value heads (h_kv) [default: h]"),
    _counts("head_dim", "--head-dim", help="width of a head (d_k) [default: d/h]"),
    _counts("ffn_hidden", "--ffn-hidden", "--d-ff", help="feed-forward width (d_ff) [default: 4d]"),
    _choice("arch", "which stacks there are [default: decoder]"),
    _counts("encoder_layers", "--encoder-layers", help="layers of the encoder, where the stacks differ [default: l]"),
    _counts("decoder_layers", "--decoder-layers", help="layers of the decoder, where the stacks differ [default: l]"),
    _counts("src_vocab", "--src-vocab", help="source vocabulary of an encoder-decoder [default: V, one shared table]"),
    _choice("ffn", "feed-forward: two matrices, or a gated three [default: mlp]"),
    _choice("activation", "the feed-forward's non-linearity [default: gelu]"),
    _choice("norm", "kind of norm [default: layernorm]"),
    Flag("pre_norm", ("--pre-norm/--post-norm",), "switch", "norm before each branch, or after its sum [default: pre]"),
    Flag("final_norm", ("--final-norm/--no-final-norm",), "switch", "a norm after each stack [default: no]"),
    Flag("bias", ("--bias/--no-bias",), "switch", "biases in every linear layer and norm [default: yes]"),
    Flag("tied", ("--tied/--untied",), "switch", "the head shares the embedding's table, or not [default: tied]"),
    Flag("head", ("--head/--no-head",), "switch", "a head, and so logits [default: yes]"),
    _choice("positions", "how positions enter [default: sinusoidal]"),
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
VARIANTS = (
    _counts("image_size", "--image-size", help="side of an image, in pixels; without MODEL: a model of images"),
    _counts("patch_size", "--patch-size", help="side of a patch, in pixels"),
    _counts("channels", "--channels", help="channels of an image (c) [default: 3]"),
    _counts("classes", "--classes", help="classes that a head tells apart (C) [default: no such head]"),
    _counts("window", "--window", help="keys that a query sees at most (w) [default: all]"),
    _counts("local_layers", "--local-layers", help="layers that have the window [default: all]"),
    Flag("attention_sinks", ("--attention-sinks/--no-attention-sinks",), "switch", "a sink per head [default: no]"),
    _choice("attention_kind", "how queries meet keys [default: softmax]", ATTENTION_KINDS),
    _counts("query_rank", "--query-rank", help="latent: width of compressed queries (d_q) [default: not compressed]"),
    _counts("kv_rank", "--kv-rank", help="latent: width of the compressed keys and values (d_c)"),
    _counts("rope_dim", "--rope-dim", help="latent: part of d_k that turns with the position (d_r)"),
    _counts("value_dim", "--value-dim", help="latent: width of a value (d_v) [default: d_k]"),
    Flag("absorbed", ("--absorbed/--expanded",), "switch", "latent: keys stay compressed [default: expanded]"),
    _counts("features", "--features", help="linear: random features of a query or key (m)"),
    _counts("hashes", "--hashes", help="lsh: rounds of hashing (r)"),
    _counts("buckets", "--buckets", help="lsh: buckets of a round (n_b)"),
    _counts("chunk_length", "--chunk-length", help="lsh: tokens of a chunk, which see it and the one before (c)"),
    _counts("kernel", "--kernel", help="tokens of a convolution (k), of the model conv [default: 3]"),
    _counts("experts", "--experts", help="experts in place of a feed-forward (E) [default: none]"),
    _counts("experts_per_token", "--experts-per-token", "--top-k", help="experts that a token uses (k) [default: 1]"),
    _counts("expert_hidden", "--expert-hidden", help="width of an expert (d_e) [default: d_ff]"),
    _counts("shared_expert_hidden", "--shared-expert-hidden", help="width of what all use (d_s) [default: none]"),
    _counts("dense_layers", "--dense-layers", help="layers without experts [default: none]"),
    Flag(
        "capacity_factor",
        ("--capacity-factor",),
        "text",
        "slots of the experts per routed token, filled or not [default: one for each, wherever it goes]",
    ),
)
MODEL_FLAGS = (*STRUCTURE, *VARIANTS)
COUNTING = (
    Flag(
        "causal", ("--causal",), "choice", "price the full score square or half of it [default: full]", ("full", "half")
    ),
    Flag("convention", ("--convention",), "text", "how FLOPs are counted [default: document]"),
)
ALL_CONVENTIONS = Flag("conventions", ("--conventions",), "switch", "every convention side by side")
STORAGE = (
    Flag("dtype", ("--dtype",), "choice", "activations and weights [default: bf16]", ("bf16", "fp16", "fp32", "fp8")),
    Flag(
        "implementation",
        ("--implementation",),
        "choice",
        "what is kept for backward [default: document]",
        ("document", "reference"),
    ),
    Flag("semantics", ("--semantics",), "choice", "device of the reference's kernels [default: cuda]", ("cuda", "cpu")),
)
RUN = (
    Flag("mode", ("--mode",), "choice", "which pass [default: train]", ("train", "prefill", "decode")),
    _counts("context", "--context", help="tokens already cached (with --mode decode)"),
    Flag("recipe", ("--recipe",), "text", "what is stored per weight: " + ", ".join(RECIPES) + " [default: zero-16]"),
    Flag("optimizer", ("--optimizer",), "text", "the same as --recipe"),
    Flag("reference_model", ("--reference-model",), "switch", "a frozen second model (DPO)"),
    Flag("logit_copies", ("--logit-copies",), "counts", "fp32 copies of the logits alive at once, gradients included"),
)
ADAPT = (
    Flag(
        "recompute",
        ("--recompute",),
        "text",
        "none, selective, full, every-K (layers), ops:A,B (run those again) or save:A,B (all others) [default: none]",
    ),
    Flag("loss", ("--loss",), "text", "eager, fused or chunked=K [default: eager]"),
    _counts("labels", "--labels", help="tokens of a sequence that have labels: logits of those alone [default: all]"),
    _counts("lora_rank", "--lora-rank", help="low-rank adapters of this rank; all else is frozen"),
    Flag(
        "lora_targets",
        ("--lora-targets",),
        "text",
        "query,key,value,output,gate,up,down, or all [default: query,value]",
    ),
    Flag("lora_dropout", ("--lora-dropout",), "probability", "of each adapter's own input [default: 0]"),
    Flag("frozen", ("--frozen",), "switch", "embeddings and layers do not train, the head does"),
    Flag("quantize", ("--quantize",), "choice", "the layers' frozen matrices", tuple(QUANTIZED)),
)
KV_DTYPE = Flag(
    "kv_dtype", ("--kv-dtype",), "choice", "elements of the KV cache [default: --dtype]", tuple(KV_ITEMSIZE)
)
DEVICE = (
    Flag("device", ("--device",), "text", "a device of tfcost devices (h100, a100-80gb), or a size (24GB, 24GiB)"),
    Flag("overhead", ("--overhead",), "bytes", "bytes taken by what is not the model's (1GB) [default: 0]"),
)
RUNNING = (*RUN, *ADAPT, KV_DTYPE, *DEVICE)
ROWS = (
    Flag("by", ("--by",), "choice", "how deep the rows go [default: component]", ("total", "component", "op", "layer")),
    Flag("formula", ("--formula/--no-formula",), "switch", "closed forms [default: yes in tables, no in JSON and CSV]"),
)
OUTPUT = (
    _choice("format", "how it is printed [default: table]", ("table", "json", "csv", "markdown", "latex")),
    Flag("json", ("--json",), "switch", "short for --format json"),
    Flag("csv", ("--csv",), "switch", "short for --format csv"),
    Flag(
        "output",
        ("-o", "--output"),
        "file",
        "write to FILE, whole or not at all; its ending picks the format: .json .csv .md .tex .txt; - is stdout",
    ),
    Flag("quiet", ("--quiet",), "switch", "no warnings on stderr"),
)

GROUPS = {
    "The pass": PASS,
    "The model; with MODEL, a what-if": STRUCTURE,
    "Variants of attention and feed-forward": VARIANTS,
    "How FLOPs are counted": (*COUNTING, ALL_CONVENTIONS),
    "What is kept": STORAGE,
    "How it is run": RUNNING,
    "Rows": ROWS,
    "Output": OUTPUT,
}
"""The flags under the headings of the help and of the README."""


def parse(flags: tuple[Flag, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were given, read: lists of ints for counts, floats for probabilities, the rest as it is."""
    values: dict[str, Any] = {}
    options = {each for flag in flags for name in flag.names for each in name.split("/")}
    for flag in flags:
        value = given.get(flag.keyword)
        if value is None:
            continue
        if isinstance(value, str) and value in options:
            raise InputError(f"{flag.label} needs a value, not the option {value}")
        if flag.kind == "counts":
            value = parse_counts(value, flag.label)
        elif flag.kind == "bytes":
            value = parse_bytes(value, flag.label)
        elif flag.kind == "probability":
            value = parse_probability(value, flag.label)
        elif flag.kind == "choice" and value not in flag.choices:
            raise InputError(f"{flag.label} must be one of {', '.join(flag.choices)}, not {value[:40]!r}")
        values[flag.keyword] = value
    return values


class Argument(NamedTuple):
    """What stands before the flags: how the usage writes it, its help, and whether there may be several."""

    metavar: str
    help: str
    several: bool = False


MODEL_HELP = "a preset (gpt2, llama-3-8b), a config.json or its folder; without it the flags describe the model"

MODEL = Argument("[MODEL]", MODEL_HELP)

NOTES = (
    "Sizes may be written 4096, 4_096, 4k (4000), 4Ki (4096), 2M, 10B; lists such as -N 1k,2k,4k give one row each. "
    "-h is heads; help is --help."
)


def grouped(flags: tuple[Flag, ...]) -> dict[str, list[Flag]]:
    """A command's flags under their headings; a flag of its own stands under "Of this command"."""
    headings = {flag.keyword: heading for heading, group in GROUPS.items() for flag in group}
    found: dict[str, list[Flag]] = {heading: [] for heading in ("Of this command", *GROUPS)}
    for flag in flags:
        found[headings.get(flag.keyword, "Of this command")].append(flag)
    return found


def help_text(name: str, help: str, flags: tuple[Flag, ...], width: int, argument: Argument = MODEL) -> str:
    """What ``tfcost NAME --help`` prints: the flags in groups, nothing cut."""
    import textwrap

    width = min(max(width, 40), 100)
    column = 28 if width >= 70 else 6

    def paragraph(text: str, first: str = "", further: str = "") -> list[str]:
        return textwrap.wrap(
            text, width, initial_indent=first, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
        )

    def entry(usage: str, meaning: str) -> list[str]:
        lines = paragraph(meaning, " " * column, " " * column)
        if len(usage) + 4 <= column and lines:
            lines[0] = f"  {usage}".ljust(column) + lines[0][column:]
            return lines
        return [*paragraph(usage, "  ", "      "), *lines]

    usage = f"Usage: tfcost {name} {argument.metavar} [options]"
    lines = [usage, "", *paragraph(help), "", *entry(argument.metavar.strip("[]"), argument.help)]
    for heading, here in grouped(flags).items():
        if here:
            lines += ["", heading, *[line for flag in here for line in entry(flag.usage, flag.help)]]
        if heading == "Output":
            lines += entry("--help", "this text")
    return "\n".join([*lines, "", *paragraph(NOTES), ""])


AppFor = Callable[[Sequence[str]], typer.Typer]
"""The app of a command, for the arguments of one command line."""


def command_app(
    name: str,
    help: str,
    flags: tuple[Flag, ...],
    action: Callable[[Any, dict[str, Any]], int | None],
    argument: Argument = MODEL,
) -> AppFor:
    """The app of one command: an optional MODEL (or another ``argument``) and these flags.

    It is made for a command line (:func:`named`): typer takes a tenth of a millisecond per flag that it is told of.

    Its callback reads the flags (:func:`parse`) and returns what is left to do, ``action`` on what was read, for
    :mod:`tfcost.cli.main` to call outside the parser, which has its own ideas of errors and closed pipes. The
    signature that typer reads is made from the table, so that a flag's names, kind and help stand in one place.
    """

    def command(**given: Any) -> Callable[[], int | None]:
        model = given.pop("model")
        values = parse(flags, given)
        return lambda: action(model, values)

    class Command(TyperCommand):
        def get_help(self, ctx: Any) -> str:
            import shutil

            return help_text(name, help, flags, shutil.get_terminal_size().columns, argument)

    def app(arguments: Sequence[str]) -> typer.Typer:
        return _typer_app(name, command, Command, argument, named(flags, arguments))

    return app


def named(flags: tuple[Flag, ...], arguments: Sequence[str]) -> tuple[Flag, ...]:
    """The flags that a command line names; all of them where it holds an option that none of them is."""
    by_name = {name: flag for flag in flags for names in flag.names for name in names.split("/")}
    found: dict[str, Flag] = {}
    for text in arguments:
        if not text.startswith("-") or text == "-":
            continue
        flag = by_name.get(text.partition("=")[0]) or (None if text.startswith("--") else by_name.get(text[:2]))
        if flag is None:
            return flags
        found[flag.keyword] = flag
    return tuple(found.values())


def _typer_app(
    name: str, command: Callable[..., Any], cls: type[TyperCommand], argument: Argument, flags: tuple[Flag, ...]
) -> typer.Typer:
    given: Any = list[str] if argument.several else str
    parameters = [_parameter("model", Annotated[given | None, typer.Argument(metavar=argument.metavar)])]
    for flag in flags:
        # Help and what a value may be are ours (help_text, parse): typer splits the command line.
        kind: Any = bool if flag.kind == "switch" else str
        parameters.append(_parameter(flag.keyword, Annotated[kind | None, typer.Option(*flag.names)]))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False)
    app.command(name, cls=cls)(command)
    return app


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
