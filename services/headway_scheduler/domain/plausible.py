"""What a measurement may be. One beyond is a fault of whoever made it, and unknown: no reader shall stumble over it."""

from typing import Final

__all__ = ["MOST", "MOST_TOKENS", "RANGES", "SMALLEST_LIMIT"]

_COUNT: Final = (0.0, 1e6)
_SHARE: Final = (0.0, 1.01)
"""Rounded up, perhaps."""
_CELSIUS: Final = (-1e3, 1e3)
_WATTS: Final = (0.0, 1e6)
_TOTAL: Final = (0.0, 1e18)
"""Of a counter, which only grows, or of bytes."""

RANGES: Final = {
    "memory_used_bytes": _TOTAL,
    "utilization": _SHARE,
    "temperature_c": _CELSIUS,
    "power_w": _WATTS,
    "ecc_errors": _TOTAL,
    "running": _COUNT,
    "waiting": _COUNT,
    "kv_use": _SHARE,
    "prefix_queries": _TOTAL,
    "prefix_hits": _TOTAL,
}
"""The least and the most of each measurement in samples, by its name."""

MOST: Final = {
    "memory_total_bytes": _TOTAL[1],
    "power_limit_w": _WATTS[1],
    "temperature_slowdown_c": _CELSIUS[1],
}
"""The most of each limit of a device."""
SMALLEST_LIMIT: Final = 1.0
"""Of those: less is none, and what is measured is divided by it."""
MOST_TOKENS: Final = 1e12
"""Of an engine's capacities."""
