"""`headway top`: the fleet, live, in a terminal.

A look costs the scheduler one GetStatus and its endpoints page by page, so that decisions pass between the pages; usage
by tenant comes from the database, every tenth second at most. Rates are differences between two looks.
"""

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Protocol

import typer
from headway.admin.v1 import admin_pb2
from headway.fleet.v1 import fleet_pb2
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headway_cli.client import Client
from headway_cli.command import command
from headway_cli.errors import CliError, Unreachable
from headway_cli.guards import guards_of
from headway_cli.messages import Plain
from headway_cli.output import console, show, table
from headway_cli.session import Session

__all__ = ["Look", "add_top", "frame", "watch"]

_USAGE_EVERY_S: Final = 10.0
_USAGE_OF: Final = timedelta(minutes=5)
_TABLE_LINES: Final = 4
"""What the endpoints' table has beside its rows: a blank line, its head, a rule, and how many are left out."""
_MOST_TENANTS: Final = 5
_PIPED_LINES: Final = 40


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at one moment. `tenants`: the last minutes' usage, the busiest first."""

    at: float
    status: fleet_pb2.GetStatusResponse
    endpoints: tuple[fleet_pb2.EndpointState, ...] = ()
    tenants: tuple[tuple[str, int, int, int], ...] = field(default_factory=tuple)


def add_top(app: typer.Typer) -> None:
    """Add `headway top`."""

    @command(
        app,
        "top",
        help="Watch the fleet: totals, endpoints by load, tenants, refusals, TTFT. Ctrl-C ends it.",
        example="headway top --once",
    )
    def top(
        session: Session,
        interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
        once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
        count: Annotated[int, typer.Option(min=0, help="End after so many frames; 0: never.")] = 0,
    ) -> None:
        with session.client() as client:
            if once:
                show(frame(_Eye(client).look(), None, _PIPED_LINES))
            else:
                watch(_Eye(client), console(), interval, count)


class Eye(Protocol):
    """Whoever looks."""

    def look(self) -> Look:
        """What there is to see now. Raises CliError."""


