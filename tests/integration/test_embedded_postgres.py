"""The Postgres that `up`, `demo` and the tests start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import psycopg
import pytest
from fakes.postgres import FAST, connect
from headway_scheduler.store.embedded import EmbeddedPostgres, EmbeddedPostgresError


def test_it_keeps_its_data_across_restarts(postgres_dir: Path) -> None:
    server = EmbeddedPostgres(postgres_dir, settings=FAST)
    with connect(server.start()) as connection:
        connection.execute("CREATE TABLE kept (n int)")
        assert (connection.execute("SHOW listen_addresses").fetchone() or ("",))[0] == ""
    server.stop()
    assert server.pid is None
    with connect(server.start()) as connection:
        connection.execute("SELECT * FROM kept")
    server.stop()


def test_a_second_one_uses_the_first_and_leaves_it_running(postgres_dir: Path) -> None:
    first = EmbeddedPostgres(postgres_dir, settings=FAST)
    second = EmbeddedPostgres(postgres_dir)
    first.start()
    assert second.start() == first.url
    assert second.pid is None
    second.stop()
    with connect(first.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    first.stop()
    with pytest.raises(psycopg.OperationalError):
        connect(first.url)


def test_a_long_path_gets_a_short_socket(postgres_dir: Path) -> None:
    server = EmbeddedPostgres(postgres_dir / ("long" * 30), settings=FAST)
    with connect(server.start()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    server.stop()


def test_it_says_why_it_does_not_start(postgres_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway_scheduler.store.embedded._RELAUNCH_FOR_S", 0.0)
    server = EmbeddedPostgres(postgres_dir, settings={"shared_buffers": "nonsense"})
    with pytest.raises(EmbeddedPostgresError, match="shared_buffers"):
        server.start()


@pytest.mark.parametrize("last_signal", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_the_process_that_started_it(postgres_dir: Path, last_signal: signal.Signals) -> None:
    program = (
        "import sys, time; from pathlib import Path;"
        "from headway_scheduler.store.embedded import EmbeddedPostgres;"
        "server = EmbeddedPostgres(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(postgres_dir)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        lines = iter(parent.stdout.readline, "")
        pid = next(int(line) for line in lines if line.strip().isdigit())
        postgres = psutil.Process(pid)
        assert postgres.is_running()
        parent.send_signal(last_signal)
    postgres.wait(timeout=20)
    assert not psutil.pid_exists(pid) or postgres.status() == psutil.STATUS_ZOMBIE
