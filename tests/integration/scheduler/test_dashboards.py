"""Each panel's and each rule's query asks for what a running scheduler's /metrics has, by names and labels."""

import json
import re
from pathlib import Path

import aiohttp
import promql_parser as promql
import pytest
import yaml
from fakes.scheduler import serving
from headway_scheduler.domain.report import Outcome
from headway_scheduler.exposition import SchedulerCollector
from headway_scheduler.http import HttpServer
from prometheus_client.parser import text_string_to_metric_families

FOLDER = Path(__file__).parents[3] / "deploy" / "grafana"
DASHBOARDS = sorted(FOLDER.glob("*.json"))
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
OUTCOMES = {outcome.value for outcome in Outcome}


def panels(dashboard):
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries():
    """Where each stands, and what it asks for, as Prometheus would read it."""
    for path in DASHBOARDS:
        for panel in panels(json.loads(path.read_text())):
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"], target["legendFormat"]
    for group in RULES:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], " ".join(rule["annotations"].values())


def readable(expression):
    """With Grafana's variables filled in."""
    return re.sub(r"\$(tenant|model)", ".*", expression.replace("$__rate_interval", "5m"))


def walk(node):
    """A query's nodes."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str | float):
            yield from walk(child)
    for child in getattr(node, "args", None) or ():
        yield from walk(child)


def selectors(expression):
    return [node for node in walk(promql.parse(expression)) if isinstance(node, promql.VectorSelector)]


@pytest.fixture
async def exposed(database_url):
    """Names and their labels, as a scheduler that has served something shows them."""
    async with serving(database_url) as served:
        await served.agent()
        await served.finish(await served.route())
        http = HttpServer(served.scheduler)
        await http.start("127.0.0.1:0")
        try:
            url = f"http://127.0.0.1:{http.port}/metrics"
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                text = await answer.text()
        finally:
            await http.stop()
        labels = {}
        for family in text_string_to_metric_families(text):
            names = {sample.name for sample in family.samples}
            base = f"{family.name}_total" if family.type == "counter" else family.name
            labels[base] = set()
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
            assert family.type != "histogram" or f"{family.name}_bucket" in names
        for family in SchedulerCollector(served.scheduler).collect():  # what has happened to nobody has labels, too
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels.setdefault(name, set()).update(family._labelnames)
        yield labels


async def test_every_query_finds_its_metrics_and_labels(exposed):
    asked = 0
    for where, raw, told in queries():
        found = selectors(readable(raw))
        assert found, where
        labels = set()
        for selector in found:
            assert selector.name in exposed, (where, selector.name)
            labels |= exposed[selector.name]
            for matcher in selector.matchers.matchers:
                assert matcher.name in exposed[selector.name], (where, selector.name, matcher.name)
                if matcher.name == "outcome":
                    assert set(matcher.value.split("|")) <= OUTCOMES, where
            asked += 1
        for node in walk(promql.parse(readable(raw))):
            grouping = getattr(getattr(node, "modifier", None), "labels", None) or []
            assert set(grouping) <= labels, (where, grouping)
        named = set(re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", told))
        assert named <= labels, (where, named)
    assert asked > 80


def test_quantiles_are_of_buckets_and_rates_of_counters():
    for where, raw, _ in queries():
        for node in walk(promql.parse(readable(raw))):
            if not isinstance(node, promql.Call):
                continue
            names = [each.name for each in walk(node) if isinstance(each, promql.VectorSelector)]
            if node.func.name == "histogram_quantile":
                assert names and all(name.endswith("_bucket") for name in names), where
            if node.func.name in ("rate", "increase"):
                assert all(re.search("_(total|bucket|sum|count)$", name) for name in names), where


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_well_formed(path):
    dashboard = json.loads(path.read_text())
    assert dashboard["uid"] == f"headway-{path.stem}"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        across, down = (range(place[at], place[at] + place[size]) for at, size in (("x", "w"), ("y", "h")))
        cells = {(x, y) for x in across for y in down}
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    for panel in panels(dashboard):
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"} <= variables, panel["title"]


async def test_variables_are_asked_of_metrics_that_have_them(exposed):
    for path in DASHBOARDS:
        for each in json.loads(path.read_text())["templating"]["list"]:
            if each["type"] == "query":
                metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", each["definition"]).groups()
                assert label in exposed[metric]


def test_every_rule_says_what_is_wrong_and_how_bad_it_is():
    names = [rule["alert"] for group in RULES for rule in group["rules"]]
    assert len(names) == len(set(names)) > 10
    for group in RULES:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"]
            assert rule["labels"]["severity"] in ("page", "ticket")
