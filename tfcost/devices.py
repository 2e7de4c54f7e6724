"""Devices by name, from ``data/hardware/``: how many bytes of memory each has."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, NamedTuple

from tfcost.data_files import data_path
from tfcost.errors import InputError, UnknownName
from tfcost.units import parse_bytes


class Device(NamedTuple):
    """A device's name and the bytes of memory that a program sees on it."""

    name: str
    memory_bytes: int


@cache
def entries() -> dict[str, dict[str, Any]]:
    """The device files by name: ``name``, ``aliases``, ``memory_bytes``, ``nominal``, ``source``."""
    files = sorted(data_path("hardware").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}


def device(text: str) -> Device:
    """A device by name or alias (``h100`` is ``h100-80gb``), or one of a size: ``24GB``, ``24GiB``."""
    wanted = text.lower()
    names = {alias: name for name, entry in entries().items() for alias in (name, *entry.get("aliases", ()))}
    if wanted in names:
        return Device(names[wanted], entries()[names[wanted]]["memory_bytes"])
    if wanted[:1].isdigit():
        capacity = parse_bytes(text, "--device")
        if capacity < 1:
            raise InputError("--device: a size must be at least one byte")
        return Device(text, capacity)
    raise UnknownName("device", text, names, "tfcost devices")
