"""Nodes and endpoints as admins handle them (cordon, drain, uncordon), and the audit trail."""

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from headway.admin.v1 import admin_pb2 as pb
from headway.fleet.v1 import fleet_pb2 as fleet_pb

from headway_cli.client import Client
from headway_cli.command import command, group
from headway_cli.durations import moment_of, seconds_of
from headway_cli.errors import NotInTime, Unreachable
from headway_cli.kinds import qualified
from headway_cli.messages import to_plain
from headway_cli.output import print_item, print_plain, print_rows, print_text
from headway_cli.resources import Name, done
from headway_cli.session import Output, Session

__all__ = ["add_audit", "live_apps"]

_POLL_S: Final = 0.5
_RETURN_S: Final = 10.0
"""How long data planes may take to tell a scheduler that leads anew what they hold."""
_NOT_THE_LEADER: Final = "this scheduler does not lead, and what is in flight only the leader knows"
_Force = Annotated[bool, typer.Option("--force", help="Even if that breaks a model's disruption budget.")]
_STATES: Final = {
    "cordon": (pb.SCHEDULING_STATE_CORDONED, "cordoned", "Send no new requests to"),
    "uncordon": (pb.SCHEDULING_STATE_ACTIVE, "active", "Send requests again to"),
}


@dataclass(frozen=True, slots=True)
class _LiveKind:
    """Nodes or endpoints: agents announce them, admins only say whether they may be used."""

    name: str
    plural: str
    columns: tuple[str, ...]
    example: str

    @property
    def noun(self) -> str:
        return self.name.lower()

    @property
    def collection(self) -> str:
        return self.plural.lower()

    def request(self, verb: str, **fields: Any) -> Any:  # a request of this verb
        return getattr(pb, f"{verb}Request")(**fields)


_NODES: Final = _LiveKind(
    "Node",
    "Nodes",
    ("name", "state", "connected", "endpoints", "devices", "inflight", "agent_version", "labels"),
    "gpu-7",
)
_ENDPOINTS: Final = _LiveKind(
    "Endpoint",
    "Endpoints",
    ("name", "state", "healthy", "inflight", "node", "models", "labels"),
    "10.0.0.7:8000@0",
)


def live_apps() -> dict[str, typer.Typer]:
    """`headway nodes` and `headway endpoints`."""
    apps = {kind.collection: _app(kind) for kind in (_NODES, _ENDPOINTS)}
    command(
        apps["nodes"],
        "delete",
        help="Forget a node that is not connected.",
        example="headway nodes delete gpu-7",
    )(_delete_node)
    return apps


def _app(kind: _LiveKind) -> typer.Typer:
    app = group(kind.collection, f"See and cordon {kind.collection}.")
    _add_reads(app, kind)
    for verb, (state, what, help_) in _STATES.items():
        _add_switch(app, kind, verb, state, what, help_)
    _add_drain(app, kind)
    return app


def _add_reads(app: typer.Typer, kind: _LiveKind) -> None:
    @command(app, "list", help=f"List {kind.collection}.", example=f"headway {kind.collection} list")
    def list_(session: Session) -> None:
        with session.client() as client:
            method = getattr(client.admin, f"List{kind.plural}")
            found = list(client.pages(method, kind.request(f"List{kind.plural}"), kind.collection))
        print_rows(session, [to_plain(each) for each in found], kind.columns, f"no {kind.collection}")

    @command(app, "get", help=f"Show one {kind.noun}.", example=f"headway {kind.collection} get {kind.example} -o json")
    def get(session: Session, name: Name) -> None:
        with session.client() as client:
            print_item(session, to_plain(_get(client, kind, name)))


def _add_switch(
    app: typer.Typer, kind: _LiveKind, verb: str, state: pb.SchedulingState.ValueType, what: str, help_: str
) -> None:
    @command(app, verb, help=f"{help_} this {kind.noun}.", example=f"headway {kind.collection} {verb} {kind.example}")
    def switch(session: Session, name: Name, force: _Force = False) -> None:
        with session.client() as client:
            done(session, _set_state(client, kind, name, state, force), what)


def _add_drain(app: typer.Typer, kind: _LiveKind) -> None:
    @command(
        app,
        "drain",
        help=f"Let this {kind.noun} run dry: no new requests, those in flight finish.",
        example=f"headway {kind.collection} drain {kind.example} --wait --deadline 5m",
    )
    def drain(
        session: Session,
        name: Name,
        wait: Annotated[bool, typer.Option("--wait", help="Wait until it is empty, and say how it goes.")] = False,
        deadline: Annotated[str, typer.Option(help="Wait so long at most (5m); then exit with 4.")] = "",
        force: _Force = False,
    ) -> None:
        limit_s = seconds_of(deadline, "--deadline") if deadline else None
        with session.client() as client:
            message = _set_state(client, kind, name, pb.SCHEDULING_STATE_DRAINING, force)
            if wait or limit_s is not None:
                message = _wait_empty(message.name, lambda: _get(client, kind, name), lambda: _leader(client), limit_s)
            elif not message.inflight and not _leader(client):
                done(session, message, f"draining; {_NOT_THE_LEADER}")
                return
        left = f"{message.inflight} in flight" if message.inflight else "empty"
        done(session, message, f"draining, {left}")


