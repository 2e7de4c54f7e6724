"""The exact fallback: a program that symbolic sizes cannot follow is run at several sizes, and its polynomials solved.

Each figure is assumed to be a polynomial of bounded degree in the sizes. It is determined by as many points as it has
coefficients, in exact rational arithmetic, and then checked at points that were not used: a figure that is not such a
polynomial does not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from tfcost.errors import InputError
from tfcost.notation import symbol
from tfcost.tracing.program import Recorded
from tfcost.tracing.records import OpRecord, SavedRecord
from tfcost.tracing.repeats import group_of

Point = dict[str, int]

DEGREE = 2
"""Of each letter, and of all lengths together: QKᵀ is quadratic, a contrastive loss is in the batch."""

FIGURES = (
    "macs", "elements", "recompute", "backward_macs", "read", "written", "backward_read", "backward_written",
)  # fmt: skip

CHECKS = 2
"""Points beside those that determine the polynomial."""


class NotPolynomial(InputError):
    """A program's figures are no polynomials of degree :data:`DEGREE` in its sizes."""


def monomials(letters: Sequence[str]) -> list[tuple[int, ...]]:
    """The exponents of every monomial: up to the degree in b, and in the lengths together."""
    every = product(range(DEGREE + 1), repeat=len(letters))
    lengths = [index for index, letter in enumerate(letters) if letter != "b"]
    return [each for each in every if sum(each[index] for index in lengths) <= DEGREE]


def points(letters: Sequence[str], choices: Mapping[str, Sequence[int]], powers: list[tuple[int, ...]]) -> list[Point]:
    """As many points as monomials, at which they are independent: the grid's own staircase; and some to check at."""
    found = [{letter: choices[letter][power] for letter, power in zip(letters, each, strict=True)} for each in powers]
    checks = [{letter: choices[letter][DEGREE + 1 + index] for letter in letters} for index in range(CHECKS)]
    return [*found, *checks]


def inverse(rows: list[list[Fraction]]) -> list[list[Fraction]]:
    """The inverse of a matrix, by elimination in rationals."""
    size = len(rows)
    work = [[*row, *[Fraction(int(i == j)) for j in range(size)]] for i, row in enumerate(rows)]
    for column in range(size):
        pivot = next((r for r in range(column, size) if work[r][column] != 0), None)
        if pivot is None:
            raise NotPolynomial("the points do not determine the polynomial")
        work[column], work[pivot] = work[pivot], work[column]
        scale = work[column][column]
        work[column] = [each / scale for each in work[column]]
        for row in range(size):
            if row != column and work[row][column] != 0:
                factor = work[row][column]
                work[row] = [a - factor * b for a, b in zip(work[row], work[column], strict=True)]
    return [row[size:] for row in work]


def _value(powers: Sequence[int], point: Point, letters: Sequence[str]) -> int:
    result = 1
    for letter, power in zip(letters, powers, strict=True):
        result *= point[letter] ** power
    return result


def figures_of(recorded: Recorded) -> dict[Any, int]:
    """A run's figures by name, alike at all sizes: sums over the ops of one name in one module."""
    found: dict[Any, int] = {}
    name: tuple[Any, ...]
    for op in recorded.ops:
        key = (group_of(op.path), op.name, op.square)
        for figure in FIGURES:
            name = ("op", *key, figure)
            found[name] = found.get(name, 0) + op.copies * getattr(op, figure)
        for unpriced, times in op.unpriced.items():
            name = ("unpriced", *key, unpriced)
            found[name] = found.get(name, 0) + op.copies * times
    for saved in recorded.saved:
        name = ("saved", group_of(saved.path), saved.op, saved.dtype, saved.floating)
        found[name] = found.get(name, 0) + saved.copies * saved.bytes
    return found


def solve(
    run: Callable[[Point], Recorded], letters: Sequence[str], choices: Mapping[str, Sequence[int]]
) -> tuple[Recorded, list[Point]]:
    """A record whose figures are polynomials in the letters, and the points at which they were checked.

    ``choices`` has ``DEGREE + 1 + CHECKS`` sizes for each letter. Raises :class:`NotPolynomial` where a figure differs
    at a point that was not used.
    """
    powers = monomials(letters)
    places = points(letters, choices, powers)
    runs = [run(point) for point in places]
    every = [figures_of(each) for each in runs]
    names = list(dict.fromkeys(name for figures in every for name in figures))
    determined, checked = places[: len(powers)], places[len(powers) :]
    matrix = inverse([[Fraction(_value(each, point, letters)) for each in powers] for point in determined])
    symbols = [symbol(letter) for letter in letters]
    ops: dict[Any, OpRecord] = {}
    saved: list[SavedRecord] = []
    for name in names:
        values = [figures.get(name, 0) for figures in every]
        coefficients = [sum((a * b for a, b in zip(row, values, strict=False)), Fraction(0)) for row in matrix]
        for point, value in zip(checked, values[len(powers) :], strict=True):
            predicted = sum(
                (c * _value(each, point, letters) for c, each in zip(coefficients, powers, strict=True)), Fraction(0)
            )
            if predicted != value:
                raise NotPolynomial(
                    f"{'/'.join(str(part) for part in name[1:3])} is no polynomial of degree {DEGREE} in "
                    f"{', '.join(letters)}: {predicted} predicted, {value} found at {point}"
                )
        _place(name, _expression(coefficients, powers, symbols), ops, saved)
    first = runs[0]
    return first._replace(ops=list(ops.values()), saved=saved, letters={}, guards=[], pinned=[]), checked


def _expression(coefficients: list[Fraction], powers: list[tuple[int, ...]], symbols: list[Any]) -> Any:
    import sympy

    total: Any = 0
    for coefficient, each in zip(coefficients, powers, strict=True):
        if coefficient:
            term = sympy.Rational(coefficient.numerator, coefficient.denominator)
            for letter, power in zip(symbols, each, strict=True):
                term = term * letter**power
            total = total + term
    return total


def _place(name: Any, value: Any, ops: dict[Any, OpRecord], saved: list[SavedRecord]) -> None:
    kind = name[0]
    if kind == "saved":
        _, path, op, dtype, floating = name
        record = SavedRecord(path, -1, (), dtype, value, floating)
        record.op = op
        saved.append(record)
        return
    key = name[1:4]
    if key not in ops:
        ops[key] = OpRecord(key[0], key[1])
        ops[key].square = key[2]
    if kind == "op":
        setattr(ops[key], name[4], value)
    else:
        ops[key].unpriced[name[4]] = 1 if value == 0 else value
