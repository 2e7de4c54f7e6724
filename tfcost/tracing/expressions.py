"""From the expressions of PyTorch's symbolic sizes to tfcost's own symbols, and guards in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy  # the sizes of a symbolic trace are sympy's expressions from the start

from tfcost.notation import symbol, written
from tfcost.tracing.torch_private import CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, PythonMod


class Translator:
    """Rewrites expressions of one trace: its size symbols become the letters of tfcost's closed forms."""

    def __init__(self, letters: Mapping[Any, str], written_as: Mapping[str, Any] | None = None) -> None:
        self.symbols = {each: (written_as or {}).get(letter, symbol(letter)) for each, letter in letters.items()}
        self._known: dict[Any, Any] = {}

    def __call__(self, value: Any) -> Any:
        """An int stays an int; an expression is expanded, in tfcost's symbols."""
        if isinstance(value, int):
            return value
        found = self._known.get(value)
        if found is None:
            found = self._known[value] = sympy.expand(standard(sympy.sympify(value).xreplace(self.symbols)))
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
    # sympy takes whole parts out of a floor, and looks at what is left (-1/N, say) only when asked again.
    return expr.replace(sympy.floor, lambda x: sympy.floor(sympy.expand(x)).replace(sympy.floor, sympy.floor))


def of_sizes(condition: Any) -> bool:
    """Whether a guard is of whole numbers: one of floats fixes a factor inside a kernel, and no shape."""
    return not any("Float" in type(each).__name__ for each in sympy.sympify(condition).atoms(sympy.Function))


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
    if isinstance(condition.lhs, sympy.Mod) and operator == "==" and condition.rhs == 0:
        return f"{condition.lhs.args[0]} a multiple of {condition.lhs.args[1]}"
    return f"{_side(condition.lhs)} {RELATIONS[operator]} {_side(condition.rhs)}"


def _side(expr: Any) -> str:
    try:
        return written(expr)
    except (TypeError, ValueError, AttributeError):
        return str(expr)


def simplest(condition: Any) -> Any:
    """A bound of one letter with the letter alone on the left: ``2 + S <= 1026`` is ``S <= 1024``."""
    letters = condition.free_symbols
    if len(letters) != 1 or getattr(condition, "rel_op", "") not in ("<=", "<", ">=", ">"):
        return condition
    letter = letters.pop()
    difference = sympy.expand(condition.lhs - condition.rhs)
    if not difference.is_polynomial(letter) or sympy.degree(difference, letter) != 1:
        return condition
    slope, rest = difference.coeff(letter, 1), difference.coeff(letter, 0)
    bound, operator = -rest / slope, condition.rel_op
    if slope.is_negative:
        operator = {"<=": ">=", "<": ">", ">=": "<=", ">": "<"}[operator]
    if operator in ("<", "<="):
        # Sizes are whole numbers.
        return sympy.Le(letter, sympy.floor(bound) if operator == "<=" else sympy.ceiling(bound) - 1)
    return sympy.Ge(letter, sympy.ceiling(bound) if operator == ">=" else sympy.floor(bound) + 1)


def bounds_first(conditions: Iterable[Any]) -> list[Any]:
    """Conditions without repetition; those that others imply (a looser bound of the same size) are left out."""
    upper: dict[Any, Any] = {}
    lower: dict[Any, Any] = {}
    others: list[Any] = []
    for each in conditions:
        condition = sympy.sympify(each)
        if isinstance(condition, sympy.Rel):
            condition = simplest(condition)
        if condition is sympy.true:
            continue
        operator = getattr(condition, "rel_op", "")
        single = operator in ("<=", ">=") and condition.lhs.is_Symbol and condition.rhs.is_number
        if single and operator == "<=":
            upper[condition.lhs] = min(condition.rhs, upper.get(condition.lhs, condition.rhs))
        elif single:
            lower[condition.lhs] = max(condition.rhs, lower.get(condition.lhs, condition.rhs))
        elif condition not in others:
            others.append(condition)
    bounds = [*[sympy.Ge(x, n) for x, n in lower.items() if n > 2], *[sympy.Le(x, n) for x, n in upper.items()]]
    return [*bounds, *others]
