"""A request's headers: what they ask for, what of it counts, and what must not reach the engine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from headway.routing.v1 import routing_pb2
from headway_openai.body import Api
from headway_tracing.build import TRACE_HEADERS, trace_context

from headway_scheduler.domain.tokens import TOKEN_PREFIX
from headway_scheduler.envoy.plane import Control, Plane, UserKeys
from headway_scheduler.errors import InvalidField, NoCredential, NoEndpoints

__all__ = ["DESTINATION", "Head", "head_of", "read_headers", "subset_hint"]

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Where the request shall go: `ip:port`, or several in the order of preference."""

_SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
_STRIPPED: Final = (
    DESTINATION,
    "x-gateway-inference-",
    "x-gateway-model-name-rewrite",
    "x-slo-",
    "x-llm-d-",
    "x-data-parallel-rank",
)
_MAX_SESSION: Final = 256
_AUTHORIZATION: Final = "authorization"
_MAX_NANOSECONDS: Final = 315_576_000_000 * 10**9
"""As long as a google.protobuf.Duration may be."""
_APIS: Final[tuple[Api, ...]] = ("chat/completions", "completions", "embeddings")
_PRIORITIES: Final = {
    "critical": routing_pb2.PRIORITY_CRITICAL,
    "standard": routing_pb2.PRIORITY_STANDARD,
    "best-effort": routing_pb2.PRIORITY_BEST_EFFORT,
    "sheddable": routing_pb2.PRIORITY_BEST_EFFORT,
}


@dataclass(slots=True)
class Head:
    """Headers by name, as the last of each name has them, and the names of those to strip."""

    values: dict[str, str] = field(default_factory=dict)
    strip: list[str] = field(default_factory=list)
    tenant: str = ""
    """Of the user who showed a key; empty: none did."""

    @property
    def api(self) -> Api:
        """Which API the path belongs to: by its end, since planes rewrite beginnings after they asked us.

        Engines read `%63ompletions` as `completions`.
        """
        path = unquote(self.values.get(":path", "").partition("?")[0])
        return next((api for api in _APIS if path.endswith(f"/{api}")), "other")

    def identify(self, plane: Plane, tenant_of: Callable[[str], str]) -> None:
        """Find out whose request it is, where users show keys, and keep every token of ours from the engine.

        `tenant_of` an `authorization` raises NoCredential for a key that does not count.
        """
        shown = self.values.get(_AUTHORIZATION, "")
        if plane.user_keys is UserKeys.NO:
            if _is_ours(shown):
                self.strip.append(_AUTHORIZATION)
            return
        if not shown:
            if plane.user_keys is UserKeys.REQUIRED:
                raise NoCredential("authorization: an API key is required")
            return
        self.strip.append(_AUTHORIZATION)
        self.tenant = tenant_of(shown)

    def tenant_in(self, plane: Plane) -> str:
        """Whom a request acts for that no control header is looked at for; empty: the plane's own tenant."""
        return self.tenant or plane.tenant

    def carry_trace(self, route: routing_pb2.RouteRequest) -> dict[str, str]:
        """Say whose work it is, as the headers do. They go on to the engine by themselves."""
        trace = trace_context(self.values)
        route.traceparent, route.tracestate = (trace.get(name, "") for name in TRACE_HEADERS)
        return trace

    def apply(self, route: routing_pb2.RouteRequest, plane: Plane) -> None:
        """Complete what the body asks for by what the plane says, and the headers that it trusts.

        Raises InvalidField naming the header.
        """
        route.tenant = self.tenant_in(plane)
        session = self.values.get("x-headway-session")
        if session:
            route.session_id = session[:_MAX_SESSION]
        if not self.strip or not plane.trusts:
            return
        tenant = self._control(plane, Control.FAIRNESS_ID, "inference-fairness-id")
        if tenant and not self.tenant:  # what a key says, no header changes
            route.tenant = tenant
        if model := self._control(plane, Control.MODEL_NAME_REWRITE, "model-name-rewrite"):
            route.model = model
        if objective := self._control(plane, Control.OBJECTIVE, "inference-objective"):
            route.priority = _PRIORITIES.get(objective, routing_pb2.PRIORITY_UNSPECIFIED)
        if ttft := self._control(plane, Control.SLO, "slo-ttft-ms"):
            route.ttft_objective.FromNanoseconds(_nanoseconds("slo-ttft-ms", ttft))
        if tpot := self._control(plane, Control.SLO, "slo-tpot-ms"):
            route.tpot_objective.FromNanoseconds(_nanoseconds("slo-tpot-ms", tpot))

    def _control(self, plane: Plane, control: Control, name: str) -> str:
        if control not in plane.trusts:
            return ""
        own = f"x-{name}" if control is Control.SLO else f"x-gateway-{name}"
        return self.values.get(own) or self.values.get(f"x-llm-d-{name}", "")


def _is_ours(authorization: str) -> bool:
    """Is it, by its beginning, one of our tokens?"""
    words = authorization.split()
    return len(words) > 1 and words[0].lower() == "bearer" and words[1].startswith(TOKEN_PREFIX)


def read_headers(message: pb.HttpHeaders) -> dict[str, str]:
    """The headers of one ext_proc message by name."""
    return {each.key: each.raw_value.decode("utf-8", "replace") or each.value for each in message.headers.headers}


def head_of(headers: dict[str, str]) -> Head:
    """Read a request's headers, their names in lower case."""
    return Head(headers, [name for name in headers if name.startswith(_STRIPPED)])


def subset_hint(metadata: base_pb2.Metadata) -> list[str] | None:
    """The endpoints (`ip:port` or `ip`) that the plane allows; None: it does not limit them.

    Raises NoEndpoints if it allows none.
    """
    if _SUBSET_NAMESPACE not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[_SUBSET_NAMESPACE].fields
    if _SUBSET_KEY not in fields:
        return None
    hint = fields[_SUBSET_KEY]
    names: Iterable[str]
    if hint.WhichOneof("kind") == "list_value":
        names = (each.string_value for each in hint.list_value.values)
    else:
        names = hint.string_value.split(",")
    found = [name for each in names if (name := each.strip())]
    if not found:
        raise NoEndpoints("the plane's subset of endpoints is empty")
    return found


def _nanoseconds(name: str, value: str) -> int:
    try:
        nanoseconds = int(float(value) * 1e6)
        if not 0 <= nanoseconds <= _MAX_NANOSECONDS:
            raise ValueError
    except (ValueError, OverflowError):
        raise InvalidField(name, "is no number of milliseconds") from None
    return nanoseconds
