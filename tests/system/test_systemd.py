"""systemd reads the units: `make test-system`."""

import re
import subprocess
from pathlib import Path

import pytest

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))
MOST_EXPOSED = 4.0
"""Of 10, by systemd-analyze security; a unit without any hardening is at 9.6."""


def installed(unit: Path, prefix: Path) -> Path:
    """The unit with programs and an account that this machine has."""
    text = re.sub(r"/opt/headway/bin/\S+", "/bin/true", unit.read_text())
    text = text.replace("User=headway", "User=daemon").replace("Group=headway", "Group=daemon")
    (copy := prefix / unit.name).write_text(text)
    return copy


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_nothing_wrong(unit, tmp_path):
    copy = installed(unit, tmp_path)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", copy], capture_output=True, text=True
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.stem in line]) == (0, [])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_it_is_hardened(unit, tmp_path):
    copy = installed(unit, tmp_path)
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", copy],
        capture_output=True,
        text=True,
        check=True,
    )
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert float(exposure) < MOST_EXPOSED, done.stdout


def test_a_unit_with_a_fault_is_found(tmp_path):
    bad = tmp_path / "bad.service"
    bad.write_text("[Service]\nExecStart=/nowhere/at-all\nProtectSistem=strict\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", bad], capture_output=True, text=True
    )
    assert "ProtectSistem" in done.stderr
