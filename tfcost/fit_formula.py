"""The largest size that fits as a closed form: the root of the polynomial that the fullest moment is, rounded down.

The bytes of one moment are a polynomial of known degree in each size that can be solved for: of batch, layers and LoRA
rank the first, of length and width the second. So many points and one determine its coefficients exactly; two more
points, and those on both sides of the answer, are held against it. Where kernels or states round sizes up, or the
fullest op within the moment changes, it does not hold, and there is no closed form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from math import isqrt, lcm
from typing import NamedTuple

LETTERS = {"batch": "b", "seq_len": "N", "layers": "l", "hidden": "d", "lora_rank": "r"}
DEGREE = {"batch": 1, "seq_len": 2, "layers": 1, "hidden": 2, "lora_rank": 1}
"""Of the bytes alive at a moment, in each size that can be solved for."""


class Letters(NamedTuple):
    """The letters of a formula."""

    free_symbols: tuple[str, ...]


class Text(str):
    """A formula as Python reads it, ``(C - 5) // 3``; :meth:`written` for people."""

    def written(self, style: str = "text") -> str:
        """With powers and products as the documents write them."""
        return self.replace("**2", "²").replace("*", "·") if style == "text" else str(self)

    @property
    def expr(self) -> Letters:
        """What a report asks of a formula's expression."""
        return Letters(tuple(dict.fromkeys(re.findall(r"\b[A-Za-z]\b", self))))


class Root(NamedTuple):
    """``scale`` times the bytes at a moment: c0 + c1 k + c2 k², where the size is k ``step``; C is the capacity."""

    moment: str
    letter: str
    step: int
    scale: int
    coefficients: tuple[int, ...]

    def largest(self, capacity: int) -> int:
        """The largest multiple of ``step`` at which the moment's bytes are within ``capacity``."""
        constant, slope, *rest = self.coefficients
        room = self.scale * capacity - constant
        if not any(rest):
            return self.step * (room // slope)
        square = rest[0]
        # floor((√D - c1) / 2 c2), and the floor of √D alone will do, since the rest are integers.
        return self.step * ((isqrt(slope**2 + 4 * square * room) - slope) // (2 * square))

    @property
    def solution(self) -> Text:
        """The formula of :meth:`largest`."""
        constant, slope, *rest = self.coefficients
        room = f"{_times(self.scale, 'C')} - {constant}"
        if any(rest):
            root = f"isqrt({slope**2} + {4 * rest[0]}*({room}))"
            whole = f"({root} - {slope}) // {2 * rest[0]}"
        else:
            whole = f"({room}) // {slope}"
        return Text(whole if self.step == 1 else f"{self.step}*({whole})")

    @property
    def bytes(self) -> Text:
        """The moment's bytes, by the size's letter."""
        variable = self.letter if self.step == 1 else f"({self.letter} // {self.step})"
        powers = ("", variable, f"{variable}**2")
        terms = [
            f"{each}*{power}" if power else str(each)
            for each, power in zip(self.coefficients, powers, strict=False)
            if each
        ]
        whole = " + ".join(reversed(terms)) or "0"
        return Text(whole if self.scale == 1 else f"({whole}) // {self.scale}")


def _times(factor: int, name: str) -> str:
    return name if factor == 1 else f"{factor}*{name}"


def polynomial(points: dict[int, int]) -> list[Fraction]:
    """The coefficients of the polynomial through some points, constant first. Imports sympy."""
    from sympy import Poly, Symbol, interpolate

    variable = Symbol("k")
    found = Poly(interpolate(list(points.items()), variable), variable).all_coeffs()[::-1]
    return [Fraction(int(each.p), int(each.q)) for each in found]


def root_of(
    name: str, value: int, step: int, moments: Callable[[int], dict[str, int]], capacity: int
) -> Root | str:
    """The closed form at the answer ``value``, or why there is none. ``moments`` are bytes by moment at a size."""
    at, degree = value // step, DEGREE[name]
    near = [each for each in range(at + 1, at - 2 * degree - 4, -1) if each > 0]
    near += range(at + 2, at + 2 + max(0, degree + 3 - len(near)))
    seen = {each: moments(each * step) for each in near[: degree + 4]}
    over = sorted((name for name, each in seen[at + 1].items() if each > capacity), key=lambda m: -seen[at + 1][m])
    for moment in over:
        known = {each: found[moment] for each, found in seen.items() if moment in found}
        if len(known) < degree + 2:
            continue
        first = dict(list(known.items())[: degree + 1])
        exact = polynomial(first)
        if any(_at(exact, each) != size for each, size in known.items()):
            continue
        scale = lcm(*[each.denominator for each in exact])
        whole = tuple(int(each * scale) for each in exact) + (0,) * (degree + 1 - len(exact))
        root = Root(moment, LETTERS[name], step, scale, whole)
        if whole[1] >= 0 and any(whole[1:]) and root.largest(capacity) == value:
            return root
    return (
        f"no closed form for {name} here: the bytes at '{over[0]}' are no polynomial around the answer (sizes that "
        "kernels, chunks or 8-bit states round up, or another op of that moment that becomes the fullest)"
    )


def _at(coefficients: Iterable[Fraction], place: int) -> Fraction:
    return sum((each * place**power for power, each in enumerate(coefficients)), Fraction(0))
