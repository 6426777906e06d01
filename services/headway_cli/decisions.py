"""`headway decisions`: what was decided, why, and what came of it."""

import json
import sys
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from headway.fleet.v1 import fleet_pb2 as pb
from rich.console import Group
from rich.text import Text

from headway_cli.client import Client
from headway_cli.command import command, group
from headway_cli.durations import moment_of
from headway_cli.messages import Plain, to_plain
from headway_cli.output import cell, print_plain, print_rows, show, table, to_yaml
from headway_cli.session import Output, Session
from headway_cli.why import why_in_words

__all__ = ["decisions_app", "show_decision"]

_COLUMNS: Final = (
    "time",
    "request",
    "tenant",
    "model",
    "strategy",
    "endpoint",
    "matched",
    "prompt",
    "predicted ms",
    "TTFT ms",
    "held ms",
    "outcome",
)
_STYLES: Final = {"": {"➜": "bold green"}}

_TenantName = Annotated[str, typer.Option("--tenant", help="Only of this tenant.")]
_ModelName = Annotated[str, typer.Option("--model", "-m", help="Only for this model.")]
_EndpointName = Annotated[str, typer.Option("--endpoint", help="Only those that it was chosen for, or that it served.")]
_Outcome = Annotated[str, typer.Option(help="in_flight, success, cancelled, server_error, …, or refused.")]
_Since = Annotated[str, typer.Option(help="Only from then on: 10m, 2h or 2027-01-31T12:00:00Z.")]


_Id = Annotated[str, typer.Argument(metavar="ID", help="A request id or a reservation id.")]


def decisions_app() -> typer.Typer:
    """The group."""
    app = group("decisions", "See what was decided, why, and what came of it.")

    @command(
        app,
        "list",
        help="List the newest decisions and refusals, or follow them as they are made.",
        example="headway decisions list --tenant acme --outcome refused",
    )
    def list_(
        session: Session,
        tenant: _TenantName = "",
        model: _ModelName = "",
        endpoint: _EndpointName = "",
        outcome: _Outcome = "",
        since: _Since = "",
        limit: Annotated[int | None, typer.Option(min=1, help="How many at most; 50, and with --follow all.")] = None,
        follow: Annotated[
            bool, typer.Option("--follow", "-f", help="Show them as they are made, until stopped.")
        ] = False,
        share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of --follow: only this part of them.")] = 1.0,
    ) -> None:
        wanted = pb.DecisionFilter(tenant=tenant, model=model, endpoint=endpoint, outcome=outcome)
        if since:
            wanted.since.FromDatetime(moment_of(since, "--since", datetime.now(UTC)))
        with session.client() as client:
            if follow:
                _follow(session, client, pb.WatchDecisionsRequest(filter=wanted, share=share), limit)
            else:
                _list(session, client, wanted, limit or 50)

    @command(
        app,
        "show",
        help="Show one decision: every candidate, its cost and guards, and what came of it.",
        example="headway decisions show 3f2a9c",
    )
    def show_(session: Session, name: _Id) -> None:
        with session.client() as client:
            show_decision(session, client, name)

    return app


def show_decision(session: Session, client: Client, name: str) -> None:
    """Print a past decision."""
    found = client.call(client.fleet.GetDecision, pb.GetDecisionRequest(id=name)).decision
    if session.output is not Output.TABLE:
        print_plain(session, to_plain(found))
        return
    rows = [_candidate(each) for each in found.candidates]
    lines = [_headline(found)]
    if found.HasField("decision"):
        lines.append(why_in_words(found.decision))
    if found.candidates_dropped:
        lines.append("its candidates are forgotten: newer decisions took their room")
    lines.append(_outcome(found))
    text = Text("\n".join(lines) + "\n")
    show(Group(table(rows, tuple(rows[0]), _STYLES), text) if rows else text)


def _list(session: Session, client: Client, wanted: pb.DecisionFilter, limit: int) -> None:
    found: list[pb.DecisionRecord] = []
    request = pb.ListDecisionsRequest(filter=wanted, page_size=min(limit, 1000))
    while len(found) < limit:
        response = client.call(client.fleet.ListDecisions, request)
        found.extend(response.decisions)
        request.page_token = response.next_page_token
        if not request.page_token:
            break
    found = found[:limit]
    if session.output is Output.TABLE:
        print_rows(session, [_row(each) for each in found], _COLUMNS, "no decisions")
    else:
        print_plain(session, [to_plain(each) for each in found])


