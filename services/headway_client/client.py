"""The client: one shared stream, failover between schedulers, and routing alone while none answers."""

import asyncio
import itertools
import random
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import structlog
from headway.routing.v1 import routing_pb2 as pb

from headway_client.connection import STABLE_AFTER_S, Connection
from headway_client.errors import RouteRefused, refusal_from_rpc, refusal_from_status
from headway_client.failopen import FailOpenRouter
from headway_client.options import ClientOptions
from headway_client.outbox import Call, Outbox
from headway_client.reservation import Reservation
from headway_client.stats import ClientStats

__all__ = ["HeadwayClient", "KeyTenants"]

log = structlog.get_logger(__name__)

FAIL_OPEN_PREFIX = "failopen-"
"""Begins the ids of reservations that the client made by itself."""

_ELSEWHERE = frozenset({"STANDBY", "SHUTTING_DOWN"})
"""Reasons that say: ask another scheduler."""
_NOT_FOR_US = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
"""A scheduler that answers so is there: routing without it would be routing against it."""
_MAX_UNSETTLED = 10_000


@dataclass(frozen=True, slots=True)
class KeyTenants:
    """What a scheduler says of keys: each one's tenant (empty: it does not count), and how long that may be kept."""

    tenants: tuple[str, ...]
    valid_s: float


