"""What a doctor says: what is wrong, where, and what to do about it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

__all__ = ["Finding", "Severity", "plain", "worst"]


class Severity(IntEnum):
    """How bad; also the command's exit code, of the worst."""

    INFO = 0
    """Worth knowing; nothing is wrong."""
    WARNING = 1
    """It works, but not as well as it could, or not for long."""
    ERROR = 2
    """Requests are refused or served badly, now or at the next fault."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found. `check` is a constant name, `where` a resource or a place in a file, `fix` what to do."""

    severity: Severity
    check: str
    where: str
    what: str
    fix: str


def worst(findings: Sequence[Finding]) -> int:
    """The exit code."""
    return int(max((finding.severity for finding in findings), default=Severity.INFO))


def plain(finding: Finding) -> dict[str, Any]:  # JSON
    """For programs."""
    return {**asdict(finding), "severity": finding.severity.name.lower()}
