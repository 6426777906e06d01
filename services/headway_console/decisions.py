"""What the console needs of a decision record, and what it makes of it: times, hits and how good predictions were."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np

__all__ = ["NO_RECORD", "Candidate", "DecisionLog", "DecisionRow", "NoRecord", "Summary", "summary_of"]


class Candidate(msgspec.Struct, frozen=True):
    """An endpoint as the decision saw it; None: its strategy did not say."""

    endpoint: str
    cost: float | None = None
    predicted_ttft_ms: float | None = None
    matched_tokens: int = 0
    guards: tuple[str, ...] = ()
    chosen: bool = False


class DecisionRow(msgspec.Struct, frozen=True):
    """One decision or refusal, and what came of it. `time` is the wall's, in seconds.

    `outcome`: empty while it is in flight; a refusal's reason where none was given. `candidates` may be empty where
    only some decisions keep them. `shadows`: what each strategy in shadow would have chosen.
    """

    request_id: str
    time: float
    tenant: str
    model: str
    strategy: str
    endpoint: str
    prompt_tokens: int = 0
    matched_tokens: int = 0
    held_ms: float = 0.0
    predicted_ttft_ms: float | None = None
    actual_ttft_ms: float | None = None
    outcome: str = ""
    refused: bool = False
    candidates: tuple[Candidate, ...] = ()
    candidates_seen: int = 0
    facts: dict[str, str] = {}
    shadows: dict[str, str] = {}


class DecisionLog(Protocol):
    """The scheduler's record of its latest decisions."""

    def newest(self, limit: int) -> Sequence[DecisionRow]:
        """The latest decisions, newest first, at most `limit`; without their candidates if that is cheaper."""
        ...

    def get(self, request_id: str) -> DecisionRow | None:
        """One decision with its candidates; None: not in the record, or not any more."""
        ...


class NoRecord:
    """A scheduler that keeps none."""

    def newest(self, limit: int) -> Sequence[DecisionRow]:
        """None."""
        return ()

    def get(self, request_id: str) -> DecisionRow | None:
        """None."""
        return None


NO_RECORD: Final = NoRecord()


@dataclass(frozen=True, slots=True)
class Summary:
    """Some decisions together; None: nothing to tell it from. Times in milliseconds."""

    count: int = 0
    refused: int = 0
    measured: int = 0
    predicted_p50: float | None = None
    predicted_p99: float | None = None
    actual_p50: float | None = None
    actual_p99: float | None = None
    error_p50: float | None = None
    """Half of the predictions were nearer to the truth than this share of it."""
    hit_ratio: float | None = None


def summary_of(rows: Iterable[DecisionRow]) -> Summary:
    """What they come to."""
    every = list(rows)
    given = [row for row in every if not row.refused]
    actual = np.array([row.actual_ttft_ms for row in given if row.actual_ttft_ms is not None], np.float64)
    predicted = np.array([row.predicted_ttft_ms for row in given if row.predicted_ttft_ms is not None], np.float64)
    errors = [
        abs(row.predicted_ttft_ms - row.actual_ttft_ms) / row.actual_ttft_ms
        for row in given
        if row.predicted_ttft_ms is not None and row.actual_ttft_ms
    ]
    prompts = sum(row.prompt_tokens for row in given)
    return Summary(
        count=len(given),
        refused=len(every) - len(given),
        measured=len(actual),
        predicted_p50=_quantile(predicted, 0.5),
        predicted_p99=_quantile(predicted, 0.99),
        actual_p50=_quantile(actual, 0.5),
        actual_p99=_quantile(actual, 0.99),
        error_p50=_quantile(np.array(errors), 0.5),
        hit_ratio=sum(row.matched_tokens for row in given) / prompts if prompts else None,
    )


def _quantile(values: "np.ndarray[tuple[int], np.dtype[np.float64]]", share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None
