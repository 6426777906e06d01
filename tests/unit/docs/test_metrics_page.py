"""docs/metrics.md names every metric that is exposed, with its type and labels, and no other."""

import re
from pathlib import Path

from fakes.rig import Rig
from headway_agent.exposition import AgentMetrics
from headway_client.client import HeadwayClient
from headway_gateway.metrics import GatewayMetrics
from headway_scheduler.exposition import SchedulerCollector

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def told(section):
    """Type and labels by name, of a section's tables."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| .+ \|$", text, re.MULTILINE)
    return {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}


def exposed(families, labels):
    return {
        f"{each.name}_total" if each.type == "counter" else each.name: (each.type, labels(each)) for each in families
    }


def test_the_schedulers():
    families = list(SchedulerCollector(Rig().scheduler).collect())
    assert told("Scheduler") == exposed(families, lambda each: list(each._labelnames))


async def test_the_gateways():
    client = HeadwayClient(["127.0.0.1:1"])
    metrics = GatewayMetrics(client)
    labelled = (metrics.requests, metrics.outcomes, metrics.engine_failures)
    named = {each._name: list(each._labelnames) for each in labelled}
    assert told("Gateway") == exposed(metrics.registry.collect(), lambda each: named.get(each.name, []))


def test_the_agents():
    metrics = AgentMetrics([])
    own = {each.name: list(each._labelnames) for each in metrics.collect()}
    assert told("Agent") == exposed(metrics.registry.collect(), lambda each: own.get(each.name, []))
