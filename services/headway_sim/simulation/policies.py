"""Policies by name: the scheduler's own algorithms and the peers' (`headway_sim.policies`)."""

import json
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from headway_scheduler.domain.desired import StrategyConfig
from headway_scheduler.errors import InvalidField
from headway_scheduler.strategies.base import Strategy
from headway_scheduler.strategies.catalog import algorithms
from headway_scheduler.strategies.registry import StrategyRegistry

from headway_sim.simulation.router import Policy

__all__ = ["ALL", "BASELINE", "PolicyError", "catalogue", "parse_policies"]

ALL: Final = "all"
BASELINE: Final = "round_robin"
_PEERS: Final = "headway_sim.policies"


class PolicyError(ValueError):
    """A policy that does not exist, or a parameter that it does not have."""


def catalogue() -> Mapping[str, type[Strategy]]:
    """Every policy by name; where a name is both, the scheduler's own counts."""
    peers: Mapping[str, type[Strategy]] = {}
    if find_spec(_PEERS) is not None:
        peers = import_module(f"{_PEERS}.catalog").PEERS
    return {**peers, **algorithms()}


def parse_policies(text: str) -> list[Policy]:
    """`a,b:parameter=value:other=value` or `all`; values are JSON, or else text. Raises PolicyError."""
    known = catalogue()
    parts = list(known) if text.strip() == ALL else [part.strip() for part in text.split(",")]
    registry = StrategyRegistry(known, lambda: 0.0)
    policies = [_parse(part) for part in parts]
    for policy in policies:
        try:
            registry.check(StrategyConfig(policy.name, policy.algorithm, dict(policy.parameters)))
        except InvalidField as error:
            raise PolicyError(f"{policy.name}: {error.message}") from error
    repeated = {policy.name for policy in policies if sum(policy.name == other.name for other in policies) > 1}
    if repeated:
        raise PolicyError(f"named twice: {', '.join(sorted(repeated))}")
    return policies


def _parse(part: str) -> Policy:
    algorithm, *settings = part.split(":")
    parameters: dict[str, Any] = {}  # JSON values, checked by the algorithm itself
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise PolicyError(f"{part!r}: {setting!r} is not PARAMETER=VALUE")
        parameters[key] = _value(value)
    return Policy(part, algorithm, parameters)


def _value(text: str) -> Any:  # any JSON value
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
