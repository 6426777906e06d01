"""What data planes report of their reservations, and what they announce again."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

__all__ = [
    "Finished",
    "FirstToken",
    "Outcome",
    "Progress",
    "Report",
    "ReportStatus",
    "Resumed",
    "ServedBy",
    "Usage",
]


class Outcome(StrEnum):
    """How a request ended."""

    __hash__ = str.__hash__  # an enumeration's own is Python code, and this one is looked up at every decision

    SUCCESS = "success"
    CANCELLED = "cancelled"
    CLIENT_ERROR = "client_error"
    SERVER_ERROR = "server_error"
    CONNECT_ERROR = "connect_error"
    TIMEOUT = "timeout"

    @property
    def is_endpoints_fault(self) -> bool:
        """Does it speak against the endpoint? A 4xx or a cancellation does not."""
        return self in (Outcome.SERVER_ERROR, Outcome.CONNECT_ERROR, Outcome.TIMEOUT)


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens as the engine counted them; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """The first byte of the answer came; `ttft_ms` by the data plane's clock."""

    ttft_ms: float | None = None


class Progress(msgspec.Struct, frozen=True, gc=False):
    """The request is alive."""


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The request is over."""

    outcome: Outcome
    usage: Usage = Usage()
    duration_ms: float | None = None
    ttft_ms: float | None = None


class ServedBy(msgspec.Struct, frozen=True, gc=False):
    """The data plane failed over to this endpoint, an id or an address."""

    endpoint: str


Report = FirstToken | Progress | Finished | ServedBy


class ReportStatus(StrEnum):
    """What became of a report."""

    __hash__ = str.__hash__  # an enumeration's own is Python code, and this one is looked up at every decision

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Resumed:
    """A reservation as its holder knows it: `endpoint` is an id; `fail_open`: it was made without a scheduler."""

    reservation_id: str
    endpoint: str
    matched_tokens: int = 0
    first_token_seen: bool = False
    fail_open: bool = False