def _follow(session: Session, client: Client, request: pb.WatchDecisionsRequest, limit: int | None) -> None:
    """A line each: of columns, of JSON, or a YAML document."""
    shown = 0
    for response in client.stream(client.fleet.WatchDecisions, request):
        if response.lost:
            typer.echo(f"{response.lost} decisions were not shown: too many at once", err=True)
        for each in response.decisions:
            sys.stdout.write(_line(session, each))
            shown += 1
            if shown == limit:
                return
        sys.stdout.flush()


def _line(session: Session, record: pb.DecisionRecord) -> str:
    if session.output is Output.JSON:
        return f"{json.dumps(to_plain(record), ensure_ascii=False)}\n"
    if session.output is Output.YAML:
        return f"---\n{to_yaml(to_plain(record))}"
    row = _row(record)
    told = [f"{name} {cell(row[name])}" for name in ("matched", "prompt", "predicted ms", "held ms")]
    place = row["endpoint"] or row["outcome"]
    parts = [row["time"], row["request"], f"{row['tenant']}/{row['model']}", row["strategy"], f"➜ {place}", *told]
    return "  ".join(str(part) for part in parts if part) + "\n"


def _row(record: pb.DecisionRecord) -> dict[str, Plain]:
    decision = record.decision
    return {
        "time": record.time.ToDatetime(tzinfo=UTC).astimezone().strftime("%H:%M:%S.%f")[:-3],
        "request": record.request_id,
        "tenant": record.tenant.removeprefix("tenants/"),
        "model": record.model,
        "strategy": decision.strategy.removeprefix("strategies/"),
        "endpoint": record.endpoint.removeprefix("endpoints/"),
        "matched": decision.matched_tokens if record.HasField("decision") else None,
        "prompt": decision.prompt_tokens if record.HasField("decision") else None,
        "predicted ms": _known(decision, "predicted_ttft_ms"),
        "TTFT ms": _known(record, "ttft_ms"),
        "held ms": round(decision.held_ms or record.refusal.held_ms, 1) or None,
        "outcome": record.refusal.reason or record.outcome,
    }


def _candidate(candidate: pb.Candidate) -> dict[str, Plain]:
    return {
        "": "➜" if candidate.chosen else " ",
        "endpoint": candidate.endpoint.removeprefix("endpoints/"),
        "cost": round(candidate.cost, 3),
        "TTFT ms": _known(candidate, "predicted_ttft_ms"),
        "matched": candidate.matched_tokens,
        "guards": list(candidate.soft_guards),
    }


def _headline(record: pb.DecisionRecord) -> str:
    at = record.time.ToDatetime(tzinfo=UTC).astimezone().isoformat(timespec="milliseconds")
    what = f"{record.request_id} of {record.tenant.removeprefix('tenants/')} for {record.model} at {at}"
    return f"{what}: {record.endpoint.removeprefix('endpoints/') or 'refused'}"


def _outcome(record: pb.DecisionRecord) -> str:
    """What came of it, in a sentence."""
    if record.HasField("refusal"):
        refusal = record.refusal
        after = f", to be tried again after {refusal.retry_after_s:.1f} s" if refusal.HasField("retry_after_s") else ""
        held = f" after a hold of {refusal.held_ms:.0f} ms" if refusal.held_ms else ""
        return f"refused{held}: {refusal.reason}: {refusal.message}{after}"
    parts = [record.outcome.replace("_", " ")]
    if record.moved:
        parts.append(f"served by {record.served_by.removeprefix('endpoints/')} instead")
    if record.HasField("ttft_ms"):
        predicted = _known(record.decision, "predicted_ttft_ms")
        parts.append(f"TTFT {cell(round(record.ttft_ms, 1))} ms of {cell(predicted)} predicted")
    if record.HasField("duration_ms"):
        parts.append(f"{cell(round(record.duration_ms, 1))} ms in all")
    usage = record.usage
    if usage.HasField("completion_tokens"):
        parts.append(f"{usage.completion_tokens} tokens answered")
    if usage.HasField("cached_tokens"):
        parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached")
    return "; ".join(parts)


def _known(message: Any, field: str) -> float | None:  # a message with such an optional field
    return round(getattr(message, field), 1) if message.HasField(field) else None
