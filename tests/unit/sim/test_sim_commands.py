"""The command line: what is asked for, what is printed, what is refused."""

import json

import pytest
from headway_sim.commands import sim_app
from typer.testing import CliRunner

ARTICLE = ["--workload", "article", "--fleet", "2xa100-40g-8b", "--limit", "10", "--jobs", "1"]


def called(*arguments):
    return CliRunner().invoke(sim_app, list(arguments), env={"COLUMNS": "250", "TERM": "dumb"})


def test_run_prints_json():
    result = called("run", *ARTICLE, "--policies", "round_robin,adaptive:externality=0.2", "-o", "json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert list(document["policies"]) == ["round_robin", "adaptive:externality=0.2"]
    assert document["policies"]["round_robin"]["vs_round_robin"] == 1.0
    assert set(document["policies"]["round_robin"]["ttft_ms"]) == {"mean", "p50", "p90", "p99", "max"}


def test_run_prints_a_table_and_writes_a_report(tmp_path):
    result = called("run", *ARTICLE, "--policies", "least_request", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "least_request" in result.stdout
    assert {each.name for each in (tmp_path / "out").iterdir()} >= {"results.json", "index.html", "ttft_cdf.png"}


def test_run_takes_a_trace(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n")
    result = called("run", "--trace", str(trace), "--policies", "random", "--jobs", "1", "-o", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["policies"]["random"]["requests"] == 1


def test_learning_can_be_switched_off_and_its_beginning_left_out():
    options = ["--limit", "30", "--learn", "none", "--warmup", "5"]  # 20 sessions begin at once, the others later
    result = called("run", *ARTICLE, *options, "--policies", "random", "-o", "json")
    assert result.exit_code == 0, result.output
    assert 0 < json.loads(result.stdout)["policies"]["random"]["requests"] < 30


def test_goodput_prints_json():
    result = called("goodput", "--slo", "100000", *ARTICLE, "--policies", "round_robin", "-o", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["policies"]["round_robin"]["goodput_per_s"] > 0


def test_tune_says_what_is_gained():
    result = called("tune", *ARTICLE, "--rounds", "1")
    assert result.exit_code == 0, result.output
    assert "noise floor" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--workload", "article", "--fleet", "3xpotato"], "potato"),
        (["--workload", "nothing"], "nothing"),
        (["--workload", "article", "--policies", "nobody"], "nobody"),
        ([], "a trace or a workload"),
        (["--trace", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_what_makes_no_sense_is_said(arguments, complaint):
    result = called("run", *arguments, "--jobs", "1")
    assert result.exit_code == 2
    assert complaint in result.output


def test_the_table_fits_a_narrow_terminal_and_a_wide_one_shows_more():
    lines = {}
    for columns in ("80", "150"):
        arguments = ["run", *ARTICLE, "--policies", "round_robin,adaptive:externality=0.25"]
        result = CliRunner().invoke(sim_app, arguments, env={"COLUMNS": columns, "TERM": "dumb"})
        assert result.exit_code == 0, result.output
        lines[columns] = result.stdout.splitlines()
    assert max(map(len, lines["80"])) <= 80
    [row] = [line.split() for line in lines["80"] if "round_robin" in line]
    assert len(row) == 7, "a policy and six figures, none of them cut"
    assert row[-1] == "1.000"
    assert "KV use" in "".join(lines["150"])