class HeadwayClient:
    """Routes requests and reports on them, over one stream shared by every caller of this event loop.

    `targets` are schedulers (`host:port`); the client stays with the first that answers and moves to the next
    when that one is unavailable, standby or shutting down. Use it as an async context manager, or call
    `start` and `close`. `token` and `credentials` may be functions, asked at each connect: what was rotated or renewed
    counts from the next one on.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        token: str | Callable[[], str] = "",
        options: ClientOptions | None = None,
        credentials: grpc.ChannelCredentials | Callable[[], grpc.ChannelCredentials] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        if not targets:
            raise ValueError("targets: at least one scheduler is required")
        self.stats = ClientStats()
        self._options = options or ClientOptions()
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng or random.Random()
        self._alone = FailOpenRouter(self._rng)
        self._outbox = Outbox(self.stats)
        self._connection = Connection(
            targets, token, credentials, self._options, self._outbox, self.stats, self, clock, self._rng
        )
        self._ids = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._has_calls = asyncio.Event()
        self._live: set[Reservation] = set()
        self._unsettled: dict[Reservation, None] = {}
        self._resuming: dict[str, Reservation] = {}
        self._welcome: pb.StreamWelcome | None = None
        self._changed = asyncio.Event()
        self._accepting = False
        self._draining = False
        self._silent_since = clock()
        self._welcomed_at = self._heard_at = self._owed_since = self._silent_since
        self._ping_at: float | None = None
        self._refusal: RouteRefused | None = None
        self._was_alone = False
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    # life

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to connect; needs a running event loop. Calls may be made at once, they wait."""
        self._silent_since = self._clock()
        self._tasks = [
            asyncio.create_task(work) for work in (self._connection.run(), self._watch(), self._ping_when_idle())
        ]

    async def close(self) -> None:
        """End every reservation that is left as CANCELLED, send the last reports, and close the stream."""
        if self._closing:
            return
        self._closing = True
        for call in list(self._calls.values()):
            self._refuse(call, RouteRefused(grpc.StatusCode.CANCELLED, "CLIENT_CLOSED", "the client is closed"))
        for reservation in list(self._live):
            reservation.finished(pb.OUTCOME_CANCELLED)
        self._outbox.close()
        if self._tasks and self._welcome is not None:
            await asyncio.wait(self._tasks[:1], timeout=self._options.close_timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_connected(self) -> None:
        """Return once a scheduler has welcomed the stream and given its view; wrap it in a timeout."""
        while not (self.connected and self._alone.view is not None):
            self._changed.clear()
            await self._changed.wait()

    # what callers see

    @property
    def connected(self) -> bool:
        """Whether a scheduler takes routes now."""
        return self._accepting

    @property
    def scheduler(self) -> pb.StreamWelcome | None:
        """Who answered last: name and epoch; None before the first welcome."""
        return self._welcome

    @property
    def view(self) -> pb.FailOpenView | None:
        """The last fail-open view."""
        return self._alone.view

    @property
    def live(self) -> int:
        """Reservations not yet finished, or finished and not yet told."""
        return len(self._live)

    def models(self, tenant: str = "") -> list[str]:
        """Return the models that the view offers to this tenant, sorted."""
        return self._alone.models(tenant)

    async def identify_keys(self, key_sha256: Sequence[bytes]) -> KeyTenants:
        """Which tenants end users' keys are of, by the keys' SHA-256; at most 1000. Raises RouteRefused."""
        response = await self._connection.identify(key_sha256)
        valid_s = response.valid_for.ToNanoseconds() / 1e9
        return KeyTenants(tuple(identity.tenant for identity in response.identities), valid_s)

    def route(self, request: pb.RouteRequest, *, timeout_s: float | None = None) -> "Routing":
        """Ask for an endpoint: `await client.route(…)` or `async with client.route(…) as reservation`.

        Raises RouteRefused. Cancelling the awaiting task gives the call up; `timeout_s` ends it with
        DEADLINE_EXCEEDED. A request without an id is given one.
        """
        return Routing(self, request, timeout_s)

    async def ask(self, request: pb.RouteRequest, timeout_s: float | None = None) -> Reservation:
        """Do what `route` promises."""
        if self._closing:
            raise RouteRefused(grpc.StatusCode.CANCELLED, "CLIENT_CLOSED", "the client is closed")
        call = self._make_call(request, timeout_s)
        if self._refusal is not None:
            self.stats.refusals += 1
            raise _again(self._refusal)
        self._calls[call.id] = call
        if self._is_overdue(self._clock()):
            self._route_alone(call)
            if call.future.done():
                return call.future.result()
        if self._accepting and self._options.fail_open and self._alone.is_ours(call.request):
            self._place(call)
            if call.future.done():
                return call.future.result()
        self._has_calls.set()
        self._outbox.route(call)
        try:
            async with asyncio.timeout(timeout_s):
                return await call.future
        except TimeoutError:
            self._abandon(call)
            self.stats.refusals += 1
            if self._is_overdue(self._clock()) and self._alone.is_empty:
                raise _no_scheduler(self._options.fail_open) from None
            message = f"no endpoint within {timeout_s} s"
            raise RouteRefused(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE", message) from None
        except asyncio.CancelledError:
            self._abandon(call)
            raise

    def _make_call(self, request: pb.RouteRequest, timeout_s: float | None) -> Call:
        own = pb.RouteRequest()
        own.CopyFrom(request)
        own.request_id = own.request_id or uuid.UUID(int=self._rng.getrandbits(128), version=4).hex
        future = asyncio.get_running_loop().create_future()
        return Call(next(self._ids), own, self._clock(), timeout_s, future)

    def _abandon(self, call: Call) -> None:
        self._forget(call)
        self._outbox.give_up(call)
        answered = call.future.done() and not call.future.cancelled() and call.future.exception() is None
        if answered:
            call.future.result().finished(pb.OUTCOME_CANCELLED)

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.id, None)
        if not self._calls:
            self._has_calls.clear()

    # what the connection tells (StreamListener)

    def welcomed(self, first: pb.RouteStreamResponse, target: str) -> None:
        """Announce what is live, and ask again for what waits."""
        now = self._clock()
        self.stats.connects += 1
        self.stats.reconnects += self._welcome is not None
        self._welcome = first.welcome
        self._welcomed_at = now
        self._ping_at = self._refusal = None
        self._accepting, self._draining, self._was_alone = True, False, False
        self._resuming = {reservation.id: reservation for reservation in self._live}
        resumes = [reservation.as_resumed() for reservation in self._live]
        self._outbox.restart(list(self._calls.values()), resumes, now)
        log.info("scheduler_connected", target=target, epoch=first.welcome.epoch, resumes=len(resumes))
        self.received(first)
        self._changed.set()

    def lost(self) -> None:
        """Keep every report for the next stream."""
        self._stop_accepting(self._clock())
        for reservation in self._live:
            if reservation.settling is None:
                reservation.settling = []
        for reservation, report in self._outbox.unwritten_reports():
            if reservation.settling is None:  # Finished, and the end was not written.
                reservation.settling = []
                self._live.add(reservation)
                self._keep_unsettled(reservation)
            reservation.settling.append(report)

    def unavailable(self, target: str, error: grpc.aio.AioRpcError) -> None:
        """Pass a refused credential on to those who wait."""
        if error.code() in _NOT_FOR_US:
            self._refusal = refusal_from_rpc(error)
            log.error("scheduler_refused_credential", target=target, reason=self._refusal.reason)
            for call in list(self._calls.values()):
                self._refuse(call, _again(self._refusal))

    def received(self, message: pb.RouteStreamResponse) -> None:
        """Take views, answers, and what became of resumes."""
        self._heard_at = self._clock()
        self._ping_at = None
        if message.HasField("fail_open_view"):
            self._alone.update(message.fail_open_view)
            self._changed.set()
        for result in message.resume_results:
            self._on_resumed(result)
        for answer in message.answers:
            self._on_answer(answer)
        if message.draining:
            self._leave_soon()
        if self._draining and not any(call.sent for call in self._calls.values()):
            self._connection.leave()

    def _on_answer(self, answer: pb.RouteAnswer) -> None:
        call = self._calls.get(answer.correlation_id)
        refused = answer.WhichOneof("result") == "error"
        if call is None:
            if not refused:  # Given up while the answer was on its way.
                end = pb.Finished(outcome=pb.OUTCOME_CANCELLED)
                self._outbox.report_stamped(pb.Report(reservation_id=answer.response.reservation_id, finished=end))
            return
        if refused:
            refusal = refusal_from_status(answer.error)
            if refusal.reason in _ELSEWHERE:
                self._leave_soon()
                self._outbox.route(call)
            else:
                call.sent = False  # it is over there: nothing is left to be given up
                self._refuse(call, refusal)
            return
        self.stats.routes += 1
        self._alone.learn(call.request, answer.response)
        self._settle(call, Reservation(self, call.request, answer.response, self._wall_clock()))

    def _on_resumed(self, result: pb.ResumeResult) -> None:
        reservation = self._resuming.pop(result.reservation_id, None)
        if reservation is None:
            return
        if result.status == pb.RESUME_STATUS_RESUMED:
            self.stats.resumed += 1
        elif result.status == pb.RESUME_STATUS_RECREATED:
            self.stats.recreated += 1
        else:
            self.stats.resume_failures += 1
            log.info("reservation_not_resumed", endpoint=reservation.endpoint.name, detail=result.detail)
        reservation.id = result.new_reservation_id or reservation.id
        waiting, reservation.settling = reservation.settling or [], None
        for report in waiting:
            self._outbox.report(reservation, report)
        self._unsettled.pop(reservation, None)
        if reservation.is_finished:
            self._live.discard(reservation)

    def _leave_soon(self) -> None:
        """Send no more routes there; leave when what was asked is answered, or soon after."""
        if self._draining:
            return
        self._draining = True
        self._stop_accepting(self._clock())
        self._outbox.pause_routes()
        self._connection.leave_after(self._options.fail_open_after_s)

    def _stop_accepting(self, since: float) -> None:
        """Start the clock of fail-open; a scheduler that only came and went does not set it back."""
        if self._accepting:
            self._accepting = False
            if self._clock() - self._welcomed_at >= STABLE_AFTER_S:
                self._silent_since = since

    # liveness and fail-open

    async def _watch(self) -> None:
        """Look after waiting calls; sleeps while there are none."""
        tick_s = self._options.fail_open_after_s / 10
        while True:
            await self._has_calls.wait()
            await asyncio.sleep(tick_s)
            now = self._clock()
            if self._accepting:
                self._check_alive(now)
            if self._is_overdue(now):
                for call in list(self._calls.values()):
                    self._route_alone(call)

    async def _ping_when_idle(self) -> None:
        """Notice a hung scheduler before anybody waits for it, and keep the stream from looking dead."""
        while True:
            await asyncio.sleep(self._options.idle_ping_s)
            now = self._clock()
            if self._accepting:
                self._check_alive(now)
                if self._ping_at is None and now - self._heard_at >= self._options.idle_ping_s * 0.5:
                    self._ping(now, owed_since=now)

    def _check_alive(self, now: float) -> None:
        """Ping a scheduler that owes an answer: one that holds a request replies, a hung one does not."""
        if self._ping_at is not None:
            if now - self._ping_at >= self._options.fail_open_after_s * 0.5:
                self.stats.unresponsive += 1
                log.warning("scheduler_unresponsive", silent_s=round(now - self._owed_since, 3))
                self._accepting = False
                self._silent_since = self._owed_since
                self._connection.leave(silent=True)
            return
        sent = [call.started for call in self._calls.values() if call.sent]
        owed_since = max(self._heard_at, min(sent, default=now))
        if now - owed_since >= self._options.fail_open_after_s * 0.25:
            self._ping(now, owed_since)

    def _ping(self, now: float, owed_since: float) -> None:
        self._ping_at, self._owed_since = now, owed_since
        self.stats.pings += 1
        self._outbox.ping()

    def _is_overdue(self, now: float) -> bool:
        return not self._accepting and now - self._silent_since >= self._options.fail_open_after_s

    def _route_alone(self, call: Call) -> None:
        """Route by the view; while there is none, a call with a deadline waits on: a scheduler may be back in time."""
        if self._options.fail_open and call.timeout_s is not None and self._alone.is_empty:
            return
        response = None
        if self._options.fail_open:
            response = self._alone.choose(call.request, f"{FAIL_OPEN_PREFIX}{call.request.request_id}")
        if response is None:
            self._refuse(call, _no_scheduler(self._options.fail_open))
            return
        if not self._was_alone:
            log.warning("routing_without_scheduler")
            self._was_alone = True
        self.stats.fail_open_routes += 1
        reservation = Reservation(self, call.request, response, self._wall_clock(), fail_open=True)
        reservation.settling = []
        self._settle(call, reservation)

    def _place(self, call: Call) -> None:
        """Place a request that is ours, and announce it; where the view offers nothing, the scheduler is asked."""
        response = self._alone.choose(call.request, f"{FAIL_OPEN_PREFIX}{call.request.request_id}")
        if response is None:
            return
        self.stats.bypassed_routes += 1
        reservation = Reservation(self, call.request, response, self._wall_clock(), fail_open=True)
        reservation.settling = []
        self._settle(call, reservation)
        self._resuming[reservation.id] = reservation
        self._outbox.resume(reservation.as_resumed())

    def _settle(self, call: Call, reservation: Reservation) -> None:
        self._forget(call)
        self._live.add(reservation)
        self._alone.begin(reservation.endpoint.name)
        if call.future.done():  # Its caller was cancelled in this very turn.
            reservation.finished(pb.OUTCOME_CANCELLED)
        else:
            call.future.set_result(reservation)

    def _refuse(self, call: Call, refusal: RouteRefused) -> None:
        self._forget(call)
        self._outbox.give_up(call)
        self.stats.refusals += 1
        if not call.future.done():
            call.future.set_exception(refusal)

    # what reservations ask for (ReservationOwner)

    def submit(self, reservation: Reservation, report: pb.Report) -> None:
        """Send a report, or keep it until a scheduler has the reservation."""
        if reservation.settling is None:
            self._outbox.report(reservation, report)
        else:
            reservation.settling.append(report)

    def moved(self, reservation: Reservation, old: str, new: str) -> None:
        """Count the reservation on another endpoint."""
        self._alone.end(old)
        self._alone.begin(new)

    def ended(self, reservation: Reservation) -> None:
        """Stop counting it; one that no scheduler has taken back yet is kept until that is done."""
        self._alone.end(reservation.endpoint.name)
        if reservation.settling is None:
            self._live.discard(reservation)
        else:
            self._keep_unsettled(reservation)

    def _keep_unsettled(self, reservation: Reservation) -> None:
        self._unsettled[reservation] = None
        if len(self._unsettled) > _MAX_UNSETTLED:
            oldest = next(iter(self._unsettled))
            del self._unsettled[oldest]
            self._live.discard(oldest)
            self.stats.reports_dropped += 1


class Routing:
    """A Route to be awaited or entered."""

    __slots__ = ("_client", "_request", "_reservation", "_timeout_s")

    def __init__(self, client: HeadwayClient, request: pb.RouteRequest, timeout_s: float | None) -> None:
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._reservation: Reservation | None = None

    def __await__(self) -> Generator[Any, None, Reservation]:
        return self._client.ask(self._request, self._timeout_s).__await__()

    async def __aenter__(self) -> Reservation:
        self._reservation = await self
        return self._reservation

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reservation is not None:
            await self._reservation.__aexit__(kind, error, trace)


def _again(refusal: RouteRefused) -> RouteRefused:
    """Copy a refusal, so that each caller raises its own."""
    return RouteRefused(refusal.code, refusal.reason, refusal.message, refusal.retry_after_s, refusal.metadata)


def _no_scheduler(fail_open: bool) -> RouteRefused:
    why = "and the last view offers no endpoint" if fail_open else "and fail-open is off"
    return RouteRefused(grpc.StatusCode.UNAVAILABLE, "NO_SCHEDULER", f"no scheduler answers, {why}")