class _Eye:
    """Looks at one scheduler again and again."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._tenants: tuple[tuple[str, int, int, int], ...] = ()
        self._counted_at = float("-inf")

    def look(self) -> Look:
        """Raises CliError."""
        client = self._client
        status = client.call(client.fleet.GetStatus, fleet_pb2.GetStatusRequest())
        endpoints = tuple(client.pages(client.fleet.ListEndpoints, fleet_pb2.ListEndpointsRequest(), "endpoints"))
        now = self._clock()
        if now - self._counted_at >= _USAGE_EVERY_S:
            self._counted_at, self._tenants = now, self._usage()
        return Look(now, status, endpoints, self._tenants)

    def _usage(self) -> tuple[tuple[str, int, int, int], ...]:
        """Requests, tokens and refusals by tenant; nothing where the caller may not see it, or Postgres is away."""
        request = admin_pb2.ListUsageRequest(parent="tenants/-", interval=admin_pb2.USAGE_INTERVAL_TOTAL)
        request.start_time.FromDatetime(datetime.now(UTC) - _USAGE_OF)
        found: dict[str, list[int]] = {}
        try:
            for each in self._client.pages(self._client.admin.ListUsage, request, "usage"):
                sums = found.setdefault(each.tenant.removeprefix("tenants/"), [0, 0, 0])
                sums[0] += each.requests
                sums[1] += each.prompt_tokens + each.completion_tokens
                sums[2] += each.refusals
        except Unreachable:
            raise
        except CliError:
            return ()
        busiest = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
        return tuple((tenant, *sums) for tenant, sums in busiest)  # type: ignore[misc]  # three sums


def watch(eye: Eye, screen: Console, interval_s: float, count: int) -> None:
    """In place on a terminal, whatever its size is by then; one below the other in a pipe."""
    before: Look | None = None
    with Live(console=screen, screen=True, auto_refresh=False) if screen.is_terminal else nullcontext() as live:
        for number in itertools.count(1):
            try:
                now = eye.look()
                shown = frame(now, before, screen.size.height if screen.is_terminal else _PIPED_LINES)
                before = now
            except Unreachable as error:  # it may be the one that restarts
                shown = Text(f"{error.message}\ntrying again", style="red")
            if live is not None:
                live.update(shown, refresh=True)
            else:
                show(shown)
            if number == count:
                return
            time.sleep(interval_s)


def frame(now: Look, before: Look | None, lines: int) -> RenderableType:
    """One picture, at most so many lines high. Without a look before it, counts stand in for rates."""
    head = _head(now, before)
    parts: list[RenderableType] = [head]
    tenants = now.tenants[:_MOST_TENANTS]
    if tenants:
        parts.append(_tenants(tenants))
    taken = len(head.plain.splitlines()) + (len(tenants) + 1 if tenants else 0)
    room = max(1, lines - taken - _TABLE_LINES)
    ordered = sorted(now.endpoints, key=lambda each: (-each.inflight, -each.queued_prefill_ms, each.name))
    if ordered:
        parts += [Text(), table([_row(each) for each in ordered[:room]], tuple(_row(ordered[0])), _STYLES)]
        if len(ordered) > room:
            parts.append(Text(f"… and {len(ordered) - room} more, less busy", style="dim"))
    else:
        parts.append(Text("no endpoints: headway doctor says why", style="yellow"))
    return Group(*parts)


def _head(now: Look, before: Look | None) -> Text:
    status = now.status
    running = sum(each.inflight for each in now.endpoints)
    line = Text()
    line.append(f"{status.scheduler} {status.version}", style="bold")
    line.append(f"  {datetime.now(UTC):%H:%M:%S} UTC  {status.standing or 'leader'}\n")
    line.append(f"nodes {status.nodes}   endpoints {status.endpoints_healthy}/{status.endpoints} healthy   ")
    line.append(f"in flight {running}   reserved {status.reservations}   held {status.holds}\n")
    line.append(f"{_routes(now, before)}   ")
    line.append(f"{_ttft(now, before)}\n")
    line.append(f"refusals: {_refusals(now, before)}\n")
    for warning in _warnings(status):
        line.append(f"{warning}\n", style="bold yellow")
    line.rstrip()
    return line


def _routes(now: Look, before: Look | None) -> str:
    count = now.status.routes
    if before is None or now.at <= before.at or count < before.status.routes:
        return f"routes {count}"
    return f"routes {(count - before.status.routes) / (now.at - before.at):.1f}/s"


def _ttft(now: Look, before: Look | None) -> str:
    """The mean since the look before, else since the start; the predicted one beside it."""
    status, past = now.status, before.status if before is not None else fleet_pb2.GetStatusResponse()
    count = status.first_tokens - past.first_tokens
    if count <= 0:
        return "TTFT -"
    seen = (status.ttft_ms_sum - past.ttft_ms_sum) / count
    predicted = (status.predicted_ttft_ms_sum - past.predicted_ttft_ms_sum) / count
    return f"TTFT {seen:.0f} ms, predicted {predicted:.0f} ms"


def _refusals(now: Look, before: Look | None) -> str:
    past = dict(before.status.refusals) if before is not None else {}
    told = []
    for reason, count in sorted(now.status.refusals.items(), key=lambda item: (-item[1], item[0])):
        more = count - past.get(reason, 0) if before is not None else 0
        told.append(f"{reason} {count}{f' (+{more})' if more else ''}")
    return ", ".join(told) or "none"


def _warnings(status: fleet_pb2.GetStatusResponse) -> list[str]:
    names = ", ".join("everybody" if name == "*" else name for name in status.bypassed)
    tripped = ", ".join(each.name for each in status.strategies if each.tripped)
    told = {
        f"BYPASSED: {names}": bool(names),
        "Postgres cannot be reached": not status.store_available,
        "most agents are silent: guards are frozen": status.guards_frozen,
        f"tripped: {tripped}": bool(tripped),
        "draining": status.draining,
    }
    return [warning for warning, stands in told.items() if stands]


def _tenants(tenants: tuple[tuple[str, int, int, int], ...]) -> Table:
    grid = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    grid.add_column("tenant, last 5 min", no_wrap=True)
    for name in ("requests", "tokens", "refused"):
        grid.add_column(name, justify="right")
    for tenant, requests, tokens, refused in tenants:
        grid.add_row(Text(tenant), str(requests), str(tokens), Text(str(refused), style="red" if refused else ""))
    return grid


_STYLES: Final = {"healthy": {"yes": "green", "no": "red"}}


def _row(endpoint: Any) -> dict[str, Plain]:  # an EndpointState
    kv = endpoint.sample.kv_use
    return {
        "endpoint": endpoint.name.removeprefix("endpoints/"),
        "node": endpoint.node.removeprefix("nodes/"),
        "healthy": endpoint.healthy,
        "in flight": endpoint.inflight,
        "queued ms": round(endpoint.queued_prefill_ms),
        "KV %": round(100 * kv.value) if kv.WhichOneof("kind") == "value" else None,
        "hit %": round(100 * endpoint.hit_ratio) if endpoint.HasField("hit_ratio") else None,
        "models": list(endpoint.models),
        "guards": guards_of(endpoint),
    }
