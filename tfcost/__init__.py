"""tfcost: exact FLOPs, parameters and memory of Transformers, each figure with its closed form.

::

    import tfcost

    report = tfcost.analyze("llama-3-8b", seq_len=8192)
    report.totals["forward_flops"]
    tfcost.closed_form(None, "forward_flops")   # l*(24*b*N*d**2 + 4*b*N**2*d) + 2*b*N*d*V

Importing this package imports neither sympy nor torch; :func:`closed_form` brings sympy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfcost.errors import ConfigError, InputError, TfcostError, UnknownName

if TYPE_CHECKING:
    from tfcost.models import Model, load
    from tfcost.point import analyze
    from tfcost.report import Report
    from tfcost.symbols import closed_form
    from tfcost.tracing.report import trace

__version__ = "0.1.0"

__all__ = [
    "ConfigError", "InputError", "Model", "Report", "TfcostError", "UnknownName", "__version__", "analyze",
    "closed_form", "load", "trace",
]  # fmt: skip

_HOMES = {
    "analyze": "point", "Model": "models", "load": "models", "Report": "report", "closed_form": "symbols",
    "trace": "tracing.report",
}


def __getattr__(name: str) -> Any:
    """The public names, each from its module, imported when first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tfcost' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"tfcost.{_HOMES[name]}"), name)
