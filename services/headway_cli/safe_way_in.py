"""`headway bypass` and `headway observe`: out of the way in one command, and what a way in would gain."""

from typing import Annotated, Any

import typer
from headway.admin.v1 import admin_pb2
from headway.fleet.v1 import fleet_pb2

from headway_cli.command import command, group
from headway_cli.kinds import qualified
from headway_cli.messages import Plain, to_plain
from headway_cli.output import print_item, print_rows, print_text
from headway_cli.session import Output, Session

__all__ = ["bypass_app", "observe_app"]

_Tenant = Annotated[str, typer.Option("--tenant", help="Only this tenant's requests; else everybody's.")]


def bypass_app() -> typer.Typer:
    """`headway bypass`."""
    app = group("bypass", "Take Headway out of requests' way at once, and put it back.")

    @command(app, "on", help="Let data planes balance by themselves.", example="headway bypass on")
    def on(session: Session, tenant: _Tenant = "") -> None:
        _set(session, tenant, on=True)

    @command(app, "off", help="Let Headway route again.", example="headway bypass off --tenant acme")
    def off(session: Session, tenant: _Tenant = "") -> None:
        _set(session, tenant, on=False)

    @command(app, "show", help="Show whose requests are left alone.", example="headway bypass show -o json")
    def show(session: Session) -> None:
        with session.client() as client:
            status = client.call(client.fleet.GetStatus, fleet_pb2.GetStatusRequest())
        _print(session, list(status.bypassed))

    return app


def _set(session: Session, tenant: str, *, on: bool) -> None:
    name = qualified("tenants", tenant) if tenant else ""
    with session.client() as client:
        answer = client.write(client.admin.SetBypass, admin_pb2.SetBypassRequest(tenant=name, bypass=on))
    _print(session, list(answer.bypassed))


def _print(session: Session, bypassed: list[str]) -> None:
    if session.output is not Output.TABLE:
        print_item(session, {"bypassed": list[Plain](bypassed)})
        return
    told = ", ".join("everybody" if name == "*" else name for name in bypassed)
    print_rows(session, [], (), f"bypassed: {told}" if told else "nothing is bypassed: Headway routes")


def observe_app() -> typer.Typer:
    """`headway observe`."""
    app = group("observe", "See what Headway would do with requests that others place.")

    @command(
        app,
        "report",
        help="Show, by tenant and model, what Headway would have done since the scheduler started, and gained.",
        example="headway observe report",
    )
    def report(session: Session) -> None:
        with session.client() as client:
            answer = client.call(client.fleet.GetObservations, fleet_pb2.GetObservationsRequest())
        if session.output in (Output.JSON, Output.YAML):
            print_item(session, to_plain(answer))
            return
        rows = [_row(each) for each in answer.observations]
        print_rows(session, rows, tuple(rows[0]) if rows else (), "nothing was watched yet: docs/safe-way-in.md")
        if answer.unpriced and session.output is Output.TABLE:
            told = ", ".join(f"{reason} {count}" for reason, count in sorted(answer.unpriced.items()))
            print_text(f"not priced: {told}")

    return app


def _row(seen: Any) -> dict[str, Plain]:  # an Observation
    placed = seen.requests - seen.elsewhere - seen.refused
    return {
        "tenant": seen.tenant,
        "model": seen.model,
        "requests": seen.requests,
        "agreed": _percent(seen.agreed, placed),
        "would hold": seen.held,
        "would refuse": seen.refused,
        "elsewhere": seen.elsewhere,
        "TTFT there ms": _mean(seen.predicted_served_ms, seen.compared),
        "TTFT ours ms": _mean(seen.predicted_chosen_ms, seen.compared),
        "gain": _percent(seen.predicted_served_ms - seen.predicted_chosen_ms, seen.predicted_served_ms),
        "cached there": _percent(seen.hit_tokens_served, seen.prompt_tokens),
        "cached ours": _percent(seen.hit_tokens_chosen, seen.prompt_tokens),
        "TTFT seen ms": _mean(seen.actual_ms, seen.timed),
        "predicted for it ms": _mean(seen.predicted_timed_ms, seen.timed),
    }


def _mean(total: float, count: int) -> float | None:
    return round(total / count, 1) if count else None


def _percent(part: float, whole: float) -> str | None:
    return f"{100 * part / whole:.0f} %" if whole else None
