"""Print the part of requirements.lock that some packages need, hashes included.

    python tools/lock_subset.py 'headway[scheduler,agent]'     what these extras of pyproject.toml need
    python tools/lock_subset.py hatchling                      what a locked package needs

It follows the `# via` notes that uv writes into the lock, so it needs nothing but Python: an image is built from it.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRAS = re.compile(r"\[([^\]]*)\]")
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Locked:
    """One entry of the lock: its text, and the packages that want it."""

    text: str
    wanted_by: frozenset[str]


def read_lock(text: str) -> dict[str, Locked]:
    """The lock's entries by normalised name."""
    entries: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line[:1].isalnum():
            lines = entries.setdefault(normalised(line), [])
        if line[:1] != "#":
            lines.append(line)
    return {name: Locked("\n".join(entry), _wanted_by(entry)) for name, entry in entries.items()}


def _wanted_by(entry: Iterable[str]) -> frozenset[str]:
    notes = (line.strip().removeprefix("#").strip().removeprefix("via").strip() for line in entry if "    #" in line)
    return frozenset(normalised(note) for note in notes if note)


def normalised(requirement: str) -> str:
    """The name that a requirement starts with, as PEP 503 writes it."""
    found = _NAME.match(requirement)
    if found is None:
        raise SystemExit(f"{requirement!r} is no requirement")
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def direct(requirement: str, project: Mapping[str, list[str]], own_name: str) -> set[str]:
    """The locked packages that a requirement names: itself, or what our own extras list. "" is what all need."""
    if normalised(requirement) != own_name:
        return {normalised(requirement)}
    extras = _EXTRAS.search(requirement)
    named = ["", *(extra.strip() for extra in extras[1].split(","))] if extras else [""]
    return {name for extra in named for inner in project[extra] for name in direct(inner, project, own_name)}


def subset(lock: Mapping[str, Locked], roots: set[str]) -> list[str]:
    """The entries of the roots and of all they need, in the lock's order."""
    missing = sorted(roots - lock.keys())
    if missing:
        raise SystemExit(f"not in the lock: {', '.join(missing)}")
    chosen: set[str] = set()
    new = roots
    while new:
        chosen |= new
        new = {name for name, locked in lock.items() if name not in chosen and locked.wanted_by & new}
    return [locked.text for name, locked in lock.items() if name in chosen]


def main(requirements: list[str]) -> None:
    """Print the subset. The lock and pyproject.toml lie beside this file or above it."""
    directory = _HERE if (_HERE / "requirements.lock").exists() else _HERE.parent
    project = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    wanted = {"": project["dependencies"], **project["optional-dependencies"]}
    lock = read_lock((directory / "requirements.lock").read_text())
    roots = {name for requirement in requirements for name in direct(requirement, wanted, project["name"])}
    print("\n".join(subset(lock, roots)))


if __name__ == "__main__":
    main(sys.argv[1:])
