"""db and config: what needs no scheduler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.headway import Headway

ROOT = Path(__file__).parents[3]
HEADWAY = Headway()


def test_a_database_is_upgraded_once(empty_database_url):
    at = {"HEADWAY_DATABASE_URL": empty_database_url}
    assert HEADWAY.text("db", "current", **at).startswith("empty, the newest is ")
    head = HEADWAY.json("db", "current", **at)["head"]
    assert HEADWAY.text("db", "upgrade", **at) == f"upgraded from nothing to {head}\n"
    assert HEADWAY.text("db", "upgrade", **at) == f"already at {head}\n"
    assert HEADWAY.json("db", "current", **at) == {"current": head, "head": head, "up_to_date": True}


def test_without_a_url_the_embedded_database_is_upgraded_and_stopped(tmp_path):
    env = {**os.environ, "HEADWAY_DATABASE_URL": "", "HEADWAY_DATA_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "headway_cli.main", "db", "upgrade"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("upgraded from nothing to ")
    assert not (tmp_path / "postgres" / "postmaster.pid").exists()


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("postgresql://u:secret@127.0.0.1:1/x", 3, "error: UNREACHABLE: the database cannot be reached: "),
        ("nonsense", 1, "error: INVALID_URL: "),
    ],
)
def test_a_database_that_is_not_there(url, code, said):
    error = HEADWAY.error("db", "current", "--database-url", url, code=code)
    assert error.startswith(said)
    assert error.count("\n") == 1
    assert "secret" not in error


def test_configurations_are_checked_by_their_own_processes(tmp_path):
    assert HEADWAY.text("config", "validate", "scheduler", "agent", "gateway") == (
        "scheduler: the configuration is valid\n"
        "agent: the configuration is valid\n"
        "gateway: the configuration is valid\n"
    )
    assert HEADWAY.json("config", "validate", "agent", "--file", str(ROOT / "deploy" / "agent.toml")) == [
        {"process": "agent", "valid": True}
    ]
    file = tmp_path / "gateway.toml"
    file.write_text("port = 99999\ncolour = 1\n")
    said = HEADWAY.error("config", "validate", "gateway", "-f", str(file))
    assert "error: INVALID_FILE: gateway: port: " in said
    assert "error: INVALID_FILE: gateway: colour: no such setting" in said
    said = HEADWAY.error("config", "validate", "scheduler", "-o", "json", HEADWAY_SCHEDULER_LISTEN="nowhere")
    assert "'nowhere' must look like HOST:PORT" in json.loads(said)["error"]["message"]
    assert "--file goes with" in HEADWAY.error("config", "validate", "scheduler", "-f", str(file), code=2)


def test_the_command_needs_no_scheduler_package_and_prints_no_traceback():
    """As a process, with the packages of the extra `scheduler` out of reach."""
    program = (
        "import sys\n"
        "for name in ('headway_scheduler', 'sqlalchemy', 'psycopg', 'alembic', 'aiohttp', 'numpy', 'grpc_status'):\n"
        "    sys.modules[name] = None\n"
        "from headway_cli.main import main\n"
        "main()\n"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HEADWAY_SCHEDULER": "127.0.0.1:1"}
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    answered = run("tenants", "list")
    assert (answered.returncode, answered.stdout) == (3, "")
    assert answered.stderr.startswith("error: UNREACHABLE: ")
    missing = run("db", "current")
    assert (missing.returncode, missing.stderr) == (
        1,
        "error: NOT_INSTALLED: headway_scheduler is missing: pip install 'headway[scheduler]'\n",
    )
    assert run("--help").returncode == 0
