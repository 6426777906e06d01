"""An asyncio HTTP load driver: open loop from a trace, closed loop from sessions.

It shares the machine with what it measures, so it parses a stream's events once, after the stream's end;
while bytes arrive it looks only for the first token.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, TypedDict

import aiohttp
import msgspec

from headway_sim.traces import TraceRequest, render_prompt
from headway_sim.workloads import SessionTurns, Turn

REFUSED_STATUSES = frozenset({429, 503})
"""HTTP statuses that say "not now" rather than "broken"."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send: its path, its body (JSON, hence Any), and whose it is."""

    path: str
    body: Mapping[str, Any]
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send calls, and how patiently.

    `headers` gives a session's headers (bearer token, tenant). `retries` is how often a refusal that names a
    Retry-After is tried again; the waiting counts as the request's own time.
    """

    base_url: str
    model: str
    headers: Callable[[str | None], Mapping[str, str]] = lambda _: {}
    timeout_s: float = 600.0
    retries: int = 0
    longest_retry_after_s: float = 30.0


class Ending(StrEnum):
    """How a request ended: answered to its end, refused (429, 503), or neither."""

    OK = "ok"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class VirtualTimes:
    """The engine's own times, from the emulator's `headway` extension; `arrival_ms` since the engine's start."""

    queued_ms: float
    ttft_ms: float
    e2e_ms: float
    arrival_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it. Times are wall times from its first attempt; unknown is None.

    `error` says what went wrong, without a word of the prompt.
    """

    ending: Ending
    status: int | None
    session_id: str | None
    started_s: float
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    virtual: VirtualTimes | None = None
    error: str | None = None
    text: str = field(default="", repr=False)


OnOutcome = Callable[[Outcome], None]
"""Called as each request ends; must be quick and must not raise."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Every outcome, in the order in which requests ended, and the wall time of the whole run."""

    outcomes: tuple[Outcome, ...]
    elapsed_s: float


def chat_call(target: Target, turn: Turn) -> Call:
    """A session's turn as a streamed chat request."""
    return _chat(target, list(turn.messages), turn.output_tokens, turn.session_id)


def trace_call(target: Target, request: TraceRequest, *, scale: float = 1.0) -> Call:
    """A trace's request: text and messages as a chat, token ids as a completion."""
    prompt = render_prompt(request, scale)
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
        return _chat(target, messages, request.output_tokens, request.session_id)
    if isinstance(prompt[0], int):
        body = {"model": target.model, "prompt": prompt, **_limits(request.output_tokens)}
        return Call("/v1/completions", body, request.session_id)
    return _chat(target, prompt, request.output_tokens, request.session_id)


async def run_trace(
    target: Target,
    requests: Sequence[TraceRequest],
    *,
    rate: float = 1.0,
    scale: float = 1.0,
    on_outcome: OnOutcome | None = None,
) -> LoadResult:
    """Open loop: send each request at its time divided by `rate`, whatever became of the others."""
    if not 0 < rate < float("inf"):
        raise ValueError("rate must be positive")
    arrivals = (
        (request.arrival_ms / 1000.0 / rate, partial(trace_call, target, request, scale=scale)) for request in requests
    )
    return await run_open_loop(target, arrivals, on_outcome=on_outcome)


async def run_open_loop(
    target: Target,
    arrivals: Iterable[tuple[float, Callable[[], Call]]],
    *,
    on_outcome: OnOutcome | None = None,
) -> LoadResult:
    """Send each call at its time in seconds from now; calls are made only when they are due."""

    async def run(driver: "_Driver") -> None:
        async with asyncio.TaskGroup() as tasks:
            for at_s, make in arrivals:
                await driver.sleep_until(at_s)
                tasks.create_task(driver.send(make()))

    return await _run(target, on_outcome, run)


async def run_closed_loop(
    target: Target,
    sessions: Iterable[SessionTurns],
    *,
    concurrency: int,
    on_outcome: OnOutcome | None = None,
) -> LoadResult:
    """Closed loop: `concurrency` sessions at a time, each sending its next turn when the last was answered.

    A session whose turn is refused or lost goes on with what it was told, at worst nothing: the number of
    requests stays the same.
    """
    if concurrency < 1:
        raise ValueError("concurrency must be positive")
    queue = iter(sessions)

    async def run(driver: "_Driver") -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(_play(driver, target, queue))

    return await _run(target, on_outcome, run)


class Percentiles(TypedDict):
    """A distribution in milliseconds; None without samples."""

    mean: float | None
    p50: float | None
    p99: float | None


