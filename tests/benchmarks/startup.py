"""Start-up held against bare programs of the same run: ``python tests/benchmarks/startup.py [--rounds N]``.

Not part of the suite: times are the machine's. Each bound is a ratio of medians of alternating runs, of processor time
(these programs only compute, on one thread), so that a slow or busy machine weighs on both sides alike. Exit status 1
where a bound is missed.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tfcost

EMPTY = """
import typer
app = typer.Typer()
@app.command()
def main(name: str = "x") -> None:
    print(name)
app()
"""

PROGRAMS = {
    "an empty typer app": EMPTY,
    "tfcost flops gpt2 --format json": "from tfcost.cli.main import run\nrun()",
    "that app importing sympy": f"import sympy\n{EMPTY}",
    "tfcost flops gpt2 (with formulas)": "from tfcost.cli.main import run\nrun()",
}
ARGUMENTS = {
    "tfcost flops gpt2 --format json": ["flops", "gpt2", "--format", "json"],
    "tfcost flops gpt2 (with formulas)": ["flops", "gpt2"],
}
BOUNDS = [
    ("tfcost flops gpt2 --format json", "an empty typer app", 1.3),
    ("tfcost flops gpt2 (with formulas)", "that app importing sympy", 1.3),
]
ANALYZE_BOUND_MS = 0.3


def start_up(rounds: int) -> dict[str, float]:
    """The median processor seconds of each program, run in turns."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONDONTWRITEBYTECODE", "COLUMNS")}
    env["PYTHONPATH"] = str(Path(tfcost.__file__).parents[1])
    taken: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        env["PYTHONPYCACHEPREFIX"] = folder  # compiled once, in the first round, on both sides
        scripts = {name: Path(folder, f"program{number}.py") for number, name in enumerate(PROGRAMS)}
        for name, script in scripts.items():
            script.write_text(PROGRAMS[name], encoding="utf-8")
        for number in range(rounds + 1):
            for name, script in scripts.items():
                command = [sys.executable, str(script), *ARGUMENTS.get(name, [])]
                begun = resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
                ended = resource.getrusage(resource.RUSAGE_CHILDREN)
                if number:
                    taken[name].append(ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime)
    return {name: statistics.median(times) for name, times in taken.items()}


def analysis() -> float:
    """The milliseconds of one ``analyze`` of a model of 32 layers, the best of several batches."""
    model = tfcost.load("llama-3-8b")
    fields = {"seq_len": 8192, "command": "flops"}
    tfcost.analyze(model, **fields)
    batches = []
    for _ in range(15):
        begun = time.process_time()
        for _ in range(50):
            tfcost.analyze(model, **fields)
        batches.append((time.process_time() - begun) / 50)
    return 1000 * min(batches)


def main() -> int:
    """Measure, print a table, and say whether every bound is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    median = start_up(parser.parse_args().rounds)
    kept = True
    print(f"{'program':<36} {'CPU ms':>8}  {'ratio':>6}  bound")
    for name, base, bound in BOUNDS:
        ratio = median[name] / median[base]
        kept &= ratio <= bound
        print(f"{base:<36} {1000 * median[base]:8.1f}  {1:6.2f}")
        print(f"{name:<36} {1000 * median[name]:8.1f}  {ratio:6.2f}  {bound}{'' if ratio <= bound else '  MISSED'}")
    taken = analysis()
    kept &= taken < ANALYZE_BOUND_MS
    missed = "" if taken < ANALYZE_BOUND_MS else "  MISSED"
    print(f"{'analyze(), 32 layers, in process':<36} {taken:8.3f}  {'':6}  {ANALYZE_BOUND_MS} ms{missed}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
