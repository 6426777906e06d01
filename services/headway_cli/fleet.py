"""`headway fleet`: the live fleet, once or watched."""

import itertools
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from headway.fleet.v1 import fleet_pb2 as pb
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from headway_cli.client import Client
from headway_cli.command import command, group
from headway_cli.guards import guards_of
from headway_cli.messages import Plain, to_plain
from headway_cli.output import console, print_plain, show, table, to_yaml
from headway_cli.session import Output, Session

__all__ = ["fleet_app"]

_Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again until interrupted.")]
_Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between two looks of --watch.")]
_Count = Annotated[int, typer.Option(min=0, help="Stop watching after so many looks; 0: never.")]
_Read = Callable[[Client], tuple[Plain, RenderableType]]

_GOOD: Final = {"yes": "green", "no": "red"}
_STYLES: Final = {
    "connected": _GOOD,
    "healthy": _GOOD,
    "state": {"cordoned": "yellow", "draining": "yellow"},
    "enabled": {"no": "yellow"},
    "tripped": {"yes": "red"},
}


def fleet_app() -> typer.Typer:
    """The group."""
    app = group("fleet", "See the live fleet.")
    _add(app, "status", "Show how the scheduler does: counts, refusals, strategies.", lambda client: _status(client))
    _add(app, "nodes", "List nodes and their devices as agents see them now.", lambda client: _nodes(client))

    @command(
        app,
        "endpoints",
        help="List endpoints with their load, guards and caches.",
        example="headway fleet endpoints --model llama-3-8b --watch",
    )
    def endpoints(
        session: Session,
        model: Annotated[str, typer.Option(help="Only those that serve this model.")] = "",
        watch: _Watch = False,
        interval: _Interval = 1.0,
        count: _Count = 0,
    ) -> None:
        _show(session, lambda client: _endpoints(client, model), watch, interval, count)

    return app


def _add(app: typer.Typer, name: str, help_: str, read: _Read) -> None:
    @command(app, name, help=help_, example=f"headway fleet {name} --watch")
    def show(session: Session, watch: _Watch = False, interval: _Interval = 1.0, count: _Count = 0) -> None:
        _show(session, read, watch, interval, count)


def _show(session: Session, read: _Read, watch: bool, interval_s: float, count: int) -> None:
    """Print what `read` finds, once or, watching, every `interval_s`: a screen, a JSON line or a YAML document each."""
    with session.client() as client:
        plain, renderable = read(client)
        if not watch and session.output is Output.TABLE:
            show(renderable)
        elif not watch:
            print_plain(session, plain)
        elif session.output is Output.TABLE:
            _watch_table(client, read, renderable, interval_s, count)
        else:
            _watch_stream(session, client, read, plain, interval_s, count)


def _watch_table(client: Client, read: _Read, first: RenderableType, interval_s: float, count: int) -> None:
    """In place on a terminal; one below the other in a pipe."""
    screen = console()
    with Live(first, console=screen, auto_refresh=False) if screen.is_terminal else nullcontext() as live:
        renderable = first
        for look in itertools.count(1):
            if live is None:
                show(renderable)
                sys.stdout.flush()
            else:
                live.update(renderable, refresh=True)
            if look == count:
                return
            time.sleep(interval_s)
            renderable = read(client)[1]


def _watch_stream(session: Session, client: Client, read: _Read, plain: Plain, interval_s: float, count: int) -> None:
    for look in itertools.count(1):
        line = (
            f"---\n{to_yaml(plain)}" if session.output is Output.YAML else f"{json.dumps(plain, ensure_ascii=False)}\n"
        )
        sys.stdout.write(line)
        sys.stdout.flush()
        if look == count:
            return
        time.sleep(interval_s)
        plain = read(client)[0]


