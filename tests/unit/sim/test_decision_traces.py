"""A scheduler's export, replayed: what another strategy would have done with the same traffic."""

import json
from dataclasses import replace

import pytest
from headway_scheduler.core import Core
from headway_scheduler.metrics.counts import Counts
from headway_scheduler.record.export import Export
from headway_scheduler.record.recorder import observe
from headway_scheduler.record.ring import Record, RecordConfig
from headway_sim.simulation.metrics import measure
from headway_sim.simulation.policies import catalogue
from headway_sim.simulation.router import Policy
from headway_sim.simulation.scenario import Scenario
from headway_sim.simulation.simulator import simulate
from headway_sim.traces import RecordedPrompt, TraceError, load_trace, render_prompt

SECRET = b"s" * 32
BOUND = 0.03
"""How far a replay's hit ratio may be from the recorded run's: blocks of 64 tokens stand for engine blocks of 16."""
SCENARIO = Scenario(workload="agentic", fleet="4xa100-40g-8b", limit=400, rate=0.5)


def recorded(monkeypatch, folder, scenario, policy, share=1.0):
    """Run it with an export; returns what it measured."""
    export = Export(folder, share, 1 << 20, 100)
    export.set_secret(SECRET)

    def watched(core, *arguments, **keywords):
        init(core, *arguments, **keywords)
        recorder = observe(core, Record(RecordConfig(0)), Counts(), lambda: 0.0, core.clock)
        recorder.sink = export

    init = Core.__init__
    monkeypatch.setattr(Core, "__init__", watched)
    run = simulate(Policy(policy, policy), catalogue(), scenario.source(), scenario.setup())
    monkeypatch.setattr(Core, "__init__", init)
    export.write()
    return measure(run), export


def replayed(folder, policy, scenario=SCENARIO):
    scenario = replace(scenario, workload=None, trace=folder, limit=None, rate=1.0)
    return measure(simulate(Policy(policy, policy), catalogue(), scenario.source(), scenario.setup()))


def ratio(measured):
    return measured.cached_tokens / measured.prompt_tokens


@pytest.mark.parametrize("policy", ["adaptive", "round_robin"])
def test_hit_ratios_agree(monkeypatch, tmp_path, policy):
    lived, export = recorded(monkeypatch, tmp_path, SCENARIO, policy)
    again = replayed(tmp_path, policy)
    assert (export.lines, export.lost) == (400, 0)
    assert (again.requests, again.prompt_tokens) == (lived.requests, lived.prompt_tokens)
    assert ratio(again) == pytest.approx(ratio(lived), abs=BOUND)


def test_it_tells_what_another_strategy_would_have_done(monkeypatch, tmp_path):
    """Recorded under round robin, it foretells what adaptive comes to on the same traffic."""
    recorded(monkeypatch, tmp_path / "trace", SCENARIO, "round_robin")
    lived, _ = recorded(monkeypatch, tmp_path / "other", SCENARIO, "adaptive")
    foretold = replayed(tmp_path / "trace", "adaptive")
    assert ratio(foretold) == pytest.approx(ratio(lived), abs=2 * BOUND)
    assert ratio(foretold) > ratio(replayed(tmp_path / "trace", "round_robin")) + 0.1


def test_a_share_keeps_whole_sessions(monkeypatch, tmp_path):
    recorded(monkeypatch, tmp_path / "all", SCENARIO, "round_robin")
    recorded(monkeypatch, tmp_path / "part", SCENARIO, "round_robin", share=0.4)

    def sessions(folder):
        found = {}
        for request in load_trace(tmp_path / folder):
            found[request.session_id] = found.get(request.session_id, 0) + 1
        return found

    every, part = sessions("all"), sessions("part")
    assert 0 < len(part) < len(every)
    assert part.items() <= every.items()


def test_tenants_are_kept(monkeypatch, tmp_path):
    scenario = replace(SCENARIO, workload="mixed-tenants", limit=60)
    recorded(monkeypatch, tmp_path, scenario, "round_robin")
    replay = replace(scenario, workload=None, trace=tmp_path, limit=None)
    assert set(replay.setup().tenants) == {"chat", "labels", "search", "summaries"}
    assert replayed(tmp_path, "round_robin", scenario).requests == 60


