"""`headway tenants usage`: what tenants consumed, for bills and charts."""

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Final

import typer
from headway.admin.v1 import admin_pb2 as pb

from headway_cli.command import command
from headway_cli.durations import seconds_of
from headway_cli.errors import UsageProblem
from headway_cli.kinds import TENANTS, qualified
from headway_cli.messages import Plain, to_plain
from headway_cli.output import print_rows
from headway_cli.session import Output, Session

__all__ = ["add_usage"]

_EVERYONE: Final = "-"
_AMOUNTS: Final = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "refusals", "failures")
_LAST: Final = "fail_open_requests"


class By(StrEnum):
    """What a row stands for."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    MODEL = "model"


_INTERVALS: Final = {
    By.MINUTE: pb.USAGE_INTERVAL_MINUTE,
    By.HOUR: pb.USAGE_INTERVAL_HOUR,
    By.DAY: pb.USAGE_INTERVAL_DAY,
    By.MODEL: pb.USAGE_INTERVAL_TOTAL,
}


def add_usage(app: typer.Typer) -> None:
    """Add `usage` to `headway tenants`."""

    @command(
        app,
        "usage",
        help="Show what a tenant consumed, by model and time; `-` is every tenant.",
        example="headway tenants usage acme --since 24h --by hour -o csv",
    )
    def usage(
        session: Session,
        name: Annotated[str, typer.Argument(metavar="NAME", help="The tenant, or - for every one.")] = _EVERYONE,
        since: Annotated[str, typer.Option(help="From so long ago (24h, 7d), or from a time in RFC 3339.")] = "24h",
        until: Annotated[str, typer.Option(help="Up to so long ago, or up to a time; now, if it is left out.")] = "",
        by: Annotated[By, typer.Option(help="What a row stands for; model: all of the time together.")] = By.HOUR,
        model: Annotated[str, typer.Option(help="Only of this model.")] = "",
    ) -> None:
        now = datetime.now(UTC)
        request = pb.ListUsageRequest(
            parent=f"tenants/{_EVERYONE}" if name == _EVERYONE else TENANTS.full_name(name),
            model=qualified("models", model) if model else "",
            interval=_INTERVALS[by],
        )
        request.start_time.FromDatetime(_moment(since, "--since", now))
        request.end_time.FromDatetime(_moment(until, "--until", now) if until else now)
        with session.client() as client:
            rows = [_row(each) for each in client.pages(client.admin.ListUsage, request, "usage")]
        print_rows(session, rows, _columns(session, by), "no usage")


def _columns(session: Session, by: By) -> tuple[str, ...]:
    when = () if by is By.MODEL and session.output is Output.TABLE else ("start_time",)
    return (*when, "tenant", "model", *_AMOUNTS, _LAST)


def _row(usage: pb.Usage) -> dict[str, Plain]:
    row = to_plain(usage)
    names = {"tenant": usage.tenant.removeprefix("tenants/"), "model": usage.model.removeprefix("models/")}
    return {"start_time": row["start_time"], **names, **{name: row[name] for name in (*_AMOUNTS, _LAST)}}


def _moment(text: str, option: str, now: datetime) -> datetime:
    """A time, or so long before now."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        try:
            return now - timedelta(seconds=seconds_of(text, option))
        except OverflowError:
            raise UsageProblem(f"{option}: {text!r} is too long ago") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
