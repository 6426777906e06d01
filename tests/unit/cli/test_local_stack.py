"""The local stack without its processes: who may have a data directory, and what `headway up` says of the dead."""

import fcntl
import os
import signal
import sys
import threading

import pytest
from fakes.headway import Headway
from headway_cli.local import commands
from headway_cli.local.processes import LocalStackError, Process
from headway_cli.local.stack import LocalStack, StackOptions


def test_a_second_stack_in_the_same_directory_is_refused_and_harms_nothing(tmp_path):
    log = tmp_path / "run" / "scheduler.log"
    log.parent.mkdir()
    log.write_text("of the first")
    with (tmp_path / "up.lock").open("ab") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(LocalStackError) as caught, LocalStack(StackOptions(tmp_path)):
            pass
    assert caught.value.message == f"another stack runs in {tmp_path}; stop it, or give another --data-dir"
    assert log.read_text() == "of the first"


def test_the_directory_is_free_again_after_a_stack_that_did_not_start(tmp_path, monkeypatch):
    def fail(*_):
        raise LocalStackError("no Postgres")

    monkeypatch.setattr(LocalStack, "_start_postgres", fail)
    for _ in range(2):
        with pytest.raises(LocalStackError, match="no Postgres"), LocalStack(StackOptions(tmp_path / "new")):
            pass


def test_up_tells_once_of_a_process_that_ended_and_goes_on(tmp_path, monkeypatch):
    dead = Process("engine-0", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "engine-0.log")
    alive = Process("gateway", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "gateway.log")

    class Stack(LocalStack):
        def __enter__(self):
            for process in (dead, alive):
                process.start()
            self.engines, self.gateway = [dead], alive
            return self

        def __exit__(self, *_):
            still_running.append(alive.running)
            self.stop()

    still_running: list[bool] = []
    monkeypatch.setattr("headway_cli.local.stack.LocalStack", Stack)
    monkeypatch.setattr(commands, "_WATCH_S", 0.01)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ctrl_c = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    ctrl_c.start()
    try:
        said = Headway().run("up", "--data-dir", str(tmp_path)).stderr
    finally:
        ctrl_c.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    ended = [line for line in said.splitlines() if "ended" in line]
    assert ended == [f"engine-0 ended with status 3; its log is at {dead.log}"]
    assert still_running == [True]
