"""What it takes to make the scheduler hold what a file says."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headway_cli.client import Client
from headway_cli.documents import Document, settings
from headway_cli.kinds import KINDS, Kind
from headway_cli.messages import Plain

__all__ = ["Action", "Change", "Verb", "live_resources", "plan"]

Live = dict[str, tuple[Kind, Any]]


class Verb(StrEnum):
    """What happens to a resource."""

    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"
    NOTHING = "unchanged"


@dataclass(frozen=True, slots=True)
class Change:
    """One field: what it is, and what the file says."""

    live: Plain
    file: Plain


@dataclass(frozen=True, slots=True)
class Action:
    """One step. `message` is what to write (to delete: what is there); `place` is where the file says so."""

    verb: Verb
    kind: Kind
    message: Any
    changes: dict[str, Change]
    place: str = ""


def live_resources(client: Client) -> Live:
    """All desired resources by name, in an order in which each refers only to those before it."""
    return {message.name: (kind, message) for kind in KINDS for message in client.list_all(kind)}


def plan(documents: Sequence[Document], live: Live, *, prune: bool) -> list[Action]:
    """Creations and updates in the order of references, then deletions in the opposite one.

    Pruning deletes what the file does not name, of the kinds that it does name, and never what is `kept`.
    """
    ordered = sorted(documents, key=lambda document: KINDS.index(document.kind))
    actions = [_action(document, live) for document in ordered]
    if prune:
        named = {document.message.name for document in documents}
        kinds = {document.kind.name for document in documents}
        actions += [
            Action(Verb.DELETE, kind, message, _changes(kind, message, kind.message()))
            for name, (kind, message) in reversed(live.items())
            if name not in named and kind.name in kinds and not kind.kept(message)
        ]
    return actions


def _action(document: Document, live: Live) -> Action:
    kind, message = document.kind, document.message
    found = live.get(message.name)
    if found is None:
        return Action(Verb.CREATE, kind, message, _changes(kind, kind.message(), message), document.place)
    changes = _changes(kind, found[1], message)
    message.etag = found[1].etag
    return Action(Verb.UPDATE if changes else Verb.NOTHING, kind, message, changes, document.place)


def _changes(kind: Kind, live: Any, wanted: Any) -> dict[str, Change]:
    before, after = settings(kind, live), settings(kind, wanted)
    return {
        name: Change(before.get(name), after.get(name)) for name in kind.fields if before.get(name) != after.get(name)
    }
