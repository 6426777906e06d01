"""The table of promises: who is held against whom, what counts as met, and what is written."""

import json
from dataclasses import replace

import numpy as np
import pytest
from fakes.measured import measured
from headway_sim.commands import sim_app
from headway_sim.decisions.report import HEADINGS, cells, markdown, write
from headway_sim.decisions.rows import (
    against_best,
    against_lmetric,
    article,
    best_peer,
    goodput,
    learned,
    overload,
    regret,
    tail,
    worst_regret,
)
from headway_sim.decisions.run import Found, Results, measure
from headway_sim.decisions.setups import Setup, Traces, capacity, setups
from headway_sim.simulation.compare import Comparison
from headway_sim.simulation.metrics import figures
from headway_sim.simulation.scenario import Scenario, run_task
from headway_sim.simulation.search import Goodput
from typer.testing import CliRunner


def compared(noise_floor=0.01, **runs):
    """A comparison of policies by their runs, or by their mean TTFT alone."""
    found = {name: run if not isinstance(run, float) else measured([run]) for name, run in runs.items()}
    return Comparison({name: figures([run], None) for name, run in found.items()},
                      {name: [run] for name, run in found.items()}, noise_floor, {})  # fmt: skip


class TestJudges:
    def test_the_best_peer_is_the_fastest_that_serves(self):
        refuser = measured([1.0], refused=9)
        found = compared(adaptive=5.0, lmetric=20.0, lpwl=10.0, sglang=refuser)
        assert best_peer(found.figures) == "lpwl"

    def test_where_all_refuse_the_fastest_counts(self):
        assert best_peer(compared(lpwl=measured([5.0], refused=9)).figures) == "lpwl"

    @pytest.mark.parametrize(("ours", "met"), [(100.9, True), (101.1, False)])
    def test_the_best_peer_within_the_noise_floor(self, ours, met):
        row = against_best()("s", compared(adaptive=ours, lmetric=200.0, lpwl=100.0))
        assert (row.met, row.aimed) == (met, None)
        assert row.ratio == pytest.approx(ours / 100)
        assert row.lmetric == pytest.approx(ours / 200)

    def test_what_was_gained_by_refusing_does_not_count(self):
        found = compared(adaptive=measured([1.0], refused=1), lmetric=100.0, lpwl=100.0)
        assert not against_best()("s", found).met
        assert not against_lmetric(0.9)("s", found).met

    @pytest.mark.parametrize(("ours", "met", "aimed"), [(71.0, True, True), (79.0, True, False), (81.0, False, False)])
    def test_lmetric_has_no_allowance(self, ours, met, aimed):
        row = against_lmetric(0.80, 0.72)("s", compared(adaptive=ours, lmetric=100.0, lpwl=50.0))
        assert (row.met, row.aimed) == (met, aimed)

    def test_the_tail_is_that_of_the_best_mean(self):
        steady, wild = [100.0] * 10, [10.0] * 9 + [800.0]
        found = compared(adaptive=measured([150.0] * 10), lmetric=measured(wild), lpwl=measured(steady))
        assert best_peer(found.figures) == "lmetric", "by its mean of 89"
        assert tail("s", found).met, "150 against 800, though lpwl's is 100"
        assert not tail("s", compared(adaptive=measured([90.0, 101.0]), lmetric=measured(steady))).met
        assert tail("s", compared(adaptive=measured([90.0] * 10), lmetric=measured(steady))).met

    @pytest.mark.parametrize(("ttft", "tpot", "met"), [(25.0, 10.0, True), (26.0, 10.0, False), (20.0, 10.2, False)])
    def test_the_article(self, ttft, tpot, met):
        ours = replace(measured([ttft]), tpot_ms=np.array([tpot]))
        assert article("s", compared(adaptive=ours, round_robin=100.0, lmetric=50.0)).met is met

    @pytest.mark.parametrize(
        ("refused", "cached", "met"), [(2, 65, True), (3, 65, False), (1, 30, False), (1, 50, True)]
    )
    def test_overload(self, refused, cached, met):
        ours = replace(measured([1.0] * (100 - refused), refused), prompt_tokens=100, cached_tokens=cached)
        theirs = replace(measured([1.0] * 88, refused=12), prompt_tokens=100, cached_tokens=25)
        assert overload("s", compared(adaptive=ours, round_robin=theirs)).met is met

    @pytest.mark.parametrize(("rate", "met", "aimed"), [(13.2, False, False), (13.4, True, False), (16.0, True, True)])
    def test_goodput(self, rate, met, aimed):
        row = goodput("s", {"adaptive": Goodput(1.0, rate), "round_robin": Goodput(1.0, 10.0)})
        assert (row.met, row.aimed, row.lmetric) == (met, aimed, None)
        assert not goodput("s", {"adaptive": Goodput(1.0, 5.0), "round_robin": Goodput(0.0, 0.0)}).met

    @pytest.mark.parametrize(("after", "met"), [(105.9, True), (106.1, False)])
    def test_only_what_comes_after_five_minutes_shows_what_was_learned(self, after, met):
        wrong = replace(measured([900.0, after]), arrival_s=np.array([299.0, 300.0]))
        right = replace(measured([1.0, 100.0]), arrival_s=np.array([299.0, 300.0]))
        assert learned("s", wrong, right, 0.01).met is met

    def test_regret_is_beyond_the_noise_floor(self):
        fine = compared(adaptive=90.0, lmetric=100.0)
        bad = compared(adaptive=104.5, lmetric=100.0)
        assert regret(fine) == pytest.approx(-0.11)
        assert worst_regret({"fine": fine}).met
        row = worst_regret({"fine": fine, "bad": bad})
        assert (row.setup, row.met) == ("worst regret: bad", False)


