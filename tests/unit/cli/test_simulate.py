"""`headway sim`: the simulator's command line behind ours, and what is said where it is not installed."""

import json
import subprocess
import sys

import pytest
from headway_cli.app import build
from typer.testing import CliRunner

ARTICLE = ["--workload", "article", "--fleet", "2xa100-40g-8b", "--limit", "6", "--jobs", "1"]


def called(*arguments):
    return CliRunner().invoke(build(), ["sim", *arguments])


def test_options_reach_the_simulator():
    result = called("run", *ARTICLE, "--policies", "round_robin", "-o", "json")
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["policies"]) == ["round_robin"]


def test_help_is_the_simulators():
    for arguments, shown in [(["--help"], "decisions"), (["run", "--help"], "--policies")]:
        result = called(*arguments)
        assert result.exit_code == 0
        assert shown in result.output


def test_its_usage_errors_are_usage():
    result = called("run", "--workload", "nothing")
    assert result.exit_code == 2
    assert "nothing" in result.output


def in_a_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("missing", ["matplotlib", "numpy"])
def test_without_the_extra_it_says_what_to_install(missing):
    out_of_reach = f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = ['sim', 'run']"
    found = in_a_process(f"{out_of_reach}; from headway_cli.main import main; main()")
    assert found.returncode == 1
    assert f"NOT_INSTALLED: {missing} is missing: pip install 'headway[sim,scheduler]'" in found.stderr


def test_building_the_command_line_imports_no_simulator():
    found = in_a_process("import sys; from headway_cli.app import build; build(); print(*sys.modules)")
    assert "headway_cli.simulate" in found.stdout.split()
    assert not [name for name in found.stdout.split() if name.startswith("headway_sim.")]
