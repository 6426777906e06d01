"""The decision path as machine code, where `tools/compile.py` made it (ADR 52): found before its source.

It is used only if this Python can load it and it was made of exactly this source. Edit a line of any compiled module
and all of them run interpreted until they are compiled again, so that nobody ever runs something else than they read.
Both behave alike; HEADWAY_INTERPRETED=1 asks for the source, for a debugger or a profiler of Python.
"""

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

__all__ = ["DIRECTORY", "MANIFEST", "VARIABLE", "digest", "prefer", "why_interpreted"]

VARIABLE: Final = "HEADWAY_INTERPRETED"
DIRECTORY: Final = Path(__file__).parent / "_native"
MANIFEST: Final = "manifest.json"
"""What was compiled: `suffix` of the files, for one Python and platform, and `sources`: each module's digest."""

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


def digest(source: Path) -> str:
    """What tells one source from another."""
    return sha256(source.read_bytes()).hexdigest()


def why_interpreted(directory: Path = DIRECTORY, packages: Path = _PACKAGES) -> str:
    """Why what is compiled there cannot stand for the modules below `packages`; empty: it can."""
    if os.environ.get(VARIABLE, "") not in ("", "0"):
        return f"{VARIABLE} is set"
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        suffix, sources = manifest["suffix"], manifest["sources"]
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
    return ""


def prefer(directory: Path = DIRECTORY) -> bool:
    """Let the compiled modules be imported instead of their source. False: they are not there, or not of this source.

    For all those that are imported from now on, so it comes first.
    """
    if why_interpreted(directory):
        return False
    suffix = json.loads((directory / MANIFEST).read_text())["suffix"]
    found = {file.relative_to(directory): file for file in directory.rglob(f"*{suffix}")}
    files = {str(path).removesuffix(suffix).replace(os.sep, "."): file for path, file in found.items()}
    sys.meta_path.insert(0, _Finder(files))
    return True
