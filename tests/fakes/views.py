"""What a strategy sees, from plain lists: a real View over real Columns."""

from collections.abc import Sequence

import numpy as np
from headway_scheduler.domain.request import Request
from headway_scheduler.fleet.columns import Columns
from headway_scheduler.strategies.base import Strategy
from headway_scheduler.strategies.view import View
from xxhash import xxh3_64_intdigest

# 1 ms a token and nothing else, so that predicted times are token counts.
SIMPLE_SPEED = {"tok_ms": 1.0, "base_ms": 0.0, "pair_ms": 0.0, "ctx_ms": 0.0, "budget_tokens": 1e9}


class Draws:
    """A random generator that gives these numbers, one list a call, and then begins again."""

    def __init__(self, *calls: Sequence[float]) -> None:
        self._calls = calls
        self._next = 0

    def random(self, size: int) -> np.ndarray:
        numbers = np.array(self._calls[self._next % len(self._calls)], float)
        assert len(numbers) == size
        self._next += 1
        return numbers


def view_of(inflight, *, hits=None, random=None, slots=None, queued_tokens=None, queued_ms=None, **columns) -> View:
    """A view of as many endpoints as `inflight` has numbers; every other list goes to the column of that name.

    `hits`: cached tokens. `queued_ms` fills `prefill_us`, `queued_tokens` fills `prefill_tokens`. Speeds are
    SIMPLE_SPEED unless given; other columns are as of a new endpoint: nothing booked, telemetry unknown. `random`: a
    seed, or a generator.
    """
    count = len(inflight)
    slots = np.arange(count, dtype=np.int32) if slots is None else np.array(slots, np.int32)
    table = Columns()
    while table.capacity <= slots.max():
        table.grow()
    table.inflight[slots] = inflight
    table.ring[slots] = [xxh3_64_intdigest(f"10.0.0.{slot}:8000".encode()) for slot in slots]
    for name, value in SIMPLE_SPEED.items():
        getattr(table, name)[slots] = value
    if queued_tokens is not None:
        table.prefill_tokens[slots] = queued_tokens
    if queued_ms is not None:
        table.prefill_us[slots] = [round(ms * 1e3) for ms in queued_ms]
    for name, values in columns.items():
        getattr(table, name)[slots] = values
    found = np.array([0.0] * count if hits is None else hits, float)
    generator = np.random.default_rng(random) if random is None or isinstance(random, int) else random
    return View(table, slots, lambda _: found, lambda _: np.zeros(count, bool), generator)


def request_of(prompt=None, *, tokens=0, session_id="", request_id="r1") -> Request:
    return Request(
        request_id=request_id,
        tenant="t",
        domain="t",
        model="m",
        prompt=prompt,
        prompt_tokens=tokens,
        session_id=session_id,
    )


def chat(*messages: tuple[str, str]) -> bytes:
    """The canonical text of a chat: (role, content) pairs."""
    return b"".join(f"\x01{role}\x02\x03{content}".encode() for role, content in messages)


def chosen(strategy: Strategy, request: Request, view: View, now: float = 0.0) -> int:
    """The position that the core would choose: lowest cost, fewest in flight, longest not chosen."""
    cost = strategy.cost(request, view, now).cost
    assert cost.shape == (len(view),)
    assert not np.isnan(cost).any()
    return int(np.lexsort((view.last_chosen, view.inflight, cost))[0])
