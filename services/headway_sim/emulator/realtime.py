"""The engine model driven in real time, `speedup` times faster than the hardware it stands for.

Virtual time is the real time since the start times `speedup`. Steps follow each other on the virtual
schedule, whenever the host gets round to running them: a late host is late to tell, but the engine's times
stay exact. Nothing runs between events: the timer is set for the next first token or finish, and while
answers are streamed, for the next time their tokens are handed out together.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from headway_sim.engine import Engine, EngineRequest, EngineSequence, Snapshot, State, Step

_TIMER_RESOLUTION_S = 0.001
"""The event loop's timers round to it: for news, wake half of it early, and go round the loop until then."""


@dataclass(frozen=True, slots=True)
class VirtualTimes:
    """A finished request's times in the engine's own milliseconds: when it arrived, and how long from then."""

    arrival_ms: float
    queued_ms: float
    ttft_ms: float
    e2e_ms: float


class Generation:
    """One request's answer as it grows."""

    def __init__(self, owner: "RealTimeEngine", sequence: EngineSequence, *, streamed: bool) -> None:
        self.sequence = sequence
        self.streamed = streamed
        self.started = False
        self.finished = False
        self._owner = owner
        self._handed_out = 0
        self._waiter: asyncio.Future[None] | None = None

    async def batches(self) -> AsyncIterator[int]:
        """How many new tokens there are, each time some are handed out, until the answer is complete.

        Without streaming, once. Leaving early does not abort: see `RealTimeEngine.abort`.
        """
        while True:
            visible = self._owner.visible_tokens(self)
            if visible > self._handed_out and (self.finished or self.streamed):
                count = visible - self._handed_out
                self._handed_out = visible
                yield count
            elif self.finished:
                return
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None

    def wake(self) -> None:
        """Let the reader look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def times(self) -> VirtualTimes:
        """The virtual times of a finished answer."""
        sequence = self.sequence
        arrival = sequence.arrival_ms
        return VirtualTimes(
            arrival_ms=arrival,
            queued_ms=round((sequence.admitted_ms or arrival) - arrival, 3),
            ttft_ms=round((sequence.first_token_ms or arrival) - arrival, 3),
            e2e_ms=round((sequence.finished_ms or arrival) - arrival, 3),
        )


class RealTimeEngine:
    """An engine on the running event loop. Belongs to that loop; no locks."""

    def __init__(
        self, engine: Engine, *, speedup: float, stream_interval_ms: float, clock_s: Callable[[], float]
    ) -> None:
        """`stream_interval_ms` is real time between two batches of tokens of a streamed answer.

        `clock_s` is a monotonic clock in seconds, finer than the event loop's milliseconds.
        """
        self._engine = engine
        self._speedup = speedup
        self._interval_ms = stream_interval_ms * speedup
        self._loop = asyncio.get_running_loop()
        self._clock_s = clock_s
        self._origin_s = clock_s()
        self._clock_ms = 0.0
        self._next_batch_ms = 0.0
        self._step: Step | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._generations: dict[EngineSequence, Generation] = {}

    @property
    def speedup(self) -> float:
        """Virtual milliseconds per real one."""
        return self._speedup

    def submit(self, request: EngineRequest, *, streamed: bool) -> Generation:
        """Queue a request now. Raises what `Engine.add` raises."""
        now_ms = self._catch_up()
        sequence = self._engine.add(request, now_ms)
        generation = Generation(self, sequence, streamed=streamed)
        self._generations[sequence] = generation
        if self._step is None:
            self._clock_ms = now_ms
            self._step = self._engine.step(now_ms)
        self._set_timer(now_ms)
        return generation

    def abort(self, generation: Generation) -> None:
        """Forget a request wherever it stands; harmless once it has finished."""
        self._catch_up()
        self._generations.pop(generation.sequence, None)
        self._engine.cancel(generation.sequence.request.request_id)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False while requests hold blocks."""
        self._catch_up()
        return self._engine.reset_prefix_cache()

    def snapshot(self) -> Snapshot:
        """The engine's numbers now."""
        self._catch_up()
        return self._engine.snapshot()

    def visible_tokens(self, generation: Generation) -> int:
        """Tokens produced by the steps that have ended; the one under way counts for nothing yet."""
        if not generation.started:
            return 0
        sequence = generation.sequence
        count = self._engine.generated(sequence)
        unfinished = not generation.finished and sequence.state in (State.DECODE, State.FINISHED)
        return count - 1 if unfinished and self._step is not None else count

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _now_ms(self) -> float:
        return (self._clock_s() - self._origin_s) * 1000.0 * self._speedup

    def _catch_up(self) -> float:
        """Run every step that should have begun by now; returns now."""
        now_ms = self._now_ms()
        while True:
            if self._step is not None:
                if self._step.end_ms > now_ms:
                    return now_ms
                self._clock_ms = self._step.end_ms
                self._announce(self._step)
            self._step = self._engine.step(self._clock_ms, now_ms)
            if self._step is None:
                return now_ms

    def _announce(self, step: Step) -> None:
        for sequence in step.first_tokens:
            generation = self._generations.get(sequence)
            if generation is not None:
                generation.started = True
                generation.wake()
        for sequence in step.finished:
            generation = self._generations.pop(sequence, None)
            if generation is not None:
                generation.finished = True
                generation.wake()

    def _on_timer(self) -> None:
        self._timer = None
        now_ms = self._catch_up()
        if now_ms >= self._next_batch_ms:
            self._next_batch_ms = now_ms + self._interval_ms
            for generation in self._generations.values():
                if generation.streamed and generation.started:
                    generation.wake()
        self._set_timer(now_ms)

    def _set_timer(self, now_ms: float) -> None:
        """Wake for the next thing anyone must hear of."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        step = self._step
        if step is None:
            return
        delay_s = self._real_s(self._next_news_ms(step) - now_ms) - _TIMER_RESOLUTION_S / 2
        if self._engine.busy_with_prompts and not (step.first_tokens or step.finished):
            # Only the next step may bring news: not worth being early for.
            delay_s = max(self._real_s(step.end_ms - now_ms), _TIMER_RESOLUTION_S)
        if any(generation.streamed and generation.started for generation in self._generations.values()):
            delay_s = min(delay_s, self._real_s(self._next_batch_ms - now_ms))
        self._timer = self._loop.call_later(max(0.0, delay_s), self._on_timer)

    def _next_news_ms(self, step: Step) -> float:
        """When a first token or a finish is due, if nothing else happens."""
        if step.first_tokens or step.finished:
            return step.end_ms
        return self._engine.next_finish_ms(step.end_ms) or step.end_ms

    def _real_s(self, virtual_ms: float) -> float:
        return virtual_ms / 1000.0 / self._speedup
