"""Counts as people write them (``4k``, ``4Ki``, ``10B``), and figures as people read them. No floats on the way in."""

from __future__ import annotations

import re

from tfcost.errors import InputError

MULTIPLES = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
"""Suffixes of counts: decimal with one letter, binary with an ``i``; B is a billion."""

MAX_DIGITS = 30
"""More than any size needs; so a typing slip of a thousand digits is an error, not a long wait."""

_COUNT = re.compile(r"([+-]?)([0-9]+(?:_[0-9]+)*)(?:\.([0-9]+))?([A-Za-z]*)", re.ASCII)


def parse_count(text: str, name: str) -> int:
    """``4096``, ``4_096``, ``4k`` (4000), ``4Ki`` (4096), ``1.5M`` as an int of at least 1; ``name`` is the flag."""
    wrong = f"{name} must be a whole number of at least 1 (4096, 4k, 4Ki, 2M, 10B)"
    match = _COUNT.fullmatch(text.strip())
    shown = text if len(text) <= 40 else text[:37] + "..."
    if match is None or match[4] not in MULTIPLES:
        raise InputError(f"{wrong}, not {shown!r}")
    sign, whole, fraction, suffix = match.groups()
    digits, places = (whole + (fraction or "")).replace("_", ""), len(fraction or "")
    if len(digits) > MAX_DIGITS:
        raise InputError(f"{name} has {len(digits)} digits; at most {MAX_DIGITS} are allowed")
    scale: int = 10**places
    value, rest = divmod(int(digits) * MULTIPLES[suffix], scale)
    if sign == "-" or value < 1 or rest:
        raise InputError(f"{wrong}, not {shown!r}")
    return value


def parse_counts(text: str, name: str) -> list[int]:
    """A comma-separated list of counts, ``1k,2k,4k``."""
    return [parse_count(part, name) for part in text.split(",")]


SIZES = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""Suffixes of sizes, always two letters or more, so that GB and GiB are never one for the other."""

_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))?([A-Za-z]+)", re.ASCII)


def parse_bytes(text: str, name: str) -> int:
    """``80GB``, ``79.5GiB``, or a bare number of bytes, as bytes (a fraction of a byte is dropped)."""
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= 30:
        return int(text)
    match = _SIZE.fullmatch(text)
    if match is None or match[3] not in SIZES or len(text) > 40:
        raise InputError(
            f"{name} must be bytes, or a size such as 80GB or 80GiB ({', '.join(SIZES)}), not {text[:40]!r}"
        )
    digits = match[2] or ""
    value: int = int(match[1] + digits) * SIZES[match[3]] // 10 ** len(digits)
    return value


def parse_probability(text: str, name: str) -> float:
    """A probability from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise InputError(f"{name} must be a number from 0 to below 1, not {text[:40]!r}")
    return value


PREFIXES = ((10**18, "E"), (10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def scaled(value: int | float, unit: str = "") -> str:
    """A figure with four digits and a decimal prefix, for reading beside the exact one: ``291.6 GFLOPs``.

    A bare count is written as :func:`parse_count` reads it, ``8.030 B``.
    """
    if abs(value) >= 10**21 or (not unit and abs(value) >= 10**15):
        return f"{value / 1:.3e} {unit}".rstrip()
    for factor, prefix in PREFIXES:
        if abs(value) >= factor:
            # Of two ints: rounded once, and correctly, however large they are.
            shown = f"{value / factor:#.4g}".rstrip(".")
            return f"{shown} {prefix}{unit}" if unit else f"{shown} {'B' if prefix == 'G' else prefix}"
    return f"{value:,} {unit}".rstrip()


def binary_and_decimal(count: int) -> str:
    """Bytes both ways, always labelled: ``28.50 GiB (30.60 GB)``."""
    for power, binary, decimal in ((4, "TiB", "TB"), (3, "GiB", "GB"), (2, "MiB", "MB"), (1, "KiB", "kB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.2f} {binary} ({count / 1000**power:,.2f} {decimal})"
    return f"{count:,} B"
