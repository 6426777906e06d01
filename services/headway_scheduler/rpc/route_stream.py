"""One RouteStream: routes and reports in, answers out, in any order.

Natural coalescing: what is answered while a message is being written becomes the next message; no timer adds latency.
Held routes do not block the line, and one bad request fails alone.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any, Final

from grpc.aio import ServicerContext
from headway.routing.v1 import routing_pb2 as pb

from headway_scheduler.admission.holds import Waiter
from headway_scheduler.app import Scheduler
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Principal
from headway_scheduler.domain.report import ReportStatus
from headway_scheduler.errors import HeadwayError, InvalidField
from headway_scheduler.faults import unexpected
from headway_scheduler.fleet.values import Owner
from headway_scheduler.rpc.convert.reports import report_from_proto, result_to_proto
from headway_scheduler.rpc.convert.routing import request_from_proto, write_decision
from headway_scheduler.rpc.fail_open import AT_ONCE, writing_view
from headway_scheduler.rpc.interceptors import to_status
from headway_scheduler.rpc.resume import Resumer
from headway_scheduler.rpc.spans import RouteSpan

__all__ = ["RouteStreamSession"]

_MAX_UNREAD: Final = 4096
"""Answers a client has not read: beyond it the session reads no more requests until it catches up."""
_REMEMBERED_CALLS: Final = 10_000
_VIEW_INTERVAL_S: Final = 0.2
_ECHO_S: Final = 0.02
"""So long an echo that nobody may wait for waits for something to be said; clients' pings wait 25 times that."""


