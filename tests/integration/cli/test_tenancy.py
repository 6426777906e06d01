"""Splits and quotas by model from the command line, drains that are waited for, and what tenants consumed."""

import csv
import io
import json
import re
import shlex
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from fakes.headway import connected_agent
from headway_scheduler.domain.usage import Usage
from headway_scheduler.fleet.ledger import EndCause
from headway_scheduler.leadership import Standing
from headway_scheduler.store.postgres import PostgresStore

PAGE = Path(__file__).parents[3] / "docs" / "tenants.md"
LLAMA = """
kind: Model
name: llama
splits:
  stable: {weight: 95, engine_version: 0.11.0}
  canary: {weight: 5, gpu_group: gold, selector: {track: canary}}
disruption_budget: {min_available: 1, min_available_share: 0.5}
---
kind: GpuGroup
name: gold
selector: {tier: gold}
---
kind: Tenant
name: acme
adapters: [sql]
model_quotas:
  meta/llama-3.1:8b: {max_inflight: 3, tokens_per_minute: 1000}
"""


def test_parts_of_maps_are_set_one_by_one(headway):
    headway.run("groups", "create", "gold", "selector.tier=gold")
    headway.run("models", "create", "llama-3.1", "splits.a.weight=9", "splits.a.engine_version=0.11.2")
    set_ = ["splits.b.weight=1", "splits.b.selector.track=canary", "splits.b.gpu_group=gold"]
    headway.run("models", "update", "llama-3.1", *set_, "disruption_budget.min_available=2")
    model = headway.json("models", "get", "llama-3.1")
    assert model["splits"] == {
        "a": {"weight": 9, "selector": {}, "engine_version": "0.11.2", "gpu_group": ""},
        "b": {"weight": 1, "selector": {"track": "canary"}, "engine_version": "", "gpu_group": "gpuGroups/gold"},
    }
    assert model["disruption_budget"] == {"min_available": 2, "min_available_share": 0}
    headway.run("models", "update", "llama-3.1", "splits.b=")
    assert list(headway.json("models", "get", "llama-3.1")["splits"]) == ["a"]
    headway.run("tenants", "create", "acme", "model_quotas.llama-3.1.max_inflight=8", "adapters=sql,poetry")
    tenant = headway.json("tenants", "get", "acme")
    assert tenant["model_quotas"]["llama-3.1"]["max_inflight"] == 8
    assert tenant["adapters"] == ["sql", "poetry"]


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["models", "create", "x", "splits.a=5"], "splits.a: must be set by its parts", 2),
        (["models", "create", "x", "splits.a.weight=much"], "splits.a.weight: must be a finite number", 2),
        (["models", "create", "x", "splits.a.weight=1"], "model.splits[a]: needs a selector", 1),
        (["models", "create", "x", "splits.a.engine_version=1"], "model.splits: one must have a weight", 1),
        (["models", "create", "x", "splits.A!.weight=1"], "model.splits[A!]: a split's name", 1),
        (["models", "create", "x", "splits.a.weight=1", "splits.a.gpu_group=no"], "model.splits.a.gpu_group", 1),
        (["models", "create", "x", "disruption_budget.min_available_share=2"], "min_available_share: must be in 0", 1),
        (["tenants", "usage", "acme", "--since", "soon"], "--since: 'soon' must look like", 2),
        (["nodes", "drain", "n", "--deadline", "5x"], "--deadline: '5x' must look like", 2),
    ],
)
def test_what_is_wrong_is_named(headway, arguments, said, code):
    assert said in headway.error(*arguments, code=code)


