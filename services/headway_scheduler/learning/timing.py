"""From reports to observations: which stretch of an endpoint's time was spent on which amounts of work.

An engine serves prompts first come, first served, so a busy period (from when a prompt was sent to an engine that had
none, to the first token after which it has none again) is what all the prefills in it took together, whatever each
of them waited. And the time from a request's first token to its end is what its decode steps took, with the prefills
mixed into them meanwhile. Both are sums of the coefficients times known amounts:

    y = tok·max(0, T - 128·steps) + base·steps + pair·Σ n(hit + n/2) + ctx·Σ decode context + overhead

Amounts are as the engine counted them (cached tokens from its usage), where it says so.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Final

from headway_scheduler.fleet.columns import Columns
from headway_scheduler.learning.priors import FREE_TOKENS
from headway_scheduler.learning.values import Done, Flight, Observation, Period

__all__ = ["Timing"]

_SAME_STEP: Final = 0.5
"""First tokens closer than this share of the shortest step come from one step."""
_PREFILL_NOISE: Final = 0.1
_DECODE_NOISE: Final = 0.05
_MIXED_NOISE: Final = 0.4
"""How well the work mixed into a decode is known: from the index, and cut at both ends."""
_MOST_MEMBERS: Final = 8
"""A busy period longer than that is cut: the step at the cut belongs to both sides, which blurs both a little."""
_MOST_AT_ONCE: Final = 64
"""First tokens of what looks like one step; of an engine far faster than it is believed to be, all look like that."""
_CUT_NOISE: Final = 0.3
_DOUBT: Final = 2.0
"""How much less is believed where the engine did not say what it had cached, or others send requests there too."""
_FLOOR_MS: Final = 2.0
_TOLERANCE_S: Final = 0.01
"""A TTFT that ends later than that after it was reported is not believed."""
_LEAST_TOKENS: Final = 8
"""Decodes shorter than this say more about the network than about the engine."""


@dataclass(slots=True, eq=False)
class _Track:
    """One endpoint's present. `pending`: without a first token yet, in the order in which they were sent."""

    done: Done = field(default_factory=Done)
    pending: dict[Flight, None] = field(default_factory=dict)
    period: Period | None = None
    last_first_at: float = float("-inf")
    broken: bool = False
    looked_at: float | None = None
    context: float = 0.0
    batch: int = 0


