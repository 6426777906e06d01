"""A value that may be missing, and why. Missing is never zero."""

from enum import StrEnum
from math import nan

import msgspec

__all__ = ["UNKNOWN", "Measurement", "MissingReason"]


class MissingReason(StrEnum):
    """Why there is no value."""

    UNSPECIFIED = "unspecified"
    UNSUPPORTED = "unsupported"
    LOST = "lost"
    STALE = "stale"
    NO_PERMISSION = "no_permission"


class Measurement(msgspec.Struct, frozen=True, gc=False):
    """`value`, or None with the reason it is missing."""

    value: float | None = None
    missing: MissingReason = MissingReason.UNSPECIFIED

    def or_nan(self) -> float:
        """The value as a column entry: NaN when missing."""
        return nan if self.value is None else self.value


UNKNOWN = Measurement()
