"""What waits to be written to the stream, and how it coalesces.

What arrives while the last message is being written, and answered, is the next message. A lone request never waits;
a report waits a few milliseconds for one to travel with.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration
from headway.routing.v1 import routing_pb2 as pb

from headway_client.reservation import Reservation
from headway_client.stats import ClientStats

__all__ = ["Call", "Outbox"]

_MESSAGE_BYTES = 1 << 20
"""A message is closed once it is this long; a single longer item still travels, alone."""
_LINGER_S = 0.005
_REMEMBERED_REPORTS = 10_000
_REPEAT_WITHIN_S = 5.0
_DEFAULT_HOLD_S = 30.0
_HOLD_MARGIN_S = 0.05


@dataclass(slots=True, eq=False)
class Call:
    """A Route that waits for its answer."""

    id: int
    request: pb.RouteRequest
    started: float
    timeout_s: float | None
    future: asyncio.Future[Reservation]
    sent: bool = field(default=False)

    def to_wire(self, now: float) -> pb.RouteCall:
        """Build the message; the hold that is asked for never outlives the caller's own deadline."""
        wire = pb.RouteCall(correlation_id=self.id, request=self.request)
        waited = now - self.started
        asked = self.request.max_wait
        explicit = self.request.HasField("max_wait")
        hold = asked.seconds + asked.nanos / 1e9 - waited if explicit else _DEFAULT_HOLD_S
        left = hold if self.timeout_s is None else min(hold, self.timeout_s - waited - _HOLD_MARGIN_S)
        if explicit or left < _DEFAULT_HOLD_S:
            wire.request.max_wait.CopyFrom(_duration(max(0.0, left)))
        return wire


class Outbox:
    """Collects calls, reports, cancels and resumes for the one writer."""

    def __init__(self, stats: ClientStats) -> None:
        self._stats = stats
        self._wake = asyncio.Event()
        self._routes: dict[int, Call] = {}
        self._reports: deque[tuple[Reservation, pb.Report]] = deque()
        self._stamped: deque[pb.Report] = deque()
        self._last: list[tuple[Reservation, pb.Report]] = []
        self._cancels: list[int] = []
        self._resumes: deque[pb.ResumedReservation] = deque()
        self._ping = False
        self._paused = False
        self._closed = False
        self._ends: deque[tuple[float, pb.Report]] = deque(maxlen=_REMEMBERED_REPORTS)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def route(self, call: Call) -> None:
        """Ask for an endpoint."""
        call.sent = False
        self._routes[call.id] = call
        self._wake.set()

    def give_up(self, call: Call) -> None:
        """Withdraw a call: silently if it was never sent."""
        if self._routes.pop(call.id, None) is None and call.sent:
            self._cancels.append(call.id)
            self._stats.cancels += 1
            self._wake.set()

    def report(self, reservation: Reservation, report: pb.Report) -> None:
        """Send a report under the id that the reservation has when it is written."""
        self._reports.append((reservation, report))
        self._wake.set()

    def report_stamped(self, report: pb.Report) -> None:
        """Send a report that already holds its reservation's id."""
        self._stamped.append(report)
        self._wake.set()

    def resume(self, resumed: pb.ResumedReservation) -> None:
        """Announce a reservation that the scheduler did not give."""
        self._resumes.append(resumed)
        self._wake.set()

    def ping(self) -> None:
        """Write a message even if it is empty."""
        self._ping = True
        self._wake.set()

    def pause_routes(self) -> None:
        """Keep calls here: this scheduler takes no more."""
        self._paused = True

    def close(self) -> None:
        """Let `next_message` return None once everything is written."""
        self._closed = True
        self._wake.set()

    def unsend(self) -> None:
        """Take back the reports of the last message: the stream had ended and never carried it."""
        self._reports.extendleft(reversed(self._last))
        refused = {id(report) for _, report in self._last}
        self._ends = deque((e for e in self._ends if id(e[1]) not in refused), maxlen=_REMEMBERED_REPORTS)
        self._last = []

    def unwritten_reports(self) -> list[tuple[Reservation, pb.Report]]:
        """Take back the reports that the lost stream never carried."""
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def restart(self, calls: list[Call], resumes: list[pb.ResumedReservation], now: float) -> None:
        """Prepare for a new stream: what the old one still owed is asked for again.

        Ends written shortly before the old stream broke may not have been read: they are repeated. A
        scheduler that had read them answers DUPLICATE.
        """
        self._cancels.clear()
        self._ping = self._paused = False
        self._routes = {call.id: call for call in calls}
        for call in calls:
            call.sent = False
        self._resumes = deque(resumes)
        self._stamped.extend(report for written, report in self._ends if now - written < _REPEAT_WITHIN_S)
        self._ends.clear()
        self._wake.set()

    async def next_message(self, clock: Callable[[], float]) -> pb.RouteStreamRequest | None:
        """Wait until there is something to write and return all of it, up to the message limit."""
        while not self._has_work():
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while not self._is_awaited() and not self._closed:
                    self._wake.clear()
                    await self._wake.wait()
        return self._take(clock())

    def _has_work(self) -> bool:
        return bool(self._reports or self._stamped or self._is_awaited())

    def _is_awaited(self) -> bool:
        """Is there something whose answer somebody waits for?"""
        routes = bool(self._routes) and not self._paused
        return bool(routes or self._cancels or self._resumes or self._ping)

    def _take(self, now: float) -> pb.RouteStreamRequest:
        message = pb.RouteStreamRequest(cancels=self._cancels)
        self._cancels = []
        self._ping = False
        room = _MESSAGE_BYTES
        while self._resumes and room > 0:
            resumed = self._resumes.popleft()
            message.resumes.append(resumed)
            room -= resumed.ByteSize()
        self._last = []
        while (self._stamped or self._reports) and room > 0:
            if self._stamped:
                report = self._stamped.popleft()
            else:
                self._last.append(self._reports.popleft())
                report = _stamp(*self._last[-1])
            message.reports.append(report)
            room -= report.ByteSize()
            if report.HasField("finished"):
                self._ends.append((now, report))
        while self._routes and not self._paused and room > 0:
            call = self._routes.pop(next(iter(self._routes)))
            wire = call.to_wire(now)
            call.sent = True
            message.routes.append(wire)
            room -= wire.ByteSize()
        self._stats.messages += 1
        self._stats.reports += len(message.reports)
        return message


def _stamp(reservation: Reservation, report: pb.Report) -> pb.Report:
    report.reservation_id = reservation.id
    return report


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