class Timing:
    """Follows requests through endpoints and tells `learn` what was observed, by slot."""

    def __init__(self, columns: Columns, learn: Callable[[int, Observation], None]) -> None:
        self._columns, self._learn = columns, learn
        self._tracks: dict[int, _Track] = {}

    def forget(self, slot: int) -> None:
        """Another endpoint is there now."""
        self._tracks.pop(slot, None)

    def sent(self, slot: int, uncached: float, hit: float, now: float, *, usable: bool = True) -> Flight:
        """A request was given to `slot`; to be called before it is counted there."""
        c = self._columns
        track = self._look(slot, now)
        full = bool(c.kv_tokens[slot] > c.kv_capacity[slot])  # it may wait for memory: nobody knows how long
        flight = Flight(slot, now, uncached, hit, alone=not c.prefill_us[slot], usable=usable and not full)
        track.pending[flight] = None
        return flight

    def first_token(self, flight: Flight, ttft_ms: float, now: float) -> None:
        """Its first token came, `ttft_ms` after it was sent."""
        if flight.first_at is not None or flight.over:
            return
        track = self._tracks.setdefault(flight.slot, _Track())
        first_at = flight.sent_at + ttft_ms / 1e3
        flight.usable = flight.usable and first_at <= now + _TOLERANCE_S
        flight.first_at = min(now, first_at) if flight.usable else now
        track.pending.pop(flight, None)
        same_step = self._join(track, flight)
        self._look(flight.slot, now)
        track.batch += 1
        tokens, pairs, steps = _prefill_amounts(self._columns, flight.slot, [flight])
        track.done.tokens += max(0.0, tokens - FREE_TOKENS * steps)
        track.done.pairs += pairs
        flight.seen = copy(track.done)
        if same_step and flight.period is not None:  # decodes that begin with this step do not wait for its prefills
            for member in flight.period.members:
                if member.seen is not None and member.first_at is not None and member.first_at >= same_step:
                    member.seen.tokens, member.seen.pairs = track.done.tokens, track.done.pairs

    def finished(
        self,
        flight: Flight,
        now: float,
        ttft_ms: float | None,
        duration_ms: float | None,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        output_tokens: int | None,
    ) -> None:
        """It ended well; the engine counted these tokens."""
        if flight.over:
            return
        flight.over = True
        if prompt_tokens:
            hit = flight.hit if cached_tokens is None else float(min(cached_tokens, prompt_tokens - 1))
            flight.hit, flight.uncached = hit, max(1.0, prompt_tokens - hit)
        flight.counted = cached_tokens is not None
        track = self._look(flight.slot, now)
        self._leave(track, flight)
        if flight.first_at is None:
            self._late(flight, track, ttft_ms, now)
            return
        if flight.seen is not None and duration_ms is not None and ttft_ms is not None and output_tokens is not None:
            self._decoded(flight, track.done, flight.seen, duration_ms - ttft_ms, output_tokens)
        if flight.period is not None:
            self._settle(flight.slot, flight.period)

    def lost(self, flight: Flight, now: float) -> None:
        """It is over or goes elsewhere; nothing changes if it ended well before.

        Where it had no first token yet, nobody knows how much of its prefill was done.
        """
        track = self._look(flight.slot, now)
        if flight.over:
            return
        flight.over = True
        self._leave(track, flight)
        if flight.period is not None:
            self._settle(flight.slot, flight.period)

    # Inside

    def _look(self, slot: int, now: float) -> _Track:
        """Add up what decoded since the last look."""
        track, c = self._tracks.setdefault(slot, _Track()), self._columns
        if track.looked_at is not None and now > track.looked_at:
            elapsed = now - track.looked_at
            track.done.context_s += track.context * elapsed
            track.done.batch_s += track.batch * elapsed
        track.looked_at = now
        track.context = float(c.context_tokens[slot])
        return track

    def _leave(self, track: _Track, flight: Flight) -> None:
        """It is not there any more. If its prefill was not over, what the next one takes holds a part of it."""
        track.pending.pop(flight, None)
        if flight.first_at is None:
            track.broken = True
        else:
            track.batch = max(0, track.batch - 1)

    def _join(self, track: _Track, flight: Flight) -> float:
        """Put it into the busy period that its first token belongs to.

        Returns since when first tokens are of the same step as its own; 0: it is the first of its step.
        """
        first_at, before = flight.first_at or 0.0, track.last_first_at
        base_s = float(self._columns.base_ms[flight.slot]) / 1e3
        same_step = first_at - before <= _SAME_STEP * base_s
        usable = flight.usable and not track.broken
        track.broken = False
        track.last_first_at = max(before, first_at)
        period = track.period
        waited = flight.sent_at < before
        if period is not None and same_step and len(period.members) >= _MOST_AT_ONCE:
            # Its time is no step's: it tells nothing, nor does what comes behind it in the same moment.
            period.usable = usable = waited = same_step = False
        if period is None or not (same_step or (waited and len(period.members) < _MOST_MEMBERS)):
            # Who was sent before and has no first token still, in an engine that serves first come, first served, does
            # not tell of it: nobody knows how much of the time was its.
            silent_since = next((each.sent_at for each in track.pending), float("inf"))
            if period is not None:
                period.open = False
                period.usable = period.usable and (waited or silent_since >= before)
                self._settle(flight.slot, period)
            start = max(flight.sent_at, before)
            usable = usable and silent_since >= flight.sent_at
            period = track.period = Period(start, start, waited, usable, track.context > 0.0)
            same_step = False
        elapsed = max(0.0, first_at - period.end)
        period.usable = period.usable and usable
        period.stages += not same_step
        period.context_s += track.context * elapsed
        period.batch_s += track.batch * elapsed
        period.end = max(period.end, first_at)
        period.members.append(flight)
        flight.period = period
        return first_at - _SAME_STEP * base_s if same_step else 0.0

    def _settle(self, slot: int, period: Period) -> None:
        """Once all that was prefilled in a closed period is over, its amounts are known."""
        if period.open or not period.usable or not all(member.over for member in period.members):
            return
        period.usable = False
        self._prefilled(slot, period)

    def _late(self, flight: Flight, track: _Track, ttft_ms: float | None, now: float) -> None:
        """Its first token was told of only at the end: useful where it met no queue."""
        if ttft_ms is None or not flight.usable or not flight.alone:
            return
        seconds = ttft_ms / 1e3
        if flight.sent_at + seconds > now + _TOLERANCE_S:
            return
        period = Period(flight.sent_at, flight.sent_at + seconds, False, False, track.context > 0.0, 1)
        period.context_s, period.batch_s = track.context * seconds, track.batch * seconds
        period.members.append(flight)
        self._prefilled(flight.slot, period)

    def _prefilled(self, slot: int, period: Period) -> None:
        c, seconds = self._columns, period.end - period.start
        if seconds <= 0.0:
            return
        actual_ms = seconds * 1e3
        context, batch = period.context_s / seconds, period.batch_s / seconds
        tokens, pairs, full_steps = _prefill_amounts(c, slot, period.members)
        steps = max(float(period.stages), full_steps)
        noise = _PREFILL_NOISE * actual_ms + _FLOOR_MS
        if period.cut:
            noise += _CUT_NOISE * float(c.tok_ms[slot]) * min(tokens, float(c.budget_tokens[slot]))
        elif period.decoding:
            steps += 0.5  # what comes while others decode waits for half a step on average
            noise += 0.3 * float(c.base_ms[slot] + c.ctx_ms[slot] * context)
        if c.external[slot] > 0.0 or not all(member.counted for member in period.members):
            noise *= _DOUBT
        busy = max(0.0, tokens + batch * steps - FREE_TOKENS * steps)
        overhead = 0.0 if period.cut else 1.0
        self._learn(slot, Observation((busy, steps, pairs, context * steps, overhead), actual_ms, noise))

    def _decoded(self, flight: Flight, done: Done, seen: Done, actual_ms: float, output_tokens: int) -> None:
        steps = output_tokens - 1
        if steps < _LEAST_TOKENS or actual_ms <= 0.0 or flight.first_at is None or not flight.usable:
            return
        c, slot = self._columns, flight.slot
        seconds = actual_ms / 1e3
        context = (done.context_s - seen.context_s) / seconds
        batch = (done.batch_s - seen.batch_s) / seconds
        tokens, pairs = done.tokens - seen.tokens, done.pairs - seen.pairs
        mixed_ms = float(c.tok_ms[slot]) * tokens + float(c.pair_ms[slot]) * pairs
        noise = _DECODE_NOISE * actual_ms + _MIXED_NOISE * mixed_ms + _FLOOR_MS
        if c.external[slot] > 0.0:
            noise *= _DOUBT
        busy = tokens + steps * max(0.0, batch - FREE_TOKENS)
        self._learn(slot, Observation((busy, float(steps), pairs, steps * context, 0.0), actual_ms, noise))


def _prefill_amounts(columns: Columns, slot: int, members: list[Flight]) -> tuple[float, float, float]:
    """Tokens, pairs, and steps at least."""
    tokens = sum(member.uncached for member in members)
    pairs = sum(member.uncached * (member.hit + member.uncached / 2) for member in members)
    return tokens, pairs, max(1.0, tokens / float(columns.budget_tokens[slot]))