class Summary(TypedDict):
    """What a run came to. `virtual` holds the engines' own times, where they told them.

    `statuses` counts the HTTP statuses of what was not ok ("none" where no answer came).
    """

    requests: int
    ok: int
    refused: int
    lost: int
    rejected_ratio: float
    ttft_ms: Percentiles
    e2e_ms: Percentiles
    requests_per_s: float
    hit_ratio: float | None
    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float
    virtual: dict[str, Percentiles]
    statuses: dict[str, int]


def summarise(result: LoadResult, *, speedup: float = 1.0) -> Summary:
    """Sum a run up. `speedup` converts wall time to the engines' time: times × it, rates ÷ it."""
    outcomes = result.outcomes
    ok = [outcome for outcome in outcomes if outcome.ending is Ending.OK]
    count = Counter(outcome.ending for outcome in outcomes)
    counted = [outcome for outcome in ok if outcome.cached_tokens is not None]
    prompt_tokens = sum(outcome.prompt_tokens or 0 for outcome in counted)
    virtual = [outcome.virtual for outcome in ok if outcome.virtual is not None]
    elapsed_s = result.elapsed_s * speedup
    return Summary(
        requests=len(outcomes),
        ok=count[Ending.OK],
        refused=count[Ending.REFUSED],
        lost=count[Ending.LOST],
        rejected_ratio=count[Ending.REFUSED] / len(outcomes) if outcomes else 0.0,
        ttft_ms=percentiles([outcome.ttft_ms * speedup for outcome in ok if outcome.ttft_ms is not None]),
        e2e_ms=percentiles([outcome.e2e_ms * speedup for outcome in ok if outcome.e2e_ms is not None]),
        requests_per_s=len(ok) / elapsed_s if elapsed_s else 0.0,
        hit_ratio=sum(outcome.cached_tokens or 0 for outcome in counted) / prompt_tokens if prompt_tokens else None,
        prompt_tokens=sum(outcome.prompt_tokens or 0 for outcome in ok),
        completion_tokens=sum(outcome.completion_tokens or 0 for outcome in ok),
        elapsed_s=elapsed_s,
        virtual={
            name: percentiles([asdict(times)[name] for times in virtual]) for name in ("queued_ms", "ttft_ms", "e2e_ms")
        }
        if virtual
        else {},
        statuses=dict(
            Counter(str(outcome.status or "none") for outcome in outcomes if outcome.ending is not Ending.OK)
        ),
    )


def percentiles(samples: Sequence[float]) -> Percentiles:
    """Mean, median and 99th percentile (nearest rank)."""
    if not samples:
        return Percentiles(mean=None, p50=None, p99=None)
    ordered = sorted(samples)

    def rank(percent: int) -> float:
        return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]

    return Percentiles(mean=sum(ordered) / len(ordered), p50=rank(50), p99=rank(99))


def _chat(target: Target, messages: list[Any], output_tokens: int, session_id: str | None) -> Call:
    body = {"model": target.model, "messages": messages, **_limits(output_tokens)}
    return Call("/v1/chat/completions", body, session_id)


def _limits(output_tokens: int) -> dict[str, Any]:
    return {
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _play(driver: "_Driver", target: Target, queue: Iterator[SessionTurns]) -> None:
    """Play one session after the other."""
    for session in queue:
        try:
            turn = next(session)
            while True:
                outcome = await driver.send(chat_call(target, turn))
                turn = session.send(outcome.text)
        except StopIteration:
            continue


async def _run(target: Target, on_outcome: OnOutcome | None, run: Callable[["_Driver"], Awaitable[None]]) -> LoadResult:
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        target.base_url, timeout=timeout, connector=connector, read_bufsize=1 << 18
    ) as http:
        # Not the loop's clock: uvloop's has a resolution of a millisecond.
        driver = _Driver(target, http, on_outcome, time.perf_counter)
        await run(driver)
        return LoadResult(tuple(driver.outcomes), driver.elapsed_s())


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    headway: VirtualTimes | None = None
    error: msgspec.Raw | None = None

    def text(self) -> str:
        """The answer's part that this event brings."""
        parts = []
        for choice in self.choices:
            if choice.text is not None:
                parts.append(choice.text)
            elif choice.delta is not None and choice.delta.content is not None:
                parts.append(choice.delta.content)
        return "".join(parts)


_decoder = msgspec.json.Decoder(_Event)