def _status(client: Client) -> tuple[Plain, RenderableType]:
    status = client.call(client.fleet.GetStatus, pb.GetStatusRequest())
    strategies = [
        {
            "strategy": each.name.removeprefix("strategies/"),
            "algorithm": each.algorithm,
            "enabled": each.enabled,
            "tripped": each.tripped,
            "decisions": each.decisions,
            "failures": each.failures,
            "last error": each.last_error,
        }
        for each in status.strategies
    ]
    refusals = ", ".join(f"{reason} {count}" for reason, count in sorted(status.refusals.items())) or "none"
    lines = [
        f"scheduler {status.scheduler} (epoch {status.epoch}, version {status.version}), up {_uptime(status)}",
        f"{status.nodes} nodes, {status.endpoints} endpoints, {status.endpoints_healthy} healthy",
        f"{status.reservations} reservations, {status.holds} held, {status.routes} routes; refusals: {refusals}",
    ]
    if not status.store_available:
        lines.append("Postgres cannot be reached: Route goes on from memory, writes fail")
    if status.guards_frozen:
        lines.append("most agents went stale at once: guards are frozen")
    if status.standing in ("standby", "taking_over"):
        lines.append(f"it does not lead: {status.standing.replace('_', ' ')}")
    if status.bypassed:
        names = ", ".join("everybody" if name == "*" else name for name in status.bypassed)
        lines.append(f"bypassed: {names}")
    if status.draining:
        lines.append("the scheduler is draining")
    text = Text("\n".join(lines) + "\n")
    return to_plain(status), Group(text, table(strategies, tuple(strategies[0]), _STYLES)) if strategies else text


def _uptime(status: pb.GetStatusResponse) -> str:
    seconds = int((datetime.now(UTC) - status.started.ToDatetime(tzinfo=UTC)).total_seconds())
    minutes, seconds = divmod(max(0, seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _nodes(client: Client) -> tuple[Plain, RenderableType]:
    nodes = list(client.pages(client.fleet.ListNodes, pb.ListNodesRequest(), "nodes"))
    rows = [_node_row(node) for node in nodes]
    return [to_plain(node) for node in nodes], _table(rows, "no nodes")


def _node_row(node: pb.NodeState) -> dict[str, Plain]:
    products = sorted({device.device.product for device in node.devices})
    failed = [
        f"{device.device.uuid}: {device.health_detail or device.health}"
        for device in node.devices
        if device.health != "ok"
    ]
    return {
        "node": node.name.removeprefix("nodes/"),
        "connected": node.connected,
        "state": node.state,
        "devices": len(node.devices),
        "product": products,
        "max GPU use": _largest(node, "utilization"),
        "max °C": _largest(node, "temperature_c"),
        "failed devices": failed,
        "agent": node.agent_version,
        "age s": round(node.sample_age_ms / 1e3, 1),
        "clock skew s": round(node.clock_skew_s, 3),
        "labels": dict(sorted(node.labels.items())),
    }


def _largest(node: pb.NodeState, field: str) -> float | None:
    values = [_measured(getattr(device.sample, field)) for device in node.devices]
    return max((value for value in values if value is not None), default=None)


def _measured(measurement: Any) -> float | None:  # a Measurement
    return round(measurement.value, 3) if measurement.WhichOneof("kind") == "value" else None


def _endpoints(client: Client, model: str) -> tuple[Plain, RenderableType]:
    request = pb.ListEndpointsRequest(model=model)
    endpoints = list(client.pages(client.fleet.ListEndpoints, request, "endpoints"))
    rows = [_endpoint_row(endpoint) for endpoint in endpoints]
    return [to_plain(endpoint) for endpoint in endpoints], _table(rows, "no endpoints")


def _endpoint_row(endpoint: pb.EndpointState) -> dict[str, Plain]:
    return {
        "endpoint": endpoint.name.removeprefix("endpoints/"),
        "node": endpoint.node.removeprefix("nodes/"),
        "models": list(endpoint.models),
        "healthy": endpoint.healthy,
        "state": endpoint.state,
        "guards": guards_of(endpoint),
        "in flight": endpoint.inflight,
        "queued ms": round(endpoint.queued_prefill_ms, 1),
        "KV use": _measured(endpoint.sample.kv_use),
        "pressure": round(endpoint.memory_pressure, 3) if endpoint.HasField("memory_pressure") else None,
        "hit ratio": round(endpoint.hit_ratio, 3) if endpoint.HasField("hit_ratio") else None,
        "blocks": endpoint.index_blocks,
        "groups": [name.removeprefix("gpuGroups/") for name in endpoint.gpu_groups],
        "age s": round(endpoint.sample_age_ms / 1e3, 1) if endpoint.HasField("sample_age_ms") else None,
    }


def _table(rows: list[dict[str, Plain]], empty: str) -> RenderableType:
    return table(rows, tuple(rows[0]), _STYLES) if rows else Text(empty)
