"""Closed forms as the documents write them: the letters, their order, terms by the number of layers, text and LaTeX."""

from __future__ import annotations

from functools import cache
from typing import Any

import sympy
from sympy import Expr, Symbol

from tfcost.graph import Size


def symbol(name: str) -> Symbol:
    """A positive integer symbol."""
    return Symbol(name, positive=True, integer=True)


LETTERS = (
    "b", "N", "T", "S", "M", "k", "d", "d_k", "d_q", "d_c", "d_r", "d_v", "d_ff", "d_e", "d_s", "h", "h_kv", "E", "w",
    "t", "e", "V", "V_src", "N_max", "N_img", "N_lab", "F", "r", "m", "n_b", "n_c", "c", "C", "P", "d_p", "S_max",
)  # fmt: skip
"""The order in which a product's letters are written: bNd, bN²h, bNdV."""

LENGTHS = frozenset("NTSM")


class Formula(str):
    """A closed form as text that Python and sympy read, ``2*N**2*b*d``; ``expr`` is the expression behind it."""

    __slots__ = ("expr",)
    expr: Expr

    def written(self, style: str = "text") -> str:
        """The formula as the documents write it (:func:`written`)."""
        return written(self.expr, style)


def plain(value: Size) -> Formula:
    """An expression, collected by the numbers of layers, as a :class:`Formula`."""
    expr = by_layers(value)
    formula = Formula(expr)
    formula.expr = expr
    return formula


DEPTHS = tuple(map(symbol, "l l_enc l_dec l_local l_global l_dense l_sparse l_w l_img".split()))


@cache
def by_layers(value: Size) -> Expr:
    """An expression expanded, then collected by the numbers of layers: ``l*(24*N*b*d**2 + ...) + 2*N*V*b*d``."""
    # sympy.collect gives the same in five times the time.
    groups = terms_by_depth(sympy.sympify(value))
    collected = sympy.Add(*[depth * sympy.Add(*terms) for depth, terms in groups.items()])
    _TERMS[collected] = groups
    return collected


_TERMS: dict[Expr, dict[Expr, list[Expr]]] = {}
"""The terms of expressions that :func:`by_layers` collected: what is printed next need not be expanded again."""


def terms_by_depth(value: Expr) -> dict[Expr, list[Expr]]:
    """The terms of an expression, without the number of layers that they are multiplied by (1 where by none)."""
    if value in _TERMS:
        return _TERMS[value]
    groups: dict[Expr, list[Expr]] = {}
    for term in sympy.Add.make_args(sympy.expand(value)):
        letters = term.free_symbols
        depth = next((each for each in DEPTHS if each in letters), sympy.S.One)
        groups.setdefault(depth, []).append(term if depth is sympy.S.One else term / depth)
    return groups


def written(value: Expr, style: str = "text") -> str:
    """A formula as the documents write it: ``l(24bNd² + 4bN²d) + 2bNdV``; ``style`` "text" or "latex".

    Products are in the order of :data:`LETTERS`; sums go from the lowest power of a length to the highest; what is
    multiplied by the number of layers is in brackets.
    """
    groups = {
        depth: [(_order(term), _product(term, style)) for term in terms]
        for depth, terms in terms_by_depth(value).items()
    }
    parts = []
    for depth in sorted(groups, key=lambda each: (each == 1, str(each))):
        inner = _sum([text for _, text in sorted(groups[depth])])
        if depth == 1:
            parts.append(inner)
        elif len(groups[depth]) == 1 and not inner.startswith("-"):
            name = _name(depth, style)
            parts.append(name if inner == "1" else f"{name}·{inner}" if style == "text" else rf"{name} \cdot {inner}")
        else:
            left, right = ("(", ")") if style == "text" else (r"\left(", r"\right)")
            parts.append(f"{_name(depth, style)}{left}{inner}{right}")
    return _sum(parts)


def _sum(parts: list[str]) -> str:
    """Terms with their signs between them; one that is added stands first, where there is one."""
    first = next((index for index, part in enumerate(parts) if not part.startswith("-")), 0)
    text = parts[first] if parts else "0"
    for part in parts[:first] + parts[first + 1 :]:
        text += f" - {part[1:]}" if part.startswith("-") else f" + {part}"
    return text


def _order(term: Expr) -> tuple[Any, ...]:
    powers = term.as_powers_dict()
    degree = sum(power for base, power in powers.items() if str(base) in LENGTHS)
    letters = tuple(-int(powers.get(symbol(letter), 0)) for letter in LETTERS)
    return (int(degree), letters, str(term))


def _name(letter: Expr, style: str) -> str:
    text = str(letter)
    if style == "text" or "_" not in text:
        return text
    head, _, tail = text.partition("_")
    return f"{head}_{{{tail}}}" if len(tail) == 1 else rf"{head}_{{\mathrm{{{tail}}}}}"


def _power(base: Expr, power: int, style: str) -> str:
    if isinstance(base, sympy.ceiling) and base.args[0].has(sympy.log):
        text = _log(base.args[0], style)
    elif isinstance(base, sympy.ceiling):
        inner = written(base.args[0], style)
        text = f"⌈{inner}⌉" if style == "text" else rf"\lceil {inner} \rceil"
    elif isinstance(base, sympy.Add):
        inner = written(base, style)
        text = f"({inner})" if style == "text" else rf"\left({inner}\right)"
    elif isinstance(base, sympy.Min):
        inner = ", ".join(written(each, style) for each in sorted(base.args, key=str))
        text = f"min({inner})" if style == "text" else rf"\min({inner})"
    else:
        text = _name(base, style)
    if power == 1:
        return text
    return text + (str(power).translate(SUPERSCRIPT) if style == "text" else f"^{{{power}}}")


def _log(quotient: Expr, style: str) -> str:
    """⌈log₂ N⌉: a quotient of two logarithms, rounded up."""
    above, below = [each.args[0] for each in quotient.as_numer_denom()]
    inner, base = written(above, style), written(below, style)
    if style == "latex":
        return rf"\lceil \log_{{{base}}} {inner} \rceil"
    return f"⌈log{'₂' if base == '2' else f'_{base}'} {inner}⌉"


SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def _product(term: Expr, style: str) -> str:
    coefficient, rest = term.as_coeff_Mul()
    powers = rest.as_powers_dict() if rest != 1 else {}
    known = {symbol(letter): index for index, letter in enumerate(LETTERS)}
    order = sorted(powers, key=lambda base: (known.get(base, len(known)), str(base)))
    above = [_power(base, int(powers[base]), style) for base in order if powers[base] > 0]
    below = [_power(base, -int(powers[base]), style) for base in order if powers[base] < 0]
    numerator, denominator = int(coefficient.p), int(coefficient.q)
    top = _join(([] if abs(numerator) == 1 and above else [str(abs(numerator))]) + above, style)
    if denominator != 1:
        below.insert(0, str(denominator))
    sign = "-" if numerator < 0 else ""
    if not below:
        return sign + top
    bottom = _join(below, style)
    if style == "latex":
        return rf"{sign}\frac{{{top}}}{{{bottom}}}"
    return f"{sign}{top}/{bottom}" if len(below) == 1 else f"{sign}{top}/({bottom})"


def _join(factors: list[str], style: str) -> str:
    """Factors side by side; a name of several letters is set off by a dot, so that d·d_ff is not read as dd_ff."""
    text, after_long = "", False
    for factor in factors:
        long = len(factor.rstrip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻")) > 1 and not factor.isdigit() and style == "text"
        text += ("·" if text and (long or after_long) else " " if text and style == "latex" else "") + factor
        after_long = long
    return text
