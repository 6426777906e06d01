"""Resource names: `tenants/acme`, `gpuGroups/gold`, `endpoints/10.0.0.1:8000@0`.

Inside the scheduler a resource is known by its id (`acme`); names appear at the edges.
"""

import re
from typing import Final

from headway_scheduler.errors import InvalidField

__all__ = [
    "BINDINGS",
    "BYPASS",
    "CREDENTIALS",
    "DEFAULT_GROUP",
    "DEFAULT_TENANT",
    "ENDPOINTS",
    "GPU_GROUPS",
    "MODELS",
    "NODES",
    "STRATEGIES",
    "STRATEGY_BINDINGS",
    "TENANTS",
    "check_id",
    "endpoint_id",
    "parse_name",
    "short",
]

TENANTS: Final = "tenants"
GPU_GROUPS: Final = "gpuGroups"
BINDINGS: Final = "bindings"
MODELS: Final = "models"
NODES: Final = "nodes"
ENDPOINTS: Final = "endpoints"
STRATEGIES: Final = "strategies"
STRATEGY_BINDINGS: Final = "strategyBindings"
CREDENTIALS: Final = "credentials"

BYPASS: Final = "bypass"
"""What audits name where everybody's requests are left alone, or no more."""

DEFAULT_TENANT: Final = "default"
DEFAULT_GROUP: Final = "all"

_SLUG = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SNAKE = re.compile(r"[a-z](?:[a-z0-9_-]{0,61}[a-z0-9])?")  # strategies are named like their algorithms
_LOOSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,252}")
_PATTERNS = {MODELS: _LOOSE, NODES: _LOOSE, ENDPOINTS: _LOOSE, STRATEGIES: _SNAKE}


def check_id(collection: str, identifier: str, field: str) -> str:
    """Return `identifier` if it may name a member of `collection`, else raise InvalidField for `field`."""
    pattern = _PATTERNS.get(collection, _SLUG)
    if not pattern.fullmatch(identifier):
        raise InvalidField(field, f"{identifier!r} must match {pattern.pattern}")
    return identifier


def parse_name(collection: str, name: str, field: str = "name") -> str:
    """The id in `name`, which must be `collection/id`; raises InvalidField for `field`."""
    if not name:
        raise InvalidField(field, "is required")
    head, _, identifier = name.partition("/")
    if head != collection or not identifier:
        raise InvalidField(field, f"{name!r} must look like {collection}/ID")
    return check_id(collection, identifier, field)


def short(collection: str, name: str, field: str) -> str:
    """The id in `name`, given either as `collection/id` or as the bare id."""
    if name.startswith(f"{collection}/"):
        return parse_name(collection, name, field)
    return check_id(collection, name, field)


def endpoint_id(address: str, dp_rank: int) -> str:
    """The id of the engine rank at `address`: `10.0.0.1:8000@0`."""
    return f"{address}@{dp_rank}"
