"""Where requests come from: traces (open loop) and sessions (open or closed loop), as jobs with one identity.

A job names the same content to both sides: to the scheduler as the prompt a data plane would send, to the engine as
chained block keys. Equal prefixes are equal on both.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from headway_scheduler.domain.names import DEFAULT_TENANT
from headway_scheduler.domain.request import BlocksPrompt, Prompt, TextPrompt, TokensPrompt
from headway_scheduler.index.hashing import BYTES, TOKENS
from xxhash import xxh3_64_intdigest

from headway_sim import traces
from headway_sim.emulator.text import render_chat
from headway_sim.engine import (
    BLOCK_TOKENS,
    TOKEN_BYTES,
    EngineRequest,
    byte_chain,
    chain_root,
    count_tokens,
    token_bytes,
)
from headway_sim.filler import filler_text
from headway_sim.traces import HASH_ID_TOKENS, TraceRequest
from headway_sim.workloads import SessionTurns, Turn, Workload

__all__ = ["MODEL", "Job", "SessionSource", "Source", "TraceSource"]

MODEL: Final = "simulated"
"""The model that every engine of a simulated fleet serves."""

_INDEX_BLOCKS: Final = HASH_ID_TOKENS // TOKENS.block_size
_KEY_BLOCKS: Final = HASH_ID_TOKENS // BLOCK_TOKENS
_BLOCK_BYTES: Final = BLOCK_TOKENS * TOKEN_BYTES
_UNIQUE: Final = 1 << 62
"""Added to ids made up here, so that they never meet a trace's own."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: what the scheduler hears, and what the engine does.

    `prompt_tokens` is what the data plane knows of the prompt's length; None: the scheduler estimates it from the text.
    """

    tenant: str
    session_id: str
    prompt: Prompt
    prompt_tokens: int | None
    max_tokens: int | None
    engine: EngineRequest


class Source(Protocol):
    """Gives the jobs of a run: those that come by themselves, and those that follow another."""

    total: int
    """Jobs in all."""

    def arrivals(self) -> Iterator[tuple[float, Job]]:
        """Jobs that come by themselves, by their time in milliseconds. Taken one at a time."""
        ...

    def after(self, job: Job, now_ms: float, *, answered: bool) -> tuple[float, Job] | None:
        """What follows now that `job` has ended, and when."""
        ...


class TraceSource:
    """A trace in open loop: each request at its time divided by `rate`.

    What a request will answer is known to the engine alone: traces state no limit.
    """

    def __init__(self, requests: Sequence[TraceRequest], rate: float = 1.0) -> None:
        if not 0 < rate < float("inf"):
            raise ValueError("rate must be positive")
        self.total = len(requests)
        self._requests = requests
        self._rate = rate

    def arrivals(self) -> Iterator[tuple[float, Job]]:
        """Every request of the trace."""
        for number, request in enumerate(self._requests):
            yield request.arrival_ms / self._rate, _trace_job(number, request)

    def after(self, job: Job, now_ms: float, *, answered: bool) -> tuple[float, Job] | None:
        """Nothing: an open loop."""
        return None


class SessionSource:
    """A workload's sessions: each turn follows the answer to the one before it, or its refusal.

    With `concurrency`, so many sessions at a time (closed loop); else each starts at its time divided by `rate`.
    """

    def __init__(self, workload: Workload, rate: float = 1.0, limit: int | None = None) -> None:
        """`limit`: no more jobs than so many."""
        if not 0 < rate < float("inf"):
            raise ValueError("rate must be positive")
        self.total = workload.requests if limit is None else min(limit, workload.requests)
        self._workload = workload
        self._rate = rate
        self._sessions: dict[str, _Session] = {}
        self._queue: deque[SessionTurns] = deque()
        self._count = 0

    def arrivals(self) -> Iterator[tuple[float, Job]]:
        """The first turn of each session that starts by itself."""
        concurrency = self._workload.concurrency
        for number, (start_ms, turns) in enumerate(self._workload.schedule()):
            if concurrency is not None and number >= concurrency:
                self._queue.append(turns)
                continue
            if (job := self._begin(turns)) is not None:
                yield start_ms / self._rate, job

    def after(self, job: Job, now_ms: float, *, answered: bool) -> tuple[float, Job] | None:
        """The session's next turn; after its last one, in a closed loop, the next session."""
        session = self._sessions.pop(job.engine.request_id)
        if self._count >= self.total:
            return None
        following = session.next(answered)
        if following is not None:
            return now_ms + following.think_ms, self._job(session, following)
        while self._queue:
            begun = self._begin(self._queue.popleft())
            if begun is not None:
                return now_ms, begun
        return None

    def _begin(self, turns: SessionTurns) -> Job | None:
        if self._count >= self.total:
            return None
        session = _Session(turns)
        first = session.start()
        return None if first is None else self._job(session, first)

    def _job(self, session: "_Session", turn: Turn) -> Job:
        self._count += 1
        request_id = f"r{self._count}"
        self._sessions[request_id] = session
        prompt, engine = session.request(request_id, turn)
        return Job(turn.tenant, turn.session_id, TextPrompt(prompt), None, turn.max_tokens, engine)


