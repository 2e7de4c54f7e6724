"""The console script: finds the command, loads only its module, and turns every error into one line and a status."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from tfcost.errors import TfcostError, UnknownName

COMMANDS = {
    "flops": ("tfcost.cli.figures", "FLOPs: forward, backward, a training step, with formulas"),
    "params": ("tfcost.cli.figures", "parameters: total, embeddings, head, the rest"),
    "memory": ("tfcost.cli.figures", "memory: activations kept for backward, logits, weights"),
    "formula": ("tfcost.cli.formulas", "closed forms, and where attention overtakes the rest"),
    "explain": ("tfcost.cli.formulas", "a walk through one layer, step by step"),
}
"""Each command: the module whose app holds it, and what the overview says of it."""

EPILOG = (
    "MODEL is a preset (gpt2, llama-3-8b, bert-base), a config.json or a folder with one; without it, -d -h -l -V "
    "describe the model. Sizes: 4096, 4k, 4Ki, 2M; lists (-N 1k,2k,4k) give one row each. -h is heads; help is --help."
)

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""The command-line parser's own error, by way of the public class that derives from it."""


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit status: 0 done, 1 no, 2 bad input, 130 interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except TfcostError as error:
        return _fail(str(error))
    except USAGE_ERROR as error:
        return _fail(_usage(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader has left (`| head`). Point stdout elsewhere, or the interpreter complains when it flushes at exit.
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "help"):
        sys.stdout.write(overview())
        return 0
    if arguments[0] == "--version":
        from tfcost import __version__

        sys.stdout.write(f"tfcost {__version__}\n")
        return 0
    name = arguments[0]
    if name.startswith("-"):
        raise UnknownName("option", name, ["--help", "--version"])
    if name not in COMMANDS:
        raise UnknownName("command", name, COMMANDS)
    command = typer.main.get_command(import_module(COMMANDS[name][0]).app(name))
    result = command.main(arguments[1:], prog_name=f"tfcost {name}", standalone_mode=False)
    return result if isinstance(result, int) else 0


def overview() -> str:
    """What ``tfcost --help`` prints."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {help}" for name, (_, help) in COMMANDS.items())
    return (
        "tfcost: exact FLOPs, parameters and memory of Transformers, each with its closed form.\n\n"
        f"Usage: tfcost COMMAND [MODEL] [options]\n       tfcost COMMAND --help\n\nCommands:\n{rows}\n\n{EPILOG}\n"
    )


def _usage(error: Exception) -> str:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    line = " ".join(str(message).split()).rstrip(".")
    if "-h" in line and "requires an argument" in line:
        return "-h is heads and needs a number; help is --help"
    return line[:1].lower() + line[1:]


def _fail(message: str) -> int:
    sys.stderr.write(f"tfcost: {' '.join(message.split())}\n")
    return 2


def run() -> None:
    """The entry point of the console script."""
    sys.exit(main())
