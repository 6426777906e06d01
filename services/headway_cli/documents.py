"""YAML files of resources: one document each, `kind` and `name` first. Every problem is told with file, line and field.

```yaml
kind: Tenant
name: acme
weight: 2
```
"""

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from headway_cli.errors import FileProblems, Problem
from headway_cli.kinds import KINDS, OUTPUTS, Kind, by_name
from headway_cli.messages import Plain, from_plain, to_plain

__all__ = ["Document", "exported", "parse_documents", "settings", "to_document"]

_LARGEST_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Document:
    """One resource of a file, as the scheduler would answer it; `place` is `fleet.yaml:12`."""

    kind: Kind
    message: Any  # of the kind
    place: str


@dataclass(frozen=True, slots=True)
class _Raw:
    """A YAML document: its values, and the line of each path in it."""

    number: int
    line: int
    values: Plain
    lines: Mapping[str, int]
    repeated: tuple[str, ...]


def parse_documents(text: str, source: str) -> list[Document]:
    """Read a file's documents. Raises FileProblems with everything that is wrong in it."""
    reader = _Reader(source)
    documents = reader.read(text)
    if reader.problems:
        raise FileProblems(reader.problems)
    return documents


def settings(kind: Kind, message: Any) -> dict[str, Plain]:  # a message of the kind
    """What an admin may set and has a value, in order. What is empty and what is absent are the same."""
    stated = {*kind.defaults, *kind.initial}
    every, set_ones = to_plain(message), to_plain(message, defaults=False)
    values = {name: every[name] if name in stated else set_ones.get(name) for name in kind.fields}
    return {name: value for name, value in values.items() if name in stated or value not in (None, {}, [])}


def to_document(kind: Kind, message: Any) -> dict[str, Plain]:  # a message of the kind
    """The resource as a document."""
    return {"kind": kind.name, "name": message.name, **settings(kind, message)}


def exported(resources: Iterable[tuple[Kind, Any]]) -> str:
    """A file of these resources."""
    documents = [to_document(kind, message) for kind, message in resources]
    return yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=120)


class _Reader:
    """Turns text into documents and collects the problems on the way."""

    def __init__(self, source: str) -> None:
        self.problems: list[Problem] = []
        self._source = source

    def read(self, text: str) -> list[Document]:
        documents: list[Document] = []
        try:
            for raw in _raw_documents(text):
                document = self._document(raw)
                if document is not None:
                    documents.append(document)
        except yaml.YAMLError as error:
            self.problems.append(self._not_yaml(error))
        return documents

    def _document(self, raw: _Raw) -> Document | None:
        if raw.values is None:
            return None
        for path in raw.repeated:
            self._wrong(raw, path, "is there twice")
        if not isinstance(raw.values, dict):
            self._wrong(raw, "", "must be a mapping with `kind` and `name`")
            return None
        values = dict(raw.values)
        kind = self._kind(raw, values.pop("kind", None))
        name = values.pop("name", None)
        if not isinstance(name, str) or not name:
            self._wrong(raw, "name", "is required, as text" if name is None else f"must be text, not {name!r}")
            name = ""
        if kind is None:
            return None
        message = kind.new(name)
        found = from_plain(message, values, readonly=OUTPUTS)
        for problem in found:
            self._wrong(raw, problem.path, problem.text)
        if found or not name:
            return None
        kind.normalize(message)
        return Document(kind, message, f"{self._source}:{raw.line}")

    def _kind(self, raw: _Raw, name: Plain) -> Kind | None:
        kind = by_name(name) if isinstance(name, str) else None
        if kind is None:
            known = ", ".join(each.name for each in KINDS)
            self._wrong(raw, "kind", f"is required: one of {known}" if name is None else f"{name!r} is none of {known}")
        return kind

    def _wrong(self, raw: _Raw, path: str, text: str) -> None:
        line = _line_of(raw, path)
        self.problems.append(Problem(f"{self._source}:{line}", _subject(raw), path, text))

    def _not_yaml(self, error: yaml.YAMLError) -> Problem:
        mark = getattr(error, "problem_mark", None)
        place = self._source if mark is None else f"{self._source}:{mark.line + 1}:{mark.column + 1}"
        text = getattr(error, "problem", None) or str(error)
        return Problem(place, "", "", f"is no YAML: {text}")


def _subject(raw: _Raw) -> str:
    values = raw.values if isinstance(raw.values, dict) else {}
    kind, name = values.get("kind"), values.get("name")
    shown = " ".join(str(part) for part in (kind, name) if isinstance(part, str))
    return f"document {raw.number} ({shown})" if shown else f"document {raw.number}"


def _line_of(raw: _Raw, path: str) -> int:
    """The line of the path, or of the nearest thing around it."""
    while path:
        if path in raw.lines:
            return raw.lines[path]
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return raw.line


def _raw_documents(text: str) -> Iterator[_Raw]:
    if len(text) > _LARGEST_BYTES:
        raise yaml.YAMLError(f"longer than {_LARGEST_BYTES} characters")
    loader = yaml.SafeLoader(io.StringIO(text))
    try:
        number = 0
        while loader.check_node():
            number += 1
            node: Any = loader.get_node()  # not None after check_node, which the stubs do not say
            lines: dict[str, int] = {}
            repeated: list[str] = []
            _walk(node, "", lines, repeated, ())
            values = loader.construct_document(node)
            yield _Raw(number, node.start_mark.line + 1, values, lines, tuple(repeated))
    except (ValueError, RecursionError) as error:  # a date that is none, a nest without end
        raise yaml.YAMLError(str(error)) from None
    finally:
        loader.dispose()


def _walk(node: yaml.Node, path: str, lines: dict[str, int], repeated: list[str], above: tuple[yaml.Node, ...]) -> None:
    """Note the line of everything below the node, and the keys that are there twice."""
    if node in above:
        raise yaml.YAMLError("an alias stands within what it names")
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            where = f"{path}.{key.value}" if path else str(key.value)
            if where in seen:
                repeated.append(where)
            seen.add(where)
            lines[where] = key.start_mark.line + 1
            _walk(value, where, lines, repeated, (*above, node))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            where = f"{path}[{index}]"
            lines[where] = value.start_mark.line + 1
            _walk(value, where, lines, repeated, (*above, node))
