"""The engine as a pure step machine with vLLM v1's scheduling (FIELD.md §2).

Times go in and come out in milliseconds; nothing here reads a clock. A step's work is O(1) plus its prefills
and the decodes that need a new block: decoding requests advance together by one counter, and each remembers
where it joined. Only the youngest running request can be in the middle of its prefill (it has taken what was
left of the budget), and every decode gets one token a step.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from headway_sim.engine.hardware import BLOCK_TOKENS, Hardware
from headway_sim.engine.pool import BlockPool, Run


class EngineError(Exception):
    """The engine does not take a request."""


class RequestTooLongError(EngineError):
    """Prompt and answer together exceed the engine's KV memory."""


class WaitingLimitError(EngineError):
    """As many requests wait as the engine allows."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What an engine needs to know of a request.

    `keys` are chained: each stands for `blocks_per_key` engine blocks of 16 tokens and implies all before it.
    They describe the first `keyed_tokens` tokens of prompt and answer (default: the prompt); what lies beyond
    is cached too, but nobody can hit it.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int] = ()
    blocks_per_key: int = 1
    keyed_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in ("prompt_tokens", "output_tokens", "blocks_per_key"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be positive")


class State(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class EngineSequence:
    """A request inside an engine. Read-only for callers; times are None until they happen.

    `cached_tokens` is the prefix found in the cache when it was first admitted.
    """

    __slots__ = (
        "_computed",
        "_filled_runs",
        "_generated",
        "_joined_step",
        "_target",
        "admitted_ms",
        "arrival_ms",
        "cached_tokens",
        "finish_step",
        "finished_ms",
        "first_token_ms",
        "keyed_blocks",
        "keys",
        "preemptions",
        "request",
        "runs",
        "state",
    )

    def __init__(self, request: EngineRequest, arrival_ms: float) -> None:
        self.request = request
        self.arrival_ms = arrival_ms
        self.admitted_ms: float | None = None
        self.first_token_ms: float | None = None
        self.finished_ms: float | None = None
        self.cached_tokens = 0
        self.preemptions = 0
        self.state = State.WAITING
        self.runs: list[Run] = []
        self.keys = request.keys if isinstance(request.keys, list) else tuple(request.keys)
        keyed_tokens = request.prompt_tokens if request.keyed_tokens is None else request.keyed_tokens
        self.keyed_blocks = min(keyed_tokens // BLOCK_TOKENS, len(self.keys) * request.blocks_per_key)
        self.finish_step = 0
        self._computed = 0
        self._target = 0
        self._generated = 0
        self._joined_step = 0
        self._filled_runs = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What happened from `start_ms` to `end_ms`, visible at `end_ms`.

    `steps` > 1: that many decode steps in a row in which nothing else happened.
    """

    start_ms: float
    end_ms: float
    steps: int
    new_tokens: int
    first_tokens: tuple[EngineSequence, ...]
    finished: tuple[EngineSequence, ...]
    preempted: tuple[EngineSequence, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the engine's metrics would say. Token counts are totals since the start."""

    running: int
    waiting: int
    kv_use: float
    kv_capacity_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int


class Engine:
    """One engine: `add` requests, call `step` whenever the last one's end has come, `cancel` at will."""

    def __init__(self, hardware: Hardware, *, kv_tokens: int | None = None, waiting_limit: int | None = None) -> None:
        """`kv_tokens` overrides the hardware's; with `waiting_limit` requests waiting, `add` refuses."""
        self.hardware = hardware
        self.waiting_limit = waiting_limit
        blocks = (hardware.kv_tokens if kv_tokens is None else kv_tokens) // BLOCK_TOKENS
        if blocks < 1:
            raise ValueError(f"kv_tokens must be at least one block of {BLOCK_TOKENS}")
        self.pool = BlockPool(blocks)
        self._sequences: dict[str, EngineSequence] = {}
        self._waiting: deque[EngineSequence] = deque()
        self._running: dict[EngineSequence, None] = {}
        self._prefilling: EngineSequence | None = None
        # Decodes: how many, Σ of their computed tokens, who needs a block when (counter modulo 16),
        # who ends when.
        self._decode_steps = 0
        self._decoding = 0
        self._decode_context = 0
        self._growers: list[dict[EngineSequence, None]] = [{} for _ in range(BLOCK_TOKENS)]
        self._finishes: list[tuple[int, int, EngineSequence]] = []
        self._serial = 0
        # The waiting head did not fit when the memory was in this state: no need to look again.
        self._memory_version = 0
        self._blocked_version = -1
        self._query_tokens = 0
        self._hit_tokens = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._preemptions = 0

    def add(self, request: EngineRequest, now_ms: float) -> EngineSequence:
        """Queue a request.

        Raises `RequestTooLongError`, `WaitingLimitError`, or ValueError if its id is already here.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request_id {request.request_id!r} is already in the engine")
        total_tokens = request.prompt_tokens + request.output_tokens
        if total_tokens > self.pool.blocks * BLOCK_TOKENS:
            raise RequestTooLongError(f"{total_tokens} tokens exceed the KV cache of {self.pool.blocks * BLOCK_TOKENS}")
        if self.waiting_limit is not None and len(self._waiting) >= self.waiting_limit:
            raise WaitingLimitError(f"{len(self._waiting)} requests are waiting")
        sequence = EngineSequence(request, now_ms)
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)
        return sequence

    def cancel(self, request_id: str) -> bool:
        """Abort a request and free its blocks; False if it is not (or no longer) here."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            self._blocked_version = -1
        else:
            self._leave(sequence)
        sequence.state = State.CANCELLED
        return True

    def step(self, now_ms: float, until_ms: float | None = None) -> Step | None:
        """Run one step from `now_ms`; None if there is nothing to do.

        With `until_ms`, decode steps that start before it and change nothing else are folded into one
        result: the caller promises to add nothing before then.
        """
        preempted = self._grow_decodes()
        if self._waiting:
            self._publish_decodes()
        decodes, context = self._decoding, self._decode_context
        # Whoever preempts admits nobody in the same step, unless all were preempted: that would be a step of nothing.
        prefills, prefill_tokens, pairs = self._schedule_prefills(now_ms, admit=not preempted or not self._running)
        new_tokens = decodes + prefill_tokens
        if not new_tokens:
            return None
        steps = 1
        duration_ms = self.hardware.step_ms(new_tokens, pairs, context)
        end_ms = now_ms + duration_ms
        if until_ms is not None and not prefill_tokens and not preempted and end_ms < until_ms:
            most = self._quiet_steps()
            while steps < most and end_ms < until_ms:
                end_ms += self.hardware.step_ms(decodes, 0.0, context + steps * decodes)
                steps += 1
        self._decode_steps += steps
        self._decode_context += decodes * steps
        self._generated_tokens += decodes * steps
        finished = self._finish_decodes(end_ms)
        for sequence in prefills:
            self._emit_first(sequence, end_ms, finished)
        return Step(
            now_ms,
            end_ms,
            steps,
            decodes * steps + prefill_tokens,
            tuple(prefills),
            tuple(finished),
            preempted,
        )

    def generated(self, sequence: EngineSequence) -> int:
        """Answer tokens produced so far."""
        if sequence.state is State.DECODE:
            return sequence._generated + self._decode_steps - sequence._joined_step
        return sequence._generated

    def next_finish_ms(self, now_ms: float) -> float | None:
        """When the first decode finishes if nothing else happens from `now_ms` on; None without decodes."""
        nearest = self._nearest_finish()
        if nearest is None:
            return None
        steps = nearest - self._decode_steps
        one = self.hardware.step_ms(self._decoding, 0.0, self._decode_context)
        return now_ms + steps * one + self.hardware.context_ms * self._decoding * steps * (steps - 1) / 2

    def quiet_until_ms(self, now_ms: float) -> float:
        """Until then, with nothing added or cancelled from `now_ms` on, no request starts, ends or is preempted.

        `now_ms` if the very next step may change that; infinite without work.
        """
        nearest = self._nearest_finish()
        if self.busy_with_prompts:
            return now_ms
        if nearest is None:
            return math.inf
        # Each decode takes a block every 16 steps: so many steps cannot run out of memory.
        safe = BLOCK_TOKENS * (self.pool.free_blocks // self._decoding)
        steps = min(nearest - self._decode_steps, safe)
        if self._waiting and steps > 1 and any(map(self._publishes, self._running)):
            return now_ms  # a decode may fill the very block that the waiting head has cached
        one = self.hardware.step_ms(self._decoding, 0.0, self._decode_context)
        return now_ms + steps * one + self.hardware.context_ms * self._decoding * steps * (steps - 1) / 2

    @property
    def busy_with_prompts(self) -> bool:
        """Whether the next step has a prefill to go on with or may admit one, as far as is known now."""
        if self._prefilling is not None:
            return True
        room = len(self._running) < self.hardware.max_sequences
        return bool(self._waiting) and room and self._blocked_version != self._memory_version

    def snapshot(self) -> Snapshot:
        """The engine's state in numbers."""
        return Snapshot(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_use=1.0 - self.pool.free_blocks / self.pool.blocks,
            kv_capacity_tokens=self.pool.blocks * BLOCK_TOKENS,
            prefix_query_tokens=self._query_tokens,
            prefix_hit_tokens=self._hit_tokens,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
        )

    def sequences(self) -> tuple[EngineSequence, ...]:
        """Everything waiting or running."""
        return tuple(self._sequences.values())

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False, and nothing is done, while requests hold blocks (as vLLM)."""
        if self._running:
            return False
        self.pool.forget_all()
        return True

    # --- one step, in order -------------------------------------------------------------------------

    def _grow_decodes(self) -> tuple[EngineSequence, ...]:
        """Give each decode at a block boundary its next block, preempting the youngest where none is free."""
        growers = self._growers[self._decode_steps % BLOCK_TOKENS]
        if not growers:
            return ()
        preempted: list[EngineSequence] = []
        for sequence in tuple(growers):
            while sequence.state is State.DECODE and not self.pool.free_blocks:
                victim = next(reversed(self._running))
                self._preempt(victim)
                preempted.append(victim)
            if sequence.state is State.DECODE:
                self._append_block(sequence)
        return tuple(preempted)

    def _publish_decodes(self) -> None:
        """Let those who wait hit the blocks that decodes fill in this very step, as vLLM does."""
        for sequence in self._growers[(self._decode_steps + 1) % BLOCK_TOKENS]:
            computed = sequence._computed + self._decode_steps - sequence._joined_step + 1
            self._fill(sequence, computed)
            if computed <= sequence.keyed_blocks * BLOCK_TOKENS:
                self._memory_version += 1

    def _schedule_prefills(self, now_ms: float, *, admit: bool) -> tuple[list[EngineSequence], int, float]:
        """Spend what the decodes left of the budget; returns (prompts completed, tokens, pairs)."""
        budget = self.hardware.step_budget_tokens - self._decoding
        completed: list[EngineSequence] = []
        tokens, pairs = 0, 0.0
        sequence = self._prefilling
        while True:
            if sequence is None:
                if not admit or not budget or not self._waiting:
                    break
                sequence = self._admit(now_ms)
                if sequence is None:
                    break
            computed = sequence._computed
            count = min(sequence._target - computed, budget)
            pairs += count * (computed + count / 2)
            tokens += count
            budget -= count
            sequence._computed = computed + count
            self._fill(sequence, sequence._computed)
            self._memory_version += 1
            if sequence._computed < sequence._target:
                self._prefilling = sequence
                break
            self._prefilling = None
            completed.append(sequence)
            sequence = None
        return completed, tokens, pairs

    def _admit(self, now_ms: float) -> EngineSequence | None:
        """Move the waiting head to the running ones if its whole input fits; None if it does not."""
        if len(self._running) >= self.hardware.max_sequences or self._blocked_version == self._memory_version:
            return None
        sequence = self._waiting[0]
        target = sequence.request.prompt_tokens + sequence._generated
        # A full hit still recomputes the last block: its logits are needed.
        limit = min(sequence.keyed_blocks, (target - 1) // BLOCK_TOKENS)
        runs, hit_blocks = self.pool.find(sequence.keys, sequence.request.blocks_per_key, limit)
        blocks = -(-target // BLOCK_TOKENS)
        while blocks - hit_blocks > self.pool.free_blocks - self.pool.free_among(runs):
            if self._running or not runs:
                self._blocked_version = self._memory_version
                return None
            hit_blocks = runs.pop().base  # alone, it must fit: a hit on a part of a run would hold all of it
        self._waiting.popleft()
        for run in runs:
            self.pool.hold(run)
        sequence.runs = runs
        sequence._filled_runs = len(runs)
        self._reserve(sequence, hit_blocks, blocks)
        sequence._computed = hit_blocks * BLOCK_TOKENS
        sequence._target = target
        sequence.state = State.PREFILL
        self._running[sequence] = None
        if sequence.admitted_ms is None:
            sequence.admitted_ms = now_ms
            sequence.cached_tokens = sequence._computed
            self._query_tokens += target
            self._hit_tokens += sequence._computed
            self._prompt_tokens += target
        return sequence

    def _finish_decodes(self, end_ms: float) -> list[EngineSequence]:
        finished: list[EngineSequence] = []
        while self._nearest_finish() == self._decode_steps:
            sequence = heapq.heappop(self._finishes)[2]
            self._finish(sequence, end_ms)
            finished.append(sequence)
        return finished

    def _emit_first(self, sequence: EngineSequence, end_ms: float, finished: list[EngineSequence]) -> None:
        """The prefill's own token; after a preemption it is just the next one."""
        self._generated_tokens += 1
        sequence._generated += 1
        if sequence.first_token_ms is None:
            sequence.first_token_ms = end_ms
        if sequence._generated == sequence.request.output_tokens:
            self._finish(sequence, end_ms)
            finished.append(sequence)
            return
        sequence.state = State.DECODE
        sequence._joined_step = self._decode_steps
        sequence.finish_step = self._decode_steps + sequence.request.output_tokens - sequence._generated
        self._growers[self._grow_slot(sequence)][sequence] = None
        self._decoding += 1
        self._decode_context += sequence._computed
        self._serial += 1
        heapq.heappush(self._finishes, (sequence.finish_step, self._serial, sequence))

    # --- leaving ------------------------------------------------------------------------------------

    def _finish(self, sequence: EngineSequence, end_ms: float) -> None:
        self._leave(sequence)
        sequence.state = State.FINISHED
        sequence.finished_ms = end_ms
        del self._sequences[sequence.request.request_id]

    def _preempt(self, sequence: EngineSequence) -> None:
        """Take the memory back; what was computed is computed again, and it is the first to be admitted."""
        self._leave(sequence)
        sequence.state = State.WAITING
        sequence.preemptions += 1
        self._preemptions += 1
        self._waiting.appendleft(sequence)

    def _leave(self, sequence: EngineSequence) -> None:
        """Out of the running ones: cache what is full, free the blocks last first."""
        if sequence.state is State.DECODE:
            joined = self._decode_steps - sequence._joined_step
            computed = sequence._computed + joined
            del self._growers[self._grow_slot(sequence)][sequence]
            self._decoding -= 1
            self._decode_context -= computed
            sequence._generated += joined
            self._fill(sequence, computed)
        elif sequence is self._prefilling:
            self._prefilling = None
        del self._running[sequence]
        for run in reversed(sequence.runs):
            self.pool.release(run)
        sequence.runs = []
        self._memory_version += 1

    # --- blocks -------------------------------------------------------------------------------------

    def _reserve(self, sequence: EngineSequence, start: int, end: int) -> None:
        """Allocate the blocks from `start` to `end`: a run per key, and one for what no key describes."""
        self.pool.take(end - start)
        per_key = sequence.request.blocks_per_key
        keyed_end = min(sequence.keyed_blocks, end)
        while start < keyed_end:
            index = start // per_key
            stop = min((index + 1) * per_key, keyed_end)
            sequence.runs.append(Run(sequence.keys[index], start, stop - start))
            start = stop
        if start < end:
            sequence.runs.append(Run(None, start, end - start))

    def _append_block(self, sequence: EngineSequence) -> None:
        """One more block for a decode: lengthen its last run, or start the next key's."""
        computed = sequence._computed + self._decode_steps - sequence._joined_step
        self._fill(sequence, computed)
        self.pool.take(1)
        block = computed // BLOCK_TOKENS
        key = None
        if block < sequence.keyed_blocks:
            key = sequence.keys[block // sequence.request.blocks_per_key]
        last = sequence.runs[-1]
        if last.key == key and last.refs == 1 and last.base + last.count == block:
            last.count += 1
            sequence._filled_runs = len(sequence.runs) - 1
        else:
            sequence.runs.append(Run(key, block, 1))

    def _fill(self, sequence: EngineSequence, computed: int) -> None:
        """Let others hit the blocks that `computed` tokens have filled."""
        full = computed // BLOCK_TOKENS
        runs = sequence.runs
        index = sequence._filled_runs
        while index < len(runs):
            run = runs[index]
            if full <= run.base:
                break
            self.pool.fill(run, min(full - run.base, run.count))
            if full < run.base + run.count:
                break
            index += 1
        sequence._filled_runs = index

    def _publishes(self, sequence: EngineSequence) -> bool:
        """Whether the blocks it fills from now on can be hit by others."""
        computed = sequence._computed + self._decode_steps - sequence._joined_step
        return sequence.state is State.DECODE and computed < sequence.keyed_blocks * BLOCK_TOKENS

    @staticmethod
    def _grow_slot(sequence: EngineSequence) -> int:
        """The step counter modulo 16 at which this decode enters a new block."""
        return (sequence._joined_step - sequence._computed) % BLOCK_TOKENS

    # --- how long nothing happens ---------------------------------------------------------------------

    def _nearest_finish(self) -> int | None:
        """The step counter after which the next decode finishes."""
        finishes = self._finishes
        while finishes:
            step, _, sequence = finishes[0]
            if sequence.state is State.DECODE and sequence.finish_step == step:
                return step
            heapq.heappop(finishes)
        return None

    def _quiet_steps(self) -> int:
        """Decode steps from now in which nobody finishes, or grows after the first of them."""
        nearest = self._nearest_finish()
        most = BLOCK_TOKENS if nearest is None else min(nearest - self._decode_steps, BLOCK_TOKENS)
        # The step before a growth fills a block, which may be what the waiting head needs to fit.
        watched = (0, 1) if self._waiting else (0,)
        for steps in range(1, most):
            slot = self._decode_steps + steps
            if any(self._growers[(slot + ahead) % BLOCK_TOKENS] for ahead in watched):
                return steps
        return most