class RouteStreamSession:
    """A data plane's stream. Its reservations live while it is open, and are orphans when it is lost."""

    def __init__(
        self, scheduler: Scheduler, principal: Principal, resumer: Resumer, context: ServicerContext[Any, Any]
    ) -> None:
        self._scheduler, self._principal, self._resumer, self._context = scheduler, principal, resumer, context
        self._owner = Owner(principal.id, stream=True)
        self._out = pb.RouteStreamResponse()
        self._pending = 0
        self._owed = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self._holds: dict[int, Waiter] = {}
        self._answered: OrderedDict[int, str] = OrderedDict()
        self._resumes: set[asyncio.Task[None]] = set()
        self._view_version: tuple[object, ...] = ()
        self._spans: dict[int, RouteSpan] = {}

    async def run(self, requests: AsyncIterator[pb.RouteStreamRequest]) -> None:
        """Serve until the client half-closes and everything is answered, or the stream breaks."""
        self._welcome()
        if len(self._scheduler.fleet.endpoints) <= AT_ONCE:
            await self._offer_view()
        reader = asyncio.create_task(self._read(requests))
        viewer = asyncio.create_task(self._watch_fleet())
        try:
            await self._write(reader)
            await reader
        finally:
            self._closed = True
            tasks = (reader, viewer, *self._resumes)
            for task in tasks:
                task.cancel()
            for waiter in self._holds.values():
                self._scheduler.dispatcher.give_up(waiter)
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._scheduler.ledger.lose_owner(self._owner, self._scheduler.clock())

    # In

    async def _read(self, requests: AsyncIterator[pb.RouteStreamRequest]) -> None:
        async for message in requests:
            now = self._scheduler.clock()
            for resumed in message.resumes:
                self._start_resume(resumed)
            for report in message.reports:
                self._report(report, now)
            # A client may give up what it asks for in the same message.
            early = [number for number in message.cancels if not self._cancel(number, now)]
            for call in message.routes:
                self._route(call, now)
            for number in early:
                self._cancel(number, now)
            self._echo(told=bool(message.reports) and not message.routes)
            await self._room.wait()

    def _route(self, call: pb.RouteCall, now: float) -> None:
        scheduler = self._scheduler
        number = call.correlation_id
        if scheduler.tracing is not None:
            self._spans[number] = RouteSpan(scheduler.tracing, call.request)
        try:
            scheduler.check_takes()
            if number in self._holds:
                raise InvalidField("correlation_id", f"{number} is open already")
            wanted, tenant = request_from_proto(
                call.request, self._principal, scheduler.intake, scheduler.ledger.new_id()
            )
            outcome = scheduler.dispatcher.submit(wanted, tenant, self._owner, now)
        except HeadwayError as error:
            self._answer(number, error)
        except Exception as error:
            self._answer(number, unexpected(error, method="RouteStream"))
        else:
            if isinstance(outcome, Waiter):
                self._hold(number, outcome)
            else:
                self._answer(number, outcome)

    def _hold(self, number: int, waiter: Waiter) -> None:
        def answer(outcome: Decision | HeadwayError) -> None:
            del self._holds[number]
            self._answer(number, outcome)

        waiter.answer = answer
        self._holds[number] = waiter

    def _report(self, message: pb.Report, now: float) -> None:
        try:
            report = report_from_proto(message)
            status, detail = self._scheduler.reporting.apply(self._owner, message.reservation_id, report, now)
        except InvalidField as error:
            status, detail = ReportStatus.INVALID, error.message
        if status is not ReportStatus.APPLIED:
            self._out.report_results.append(result_to_proto(message.reservation_id, status, detail))
            self._wake(1)

    def _cancel(self, correlation_id: int, now: float) -> bool:
        """False: there is no such call."""
        self._spans.pop(correlation_id, None)
        waiter = self._holds.pop(correlation_id, None)
        if waiter is not None:
            self._scheduler.dispatcher.give_up(waiter)
            return True
        reservation_id = self._answered.pop(correlation_id, None)
        if reservation_id is not None:
            self._scheduler.dispatcher.give_back(reservation_id, self._owner, now)
        return reservation_id is not None

    def _start_resume(self, message: pb.ResumedReservation) -> None:
        task = asyncio.create_task(self._resume(message))
        self._resumes.add(task)
        task.add_done_callback(self._resumes.discard)
        task.add_done_callback(lambda _: self._news.set())

    async def _resume(self, message: pb.ResumedReservation) -> None:
        result = await self._resumer.resume(message, self._principal, self._owner)
        self._out.resume_results.append(result)  # the message to come, which may be another than before the wait
        self._wake(1)

    # Out

    def _welcome(self) -> None:
        scheduler = self._scheduler
        welcome = pb.StreamWelcome(scheduler=scheduler.config.name, epoch=scheduler.epoch)
        welcome.resume_grace.FromMilliseconds(int(scheduler.config.resume_grace_s * 1e3))
        self._out.welcome.CopyFrom(welcome)
        self._wake(0)

    async def _offer_view(self) -> None:
        version = (self._scheduler.fleet.version, self._scheduler.steering, self._scheduler.is_settled)
        if self._view_version != version:
            self._view_version = version
            view = pb.FailOpenView()
            for _ in writing_view(view, self._scheduler, self._principal):
                await asyncio.sleep(0)  # let decisions pass
            self._out.fail_open_view.CopyFrom(view)
            self._wake(1)

    async def _watch_fleet(self) -> None:
        """Send the view when the fleet changed, and say once that the scheduler goes away."""
        told = False
        while True:
            await self._offer_view()
            await asyncio.sleep(_VIEW_INTERVAL_S)
            if not self._scheduler.serves:
                self._wake(0)
            if self._scheduler.draining and not told:
                told = True
                self._out.draining = True
                self._wake(1)

    def _answer(self, number: int, outcome: Decision | HeadwayError) -> None:
        if self._closed:
            return
        if self._spans:
            self._end_span(number, outcome)
        answer = self._out.answers.add(correlation_id=number)
        if isinstance(outcome, Decision):
            write_decision(outcome, answer.response)
            self._answered[number] = outcome.reservation_id
            self._answered.move_to_end(number)
            if len(self._answered) > _REMEMBERED_CALLS:
                self._answered.popitem(last=False)
        else:
            self._scheduler.count_refusal(outcome)
            answer.error.CopyFrom(to_status(outcome))
        self._wake(1)

    def _end_span(self, number: int, outcome: Decision | HeadwayError) -> None:
        span = self._spans.pop(number, None)
        if span is not None:
            span.answered(outcome)

    def _echo(self, told: bool) -> None:
        """Every message is answered, also one that asks nothing: an empty one is a ping.

        To one that only `told` something, the next answer will do: a busy stream would else carry as many empty
        messages as others.
        """
        if not told:
            self._wake(0)
        elif not self._owed:
            self._owed = True
            asyncio.get_running_loop().call_later(_ECHO_S, self._news.set)

    def _wake(self, count: int) -> None:
        self._owed = True
        self._pending += count
        if self._pending >= _MAX_UNREAD:
            self._room.clear()
        self._news.set()

    async def _write(self, reader: "asyncio.Task[None]") -> None:
        """Write whatever there is, as one message, until the client is done and nothing is owed to it."""
        reader.add_done_callback(lambda _: self._news.set())
        while True:
            await self._news.wait()
            self._news.clear()
            if self._owed:
                message, self._out = self._out, pb.RouteStreamResponse()
                self._pending, self._owed = 0, False
                self._room.set()
                self._scheduler.check_serves()  # also of what was decided before it was stopped
                try:
                    await self._context.write(message)
                except asyncio.InvalidStateError:
                    return  # the client is gone
            if reader.done() and self._is_over(reader):
                return

    def _is_over(self, reader: "asyncio.Task[None]") -> bool:
        """The client says no more: is anything still owed to it?"""
        if reader.cancelled() or reader.exception() is not None:
            return True
        return not (self._owed or self._holds or self._resumes)
