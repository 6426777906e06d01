"""Compiled code stands for its source only where it was made of it, and decides alike."""

import json
import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import headway_scheduler
import pytest
from headway_scheduler.native import LIBRARY, MANIFEST, VARIABLE, digest, why_not

SERVICES = Path(headway_scheduler.__file__).parent.parent
SIMULATION = (
    "import json, sys, headway_scheduler.admission.dispatcher as d\n"
    "from headway_bench.inproc import VirtualFleet\n"
    "fleet, found = VirtualFleet(20, 'adaptive', 2048), []\n"
    "for n in range(400):\n"
    "    route = fleet.route(b'%d shared %d ' % (n % 7, n % 31) * 100)\n"
    "    fleet.first_token(route)\n"
    "    if n % 3: fleet.finish(route)\n"
    "    fleet.pass_time(0.3)\n"
    "    why = route.why\n"
    "    found.append([route.endpoint.spec.id, why.matched_tokens, why.predicted_ttft_ms, len(route.fallbacks)])\n"
    "print(json.dumps([d.__file__.endswith('.py'), found]))"
)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A package `p` with one module, as compiled."""
    monkeypatch.delenv(VARIABLE, raising=False)
    source = tmp_path / "packages" / "p" / "m.py"
    source.parent.mkdir(parents=True)
    source.write_text("X = 1\n")
    native = tmp_path / "native"
    native.mkdir()
    (native / "m.so").write_bytes(b"code")
    manifest(native, sources={"p.m": digest(source)}, files={"m.so": 4})
    return native, source


def manifest(native, suffix=EXTENSION_SUFFIXES[0], **more):
    (native / MANIFEST).write_text(json.dumps({"suffix": suffix, **more}))


def why(made):
    native, source = made
    return why_not(native, source.parent.parent)


def test_made_of_this_source_it_is_used(made):
    assert why(made) == ""


def test_one_line_changed_it_is_not(made):
    made[1].write_text("X = 2\n")
    assert why(made) == "p.m changed since it was compiled"


def test_nor_where_a_module_is_gone(made):
    made[1].unlink()
    assert why(made) == "p.m changed since it was compiled"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"suffix": ".so"}', "null", '{"suffix": ".so", "sources": 3, "files": {}}']
)
def test_nor_with_a_broken_manifest(made, text):
    (made[0] / MANIFEST).write_text(text)
    assert why(made).startswith(f"{MANIFEST} cannot be read: ")


def test_nor_for_another_python(made):
    manifest(made[0], ".cpython-27.so", sources={}, files={})
    assert why(made) == "it was compiled for another Python (.cpython-27.so)"


@pytest.mark.parametrize(("value", "reason"), [("1", f"{VARIABLE} is set"), ("0", ""), ("", "")])
def test_the_variable_asks_for_the_source(made, monkeypatch, value, reason):
    monkeypatch.setenv(VARIABLE, value)
    assert why(made) == reason


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"cod"), lambda file: file.unlink()])
def test_nor_where_a_file_is_not_whole(made, damage):
    damage(made[0] / "m.so")
    assert why(made) == "m.so is damaged"


def test_where_nothing_was_compiled_nothing_is_found(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert why_not(tmp_path) == "it was not compiled"


def test_what_cannot_be_loaded_is_not_used(made):
    """As of another C library."""
    native, _ = made
    library = native / f"{LIBRARY}{EXTENSION_SUFFIXES[0]}"
    library.write_bytes(b"no library")
    manifest(native, sources={}, files={library.name: 10})
    ran = python(
        "import os, sys; from pathlib import Path; from headway_scheduler import native;"
        f"os.environ[{VARIABLE!r}] = '0';"
        f"before = list(sys.meta_path); native.prefer(Path({str(native)!r}));"
        "print(native.why_interpreted(), sys.meta_path == before)",
        interpreted="1",
    )
    assert ran.startswith("it cannot be loaded: ")
    assert ran.endswith(" True\n")


def python(code, interpreted):
    environment = {**os.environ, VARIABLE: interpreted, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return ran.stdout


def decisions(interpreted):
    """Is it the source that runs, and what it decides."""
    return json.loads(python(SIMULATION, interpreted))


def test_both_decide_alike(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    by_source, expected = decisions("1")
    assert by_source
    by_default, found = decisions("")
    assert by_default is bool(why_not())
    assert found == expected
    assert len({endpoint for endpoint, *_ in found}) > 5
