"""The local stack without its processes: who may have a data directory."""

import fcntl

import pytest
from headway_cli.local.processes import LocalStackError
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