class _Session:
    """A session in progress: its generator, and the blocks hashed so far."""

    def __init__(self, turns: SessionTurns) -> None:
        self._turns = turns
        self._answer = ""
        self._content = b""
        self._keys: list[int] = []

    def start(self) -> Turn | None:
        return next(self._turns, None)

    def next(self, answered: bool) -> Turn | None:
        try:
            return self._turns.send(self._answer if answered else "")
        except StopIteration:
            return None

    def request(self, request_id: str, turn: Turn) -> tuple[bytes, EngineRequest]:
        """The turn as the router's prompt and as the engine's request: prompt and answer are both hashed."""
        prompt = render_chat(turn.messages)
        root = chain_root(MODEL, turn.tenant)
        self._answer = filler_text(xxh3_64_intdigest(prompt, root), 0, turn.output_tokens)
        content = prompt + self._answer.encode()
        keys = self._extended(content, root)
        tokens = count_tokens(prompt)
        keyed = len(keys) * BLOCK_TOKENS
        self._content, self._keys = content, keys
        return prompt, EngineRequest(request_id, tokens, turn.output_tokens, keys=keys, keyed_tokens=keyed)

    def _extended(self, content: bytes, root: int) -> list[int]:
        """The chain of `content`, of which the part known from the turn before is not hashed again."""
        if not self._keys or not content.startswith(self._content):
            return byte_chain(content, root)
        known = self._keys
        return known + byte_chain(content[len(known) * _BLOCK_BYTES :], known[-1])


def _trace_job(number: int, request: TraceRequest) -> Job:
    request_id = f"r{number}"
    prompt, tokens, engine = _trace_prompt(request_id, number, request)
    tenant = request.tenant or DEFAULT_TENANT
    return Job(tenant, request.session_id or "", prompt, tokens, request.max_tokens, engine)


def _trace_prompt(request_id: str, number: int, request: TraceRequest) -> tuple[Prompt, int | None, EngineRequest]:
    output, given = request.output_tokens, request.prompt
    match given:
        case traces.HashedPrompt(hash_ids, tokens):
            full = tokens // TOKENS.block_size
            blocks = [hash_id * _INDEX_BLOCKS + part for hash_id in hash_ids for part in range(_INDEX_BLOCKS)]
            engine = EngineRequest(request_id, tokens, output, keys=hash_ids, blocks_per_key=_KEY_BLOCKS)
            return BlocksPrompt(TOKENS.name, tuple(blocks[:full])), tokens, engine
        case traces.RecordedPrompt(blocks, block_tokens, tokens, answer):
            scheme = TOKENS if block_tokens == TOKENS.block_size else BYTES
            engine = _recorded(request_id, (*blocks, *answer), block_tokens, tokens, output)
            return BlocksPrompt(scheme.name, blocks), tokens, engine
        case traces.LengthPrompt(tokens, _):
            first = _UNIQUE + (number << 20)
            blocks = list(range(first, first + tokens // TOKENS.block_size))
            return BlocksPrompt(TOKENS.name, tuple(blocks)), tokens, EngineRequest(request_id, tokens, output)
        case traces.TokenPrompt(token_ids):
            data = token_bytes(token_ids)
            keys = byte_chain(data, chain_root(MODEL))
            engine = EngineRequest(request_id, len(token_ids), output, keys=keys)
            return TokensPrompt(data), len(token_ids), engine
        case traces.TextPrompt(text):
            data = render_chat([{"role": "user", "content": text}])
        case traces.ChatPrompt(messages):
            data = render_chat(messages)
    keys = byte_chain(data, chain_root(MODEL))
    return TextPrompt(data), None, EngineRequest(request_id, count_tokens(data), output, keys=keys)


def _recorded(
    request_id: str, blocks: tuple[int, ...], block_tokens: float, prompt_tokens: int, output_tokens: int
) -> EngineRequest:
    """Engine blocks of which a recorded block tells the content: each is within one, and whatever stands before it."""
    count = min(int(len(blocks) * block_tokens), prompt_tokens + output_tokens) // BLOCK_TOKENS
    keys = []
    for number in range(count):
        covering = min(len(blocks), math.ceil((number + 1) * BLOCK_TOKENS / block_tokens)) - 1
        keys.append(xxh3_64_intdigest(blocks[covering].to_bytes(8, "little"), number))
    return EngineRequest(request_id, prompt_tokens, output_tokens, keys=keys, keyed_tokens=count * BLOCK_TOKENS)
