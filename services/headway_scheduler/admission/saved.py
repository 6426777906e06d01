"""What is left of quotas in the form in which it is kept. msgspec reads it back by its annotations: see ADR 52."""

import msgspec

__all__ = ["Level", "SavedLevels"]

Level = tuple[float, float]
"""What was left, and when, by the wall's clock."""


class SavedLevels(msgspec.Struct):
    """By `tenant` or `tenant/model`: levels of requests and of tokens, None where there is no quota."""

    levels: dict[str, tuple[Level | None, Level | None]]
