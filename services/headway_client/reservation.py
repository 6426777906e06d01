"""A reservation as its holder sees it."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from google.protobuf.timestamp_pb2 import Timestamp
from headway.routing.v1 import routing_pb2 as pb

__all__ = ["Reservation", "ReservationOwner", "outcome_of"]


class ReservationOwner(Protocol):
    """What a reservation needs of the client that made it."""

    def submit(self, reservation: "Reservation", report: pb.Report) -> None:
        """Send a report, or keep it until a scheduler is there."""

    def moved(self, reservation: "Reservation", old: str, new: str) -> None:
        """Count the reservation on another endpoint."""

    def ended(self, reservation: "Reservation") -> None:
        """Stop counting it."""


class Reservation:
    """A place on an endpoint. Its reports are sent in the background; none of them blocks or raises.

    As an async context manager it finishes itself: SUCCESS, or what the exception says (see `outcome_of`).
    """

    __slots__ = (
        "_finished",
        "_first_token_seen",
        "_owner",
        "_request",
        "_response",
        "_served_by",
        "_started_s",
        "fail_open",
        "id",
        "settling",
    )

    def __init__(
        self,
        owner: ReservationOwner,
        request: pb.RouteRequest,
        response: pb.RouteResponse,
        started_s: float,
        fail_open: bool = False,
    ) -> None:
        self._owner = owner
        self._request = _without_prompt(request)
        self._response = response
        self._started_s = started_s
        self._served_by = response.endpoint
        self._first_token_seen = False
        self._finished = False
        self.id = response.reservation_id
        """Changes when a restarted scheduler counts the reservation anew."""
        self.fail_open = fail_open
        """Whether the client chose the endpoint by itself."""
        self.settling: list[pb.Report] | None = None
        """Reports that wait until a scheduler has taken the reservation back; None while none is needed."""

    @property
    def endpoint(self) -> pb.Endpoint:
        """The endpoint that serves the request: the chosen one, or the one told by `served_by`."""
        return self._served_by

    @property
    def fallbacks(self) -> Sequence[pb.Endpoint]:
        """Where to go if the endpoint fails, in order of preference."""
        return self._response.fallbacks

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to add to the forwarded request."""
        return self._response.headers

    @property
    def answer_headers(self) -> Mapping[str, str]:
        """Headers to add to the answer to the client: what is left of its quotas."""
        return self._response.answer_headers

    @property
    def cache_salt(self) -> str:
        """What keeps isolation domains apart inside one engine; may be empty."""
        return self._response.cache_salt

    @property
    def model(self) -> str:
        """The name to ask the engine for, an alias resolved."""
        return self._response.model or self._request.model

    @property
    def decision(self) -> pb.Decision:
        """Why this endpoint."""
        return self._response.decision

    @property
    def request_id(self) -> str:
        """The Route's request id."""
        return self._request.request_id

    @property
    def is_finished(self) -> bool:
        """Whether its outcome was reported."""
        return self._finished

    def first_token(self, ttft_ms: float | None = None) -> None:
        """Report the first token; only the first call counts."""
        if self._finished or self._first_token_seen:
            return
        self._first_token_seen = True
        self._owner.submit(self, pb.Report(first_token=pb.FirstToken(ttft_ms=ttft_ms)))

    def progress(self, completion_tokens: int | None = None) -> None:
        """Report that the request is alive."""
        if not self._finished:
            self._owner.submit(self, pb.Report(progress=pb.Progress(completion_tokens=completion_tokens)))

    def served_by(self, endpoint: pb.Endpoint) -> None:
        """Report a failover: the reservation moves to this endpoint."""
        if self._finished or endpoint.name == self._served_by.name:
            return
        old, self._served_by = self._served_by.name, endpoint
        self._owner.moved(self, old, endpoint.name)
        self._owner.submit(self, pb.Report(served_by=pb.ServedBy(endpoint=endpoint.name or endpoint.address)))

    def finished(
        self,
        outcome: pb.Outcome.ValueType,
        usage: pb.Usage | None = None,
        *,
        duration_ms: float | None = None,
        http_status: int = 0,
        ttft_ms: float | None = None,
    ) -> bool:
        """Report the outcome. Only the first call counts; returns whether this was it."""
        if self._finished:
            return False
        self._finished = True
        end = pb.Finished(
            outcome=outcome, usage=usage, duration_ms=duration_ms, http_status=http_status, ttft_ms=ttft_ms
        )
        self._owner.submit(self, pb.Report(finished=end))
        self._owner.ended(self)
        return True

    def as_resumed(self) -> pb.ResumedReservation:
        """Describe it to a scheduler that may not know it."""
        request, decision = self._request, self._response.decision
        started = Timestamp()
        started.FromNanoseconds(int(self._started_s * 1e9))
        return pb.ResumedReservation(
            reservation_id=self.id,
            request_id=request.request_id,
            tenant=request.tenant,
            model=self.model,
            adapter=request.adapter,
            endpoint=self._served_by.name,
            prompt_tokens=decision.prompt_tokens,
            matched_tokens=decision.matched_tokens,
            max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
            task_hint=request.task_hint,
            first_token_seen=self._first_token_seen,
            started=started,
            blocks=request.blocks if request.HasField("blocks") else None,
            fail_open=self.fail_open and self.id == self._response.reservation_id,  # no scheduler has counted it yet
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finished(outcome_of(error))


def outcome_of(error: BaseException | None) -> pb.Outcome.ValueType:
    """Return what an exception says about the endpoint: a bug or a cancelled task says nothing against it."""
    if error is None:
        return pb.OUTCOME_SUCCESS
    if isinstance(error, TimeoutError):
        return pb.OUTCOME_TIMEOUT
    if isinstance(error, ConnectionRefusedError):
        return pb.OUTCOME_CONNECT_ERROR
    if isinstance(error, ConnectionError):
        return pb.OUTCOME_SERVER_ERROR
    return pb.OUTCOME_CANCELLED


def _without_prompt(request: pb.RouteRequest) -> pb.RouteRequest:
    """Copy what a resume needs; the prompt, which may be megabytes, is let go (its hashes are kept)."""
    kept = pb.RouteRequest(
        request_id=request.request_id,
        tenant=request.tenant,
        model=request.model,
        adapter=request.adapter,
        task_hint=request.task_hint,
    )
    if request.HasField("max_tokens"):
        kept.max_tokens = request.max_tokens
    if request.HasField("blocks"):
        kept.blocks.CopyFrom(request.blocks)
    return kept
