"""Fleets as one writes them: `8xa100-40g-8b`, `4xa100-40g-8b+2xh100-8b+2xcpu-8b`."""

import dataclasses
import re

from headway_sim.engine import HARDWARE, Hardware

__all__ = ["FleetError", "parse_fleet"]

_PART = re.compile(r"(?:(\d+)x)?([a-z0-9][a-z0-9-]*)")
_MOST_ENGINES = 10_000


class FleetError(ValueError):
    """A fleet that cannot be read; says which part."""


def parse_fleet(text: str, *, cache_scale: float = 1.0) -> tuple[Hardware, ...]:
    """The hardware of each engine, in the order given.

    `cache_scale` multiplies the KV memory, as a tier of host memory behind it would. Raises FleetError.
    """
    if not 0 < cache_scale <= 1000:
        raise FleetError("cache-scale must be above 0 and at most 1000")
    engines: list[Hardware] = []
    for part in text.split("+"):
        match = _PART.fullmatch(part.strip())
        if match is None or match[2] not in HARDWARE:
            raise FleetError(f"{part.strip()!r} is not COUNTxHARDWARE with hardware of {', '.join(HARDWARE)}")
        count = int(match[1] or 1)
        if not 1 <= count <= _MOST_ENGINES - len(engines):
            raise FleetError(f"{part.strip()!r}: a fleet has 1 to {_MOST_ENGINES} engines")
        hardware = HARDWARE[match[2]]
        scaled = dataclasses.replace(hardware, kv_tokens=round(hardware.kv_tokens * cache_scale))
        engines += [scaled] * count
    return tuple(engines)
