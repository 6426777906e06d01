"""The units run programs that exist, with settings that they know; `make test-system` has systemd itself read them."""

import configparser
import tomllib
from pathlib import Path

import pytest
from headway_scheduler.config import Config

ROOT = Path(__file__).parents[3]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
PROGRAMS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
HARD = {
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "RestrictNamespaces": "yes",
    "SystemCallArchitectures": "native",
    "UMask": "0077",
}


def section(path, name):
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read_string(path.read_text())
    return dict(parser[name])


def test_there_is_one_for_each_process():
    assert [path.stem for path in UNITS] == ["headway-agent", "headway-gateway", "headway-scheduler"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_it_runs_what_is_installed_restarts_it_and_may_do_little(path):
    service = section(path, "Service")
    program = service["ExecStart"].split()[0]
    assert program == f"/opt/headway/bin/{path.stem}"
    assert path.stem in PROGRAMS
    assert service["Restart"] == "on-failure"
    assert service["User"] != "root"
    assert {name: service[name] for name in HARD} == HARD


def test_the_scheduler_has_time_to_drain():
    service = section(ROOT / "deploy" / "systemd" / "headway-scheduler.service", "Service")
    assert int(service["TimeoutStopSec"]) > Config.model_fields["drain_timeout_s"].default


def test_the_environment_file_has_only_what_the_scheduler_knows():
    lines = (ROOT / "deploy" / "systemd" / "scheduler.env").read_text().splitlines()
    named = [line.partition("=")[0] for line in lines if line and not line.startswith("#")]
    known = {f"HEADWAY_SCHEDULER_{name.upper()}" for name in Config.model_fields} | {"HEADWAY_DATABASE_URL"}
    assert set(named) <= known
