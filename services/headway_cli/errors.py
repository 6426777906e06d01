"""What can go wrong, and how it is said: one line on stderr (or JSON with `-o json`) and an exit code, no traceback."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.rpc import error_details_pb2, status_pb2

__all__ = [
    "DEADLINE",
    "FAILED",
    "UNREACHABLE",
    "USAGE",
    "CliError",
    "FileProblems",
    "NotInTime",
    "NotInstalled",
    "Problem",
    "Refusals",
    "Unreachable",
    "UsageProblem",
    "from_rpc",
    "from_status",
    "report",
]

FAILED: Final = 1
"""Exit code: the scheduler refused, or what was asked failed."""
USAGE: Final = 2
"""Exit code: the command line is wrong."""
UNREACHABLE: Final = 3
"""Exit code: no scheduler (or database) answers."""
DEADLINE: Final = 4
"""Exit code: what was waited for did not happen in time. It goes on."""

_DETAILS_KEY: Final = "grpc-status-details-bin"


class CliError(Exception):
    """Ends the command. `facts` hold what the scheduler said beside the message: `field`, `resource`, …"""

    exit_code = FAILED

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.facts = dict(facts or {})

    def lines(self) -> Sequence[str]:
        """For people."""
        later = "" if self.retry_after_s is None else f" (retry after {self.retry_after_s:g} s)"
        return [f"error: {self.reason}: {self.message}{later}"]

    def as_plain(self) -> dict[str, Any]:  # JSON
        """For programs."""
        plain: dict[str, Any] = {"reason": self.reason, "message": self.message}
        if self.retry_after_s is not None:
            plain["retry_after_s"] = self.retry_after_s
        if "field" in self.facts:
            plain["field"] = self.facts["field"]
        return {**plain, "facts": self.facts}


class UsageProblem(CliError):
    """The command line says something that cannot be meant."""

    exit_code = USAGE

    def __init__(self, message: str) -> None:
        super().__init__("USAGE", message)


class Unreachable(CliError):
    """Nobody answers."""

    exit_code = UNREACHABLE

    def __init__(self, message: str) -> None:
        super().__init__("UNREACHABLE", message)


class NotInTime(CliError):
    """What was waited for did not happen before the deadline."""

    exit_code = DEADLINE


class NotInstalled(CliError):
    """A package of an extra is missing."""

    def __init__(self, error: ImportError, extra: str) -> None:
        package = (error.name or "a package").partition(".")[0]
        super().__init__("NOT_INSTALLED", f"{package} is missing: pip install 'headway[{extra}]'")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a file: `place` is `fleet.yaml:12`, `field` its path in the document."""

    place: str
    subject: str
    field: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.subject, self.field, self.text) if part)


class FileProblems(CliError):
    """Everything wrong in a file or a configuration, all at once."""

    def __init__(self, problems: Sequence[Problem], reason: str = "INVALID_FILE") -> None:
        super().__init__(reason, str(problems[0]))
        self.problems = tuple(problems)

    def lines(self) -> Sequence[str]:
        """One a line."""
        return [f"error: {self.reason}: {problem}" for problem in self.problems]

    def as_plain(self) -> dict[str, Any]:  # JSON
        """With each problem's parts."""
        problems = [{"place": p.place, "subject": p.subject, "field": p.field, "text": p.text} for p in self.problems]
        return {"reason": self.reason, "message": self.message, "problems": problems}


class Refusals(CliError):
    """Everything that the scheduler refuses of a file, all at once; reason and message are the first one's."""

    def __init__(self, errors: Sequence[CliError]) -> None:
        super().__init__(errors[0].reason, errors[0].message, facts=errors[0].facts)
        self.errors = tuple(errors)

    def lines(self) -> Sequence[str]:
        """One a line."""
        return [line for error in self.errors for line in error.lines()]

    def as_plain(self) -> dict[str, Any]:  # JSON
        """With each refusal."""
        return {**super().as_plain(), "problems": [error.as_plain() for error in self.errors]}


def from_rpc(error: Any, scheduler: str) -> CliError:  # a grpc.RpcError: also a grpc.Call, which its stubs do not say
    """What a failed call says. An answer without ErrorInfo comes from the transport, not from a scheduler."""
    code, details = error.code(), error.details() or ""
    status = _status(error.trailing_metadata())
    if status is not None:
        return from_status(status)
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unreachable(f"no scheduler answers at {scheduler}: {_first_line(details)}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unreachable(f"{scheduler} did not answer in time; --timeout allows more")
    return CliError(code.name, _first_line(details) or f"{scheduler} answered {code.name}")


def from_status(status: status_pb2.Status) -> CliError:
    """What a status with an ErrorInfo says."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after_s = None
    for detail in status.details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_after_s = round(retry.retry_delay.ToNanoseconds() / 1e9, 3)
    return CliError(info.reason or "UNKNOWN", status.message, retry_after_s=retry_after_s, facts=dict(info.metadata))


def report(error: CliError, *, as_json: bool) -> None:
    """Say it on stderr."""
    if as_json:
        sys.stderr.write(json.dumps({"error": error.as_plain()}, ensure_ascii=False) + "\n")
    else:
        sys.stderr.write("".join(f"{line}\n" for line in error.lines()))


def _status(metadata: Iterable[tuple[str, Any]] | None) -> status_pb2.Status | None:  # values are text or bytes
    for key, value in metadata or ():
        if key == _DETAILS_KEY:
            status = status_pb2.Status.FromString(value)
            return status if status.details else None
    return None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