class TestWhatIsInIt:
    def lines(self, monkeypatch, tmp_path):
        recorded(monkeypatch, tmp_path, replace(SCENARIO, limit=20), "adaptive")
        return [json.loads(line) for file in sorted(tmp_path.iterdir()) for line in file.read_text().splitlines()]

    def test_fields(self, monkeypatch, tmp_path):
        for line in self.lines(monkeypatch, tmp_path):
            assert (line["headway"], line["tenant"], line["outcome"]) == (1, "default", "success")
            assert line["ttft_ms"] > 0 and line["output_length"] > 0 and line["strategy"] == "adaptive"
            assert len(line["blocks"]) == line["input_length"] // 64

    def test_hashes_are_keyed(self, monkeypatch, tmp_path):
        """Equal under one secret; under another all are different, so that nobody can test a guess."""
        first = self.lines(monkeypatch, tmp_path / "a")
        monkeypatch.setitem(globals(), "SECRET", b"t" * 32)
        second = self.lines(monkeypatch, tmp_path / "b")
        mine, others = ({block for line in lines for block in line["blocks"]} for lines in (first, second))
        assert len(mine) == len(others) and not mine & others
        assert not {line["session_id"] for line in first} & {line["session_id"] for line in second}


class TestBounds:
    def test_files_follow_each_other_and_the_oldest_goes(self, monkeypatch, tmp_path):
        export = Export(tmp_path, 1.0, 2000, 3)
        export.set_secret(SECRET)
        _, full = recorded(monkeypatch, tmp_path / "source", replace(SCENARIO, limit=30), "round_robin")
        assert full.lines == 30
        for _ in range(10):
            export._append("x" * 1000 + "\n")
        names = sorted(path.name for path in tmp_path.glob("*.jsonl"))
        assert names == ["decisions-000003.jsonl", "decisions-000004.jsonl", "decisions-000005.jsonl"]

    def test_a_disk_that_refuses_loses_lines_and_nothing_else(self, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        _, export = recorded(monkeypatch, tmp_path / "file" / "folder", replace(SCENARIO, limit=5), "round_robin")
        assert (export.lines, export.lost) == (0, 5)


LINE = {
    "headway": 1, "timestamp": 5.0, "tenant": "acme", "blocks": ["00000000000000ff"], "block_tokens": 64.0,
    "input_length": 70, "output_length": None, "session_id": "", "max_tokens": 9,
}  # fmt: skip


class TestReader:
    def load(self, tmp_path, *changes):
        path = tmp_path / "t.jsonl"
        path.write_text("".join(json.dumps(LINE | change) + "\n" for change in changes))
        return load_trace(path)

    def test_what_goes_on_tells_the_answer(self, tmp_path):
        first, second = self.load(
            tmp_path,
            {"output_length": 130},
            {"timestamp": 9.0, "blocks": ["00000000000000ff", *(f"{n:016x}" for n in range(4))], "output_length": 50},
        )
        assert first.prompt == RecordedPrompt((255,), 64.0, 70, answer=(0, 1))
        assert second.prompt.answer == ()
        assert (first.tenant, first.max_tokens, second.arrival_ms) == ("acme", 9, 4.0)

    def test_an_unknown_answer_is_of_the_mean_length(self, tmp_path):
        found = self.load(tmp_path, {}, {"output_length": 10}, {"output_length": 20})
        assert [request.output_tokens for request in found] == [15, 10, 20]

    @pytest.mark.parametrize(
        ("change", "field"),
        [({"headway": 2}, "headway"), ({"blocks": ["zz"]}, "blocks"), ({"tenant": ""}, "tenant"),
         ({"block_tokens": 0}, "block_tokens"), ({"input_length": 0}, "input_length")],
    )  # fmt: skip
    def test_what_is_wrong_is_named(self, tmp_path, change, field):
        with pytest.raises(TraceError) as error:
            self.load(tmp_path, change)
        assert error.value.field == field

    def test_text_with_the_same_beginnings(self, tmp_path):
        found = self.load(tmp_path, {}, {"blocks": ["00000000000000ff", "0000000000000001"], "input_length": 140})
        first, second = (render_prompt(request) for request in found)
        assert first[: 64 * 4] == second[: 64 * 4] and first != second[: len(first)]
