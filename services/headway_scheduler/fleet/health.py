"""What outcomes say of endpoints: those that keep failing are ejected, probed, and brought back slowly.

After Envoy's outlier detection: faults in a row, or a share of faults, eject; each time for longer. Then a request or
two are let through, and one that is answered makes the endpoint whole. Before all that a fault counts as load there, so
that a fast 5xx never looks like an idle endpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp
from typing import Final

__all__ = [
    "APPLICATION_XIDS",
    "DeviceLimits",
    "EjectionConfig",
    "Ejections",
    "Handicap",
    "HardGuard",
    "Phase",
    "Reason",
    "SlowStart",
    "Verdict",
]

APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that speak of the program on the GPU, not of the GPU (NVIDIA's XID catalogue): no recovery is ever reported."""
_NEGLIGIBLE: Final = 0.5
"""Less than half a request is none: where all are idle, one fault must not keep an endpoint from its turn for long."""
_SPARED_S: Final = 1.0
"""How long an endpoint that was spared is not judged anew."""


class HardGuard(StrEnum):
    """What takes an endpoint out, beside an admin's `cordoned` and `draining`."""

    STALE = "stale"
    NOT_READY = "not_ready"
    DEVICE_LOST = "device_lost"
    DEVICE_XID = "device_xid"
    DEVICE_ECC = "device_ecc"
    EJECTED = "ejected"
    PROBING = "probing"


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Which of its devices' faults close an endpoint.

    `ecc_errors`: so many uncorrected ones since the driver was loaded; 0: none do.
    """

    ignored_xids: frozenset[int] = APPLICATION_XIDS
    ecc_errors: int = 1


class SlowStart(StrEnum):
    """After what an endpoint is brought back slowly."""

    EJECTION = "ejection"
    NEW = "new"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class EjectionConfig:
    """When endpoints are ejected, and how they come back. Times in seconds.

    `failures` in a row eject (0: never), or `failure_percent` of at least `min_requests` within about `window_s` (0:
    never); for `base_s` times the ejections in a row, at most `max_s`; never more than `max_percent` of a pool.
    `probes`: so many requests must be answered before it is whole again. A fault counts as load for about
    `fault_load_s`. `slow_start_s`: how long an endpoint that comes after one of `slow_start_after` counts as busier
    than it is.
    """

    failures: int = 5
    failure_percent: float = 50.0
    window_s: float = 30.0
    min_requests: int = 20
    base_s: float = 5.0
    max_s: float = 120.0
    max_percent: float = 50.0
    probes: int = 1
    fault_load_s: float = 2.0
    slow_start_s: float = 10.0
    slow_start_after: frozenset[SlowStart] = frozenset({SlowStart.EJECTION})


class Phase(StrEnum):
    """How an endpoint stands."""

    WHOLE = "whole"
    EJECTED = "ejected"
    PROBING = "probing"


class Reason(StrEnum):
    """Why it was ejected."""

    CONSECUTIVE = "consecutive_faults"
    RATE = "failure_rate"
    PROBE = "failed_probe"


class Verdict(StrEnum):
    """What an outcome changed."""

    NOTHING = "nothing"
    EJECTED = "ejected"
    WHOLE = "whole"


@dataclass(slots=True)
class _Record:
    """Outcomes of one endpoint. `served` and `failed` decay; what was placed before `since` does not count."""

    phase: Phase = Phase.WHOLE
    in_a_row: int = 0
    served: float = 0.0
    failed: float = 0.0
    counted_at: float = 0.0
    since: float = float("-inf")
    ejections: int = 0
    reason: Reason = Reason.CONSECUTIVE
    for_s: float = 0.0
    until: float = 0.0
    whole_at: float | None = None
    spared_until: float = float("-inf")
    passed: int = 0
    probes: set[str] = field(default_factory=set)


class Ejections:
    """Outcomes by endpoint. A 4xx or a cancellation is not the endpoint's: callers do not record it.

    `out` holds who is ejected or probed now; `counts` ejections by reason; `spared` those that were not made, since too
    little would have been left.
    """

    def __init__(self, config: EjectionConfig | None = None) -> None:
        self.config = config or EjectionConfig()
        self.out: dict[str, Phase] = {}
        self.counts: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self.spared = 0
        self._records: dict[str, _Record] = {}
        self._probes: dict[str, str] = {}

    # What happens

    def record(
        self,
        endpoint: str,
        failed: bool,
        now: float,
        spared: Callable[[], bool],
        *,
        placed_at: float | None = None,
        reservation: str = "",
    ) -> Verdict:
        """Count an outcome of a request placed at `placed_at` (None: just now). Never ejects while `spared()`."""
        record = self._records.get(endpoint)
        if record is None:
            record = self._records[endpoint] = _Record(counted_at=now)
        if record.phase is Phase.EJECTED or (placed_at is not None and placed_at < record.since):
            return Verdict.NOTHING  # sent before the ejection
        if record.phase is Phase.PROBING:
            if failed:
                return self._eject(endpoint, record, Reason.PROBE, now)
            if self.probe_over(reservation) is None:
                return Verdict.NOTHING  # it counted with its first token
            return self._pass(endpoint, record, now)
        self._count(record, failed, now)
        reason = self._reason(record) if failed else None
        if reason is None or now < record.spared_until:
            return Verdict.NOTHING
        if spared():
            self.spared += 1
            record.spared_until = now + _SPARED_S
            return Verdict.NOTHING
        return self._eject(endpoint, record, reason, now)

    def expire(self, now: float) -> list[str]:
        """Begin to probe those whose time is over."""
        due = [n for n, phase in self.out.items() if phase is Phase.EJECTED and self._records[n].until <= now]
        for name in due:
            record = self._records[name]
            self.out[name] = record.phase = Phase.PROBING
            record.since, record.passed = now, 0
        return due

    def pardon(self, endpoint: str, now: float) -> bool:
        """Let it back in as it is; False if it was in. One more fault ejects it again, where it may be spared."""
        if endpoint not in self.out:
            return False
        record = self._records[endpoint]
        self._make_whole(endpoint, record, now)
        record.in_a_row = max(0, self.config.failures - 1)
        return True

    def lift(self, endpoint: str, now: float) -> bool:
        """An admin mended it: whole, and its past forgotten. False if it was whole."""
        found = self.pardon(endpoint, now)
        if found:
            self._records[endpoint] = _Record(counted_at=now, since=now)
        return found

    def hurry(self, endpoint: str, now: float) -> None:
        """Its engine was started anew: probe it with the next `expire`."""
        if self.ejected(endpoint):
            self._records[endpoint].until = now

    def forget(self, endpoint: str) -> None:
        """The endpoint is gone."""
        record = self._records.pop(endpoint, None)
        self.out.pop(endpoint, None)
        for probe in () if record is None else record.probes:
            self._probes.pop(probe, None)

    # Probes

    def probe(self, endpoint: str, reservation: str) -> bool:
        """A request was placed there; True if it is a probe."""
        if self.out.get(endpoint) is not Phase.PROBING:
            return False
        self._probes[reservation] = endpoint
        self._records[endpoint].probes.add(reservation)
        return True

    def probe_over(self, reservation: str) -> str | None:
        """A request is over or elsewhere: the endpoint that it probed, if it did."""
        endpoint = self._probes.pop(reservation, None)
        if endpoint is not None:
            self._records[endpoint].probes.discard(reservation)
        return endpoint

    def answered(self, reservation: str, now: float) -> str | None:
        """A request got its first token: the endpoint that is whole by it, if one is."""
        endpoint = self._probes.get(reservation)
        if endpoint is None:
            return None
        self.probe_over(reservation)
        return endpoint if self._pass(endpoint, self._records[endpoint], now) is Verdict.WHOLE else None

    # How they stand

    def ejected(self, endpoint: str) -> bool:
        """Is it out now, and not even probed?"""
        return self.out.get(endpoint) is Phase.EJECTED

    def guard(self, endpoint: str) -> HardGuard | None:
        """What keeps requests from it: it is out, or as many as may probe it do."""
        phase = self.out.get(endpoint)
        if phase is None:
            return None
        if phase is Phase.EJECTED:
            return HardGuard.EJECTED
        record = self._records[endpoint]
        return HardGuard.PROBING if len(record.probes) + record.passed >= self.config.probes else None

    def failing(self, endpoint: str) -> bool:
        """Would it be ejected, were it not spared?"""
        record = self._records.get(endpoint)
        return record is not None and record.phase is Phase.WHOLE and self._reason(record) is not None

    def history(self, endpoint: str) -> tuple[Reason, int, float]:
        """Of one that is out: why, how many times in a row, and for how long this time."""
        record = self._records[endpoint]
        return record.reason, record.ejections, record.for_s

    def remaining_s(self, endpoint: str, now: float) -> float:
        """Until it is probed; 0 if it is."""
        return max(0.0, self._records[endpoint].until - now) if self.ejected(endpoint) else 0.0

    # Inside

    def _count(self, record: _Record, failed: bool, now: float) -> None:
        kept = exp((record.counted_at - now) / self.config.window_s)
        record.counted_at = now
        record.served = record.served * kept + 1.0
        record.failed = record.failed * kept + failed
        record.in_a_row = record.in_a_row + 1 if failed else 0

    def _reason(self, record: _Record) -> Reason | None:
        config = self.config
        if config.failures and record.in_a_row >= config.failures:
            return Reason.CONSECUTIVE
        enough = record.served >= config.min_requests
        if config.failure_percent and enough and record.failed * 100.0 >= config.failure_percent * record.served:
            return Reason.RATE
        return None

    def _eject(self, endpoint: str, record: _Record, reason: Reason, now: float) -> Verdict:
        config = self.config
        if reason is not Reason.PROBE and record.whole_at is not None:
            # Forgiven, one by one, while it is well.
            record.ejections = max(0, record.ejections - int((now - record.whole_at) / config.window_s))
        record.ejections += 1
        record.for_s = min(config.base_s * record.ejections, config.max_s)
        record.until, record.reason = now + record.for_s, reason
        self.out[endpoint] = record.phase = Phase.EJECTED
        self.counts[reason] += 1
        self._drop_probes(record)
        return Verdict.EJECTED

    def _pass(self, endpoint: str, record: _Record, now: float) -> Verdict:
        record.passed += 1
        if record.passed < self.config.probes:
            return Verdict.NOTHING
        self._make_whole(endpoint, record, now)
        return Verdict.WHOLE

    def _make_whole(self, endpoint: str, record: _Record, now: float) -> None:
        self.out.pop(endpoint, None)
        record.phase, record.whole_at = Phase.WHOLE, now
        record.since = max(record.since, record.until - record.for_s)
        record.in_a_row, record.served, record.failed, record.counted_at = 0, 0.0, 0.0, now
        self._drop_probes(record)

    def _drop_probes(self, record: _Record) -> None:
        for probe in record.probes:
            self._probes.pop(probe, None)
        record.probes.clear()


@dataclass(slots=True)
class Handicap:
    """Requests that an endpoint counts beyond those it has: for its faults, and while it starts slowly."""

    faults: float = 0.0
    faults_at: float = 0.0
    started_at: float | None = None

    def fault(self, gap: float, now: float, config: EjectionConfig) -> None:
        """A request failed there. `gap`: how many fewer it has in flight than the busiest of its pools."""
        self.faults = max(self._faults(now, config), gap) + 1.0
        self.faults_at = now

    def load(self, busiest: float, now: float, config: EjectionConfig) -> float:
        """What it counts for now; 0: it is over."""
        faults, starting = self._faults(now, config), 0.0
        if self.started_at is not None and config.slow_start_s:
            left = 1.0 - (now - self.started_at) / config.slow_start_s
            starting = max(0.0, left) * max(1.0, busiest)
            if left <= 0.0:
                self.started_at = None
        return starting + (faults if faults >= _NEGLIGIBLE else 0.0)

    def _faults(self, now: float, config: EjectionConfig) -> float:
        if not self.faults or not config.fault_load_s:
            return 0.0
        return self.faults * exp((self.faults_at - now) / config.fault_load_s)
