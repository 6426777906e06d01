"""Open-loop workloads: sessions that arrive by themselves, each made of turns that follow one another.

Lengths are log-normal around a median, as in published traces of chats; a session's text is its own from the first
byte on, after the system prompt that it shares with others. Everything follows from the seed.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from headway_sim.filler import filler_text, unique_text
from headway_sim.workloads.article import Message, SessionTurns, Turn

__all__ = ["Lengths", "OpenWorkload", "SessionKind"]

_SIGMA = 0.8


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal length in tokens: `median`, of which about two thirds lie within a factor of e^sigma."""

    median: float
    sigma: float = _SIGMA
    most: int = 100_000

    def draw(self, dice: random.Random) -> int:
        """One length, at least 1."""
        return max(1, min(self.most, round(self.median * math.exp(dice.gauss(0.0, self.sigma)))))


@dataclass(frozen=True, slots=True)
class SessionKind:
    """What a session of one kind looks like.

    `share` is its part of all sessions. `system_tokens` come first and are common to `system_prompts` groups of
    sessions. Turns: uniformly from `turns`. A turn adds `new_tokens` and waits for `think_s` (the median of a
    log-normal) after the answer before it. `role` is who speaks after the first turn: a user, or a tool.
    `max_tokens` is the limit that requests state, if any.
    """

    tenant: str = "default"
    share: float = 1.0
    system_tokens: int = 0
    system_prompts: int = 1
    turns: tuple[int, int] = (1, 1)
    first_tokens: Lengths = field(default_factory=lambda: Lengths(200))
    new_tokens: Lengths = field(default_factory=lambda: Lengths(100))
    output_tokens: Lengths = field(default_factory=lambda: Lengths(200))
    think_s: float = 0.0
    role: str = "user"
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class OpenWorkload:
    """`sessions` sessions of some kinds, arriving as a Poisson process whose rate `rate_at` gives.

    `rate_at(t_s)` is in sessions a second at most `peak_per_s`, at a time since the start.
    """

    kinds: tuple[SessionKind, ...]
    sessions: int
    peak_per_s: float
    rate_at: Callable[[float], float] | None = None
    seed: int = 0

    @property
    def concurrency(self) -> int | None:
        """Open loop: no limit."""
        return None

    @property
    def tenants(self) -> tuple[str, ...]:
        """Every tenant that sends."""
        return tuple(sorted({kind.tenant for kind in self.kinds}))

    @property
    def requests(self) -> int:
        """Requests in all."""
        return sum(self._plan(number)[1] for number in range(self.sessions))

    def schedule(self) -> Iterator[tuple[float, SessionTurns]]:
        """Every session, by its start in milliseconds."""
        dice = random.Random(f"{self.seed} arrivals")
        now_s = 0.0
        for number in range(self.sessions):
            now_s = self._next_arrival(now_s, dice)
            kind, turns, lengths = self._plan(number)
            yield now_s * 1e3, _play(kind, f"s{number}", number, turns, lengths, self.seed)

    def _next_arrival(self, now_s: float, dice: random.Random) -> float:
        """Thinning (Lewis and Shedler 1979): candidates at the peak rate, each kept with its own rate's share."""
        while True:
            now_s += dice.expovariate(self.peak_per_s)
            if self.rate_at is None or dice.random() * self.peak_per_s < self.rate_at(now_s):
                return now_s

    def _plan(self, number: int) -> tuple[SessionKind, int, random.Random]:
        """The kind and the number of turns of a session, and the dice for the rest of it."""
        dice = random.Random(f"{self.seed} session {number}")
        kind = dice.choices(self.kinds, [each.share for each in self.kinds])[0]
        return kind, dice.randint(*kind.turns), dice


def _play(kind: SessionKind, session_id: str, number: int, turns: int, dice: random.Random, seed: int) -> SessionTurns:
    messages: list[Message] = []
    if kind.system_tokens:
        group = dice.randrange(kind.system_prompts)
        label = f"{kind.tenant} {group}"
        system = f"{label}: {filler_text(xxh3_64_intdigest(label.encode(), seed), 0, kind.system_tokens)}"
        messages.append({"role": "system", "content": system[: 4 * kind.system_tokens]})
    for index in range(turns):
        lengths = kind.new_tokens if index else kind.first_tokens
        text = unique_text(xxh3_64_intdigest(f"{number}.{index}".encode(), seed), lengths.draw(dice))
        messages.append({"role": kind.role if index else "user", "content": text})
        think_s = kind.think_s * math.exp(dice.gauss(0.0, _SIGMA)) if index else 0.0
        answer = yield Turn(
            session_id,
            index,
            tuple(messages),
            kind.output_tokens.draw(dice),
            think_ms=think_s * 1e3,
            tenant=kind.tenant,
            max_tokens=kind.max_tokens,
        )
        messages.append({"role": "assistant", "content": answer})
