"""`headway auth`: who am I, and credentials' tokens made, rotated and revoked."""

from typing import Annotated, Final

import typer
from headway.admin.v1 import admin_pb2 as pb
from headway.fleet.v1 import fleet_pb2

from headway_cli.command import command, group
from headway_cli.durations import seconds_of
from headway_cli.kinds import CREDENTIALS
from headway_cli.messages import to_plain
from headway_cli.output import print_item
from headway_cli.resources import Name, done, list_command, show_token
from headway_cli.session import Session

__all__ = ["add_token_verbs", "auth_app"]

_MOST_S: Final = 1e9
"""What a message can carry; the scheduler refuses far less."""


def auth_app() -> typer.Typer:
    """`headway auth`."""
    app = group("auth", "Who may call: see, rotate and revoke credentials.")
    command(app, "whoami", help="Say what the credential that you show is good for.", example="headway auth whoami")(
        _whoami
    )
    list_command(app, CREDENTIALS, "headway auth list")
    add_token_verbs(app, "auth")
    return app


def add_token_verbs(app: typer.Typer, name: str) -> None:
    """Add `rotate` and `revoke` to a group of this name."""
    command(
        app,
        "rotate",
        help="Give a credential a new token; the one before stays valid for a while.",
        example=f"headway {name} rotate gateway-1 --overlap 1h",
    )(_rotate)
    command(
        app,
        "revoke",
        help="Refuse a credential from now on: its tokens, its certificate, and every stream that it has open.",
        example=f"headway {name} revoke gateway-1",
    )(_revoke)


def _whoami(session: Session) -> None:
    with session.client() as client:
        print_item(session, to_plain(client.call(client.fleet.WhoAmI, fleet_pb2.WhoAmIRequest())))


def _rotate(
    session: Session,
    name: Name,
    overlap: Annotated[
        str, typer.Option(help="How long the token of before stays valid, at most 30d; 0: not at all.")
    ] = "1h",
) -> None:
    request = pb.RotateCredentialRequest(name=CREDENTIALS.full_name(name))
    request.overlap.FromMilliseconds(int(min(seconds_of(overlap, "--overlap"), _MOST_S) * 1e3))
    with session.client() as client:
        response = client.write(client.admin.RotateCredential, request)
    show_token(session, response.credential, response.token, "rotated")


def _revoke(session: Session, name: Name) -> None:
    with session.client() as client:
        request = pb.RevokeCredentialRequest(name=CREDENTIALS.full_name(name))
        done(session, client.write(client.admin.RevokeCredential, request).credential, "revoked")
