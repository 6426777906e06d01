"""What keeps a scheduler from starting is said in one line, and leaves nothing running."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest


def start(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"HEADWAY_SCHEDULER_LISTEN": "127.0.0.1:0", "HEADWAY_SCHEDULER_LISTEN_HTTP": "127.0.0.1:0"}
    paths = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-m", "headway_scheduler.main"],
        env={**paths, **settings, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_no_database(tmp_path: Path) -> None:
    done = start(tmp_path, HEADWAY_DATABASE_URL="postgresql://x@127.0.0.1:1/x")
    assert last_line(done) == "database: the store cannot be reached"


@pytest.mark.parametrize("setting", ["listen", "listen_http"])
def test_a_port_that_is_taken(tmp_path: Path, database_url: str, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = start(tmp_path, HEADWAY_DATABASE_URL=database_url, **{f"HEADWAY_SCHEDULER_{setting.upper()}": address})
    assert last_line(done).startswith(f"{setting} {address}: ")
