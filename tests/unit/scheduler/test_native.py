"""Compiled code stands for its source only where it was made of it, and decides alike."""

import json
import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import headway_scheduler
import pytest
from headway_scheduler.native import MANIFEST, VARIABLE, digest, prefer, why_interpreted

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
    manifest(native, sources={"p.m": digest(source)})
    return native, source


def manifest(native, suffix=EXTENSION_SUFFIXES[0], **more):
    (native / MANIFEST).write_text(json.dumps({"suffix": suffix, **more}))


def why(made):
    native, source = made
    return why_interpreted(native, source.parent.parent)


def test_made_of_this_source_it_is_used(made):
    assert why(made) == ""


def test_one_line_changed_it_is_not(made):
    made[1].write_text("X = 2\n")
    assert why(made) == "p.m changed since it was compiled"


def test_nor_where_a_module_is_gone(made):
    made[1].unlink()
    assert why(made) == "p.m changed since it was compiled"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"suffix": ".so"}', "null"])
def test_nor_with_a_broken_manifest(made, text):
    (made[0] / MANIFEST).write_text(text)
    assert why(made).startswith(f"{MANIFEST} cannot be read: ")


def test_nor_for_another_python(made):
    manifest(made[0], ".cpython-27.so", sources={})
    assert why(made) == "it was compiled for another Python (.cpython-27.so)"


@pytest.mark.parametrize(("value", "reason"), [("1", f"{VARIABLE} is set"), ("0", ""), ("", "")])
def test_the_variable_asks_for_the_source(made, monkeypatch, value, reason):
    monkeypatch.setenv(VARIABLE, value)
    assert why(made) == reason


def test_where_nothing_was_compiled_nothing_is_found(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    before = list(sys.meta_path)
    assert why_interpreted(tmp_path) == "it was not compiled"
    assert not prefer(tmp_path)
    assert sys.meta_path == before


def decisions(interpreted):
    """Is it the source that runs, and what it decides."""
    environment = {**os.environ, VARIABLE: interpreted, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", SIMULATION], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout)


def test_both_decide_alike(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    by_source, expected = decisions("1")
    assert by_source
    by_default, found = decisions("")
    assert by_default is bool(why_interpreted())
    assert found == expected
    assert len({endpoint for endpoint, *_ in found}) > 5
