"""`apply`, `diff` and `export`: the desired state as a file."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from headway_cli.client import Client
from headway_cli.command import command
from headway_cli.documents import Document, exported, parse_documents, to_document
from headway_cli.errors import CliError, FileProblems, Problem, UsageProblem
from headway_cli.messages import Plain
from headway_cli.output import print_plain, print_text
from headway_cli.plan import Action, Verb, live_resources, plan
from headway_cli.session import Output, Session

__all__ = ["add_file_commands"]

_File = Annotated[list[str], typer.Option("--file", "-f", help="A YAML file, or - for stdin; may be repeated.")]
_Prune = Annotated[
    bool,
    typer.Option(
        "--prune",
        help="Also delete what the files do not name, of the kinds they name. Kept always: what the installation "
        "made, discovered models, credentials.",
    ),
]
_PAST: Final = {Verb.CREATE: "created", Verb.UPDATE: "updated", Verb.DELETE: "deleted", Verb.NOTHING: "unchanged"}
_FUTURE: Final = {
    Verb.CREATE: "would be created",
    Verb.UPDATE: "would be updated",
    Verb.DELETE: "would be deleted",
    Verb.NOTHING: "unchanged",
}
_SIGNS: Final = {Verb.CREATE: "+", Verb.UPDATE: "~", Verb.DELETE: "-"}
_MISSING: Final = frozenset({"UNKNOWN_RESOURCE", "UNKNOWN_TENANT", "UNKNOWN_MODEL"})


def add_file_commands(app: typer.Typer) -> None:
    """Add them to the root."""
    command(
        app,
        "apply",
        help="Make the scheduler hold what the files say. What is so already is left alone.",
        example="headway apply -f fleet.yaml --dry-run",
    )(_apply)
    command(app, "diff", help="Show what apply would change.", example="headway diff -f fleet.yaml --exit-code")(_diff)
    command(
        app,
        "export",
        help="Print the desired state as a file for apply. Tokens are not in it: only their hashes are kept.",
        example="headway export > fleet.yaml",
    )(_export)


def _apply(
    session: Session,
    file: _File,
    prune: _Prune = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the scheduler check each change and write nothing.")
    ] = False,
) -> None:
    documents = _read(file)
    results: list[dict[str, Plain]] = []
    with session.client() as client:
        actions = plan(documents, live_resources(client), prune=prune)
        coming = {action.message.name for action in actions if action.verb is Verb.CREATE}
        try:
            for action in actions:
                token = _perform(client, action, coming if dry_run else None)
                results.append(_result(action, dry_run, token))
                if session.output is Output.TABLE:
                    print_text(_line(action, dry_run, token))
        finally:
            if session.output is not Output.TABLE:
                print_plain(session, results)


def _diff(
    session: Session,
    file: _File,
    prune: _Prune = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if there is a difference.")] = False,
) -> None:
    documents = _read(file)
    with session.client() as client:
        actions = [a for a in plan(documents, live_resources(client), prune=prune) if a.verb is not Verb.NOTHING]
    if session.output is not Output.TABLE:
        print_plain(session, [_difference(action) for action in actions])
    for action in actions if session.output is Output.TABLE else ():
        print_text(f"{_SIGNS[action.verb]} {action.message.name}")
        for name, change in action.changes.items():
            if action.verb is not Verb.CREATE:
                print_text(f"    - {name}: {json.dumps(change.live, ensure_ascii=False)}")
            if action.verb is not Verb.DELETE:
                print_text(f"    + {name}: {json.dumps(change.file, ensure_ascii=False)}")
    if actions and exit_code:
        raise typer.Exit(1)


def _export(session: Session) -> None:
    with session.client() as client:
        resources = list(live_resources(client).values())
    if session.output is Output.JSON:
        print_plain(session, [to_document(kind, message) for kind, message in resources])
    else:
        sys.stdout.write(exported(resources))


def _read(files: list[str]) -> list[Document]:
    """All documents of all files. Raises UsageProblem, FileProblems."""
    documents = []
    for name in files:
        try:
            text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageProblem(f"--file: {name}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageProblem(f"--file: {name}: is no text in UTF-8") from None
        documents += parse_documents(text, "stdin" if name == "-" else name)
    first_at: dict[str, str] = {}
    for document in documents:
        name = document.message.name
        if name in first_at:
            text = f"is there already, at {first_at[name]}"
            raise FileProblems([Problem(document.place, f"{document.kind.name} {name}", "name", text)])
        first_at[name] = document.place
    return documents


def _perform(client: Client, action: Action, coming: set[str] | None) -> str:
    """Do it, or with `coming` only have it checked; returns a new credential's token. Names the place in errors.

    A check fails for want of what the same file creates; that is no fault, so what is `coming` is forgiven.
    """
    check = coming is not None
    try:
        if action.verb is Verb.CREATE:
            return str(getattr(client.create(action.kind, action.message, validate_only=check), "token", ""))
        if action.verb is Verb.UPDATE:
            client.update(action.kind, action.message, list(action.changes), validate_only=check)
        if action.verb is Verb.DELETE and not check:
            client.delete(action.kind, action.message.name, etag=action.message.etag)
    except CliError as error:
        if coming and error.reason in _MISSING and error.facts.get("resource") in coming:
            return ""
        error.message = f"{action.place or 'prune'}: {action.message.name}: {error.message}"
        raise
    return ""


def _result(action: Action, dry_run: bool, token: str) -> dict[str, Plain]:
    result: dict[str, Any] = {"name": action.message.name, "action": action.verb.value, "fields": list(action.changes)}
    if dry_run:
        result["dry_run"] = True
    return {**result, "token": token} if token else result


def _line(action: Action, dry_run: bool, token: str) -> str:
    what = (_FUTURE if dry_run else _PAST)[action.verb]
    fields = f" ({', '.join(action.changes)})" if action.verb is Verb.UPDATE else ""
    shown = f"; token, shown this once: {token}" if token else ""
    return f"{action.message.name} {what}{fields}{shown}"


def _difference(action: Action) -> dict[str, Plain]:
    changes = {name: {"live": change.live, "file": change.file} for name, change in action.changes.items()}
    return {"name": action.message.name, "action": action.verb.value, "changes": changes}
