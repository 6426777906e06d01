"""Millions of requests that end in every way there is: memory stays flat, and nothing stays counted.

Without a wire and on a virtual clock, in a process of its own, since memory is that of the whole process:
`python -m headway_bench.soak ROUTES ENDPOINTS`.
"""

import gc
import json
import random
import sys
from collections import Counter, deque
from typing import Final

import psutil
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.report import Finished, Outcome, Usage
from headway_scheduler.fleet.columns import BOOKED
from headway_scheduler.fleet.values import Owner

from headway_bench.figures import Json
from headway_bench.inproc import VirtualFleet

__all__ = ["main", "measure_soak"]

_CONCURRENCY: Final = 64
_DURATION_S: Final = 1.5
_PROMPT_BYTES: Final = 2048
_SHARED_BYTES: Final = 512
_WAYS: Final = {
    "success": 700,
    "cancelled": 80,
    "client_error": 50,
    "timeout": 4,
    "server_error": 4,
    "connect_error": 2,
    "given_back": 50,
    "never_reported": 30,
    "reported_twice": 50,
    "owner_lost": 30,
}
"""How requests end, in shares."""
_READINGS: Final = 100
_SAMPLE_EVERY: Final = 50


def measure_soak(routes: int, endpoints: int) -> Json:
    """Route so many, end them at random; then let time pass, and see what is left."""
    soak = _Soak(endpoints)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # as the scheduler's
    memory = []
    for number in range(1, routes + 1):
        soak.turn()
        if number % _SAMPLE_EVERY == 0:
            soak.sample()
        if number % max(1, routes // _READINGS) == 0:
            memory.append(psutil.Process().memory_info().rss / 1e6)
    settled = memory[len(memory) // 10 :]
    left = soak.finish()
    return {
        "routes": routes,
        "ends": dict(sorted(soak.ends.items())),
        "rss_mb_after_a_tenth": round(settled[0], 1),
        "rss_mb_highest": round(max(settled), 1),
        "rss_mb_last": round(settled[-1], 1),
        "growth": round(max(settled) / settled[0] - 1.0, 4),
        "reservations_left": left,
        "counts_left": soak.counts(),
    }


class _Soak:
    """A fleet under load, and the requests in flight."""

    def __init__(self, endpoints: int) -> None:
        self.fleet = VirtualFleet(endpoints, "adaptive", _PROMPT_BYTES)
        self.ends: Counter[str] = Counter()
        self._dice = random.Random(5)  # the same ends in every run
        self._shared = self._dice.randbytes(_SHARED_BYTES)
        self._running: deque[tuple[Decision, Owner]] = deque()
        self._stream = Owner("p", stream=True)

    def turn(self) -> None:
        """One request begins, the oldest ends."""
        fleet = self.fleet
        prompt = self._shared + self._dice.randbytes(_PROMPT_BYTES - _SHARED_BYTES)
        owner = self._stream if self._dice.random() < 0.5 else Owner("p", stream=False)
        decision = fleet.route(prompt, owner)
        if self._dice.random() < 0.9:
            fleet.first_token(decision)
        self._running.append((decision, owner))
        if len(self._running) > _CONCURRENCY:
            self._end(*self._running.popleft())
        fleet.now += _DURATION_S / _CONCURRENCY

    def sample(self) -> None:
        """The engines say what they run, which is not all that is counted: some ends are never reported."""
        self.fleet.pass_time(0.0, Counter(decision.endpoint.spec.id for decision, _ in self._running))

    def finish(self) -> int:
        """All in flight end, and what nobody ever reported expires; returns the reservations that are left."""
        while self._running:
            self._end(*self._running.popleft())
        ledger = self.fleet.core.ledger
        ledger.lose_owner(self._stream, self.fleet.now)
        for _ in range(100):
            self.fleet.pass_time(ledger.config.max_ttl_s / 50, {})
        return len(ledger.reservations)

    def counts(self) -> int:
        """What the columns still count; with nothing in flight that is nothing."""
        columns = self.fleet.core.fleet.columns
        return int(sum(abs(getattr(columns, name)).sum() for name in BOOKED))

    def _end(self, decision: Decision, owner: Owner) -> None:
        way = self._dice.choices(list(_WAYS), list(_WAYS.values()))[0]
        self.ends[way] += 1
        core, now = self.fleet.core, self.fleet.now
        if way == "never_reported":
            return
        if way == "owner_lost":
            core.ledger.lose_owner(owner, now)
            return
        if way == "given_back":
            core.dispatcher.give_back(decision.reservation_id, owner, now)
            return
        outcome = Outcome.SUCCESS if way == "reported_twice" else Outcome(way)
        tokens = self._dice.randrange(1, 400)
        usage = Usage(decision.why.prompt_tokens, tokens, decision.why.matched_tokens)
        report = Finished(outcome, usage, _DURATION_S * 1e3, 80.0)
        for _ in range(1 + (way == "reported_twice")):
            core.reporting.apply(owner, decision.reservation_id, report, now)


def main() -> None:
    """Run as the arguments say."""
    print(json.dumps(measure_soak(int(sys.argv[1]), int(sys.argv[2]))))


if __name__ == "__main__":
    main()
