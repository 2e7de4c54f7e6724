"""``python -m tfcost``."""

from tfcost.cli.main import run

run()
