"""`headway demo` and `replay`: what the stack's scheduler refuses is said as by every other command."""

import json

from headway_cli.local import replay
from headway_cli.local.stack import LocalStack, StackOptions


def test_a_strategy_that_there_is_not_is_told_in_one_line(headway, scheduler, tmp_path, monkeypatch):
    """Against the test's scheduler: no other process is needed to be refused."""

    class Stack(LocalStack):
        def __init__(self, options: StackOptions) -> None:
            super().__init__(options)
            self.scheduler_port = int(scheduler.address.rpartition(":")[2])

        def __enter__(self):
            return self

    monkeypatch.setattr(replay, "LocalStack", Stack)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n')
    said = headway.error("replay", str(trace), "--strategy", "nope")
    assert said.splitlines()[-1].startswith("error: UNKNOWN_RESOURCE: ")
    assert "'strategies/nope' does not exist" in said
    assert "rpc" not in said.lower()
    said = headway.error("replay", str(trace), "--strategy", "nope", "-o", "json")
    assert json.loads(said.splitlines()[-1])["error"]["facts"]["resource"] == "strategies/nope"