class TestSetups:
    def test_without_traces_only_what_needs_none(self):
        found = list(setups(Traces.of(None), 100))
        assert all(setup.scenario.trace is None for setup in found)
        assert {"article", "article-overload", "bursty", "agentic"} <= {setup.name for setup in found}

    def test_traces_by_their_names(self, tmp_path):
        for name in ("mooncake_conversation_trace.jsonl", "AzureX_conv.csv", "AzureX_code.csv.gz", "other.txt"):
            (tmp_path / name).touch()
        found = list(setups(Traces.of(tmp_path), 100))
        assert len({setup.name for setup in found}) == len(found)
        traces = {setup.scenario.trace.name for setup in found if setup.scenario.trace is not None}
        assert traces == {"mooncake_conversation_trace.jsonl", "AzureX_conv.csv", "AzureX_code.csv.gz"}
        assert {setup.scenario.limit for setup in found if setup.scenario.limit} == {100, 50}

    def test_capacity_is_the_rate_that_the_fleet_can_do(self, tmp_path):
        """One request a second of 4,000 tokens, of which an A100 prefills about 3.3 a second."""
        lines = [f"2023-11-16 18:{n // 60:02}:{n % 60:02}.0000000,4000,2" for n in range(120)]
        (tmp_path / "t.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
        one = Scenario(trace=tmp_path / "t.csv", fleet="1xa100-40g-8b")
        single = capacity(one, in_this_process)
        assert single == pytest.approx(3.3, rel=0.1)
        assert capacity(replace(one, fleet="2xa100-40g-8b"), in_this_process) == pytest.approx(2 * single, rel=0.05)


def in_this_process(tasks):
    return [run_task(task) for task in tasks]


class TestRun:
    def test_every_setup_is_judged_and_kept(self, tmp_path):
        scenario = Scenario(workload="agentic", limit=12, fleet="2xa100-40g-8b", prior_error=2.0)
        one = Setup("mixed", scenario, (against_best(), tail), policies="round_robin,lmetric,adaptive")
        two = Setup("shared", Scenario(workload="shared-system-prompt", limit=12), (against_best(),),
                    capacity_share=0.5, policies="round_robin,lmetric,adaptive")  # fmt: skip
        kept = []
        measure(
            [one, two],
            with_goodput=False,
            run=in_this_process,
            on_change=lambda found: kept.append((len(found.rows), len(found.table))),
        )
        assert kept == [(3, 5), (4, 6), (4, 6)]

    def test_a_hold_beyond_what_calls_allow_is_not_bounded(self):
        for longest, met in ((30_050.0, True), (30_051.0, False)):
            found = compared(adaptive=1.0, lmetric=1.0)
            results = Results(setups={"article": Found(1.0, found, np.array([5.0, longest]))})
            assert [row.met for row in results.table if row.setup.startswith("longest hold")] == [met]

    def test_written(self, tmp_path):
        found = compared(adaptive=90.0, lmetric=100.0, round_robin=300.0)
        results = Results([against_best(aim=0.8)("s | t", found)], {"s": Found(1.0, found, np.array([0.0, 50.0]))})
        write(tmp_path, results)
        assert {each.name for each in tmp_path.iterdir()} == {
            "decisions.json", "decisions.md", "decisions-ratios.png", "decisions-holds.png", "decisions-ttft.png",
        }  # fmt: skip
        document = json.loads((tmp_path / "decisions.json").read_text())
        assert document["rows"][0]["met"] is True
        assert document["setups"]["s"]["policies"]["adaptive"]["ttft_ms"]["mean"] == 90.0
        assert markdown(results.rows).splitlines()[0] == f"| {' | '.join(HEADINGS)} |"
        assert cells(results.rows[0])[4:] == ("0.900", "0.900", "1.0%", "≤ 1 x best peer", "yes", "0.8 x", "no")

    def test_the_command(self, tmp_path, monkeypatch):
        monkeypatch.delenv("HEADWAY_TRACES", raising=False)
        arguments = ["decisions", "--only", "agent*", "--limit", "8", "--jobs", "1", "--quiet", "--out", str(tmp_path)]
        result = CliRunner().invoke(sim_app, arguments)
        assert result.exit_code == 0, result.output
        assert "| agentic | mean TTFT |" in result.stdout
        assert "for want of their traces: mooncake, azure_conv, azure_code" in result.stdout
        assert json.loads((tmp_path / "decisions.json").read_text())["rows"][0]["setup"] == "agentic"

    def test_the_command_names_what_it_knows_not(self):
        result = CliRunner().invoke(sim_app, ["decisions", "--only", "nothing"])
        assert result.exit_code == 2
        assert "nothing" in result.output
