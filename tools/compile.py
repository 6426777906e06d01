"""Compile the decision path to machine code, by mypyc (docs/adr/0052).

`python tools/compile.py` does nothing when what is there was made of this very source. It needs a C compiler and
Python's headers; without them, and where it fails, it says so, and everything runs interpreted: slower, not otherwise.
`--strict`: that is a failure.
"""

import ast
import contextlib
import json
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ROOT / "services"
WANTED = os.environ.get("HEADWAY_INTERPRETED", "") in ("", "0")
os.environ["HEADWAY_INTERPRETED"] = "1"  # what is imported here is the source
sys.path.insert(0, str(SERVICES))

from headway_scheduler.native import DIRECTORY, LIBRARY, MANIFEST, digest, why_not  # noqa: E402

PACKAGES = ("admission", "fleet", "index", "learning", "metrics", "record")
"""All of these that mypyc can take."""
MORE = ("strategies/view", "strategies/registry", "strategies/stopwatch")
"""Strategies are small, and classes of pydantic's."""
INTERPRETED = (
    "(msgspec.Struct",  # mypyc drops a class's options (`frozen`), and annotations that msgspec reads back
    "from headway_scheduler.compiling import",  # numba compiles it from source
    "(BaseModel)",  # pydantic wants its own metaclass
    "@runtime_checkable",
)
"""What a module says that cannot be compiled."""
SLOWER = "the scheduler runs interpreted, and a decision costs 1.7 times as much"


class CompileError(Exception):
    """It cannot be done here; the message says why."""


def modules() -> list[Path]:
    """What is compiled."""
    scheduler = SERVICES / "headway_scheduler"
    wanted = [path for package in PACKAGES for path in sorted((scheduler / package).glob("*.py"))]
    wanted += [scheduler / f"{each}.py" for each in MORE]
    return [path for path in wanted if path.stat().st_size and not _is_interpreted(path)]


def sources() -> dict[str, str]:
    """The digest of what is compiled and of all that it imports of ours: mypyc copies constants."""
    found: dict[str, str] = {}
    left = modules()
    while left:
        path = left.pop()
        name = ".".join(path.relative_to(SERVICES).with_suffix("").parts)
        if name not in found:
            found[name] = digest(path)
            left += _imported(path)
    return dict(sorted(found.items()))


def _imported(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headway_"):
            file = SERVICES / f"{node.module.replace('.', '/')}.py"
            if file.is_file():
                yield file


def _is_interpreted(path: Path) -> bool:
    text = path.read_text()
    return any(each in text for each in INTERPRETED)


def is_fresh() -> bool:
    """Is what is there whole, and of this source?"""
    os.environ["HEADWAY_INTERPRETED"] = "0"
    try:
        if why_not():
            return False
        return bool(json.loads((DIRECTORY / MANIFEST).read_text())["sources"] == sources())
    finally:
        os.environ["HEADWAY_INTERPRETED"] = "1"


def missing() -> str:
    """What this machine lacks; empty: nothing."""
    compiler = (os.environ.get("CC", "").split() or str(sysconfig.get_config_var("CC") or "cc").split())[0]
    if shutil.which(compiler) is None:
        return f"no C compiler ({compiler})"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "no Python.h (python3-dev)"
    if not os.access(DIRECTORY.parent, os.W_OK):
        return f"{DIRECTORY.parent} cannot be written"
    return ""


@contextlib.contextmanager
def kept(output: IO[bytes]) -> Iterator[None]:
    """What is said meanwhile, by this process and those that it starts, goes there."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, saved in zip((1, 2), before, strict=True):
            os.dup2(saved, number)
            os.close(saved)


def build(into: Path, work: Path) -> None:
    """Make all extension modules."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    os.chdir(SERVICES)
    cache = ROOT / ".mypy_cache" if os.access(ROOT, os.W_OK) else work / "cache"
    arguments = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={cache}", *map(str, modules())]
    group = LIBRARY.removesuffix("__mypyc")
    extensions = mypycify(arguments, opt_level="2", debug_level="0", target_dir=str(work / "c"), group_name=group)
    for extension in extensions:  # another compiler warns of other things
        extension.extra_compile_args = [each for each in extension.extra_compile_args if each != "-Werror"]
    distribution = Distribution({"name": "headway", "ext_modules": extensions})
    command = distribution.get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(into), str(work / "o")  # type: ignore[attr-defined]
    distribution.run_command("build_ext")


def install(made: Path, made_of: dict[str, str]) -> None:
    """Put it in its place, whole or not at all."""
    files = {str(file.relative_to(made)): file.stat().st_size for file in sorted(made.rglob("*")) if file.is_file()}
    manifest = {"suffix": sysconfig.get_config_var("EXT_SUFFIX"), "sources": made_of, "files": files}
    beside = Path(tempfile.mkdtemp(prefix=".native-", dir=DIRECTORY.parent))
    try:
        fresh = beside / "fresh"
        shutil.copytree(made, fresh)
        (fresh / MANIFEST).write_text(json.dumps(manifest))
        if DIRECTORY.exists():
            DIRECTORY.rename(beside / "old")
        with contextlib.suppress(FileExistsError):  # somebody else was quicker
            fresh.rename(DIRECTORY)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def compile_all() -> None:
    """Compile what is not compiled yet. Raises CompileError."""
    if not WANTED or is_fresh():
        return
    lacking = missing()
    if lacking:
        raise CompileError(lacking)
    print("Compiling the decision path, once: one to three minutes", flush=True)
    made_of = sources()
    with tempfile.TemporaryDirectory(prefix="headway-compile-") as work, tempfile.TemporaryFile() as output:
        try:
            with kept(output):
                build(Path(work) / "made", Path(work))
            install(Path(work) / "made", made_of)
        except (Exception, SystemExit) as error:
            output.seek(0)
            said = output.read().decode(errors="replace")[-4000:]
            raise CompileError(f"{said}\nit cannot be compiled: {error}") from error


def main() -> int:
    """Compile, or say why not."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        compile_all()
    except CompileError as error:
        print(f"{error}: {SLOWER}")
        return int("--strict" in sys.argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
