"""`apply`, `diff` and `export`: the desired state as a file."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from headway.admin.v1 import admin_pb2

from headway_cli.client import Client
from headway_cli.command import command
from headway_cli.documents import Document, exported, parse_documents, to_document
from headway_cli.errors import CliError, FileProblems, Problem, Refusals, Unreachable, UsageProblem
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
_SCOPE: Final = frozenset({"tenant", "model", "gpu_group", "shadow"})
_MEMBERS: Final = frozenset({"selector", "nodes", "endpoints", "all"})


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
        _check(client, actions)
        try:
            for action in actions:
                token = "" if dry_run else _perform(client, action)
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


def _check(client: Client, actions: list[Action]) -> None:
    """Have the scheduler check every change, and write none. Raises what it refuses, all of it.

    Each change is checked alone. One that is refused only for want of what the same file does before it is no fault.
    """
    coming = {action.message.name for action in actions if action.verb is Verb.CREATE}
    updated: dict[str, Action] = {}
    refused = []
    for action in actions:
        try:
            _perform(client, action, validate_only=True)
        except CliError as error:
            if isinstance(error, Unreachable) or error.retry_after_s is not None:
                raise  # the scheduler's state, not the file's fault
            if not (_comes(error, coming) or _makes_room(error, action, updated)):
                refused.append(error)
        if action.verb is Verb.UPDATE:
            updated[action.message.name] = action
    if len(refused) == 1:
        raise refused[0]
    if refused:
        raise Refusals(refused)


def _comes(error: CliError, coming: set[str]) -> bool:
    """Is it refused for want of what the file creates?"""
    return error.reason in _MISSING and error.facts.get("resource") in coming


def _makes_room(error: CliError, action: Action, updated: dict[str, Action]) -> bool:
    """Is what stands in the way among what the file updates before?"""
    message = action.message
    if action.kind.name == "Binding" and error.reason == "GROUP_NOT_FREE":
        user = error.facts.get("user", "")
        if "/bindings/" not in user:  # a tenant whose other dedicated group has an endpoint of this one, too
            modes = (other for other in updated.values() if other.message.name.startswith(f"{user}/bindings/"))
            groups = (other for other in updated.values() if other.kind.name == "GpuGroup")
            return any("mode" in other.changes for other in modes) or any(
                _MEMBERS & each.changes.keys() for each in groups
            )
        # Another tenant's binding to the group, which is dedicated; a dedicated one bears no other of any mode.
        holder = updated.get(user)
        return message.mode != admin_pb2.BINDING_MODE_DEDICATED and holder is not None and "mode" in holder.changes
    if action.kind.name == "StrategyBinding" and error.reason == "IN_USE":
        # Another one has the scope; the scheduler does not say which.
        others = (other for other in updated.values() if other.kind is action.kind)
        return error.facts.get("resource") != message.name and any(_SCOPE & other.changes.keys() for other in others)
    if action.kind.name == "Model" and (
        error.reason == "DUPLICATE_NAME" or error.facts.get("field", "").startswith("model.aliases[")
    ):
        names = {message.name.partition("/")[2], *message.aliases}
        aliases = (other.changes.get("aliases") for other in updated.values() if other.kind is action.kind)
        given_up = (set(_items(change.live)) - set(_items(change.file)) for change in aliases if change)
        return any(names & dropped for dropped in given_up)
    return False


def _items(value: Plain) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _perform(client: Client, action: Action, *, validate_only: bool = False) -> str:
    """Do it, or only have it checked; returns a new credential's token. Names the place in errors."""
    try:
        if action.verb is Verb.CREATE:
            response = client.create(action.kind, action.message, validate_only=validate_only)
            return str(getattr(response, "token", ""))
        if action.verb is Verb.UPDATE:
            client.update(action.kind, action.message, list(action.changes), validate_only=validate_only)
        if action.verb is Verb.DELETE and not validate_only:
            client.delete(action.kind, action.message.name, etag=action.message.etag)
    except CliError as error:
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