def test_a_file_of_it_is_applied_and_exported_and_then_nothing_differs(headway, tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text(LLAMA)
    headway.run("apply", "-f", str(file))
    assert headway.text("diff", "-f", str(file)) == ""
    exported = headway.text("export")
    file.write_text(exported)
    assert headway.text("diff", "-f", str(file)) == ""
    (model,) = [each for each in yaml.safe_load_all(exported) if each.get("kind") == "Model"]
    assert list(model["splits"]) == ["canary", "stable"]
    file.write_text("kind: Model\nname: other\n---\nkind: GpuGroup\nname: other\n")
    assert "gpuGroups/gold deleted" in headway.text("apply", "-f", str(file), "--prune")
    file.write_text("kind: Model\nname: llama\nsplits: {a: 5}\n")
    assert "splits.a: must be a mapping, not 5" in headway.error("apply", "-f", str(file))


def test_what_the_page_on_tenants_shows_works(headway, scheduler):
    """Line by line, in the order of the page."""
    lines = re.findall(r"^\$ headway (.*)$", PAGE.read_text(), re.MULTILINE)
    headway.run("models", "create", "llama-3-8b")
    with connected_agent(scheduler.address, "gpu-7", ["10.0.0.7:8000", "10.0.0.7:8001"], "llama-3-8b"):
        for line in lines:
            headway.run(*shlex.split(line))
    tenant = headway.json("tenants", "get", "acme")
    assert (tenant["isolation_domain"], tenant["model_quotas"]["llama-3-8b"]["max_inflight"]) == ("house", 32)
    assert sorted(headway.json("models", "get", "llama-3-8b")["splits"]) == ["canary", "stable"]


class TestDrain:
    def test_an_empty_one_is_drained_at_once(self, headway, fleet):
        result = headway.run("nodes", "drain", "gpu-7", "--wait", "--deadline", "5m")
        assert (result.stdout, result.stderr) == ("nodes/gpu-7 draining, empty\n", "")

    def test_it_tells_how_it_goes_and_ends_when_the_last_request_does(self, headway, scheduler, fleet):
        first = headway.json("route", "--model", "llama")
        reservation = scheduler.scheduler.ledger.reservations[first["reservation_id"]]

        def end():
            scheduler.scheduler.ledger.end(reservation, EndCause.REPORTED, scheduler.scheduler.clock())

        timer = threading.Timer(0.7, lambda: scheduler.call(end))
        timer.start()
        result = headway.run("nodes", "drain", "gpu-7", "--wait", "--deadline", "1m")
        timer.join()
        assert result.stderr == "nodes/gpu-7: 1 in flight\n"
        assert result.stdout == "nodes/gpu-7 draining, empty\n"

    def test_the_deadline_has_its_own_exit_code_and_the_drain_goes_on(self, headway, fleet):
        endpoint = headway.json("route", "--model", "llama")["endpoint"]["name"]
        said = headway.error("endpoints", "drain", endpoint, "--wait", "--deadline", "100ms", code=4)
        assert "error: NOT_EMPTY: " in said
        assert "1 in flight after 0 s; it goes on draining" in said
        assert headway.json("endpoints", "get", endpoint)["state"] == "draining"

    def test_one_that_does_not_lead_never_says_that_it_is_empty(self, headway, scheduler, fleet, monkeypatch):
        monkeypatch.setattr(scheduler.scheduler.leadership, "standing", Standing.STANDBY)
        assert "empty" not in headway.text("nodes", "drain", "gpu-7")
        said = headway.error("nodes", "drain", "gpu-7", "--wait", "--deadline", "100ms", code=4)
        assert "does not lead, and what is in flight only the leader knows" in said

    def test_a_disruption_budget_refuses_it_unless_forced(self, headway, scheduler):
        headway.run("models", "create", "llama", "disruption_budget.min_available=2")
        with connected_agent(scheduler.address, "gpu-7", ["10.0.0.7:8000", "10.0.0.7:8001"]):
            said = headway.error("endpoints", "drain", "10.0.0.7:8000@0", "--wait")
            assert "DISRUPTION_BUDGET" in said
            assert "1 of the endpoints of 'models/llama' could serve; its disruption budget wants 2" in said
            assert "DISRUPTION_BUDGET" in headway.error("nodes", "cordon", "gpu-7")
            assert headway.json("endpoints", "get", "10.0.0.7:8000@0")["state"] == "active"
            headway.run("endpoints", "drain", "10.0.0.7:8000@0", "--force")


class TestUsage:
    @pytest.fixture
    async def recorded(self, database_url):
        now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        store = PostgresStore(database_url)
        rows = [
            Usage(tenant, model, now - timedelta(hours=hours, minutes=minute), 1, 100, 40, 7, 2, 1, 1)
            for tenant, model, hours in (("acme", "a", 1), ("acme", "b", 1), ("acme", "a", 2), ("beta", "a", 30))
            for minute in (1, 2)
        ]
        await store.record_usage(rows)
        await store.close()
        return now

    def test_by_hour_minute_and_model(self, headway, recorded):
        hours = headway.json("tenants", "usage", "acme")
        assert [(row["model"], row["requests"], row["cached_tokens"]) for row in hours] == [
            ("a", 2, 80), ("a", 2, 80), ("b", 2, 80)
        ]  # fmt: skip
        assert hours[0]["start_time"] == (recorded - timedelta(hours=3)).isoformat().replace("+00:00", "Z")
        assert len(headway.json("tenants", "usage", "acme", "--by", "minute", "--model", "a")) == 4
        (row,) = headway.json("tenants", "usage", "acme", "--by", "model", "--model", "a")
        wanted = {"prompt_tokens": 400, "completion_tokens": 28, "refusals": 8, "failures": 4, "fail_open_requests": 4}
        assert {name: row[name] for name in wanted} == wanted

    def test_of_everyone_and_since(self, headway, recorded):
        everyone = headway.json("tenants", "usage", "-", "--since", "2d", "--by", "day")
        assert {row["tenant"] for row in everyone} == {"acme", "beta"}
        assert headway.text("tenants", "usage", "beta") == "no usage\n"
        until = (recorded - timedelta(hours=2)).isoformat()
        assert len(headway.json("tenants", "usage", "acme", "--until", until)) == 1

    def test_as_csv(self, headway, recorded):
        lines = headway.text("tenants", "usage", "acme", "--by", "model", "-o", "csv")
        rows = list(csv.DictReader(io.StringIO(lines)))
        assert [(row["tenant"], row["model"], row["prompt_tokens"]) for row in rows] == [
            ("acme", "a", "400"), ("acme", "b", "200")
        ]  # fmt: skip
        assert headway.text("tenants", "usage", "nobody", "-o", "csv").count("\n") == 1
        listed = list(csv.DictReader(io.StringIO(headway.text("tenants", "list", "-o", "csv"))))
        assert json.loads(listed[0]["quotas"])["max_inflight"] == 0

    def test_as_a_table(self, headway, recorded):
        head, _, row, *_ = headway.text("tenants", "usage", "acme", "--by", "model").splitlines()
        assert head.split()[:3] == ["tenant", "model", "requests"]
        assert row.split()[:3] == ["acme", "a", "4"]
