""":func:`trace`: a program's closed forms, its figures at chosen sizes, and the range in which they hold."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from sympy import Eq, Mod

from tfcost.errors import InputError
from tfcost.notation import symbol, written
from tfcost.tracing.expressions import Translator, bounds_first, holds, in_words, of_sizes, standard
from tfcost.tracing.polynomial import CHECKS, DEGREE, NotPolynomial, Point, solve
from tfcost.tracing.program import ModuleError, Recorded, run
from tfcost.tracing.semantics import Semantics
from tfcost.tracing.sources import DTYPES, Source
from tfcost.tracing.torch_private import CAPABILITY, cannot_follow, torch
from tfcost.tracing.traced import Traced


class Settings(NamedTuple):
    """How a program is run: mode, kernel, whose kernels, element type, autocast, and whether equal layers share."""

    train: bool = True
    attention: str = "eager"
    dtype: str = "bf16"
    semantics: str = "cuda"
    autocast: str | None = None
    torch_device: str = "cpu"
    share: bool = True
    progress: bool = False


class Result(NamedTuple):
    """A traced program: ``forms`` is its graph in letters, ``numbers`` the same at the chosen sizes.

    ``method`` is ``symbolic`` or ``polynomial``; ``conditions`` are what must hold of the letters for the closed forms,
    ``chosen`` the sizes that values decide, at the most that they can be.
    """

    source: Source
    settings: Settings
    forms: Traced
    numbers: Traced
    method: str
    conditions: list[Any]
    checked: list[Point]
    notes: list[str]
    chosen: Mapping[str, int] = MappingProxyType({})


def primes() -> list[int]:
    """The primes below 10,000, from 5 on: sizes that no constant of a model equals by accident."""
    sieve = bytearray([1]) * 10_000
    for number in range(2, 100):
        if sieve[number]:
            sieve[number * number :: number] = bytearray(len(sieve[number * number :: number]))
    return [number for number in range(5, 10_000) if sieve[number]]


def hints_of(source: Source) -> dict[str, int]:
    """A size for each letter to trace at: the greatest free prime up to what is asked for, and at least 5.

    0 and 1 would be taken for constants, and equal sizes for one; a constant of the model would be taken for a size.
    """
    candidates = [each for each in primes() if each not in source.taken]
    found: dict[str, int] = {}
    for letter, size in source.letters.items():
        free = [each for each in candidates if each not in found.values()]
        below = [each for each in free if each <= size]
        found[letter] = below[-1] if below else free[0]
    return found


def traced(source: Source, settings: Settings) -> Result:
    """Trace a program symbolically; where that cannot be followed, solve its polynomials from runs at several sizes."""
    semantics = Semantics(settings.semantics, settings.attention)
    options: dict[str, Any] = {
        "train": settings.train, "backward": settings.train, "semantics": semantics, "share": settings.share,
        "progress": settings.progress, "around": source.around,
        "autocast": None if settings.autocast is None else DTYPES[settings.autocast],
    }  # fmt: skip

    def concrete(point: Point) -> Recorded:
        return run(source.build, source.feed, point, symbolic=False, **options)

    notes = list(source.notes)
    checked: list[Point] = []
    method, why = "symbolic", ""
    conditions: list[Any] = []
    recorded: Recorded | None = None
    if not source.letters:
        recorded = concrete({})
    else:
        try:
            recorded = run(source.build, source.feed, hints_of(source), symbolic=True, **options)
            if recorded.pinned:
                why = f"symbolic sizes would fix {', '.join(recorded.pinned)}"
        except ModuleError:
            raise
        except Exception as error:
            why = cannot_follow(error)
            if not why:
                raise
        if recorded is not None and not why and settings.torch_device == "cuda":
            recorded = _on_cuda(source, options, recorded, notes)
    if recorded is None or why:
        method = "polynomial"
        recorded, checked, conditions = _polynomial(source, concrete)
        notes.append(
            f"symbolic sizes cannot follow this program ({why}): the closed forms are polynomials of degree {DEGREE}, "
            f"solved exactly from runs on fake tensors and equal to further runs at "
            + " and ".join(", ".join(f"{k}={v}" for k, v in point.items()) for point in checked)
        )
    by_values = {each: chosen.letter for each, chosen in recorded.chosen.items()}
    translate = Translator({**recorded.letters, **by_values}, source.written_as)
    forms = Traced(recorded, translate)
    if method == "symbolic":
        guards = [standard(each.xreplace(translate.symbols)) for each in recorded.guards if of_sizes(each)]
        tables = [translate(length) <= rows for length, rows, _ in recorded.bounds if not isinstance(length, int)]
        conditions = bounds_first([*guards, *tables])
    sizes = {**source.letters, **source.derived}
    values = {symbol(letter): size for letter, size in sizes.items()}
    most: dict[str, int] = {}
    for letter, limit, op, path in recorded.chosen.values():
        most[letter] = _number(translate(limit), values)
        values[symbol(letter)] = most[letter]
        notes.append(
            f"{letter} is how many elements {op} chooses in {path or 'the module'}, which values decide: "
            f"the figures take all, {written(translate(limit))}"
        )
    inside = holds(conditions, {**sizes, **most})
    if source.letters and not most and (not inside or method == "polynomial" or 1 in source.letters.values()):
        numbers = Traced(concrete(source.letters), lambda value: value)
        if not inside:
            notes.append(
                "the sizes asked for are outside the range of the closed forms: the figures are of a run there"
            )
        elif differing := _differences(forms, numbers, values):
            notes.append(
                f"at these sizes {', '.join(differing)} differ from the closed form: the figures are of a run there"
            )
    else:
        known: dict[Any, int] = {}

        def number(value: Any) -> int:
            if value not in known:
                known[value] = _number(translate(value), values)
            return known[value]

        numbers = Traced(recorded, number)
    notes += semantics.notes
    return Result(source, settings, forms, numbers, method, conditions, checked, notes, most)


def _number(value: Any, values: Mapping[Any, int]) -> int:
    if isinstance(value, int):
        return value
    number = value.subs(values)
    return int(number)


def _on_cuda(source: Source, options: dict[str, Any], recorded: Recorded, notes: list[str]) -> Recorded:
    """The program on fake CUDA tensors: what it keeps is what the CUDA build's own kernels keep.

    Without a GPU autograd cannot run backward there: the backward pass is that of the same kernels on the CPU.
    """
    found = run(source.build, source.feed, hints_of(source), symbolic=True, device="cuda", **options)
    if torch.cuda.is_available():
        return found
    notes.append(
        "kept bytes are of fake CUDA tensors; no GPU was found, so backward is that of the same kernels on a CPU, "
        f"and a program that asks is told of compute capability {'.'.join(map(str, CAPABILITY))}"
    )
    translate = Translator(found.letters, source.written_as)
    for saved in found.saved:
        saved.bytes = translate(saved.bytes)
        saved.shape = tuple(map(translate, saved.shape))
    return recorded._replace(saved=found.saved, guards=[*recorded.guards], bounds=recorded.bounds)


def figures(graph: Traced) -> dict[str, Any]:
    """Every total of a traced program."""
    return {"parameters": graph.parameters(), **graph.flops(), **graph.memory()}


def _differences(forms: Traced, numbers: Traced, values: Mapping[Any, int]) -> list[str]:
    here = figures(numbers)
    return [name for name, value in figures(forms).items() if _number(value, values) != here[name]]


ALIGNMENT = 32
"""Lengths to which memory-efficient attention pads its log-sum-exp."""


def _polynomial(source: Source, concrete: Any) -> tuple[Recorded, list[Point], list[Any]]:
    """Closed forms from runs at several sizes, none of which is a constant of the model, and what they hold for.

    Where a kernel pads lengths they are polynomials only at the lengths that it does not pad.
    """
    try:
        return (*_solved(source, concrete, 1), [])
    except NotPolynomial:
        lengths = [letter for letter in source.letters if letter != "b"]
        if not lengths:
            raise
        conditions = [Eq(Mod(symbol(letter), ALIGNMENT), 0) for letter in lengths]
        return (*_solved(source, concrete, ALIGNMENT), conditions)


def _solved(source: Source, concrete: Any, step: int) -> tuple[Recorded, list[Point]]:
    letters = list(source.letters)
    small = [each for each in primes() if each not in source.taken and each > 7]
    if step > 1:
        small = [step * each for each in range(1, 40) if step * each not in source.taken]
    batches = [2, 3, *[each for each in primes() if each not in source.taken]]
    count = DEGREE + 1 + CHECKS
    lengths = [letter for letter in letters if letter != "b"]
    if source.limit is not None and step == 1 and small[len(lengths) * count - 1] > source.limit:
        # Few positions: any lengths that there are, those first that are no constant of the model.
        small = sorted(range(2, source.limit + 1), key=source.taken.__contains__)
    choices = {letter: small[index * count : (index + 1) * count] for index, letter in enumerate(lengths)}
    if "b" in letters:
        choices["b"] = batches[:count]
    try:
        return solve(concrete, letters, choices)
    except (ModuleError, NotPolynomial):
        raise
    except Exception as error:
        if why := cannot_follow(error):
            raise InputError(f"{source.name} cannot be traced on fake tensors: {why}") from None
        raise


def conditions_in_words(result: Result) -> list[str]:
    """The range of the closed forms, as people write it."""
    return [in_words(each) for each in result.conditions]


__all__ = ["Result", "Settings", "conditions_in_words", "figures", "traced"]
