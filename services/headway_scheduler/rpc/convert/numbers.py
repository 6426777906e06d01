"""Numbers as the wire's fields hold them: one that does not fit must not take a whole answer away."""

from typing import Final

__all__ = ["uint32"]

_MOST: Final = 2**32 - 1


def uint32(value: float) -> int:
    """The nearest that a uint32 holds, without what is behind the point; NaN is 0."""
    if not value > 0:
        return 0
    return _MOST if value >= _MOST else int(value)
