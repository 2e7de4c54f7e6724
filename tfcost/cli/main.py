"""The console script: finds the command, loads only its module, and turns every error into one line and a status."""

from __future__ import annotations

import sys

from tfcost.errors import InputError, TfcostError, UnknownName

COMMANDS = {
    "flops": ("tfcost.cli.figures", "FLOPs: forward, backward, a training step, with formulas"),
    "params": ("tfcost.cli.figures", "parameters: total, embeddings, head, the rest"),
    "memory": ("tfcost.cli.figures", "memory on one device: weights, optimizer, activations, the peak"),
    "kv": ("tfcost.cli.running", "the KV cache: bytes per token, per sequence, tokens that fit"),
    "fit": ("tfcost.cli.running", "the largest batch, length, depth, width or LoRA rank that fits a device"),
    "formula": ("tfcost.cli.formulas", "closed forms, and where attention overtakes the rest"),
    "compare": ("tfcost.cli.listing", "models side by side, absolute and relative"),
    "models": ("tfcost.cli.listing", "the presets, by name, family and size"),
    "devices": ("tfcost.cli.running", "the devices, by name, with their memory"),
    "validate": ("tfcost.cli.validate", "every figure held against PyTorch on this machine"),
    "trace": ("tfcost.cli.trace", "closed forms derived from a running PyTorch program"),
    "explain": ("tfcost.cli.formulas", "a walk through one layer, step by step"),
}
"""Each command: the module whose app holds it, and what the overview says of it."""

NOTES = (
    "MODEL is a preset (gpt2, llama-3-8b, bert-base), a config.json or a folder with one; without it, -d -h -l -V "
    "describe the model. Sizes: 4096, 4k, 4Ki, 2M; lists (-N 1k,2k,4k) give one row each. -h is heads; help is --help."
)

HEADS = "-h is heads and needs a number; help is --help"


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit status: 0 done, 1 no, 2 bad input, 130 interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(arguments)
    except TfcostError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0  # the reader has left (`| head`)


def _dispatch(arguments: list[str]) -> int:
    from tfcost.cli.output import write

    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    if not arguments or arguments[0] == "--help":
        write(overview(), None)
        return 0
    name, *rest = arguments
    if name == "--version" or rest[:1] == ["--version"]:
        from tfcost import __version__

        write(f"tfcost {__version__}", None)
        return 0
    if name not in COMMANDS:
        raise _unknown(name)
    return _run(name, rest)


def _run(name: str, arguments: list[str]) -> int:
    from importlib import import_module

    import typer
    from typer.main import get_command

    from tfcost.cli.output import write

    command = get_command(import_module(COMMANDS[name][0]).app(name)(arguments))
    if "--help" in arguments:
        write(command.get_help(typer.Context(command, info_name=name)), None)
        return 0
    # The command-line parser's own error, by way of the public class that derives from it.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        action = command.main(arguments, prog_name=f"tfcost {name}", standalone_mode=False)
    except usage_error as error:
        raise InputError(_usage(name, error)) from None
    return action() or 0 if callable(action) else int(action)


def _unknown(name: str) -> InputError:
    """What is wrong with a command line that does not begin with a command."""
    if name == "-h":
        return InputError(HEADS)
    if name.startswith("-"):
        return InputError(f"{name[:40]!r} stands before any command; options follow one: tfcost flops {name[:40]} ...")
    from tfcost.data_files import data_path

    if data_path("models", f"{name.lower()}.json").is_file() or name.endswith(".json"):
        return InputError(f"{name[:60]!r} is a model; a command stands before it: tfcost flops {name[:60]}")
    return UnknownName("command", name, COMMANDS)


def overview() -> str:
    """What ``tfcost --help`` prints."""
    import shutil
    import textwrap

    width = min(max(shutil.get_terminal_size().columns, 40), 100)
    longest = max(map(len, COMMANDS))
    rows = [
        textwrap.fill(help, width, initial_indent=f"  {name:<{longest}}  ", subsequent_indent=" " * (longest + 4))
        for name, (_, help) in COMMANDS.items()
    ]
    opening = "tfcost: exact FLOPs, parameters and memory of Transformers, each with its closed form."
    usage = ["Usage: tfcost COMMAND [MODEL] [options]", "       tfcost COMMAND --help"]
    notes = textwrap.fill(NOTES, width, break_on_hyphens=False)
    return "\n".join([textwrap.fill(opening, width), "", *usage, "", "Commands:", *rows, "", notes])


def _usage(command: str, error: Exception) -> str:
    """The parser's complaint, in our words."""
    option = getattr(error, "option_name", None)
    if hasattr(error, "possibilities"):
        close = error.possibilities or []
        hint = f"did you mean {' or '.join(close[:3])}?" if close else f"tfcost {command} --help lists them"
        return f"unknown option {str(option)[:40]!r}; {hint}"
    message = str(error.format_message()) if hasattr(error, "format_message") else str(error)
    if message.startswith("Got unexpected extra argument"):
        return f"unexpected argument {message.partition(' (')[2].rstrip('.)')}: a command takes one MODEL"
    if "requires an argument" in message:
        return HEADS if option == "-h" else f"{option} needs a value"
    return message[:1].lower() + message[1:].rstrip(".")


def _fail(message: str) -> int:
    from tfcost.cli.output import tell

    tell(message)
    return 2


def run() -> None:
    """The entry point of the console script."""
    import gc

    # Many objects are made and few die: imports take a tenth less with rare collections.
    gc.set_threshold(100_000, 20, 20)
    sys.exit(main())
