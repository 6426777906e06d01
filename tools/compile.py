"""Compile the decision path to machine code, by mypyc (docs/adr/0052).

`python tools/compile.py` does nothing when what is there was made of this very source. It needs a C compiler and
Python's headers; without them it says so, and everything runs interpreted: slower, not otherwise.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ROOT / "services"
sys.path.insert(0, str(SERVICES))
os.environ["HEADWAY_INTERPRETED"] = "1"

from headway_scheduler.native import DIRECTORY, MANIFEST, digest  # noqa: E402

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


def modules() -> dict[str, Path]:
    """What is compiled, by name."""
    scheduler = SERVICES / "headway_scheduler"
    wanted = [path for package in PACKAGES for path in sorted((scheduler / package).glob("*.py"))]
    wanted += [scheduler / f"{each}.py" for each in MORE]
    kept = (path for path in wanted if path.stat().st_size and not _is_interpreted(path))
    return {str(path.relative_to(SERVICES).with_suffix("")).replace("/", "."): path for path in kept}


def _is_interpreted(path: Path) -> bool:
    text = path.read_text()
    return any(each in text for each in INTERPRETED)


def suffix() -> str:
    """That of this Python's extension modules."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def manifest() -> str:
    """What it will have been made of."""
    return json.dumps({"suffix": suffix(), "sources": {name: digest(path) for name, path in modules().items()}})


def is_fresh() -> bool:
    """Is what is there of this source?"""
    file = DIRECTORY / MANIFEST
    return file.is_file() and file.read_text() == manifest()


def missing() -> str:
    """What this machine lacks; empty: nothing."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(os.environ.get("CC", compiler).split()[0]) is None:
        return f"no C compiler ({compiler})"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "no Python.h (python3-dev)"
    return ""


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """What is said meanwhile, by this process and those it starts."""
    said = io.StringIO()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                yield said
        finally:
            for number, saved in zip((1, 2), kept, strict=True):
                os.dup2(saved, number)
                os.close(saved)
            file.seek(0)
            said.write(file.read().decode(errors="replace"))


def build(into: Path, work: Path) -> None:
    """Make all extension modules."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    os.chdir(SERVICES)
    options = (f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}")
    arguments = [*options, *(str(path) for path in modules().values())]
    extensions = mypycify(arguments, opt_level="2", debug_level="0", target_dir=str(work / "c"), group_name="headway")
    distribution = Distribution({"name": "headway", "ext_modules": extensions})
    command = distribution.get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(into), str(work / "o")  # type: ignore[attr-defined]
    distribution.run_command("build_ext")


def main() -> int:
    """Compile what is not compiled yet."""
    if is_fresh():
        return 0
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    lacking = missing()
    if lacking:
        print(f"{lacking}: the scheduler runs interpreted, and a decision costs some 1.6 times as much")
        return 0
    print("Compiling the decision path, once: about a minute")
    wanted = manifest()
    with tempfile.TemporaryDirectory(prefix="headway-compile-") as work:
        made = Path(work) / "made"
        try:
            with quiet() as said:
                build(made, Path(work))
        except (Exception, SystemExit) as error:
            print(said.getvalue()[-8000:])
            print(f"it cannot be compiled: {error}")
            return 1
        (made / MANIFEST).write_text(wanted)
        shutil.copytree(made, DIRECTORY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
