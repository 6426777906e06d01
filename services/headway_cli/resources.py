"""list, get, create, update and delete of every kind of resource, made from the table in `kinds`."""

from typing import Annotated, Any

import typer

from headway_cli.command import command, group
from headway_cli.errors import UsageProblem
from headway_cli.kinds import KINDS, OUTPUTS, Kind
from headway_cli.messages import Plain, assign, from_plain, to_plain
from headway_cli.output import print_item, print_plain, print_rows, print_text
from headway_cli.session import Output, Session

__all__ = [
    "Assignments",
    "DryRun",
    "Etag",
    "Name",
    "assigned",
    "done",
    "edited",
    "list_command",
    "resource_apps",
    "show_token",
]

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name, with or without the collection.")]
Assignments = Annotated[
    list[str], typer.Argument(metavar="FIELD=VALUE…", help="Fields to set; nothing after the = takes a value away.")
]
Etag = Annotated[str, typer.Option(help="Do it only if the resource still has this etag.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Let the scheduler check everything and write nothing.")]


def resource_apps() -> dict[str, typer.Typer]:
    """One group of commands for each kind, by name."""
    return {kind.command: _app(kind) for kind in KINDS}


def assigned(kind: Kind, message: Any, assignments: list[str]) -> list[str]:
    """Alter the message by `field=value` arguments; returns the fields touched. Raises UsageProblem."""
    values = {name: value for name, value in to_plain(message, defaults=False).items() if name not in OUTPUTS}
    try:
        touched = assign(message, values, assignments)
    except ValueError as error:
        raise UsageProblem(str(error)) from None
    etag = message.etag
    message.Clear()
    problems = from_plain(message, values, readonly=OUTPUTS)
    readonly = [name for name in touched if name in OUTPUTS or name == "name"]
    if problems or readonly:
        lines = [f"{problem.path}: {problem.text}" for problem in problems]
        raise UsageProblem("; ".join(lines + [f"{name}: is not for you to set" for name in readonly]))
    kind.normalize(message)
    message.etag = etag
    return touched


def edited(session: Session, kind: Kind, name: str, assignments: list[str], **options: Any) -> Any:
    """Update a resource by `field=value` arguments and return it."""
    with session.client() as client:
        return client.edit(kind, kind.full_name(name), lambda message: assigned(kind, message, assignments), **options)


def done(session: Session, message: Any, what: str) -> None:
    """Say what was done to a resource: a line for people, the resource for programs."""
    if session.output is Output.TABLE:
        print_text(f"{message.name} {what}")
    else:
        print_plain(session, to_plain(message))


def _app(kind: Kind) -> typer.Typer:
    app = group(kind.command, f"Manage {kind.what}.")
    _add_reads(app, kind)
    _add_create(app, kind)
    _add_update(app, kind)
    _add_delete(app, kind)
    return app


def list_command(app: typer.Typer, kind: Kind, example: str) -> None:
    """Add `list`."""

    @command(app, "list", help=f"List {kind.what}.", example=example)
    def list_(session: Session) -> None:
        with session.client() as client:
            rows = [_shown(session, message) for message in client.list_all(kind)]
        print_rows(session, rows, kind.columns, f"no {kind.command.replace('-', ' ')}")


def _add_reads(app: typer.Typer, kind: Kind) -> None:
    list_command(app, kind, f"headway {kind.command} list -o json")

    @command(
        app,
        "get",
        help=f"Show one {kind.singular}.",
        example=f"headway {kind.command} get {kind.example.split()[0]} -o yaml",
    )
    def get(session: Session, name: Name) -> None:
        with session.client() as client:
            print_item(session, _shown(session, client.get(kind, kind.full_name(name))))


def _shown(session: Session, message: Any) -> dict[str, Plain]:
    """The resource: all of it for programs, without the zeros inside its parts for people."""
    plain = to_plain(message)
    if session.output is Output.TABLE:
        set_ones = to_plain(message, defaults=False)
        plain.update({name: set_ones.get(name) for name, value in plain.items() if isinstance(value, dict)})
    return plain


def _add_create(app: typer.Typer, kind: Kind) -> None:
    @command(
        app,
        "create",
        help=f"Create a {kind.singular}. Fields: {', '.join(kind.fields)}.",
        example=f"headway {kind.command} create {kind.example}",
    )
    def create(session: Session, name: Name, assignments: Assignments = [], dry_run: DryRun = False) -> None:  # noqa: B006 -- Typer copies it
        message = kind.new(kind.full_name(name))
        _create(session, kind, message, assignments, dry_run)


def _create(session: Session, kind: Kind, message: Any, assignments: list[str], dry_run: bool) -> None:
    assigned(kind, message, assignments)
    with session.client() as client:
        response = client.create(kind, message, validate_only=dry_run)
    created, token = getattr(response, kind.noun), getattr(response, "token", "")
    if token:
        show_token(session, created, token, "created")
    else:
        done(session, created, "is valid" if dry_run else "created")


def show_token(session: Session, credential: Any, token: str, what: str) -> None:
    """Show a new token, the only time that anyone sees it."""
    if session.output is Output.TABLE:
        print_text(f"{credential.name} {what}")
        print_text(f"token: {token}")
        print_text("Keep it now: only its hash is stored, and it is shown this once.")
    else:
        print_plain(session, {**to_plain(credential), "token": token})


def _add_update(app: typer.Typer, kind: Kind) -> None:
    name_, *fields = kind.example.split()

    @command(
        app,
        "update",
        help=f"Change fields of a {kind.singular}, and no others. Fields: {', '.join(kind.fields)}.",
        example=f"headway {kind.command} update {name_} {' '.join(fields)}",
    )
    def update(
        session: Session, name: Name, assignments: Assignments, etag: Etag = "", dry_run: DryRun = False
    ) -> None:
        message = edited(session, kind, name, assignments, etag=etag, validate_only=dry_run)
        done(session, message, "is valid" if dry_run else "updated")


def _add_delete(app: typer.Typer, kind: Kind) -> None:
    help_ = f"Delete a {kind.singular}."
    example = f"headway {kind.command} delete {kind.example.split()[0]}"

    def delete(session: Session, name: Name, etag: Etag = "", force: bool = False) -> None:
        full = kind.full_name(name)
        with session.client() as client:
            client.delete(kind, full, etag=etag, force=force)
        if session.output is Output.TABLE:
            print_text(f"{full} deleted")
        else:
            print_plain(session, {"name": full, "deleted": True})

    if kind.can_force:
        force_option = Annotated[bool, typer.Option("--force", help="Also delete what hangs on it: bindings.")]

        @command(app, "delete", help=help_, example=example)
        def delete_with_force(session: Session, name: Name, etag: Etag = "", force: force_option = False) -> None:
            delete(session, name, etag, force)

    else:

        @command(app, "delete", help=help_, example=example)
        def delete_alone(session: Session, name: Name, etag: Etag = "") -> None:
            delete(session, name, etag)
