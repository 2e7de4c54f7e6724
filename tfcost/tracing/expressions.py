"""From the expressions of PyTorch's symbolic sizes to tfcost's own symbols, and guards in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy  # the sizes of a symbolic trace are sympy's expressions from the start

from tfcost.symbols import symbol, written
from tfcost.tracing.torch_private import CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, PythonMod


class Translator:
    """Rewrites expressions of one trace: its size symbols become the letters of tfcost's closed forms."""

    def __init__(self, letters: Mapping[Any, str]) -> None:
        self._symbols = {each: symbol(letter) for each, letter in letters.items()}
        self._known: dict[Any, Any] = {}

    def __call__(self, value: Any) -> Any:
        """An int stays an int; an expression is expanded, in tfcost's symbols."""
        if isinstance(value, int):
            return value
        found = self._known.get(value)
        if found is None:
            found = self._known[value] = sympy.expand(standard(sympy.sympify(value).xreplace(self._symbols)))
            if found.is_Integer:
                found = self._known[value] = int(found)
        return found


def standard(expr: Any) -> Any:
    """PyTorch's integer functions as sympy's: ``FloorDiv(a, b)`` is ``floor(a/b)``, and so on."""
    if not expr.has(FloorDiv, CleanDiv, CeilDiv, Mod, PythonMod, Max, Min):
        return expr
    for ours, theirs in (
        (FloorDiv, lambda a, b: sympy.floor(a / b)),
        (CleanDiv, lambda a, b: a / b),
        (CeilDiv, lambda a, b: sympy.ceiling(a / b)),
        (Mod, sympy.Mod),
        (PythonMod, sympy.Mod),
        (Max, sympy.Max),
        (Min, sympy.Min),
    ):
        expr = expr.replace(ours, theirs)
    return expr


def holds(conditions: Iterable[Any], sizes: Mapping[str, int]) -> bool:
    """Whether all conditions are true at these sizes."""
    values = {symbol(letter): size for letter, size in sizes.items()}
    return all(bool(sympy.sympify(each).subs(values)) for each in conditions)


RELATIONS = {"<=": "<=", "<": "<", ">=": ">=", ">": ">", "==": "=", "!=": "≠"}


def in_words(condition: Any) -> str:
    """``N <= 1024``: a condition as people write it."""
    operator = getattr(condition, "rel_op", None)
    if operator is None:
        return str(condition)
    return f"{_side(condition.lhs)} {RELATIONS[operator]} {_side(condition.rhs)}"


def _side(expr: Any) -> str:
    try:
        return written(expr)
    except (TypeError, ValueError, AttributeError):
        return str(expr)


def bounds_first(conditions: Iterable[Any]) -> list[Any]:
    """Conditions without repetition; those that others imply (a looser bound of the same size) are left out."""
    kept: dict[Any, Any] = {}
    others = []
    for each in conditions:
        condition = sympy.sympify(each)
        if condition is sympy.true:
            continue
        if getattr(condition, "rel_op", "") == "<=" and condition.lhs.is_Symbol and condition.rhs.is_number:
            before = kept.get(condition.lhs)
            if before is None or condition.rhs < before.rhs:
                kept[condition.lhs] = condition
        elif condition not in others:
            others.append(condition)
    return [*kept.values(), *others]