def _leader(client: Client) -> str:
    """Which start of which scheduler answers; empty if it does not lead."""
    status = client.call(client.fleet.GetStatus, fleet_pb.GetStatusRequest())
    return f"{status.scheduler}.{status.epoch}" if status.standing == "leader" else ""


def _wait_empty(name: str, read: Callable[[], Any], leader: Callable[[], str], limit_s: float | None) -> Any:
    """Read until nothing is in flight, and tell each change. Raises NotInTime; it stays draining then.

    A scheduler that is away for a while is waited for: it may be the one that moves. One that leads anew knows what is
    in flight when the data planes are back.
    """
    started, told, before, doubtful_until = time.monotonic(), None, None, 0.0
    while True:
        now = time.monotonic()
        try:
            leads = leader()
            message = read()
            leads = leads if leader() == leads else ""
        except Unreachable as error:
            leads, message, left = "", None, error.message
        else:
            left = f"{message.inflight} in flight"
            if not leads:
                left = _NOT_THE_LEADER
        if not leads or before not in (None, leads) or (before is None and _is_unseen(message)):
            doubtful_until = now + _RETURN_S
        before = leads
        if message is not None and leads and not message.inflight:
            if now >= doubtful_until:
                return message
            left = "the scheduler leads anew, or just started; data planes tell it what they hold"
        if left != told:
            told = left
            sys.stderr.write(f"{name}: {left}\n")
            sys.stderr.flush()
        waited_s = time.monotonic() - started
        if limit_s is not None and waited_s >= limit_s:
            raise NotInTime("NOT_EMPTY", f"{name}: {left} after {waited_s:.0f} s; it goes on draining")
        time.sleep(_POLL_S if limit_s is None else min(_POLL_S, limit_s - waited_s))


def _is_unseen(message: Any) -> bool:  # a Node or an Endpoint
    """Has no agent said anything of it since the scheduler started?"""
    if isinstance(message, pb.Node):
        return not message.connected and not message.endpoints
    return isinstance(message, pb.Endpoint) and not message.node


def _get(client: Client, kind: _LiveKind, name: str) -> Any:  # a Node or an Endpoint
    method = getattr(client.admin, f"Get{kind.name}")
    request = kind.request(f"Get{kind.name}", name=qualified(kind.collection, name))
    return getattr(client.call(method, request), kind.noun)


def _set_state(client: Client, kind: _LiveKind, name: str, state: pb.SchedulingState.ValueType, force: bool) -> Any:
    method = getattr(client.admin, f"Set{kind.name}State")
    request = kind.request(f"Set{kind.name}State", name=qualified(kind.collection, name), state=state, force=force)
    return getattr(client.write(method, request), kind.noun)


def _delete_node(session: Session, name: Name) -> None:
    full = qualified("nodes", name)
    with session.client() as client:
        client.write(client.admin.DeleteNode, pb.DeleteNodeRequest(name=full))
    if session.output is Output.TABLE:
        print_text(f"{full} forgotten")
    else:
        print_plain(session, {"name": full, "deleted": True})


def add_audit(app: typer.Typer) -> None:
    """Add `headway audit`."""

    @command(app, "audit", help="Show who changed what, newest first.", example="headway audit --limit 20")
    def audit(
        session: Session,
        limit: Annotated[int, typer.Option(min=1, help="How many entries at most.")] = 50,
        resource: Annotated[str, typer.Option(help="Only of this resource, and what is below it: tenants/acme.")] = "",
        principal: Annotated[str, typer.Option(help="Only what this credential wrote.")] = "",
        since: Annotated[str, typer.Option(help="Only from then on: 2h, 7d or 2027-01-31T12:00:00Z.")] = "",
    ) -> None:
        request = pb.ListAuditEntriesRequest(resource=resource, principal=principal.removeprefix("credentials/"))
        if since:
            request.since.FromDatetime(moment_of(since, "--since", datetime.now(UTC)))
        with session.client() as client:
            entries = client.pages(client.admin.ListAuditEntries, request, "audit_entries")
            rows = [to_plain(entry) for entry in itertools.islice(entries, limit)]
        print_rows(session, rows, ("id", "time", "principal", "method", "resource"), "no entries")
