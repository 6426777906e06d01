"""The decision path as machine code, where `tools/compile.py` made it (ADR 52): found before its source.

It is used only if this Python can load it and it was made of exactly this source. Edit a line of any module that is
compiled, or that a compiled one imports, and all run interpreted until they are compiled again, so that nobody ever
runs something else than they read. Both behave alike; HEADWAY_INTERPRETED=1 asks for the source, for a debugger or a
profiler of Python.
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

__all__ = ["DIRECTORY", "LIBRARY", "MANIFEST", "VARIABLE", "digest", "prefer", "why_interpreted", "why_not"]

VARIABLE: Final = "HEADWAY_INTERPRETED"
DIRECTORY: Final = Path(__file__).parent / "_native"
MANIFEST: Final = "manifest.json"
"""What was compiled: `suffix`, of one Python and platform; `sources`, each module's digest; `files`, their sizes."""
LIBRARY: Final = "headway__mypyc"
"""What all compiled modules share."""

_PACKAGES: Final = Path(__file__).parent.parent


class _Finder:
    """Finds modules by their files."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As importlib asks every finder."""
        file = self.files.get(name)
        if file is None:
            return None
        return importlib.util.spec_from_file_location(name, file, loader=ExtensionFileLoader(name, str(file)))


class _Found:
    why_interpreted = "it was not looked for"


def digest(source: Path) -> str:
    """What tells one source from another."""
    return sha256(source.read_bytes()).hexdigest()


def why_interpreted() -> str:
    """Why this process runs decisions by their source; empty: it runs what was compiled."""
    return _Found.why_interpreted


def why_not(directory: Path = DIRECTORY, packages: Path = _PACKAGES) -> str:
    """Why what is in `directory` cannot stand for the modules below `packages`; empty: it can."""
    if os.environ.get(VARIABLE, "") not in ("", "0"):
        return f"{VARIABLE} is set"
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        suffix = manifest["suffix"]
        sources, files = dict(manifest["sources"]), dict(manifest["files"])
    except FileNotFoundError:
        return "it was not compiled"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error!r}"
    if suffix not in EXTENSION_SUFFIXES:
        return f"it was compiled for another Python ({suffix})"
    for name, made_of in sources.items():
        source = packages / f"{name.replace('.', '/')}.py"
        if not source.is_file() or digest(source) != made_of:
            return f"{name} changed since it was compiled"
    for name, size in files.items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is damaged"
    return ""


def prefer(directory: Path = DIRECTORY) -> None:
    """Let the compiled modules be imported instead of their source, if they are there, whole, and of this source.

    That is for all those that are imported from now on, so it comes first.
    """
    _Found.why_interpreted = why_not(directory)
    if _Found.why_interpreted:
        return
    manifest = json.loads((directory / MANIFEST).read_text())
    names = {name.removesuffix(manifest["suffix"]).replace("/", "."): directory / name for name in manifest["files"]}
    finder = _Finder(names)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(LIBRARY)
    except ImportError as error:  # of another C library, or another processor
        sys.meta_path.remove(finder)
        _Found.why_interpreted = f"it cannot be loaded: {error}"