class _Driver:
    """Sends calls over one client session and collects what became of them."""

    def __init__(
        self,
        target: Target,
        http: aiohttp.ClientSession,
        on_outcome: OnOutcome | None,
        clock_s: Callable[[], float],
    ) -> None:
        self._target = target
        self._http = http
        self._on_outcome = on_outcome
        self._clock_s = clock_s
        self._start_s = clock_s()
        self.outcomes: list[Outcome] = []

    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock_s() - self._start_s

    async def sleep_until(self, at_s: float) -> None:
        """Wait for a time of the run; even when late, let others work first."""
        await asyncio.sleep(max(0.0, at_s - self.elapsed_s()))

    async def send(self, call: Call) -> Outcome:
        """Send a call, again where it was refused and may be, and record its outcome."""
        started_s = self.elapsed_s()
        body = msgspec.json.encode(call.body)
        headers = {"Content-Type": "application/json", **self._target.headers(call.session_id)}
        attempts_left = self._target.retries
        while True:
            outcome, retry_after_s = await self._attempt(call, body, headers, started_s)
            if outcome.ending is not Ending.REFUSED or retry_after_s is None or not attempts_left:
                break
            attempts_left -= 1
            await asyncio.sleep(min(retry_after_s, self._target.longest_retry_after_s))
        self.outcomes.append(outcome)
        if self._on_outcome is not None:
            self._on_outcome(outcome)
        return outcome

    async def _attempt(
        self, call: Call, body: bytes, headers: Mapping[str, str], started_s: float
    ) -> tuple[Outcome, float | None]:
        """One try: its outcome, and how long a refusal asks to wait."""
        status: int | None = None
        try:
            async with self._http.post(call.path, data=body, headers=headers) as response:
                status = response.status
                if status == 200:
                    data, ttft_ms = await self._read_stream(response, started_s)
                    return self._judge(call, started_s, data, ttft_ms), None
                await response.read()
                retry_after_s = _seconds(response.headers.get("Retry-After"))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Outcome(Ending.LOST, status, call.session_id, started_s, error=type(error).__name__), None
        ending = Ending.REFUSED if status in REFUSED_STATUSES else Ending.LOST
        return Outcome(ending, status, call.session_id, started_s, error=f"HTTP {status}"), retry_after_s

    async def _read_stream(self, response: aiohttp.ClientResponse, started_s: float) -> tuple[bytes, float | None]:
        """The whole stream, and when its first token came."""
        received: list[bytes] = []
        ttft_ms: float | None = None
        async for data in response.content.iter_any():
            received.append(data)
            if ttft_ms is None and _brings_text(b"".join(received)):
                ttft_ms = (self.elapsed_s() - started_s) * 1000.0
        return b"".join(received), ttft_ms

    def _judge(self, call: Call, started_s: float, data: bytes, ttft_ms: float | None) -> Outcome:
        e2e_ms = (self.elapsed_s() - started_s) * 1000.0
        events, done, error = _parse(data)
        usage = next((event.usage for event in reversed(events) if event.usage is not None), None)
        details = usage.prompt_tokens_details if usage is not None else None
        complete = done and error is None
        return Outcome(
            Ending.OK if complete else Ending.LOST,
            200,
            call.session_id,
            started_s,
            ttft_ms=ttft_ms,
            e2e_ms=e2e_ms,
            prompt_tokens=usage.prompt_tokens if usage is not None else None,
            cached_tokens=details.cached_tokens if details is not None else None,
            completion_tokens=usage.completion_tokens if usage is not None else None,
            virtual=next((event.headway for event in reversed(events) if event.headway is not None), None),
            error=None if complete else error or "the stream ended without [DONE]",
            text="".join(event.text() for event in events),
        )


def _brings_text(data: bytes) -> bool:
    """Whether the complete events so far bring any of the answer."""
    events, _, _ = _parse(data[: data.rfind(b"\n\n") + 2])
    return any(event.text() for event in events)


def _parse(data: bytes) -> tuple[list[_Event], bool, str | None]:
    """A stream's events, whether [DONE] ended it, and what was wrong with it."""
    events: list[_Event] = []
    for line in data.replace(b"\r\n", b"\n").split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            return events, True, None
        try:
            event = _decoder.decode(payload)
        except msgspec.DecodeError:
            return events, False, "an event is not what OpenAI's API sends"
        if event.error is not None:
            return events, False, "the stream reported an error"
        events.append(event)
    return events, False, None


def _seconds(text: str | None) -> float | None:
    """A Retry-After in seconds; its date form is not used by those we drive."""
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        return None
