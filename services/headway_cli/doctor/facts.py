"""What a doctor looks at: what the scheduler says of itself, its fleet, and what admins configured."""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from headway.admin.v1 import admin_pb2
from headway.fleet.v1 import fleet_pb2

from headway_cli.client import Client
from headway_cli.kinds import (
    BINDINGS,
    CREDENTIALS,
    MODELS,
    STRATEGY_BINDINGS,
    TENANTS,
)

__all__ = ["Facts", "gather"]

_CONNECT_S = 1.0


@dataclass(frozen=True, slots=True)
class Facts:
    """All of it, of one moment. `now` is this host's clock; `skew_s` the scheduler's less it.

    `unreached`: addresses of engines that took no connection from this host, if that was tried.
    """

    status: fleet_pb2.GetStatusResponse
    now: float
    skew_s: float = 0.0
    nodes: Sequence[fleet_pb2.NodeState] = ()
    endpoints: Sequence[fleet_pb2.EndpointState] = ()
    tenants: Sequence[admin_pb2.Tenant] = ()
    bindings: Sequence[admin_pb2.Binding] = ()
    models: Sequence[admin_pb2.Model] = ()
    strategy_bindings: Sequence[admin_pb2.StrategyBinding] = ()
    credentials: Sequence[admin_pb2.Credential] = ()
    unreached: Sequence[str] = field(default_factory=tuple)


def gather(client: Client, *, connect: bool, clock: Callable[[], float] = time.time) -> Facts:
    """Ask for it. Raises CliError."""
    before = clock()
    status = client.call(client.fleet.GetStatus, fleet_pb2.GetStatusRequest())
    now = clock()
    told = status.clock.ToNanoseconds() / 1e9
    skew_s = told - (before + now) / 2 if status.HasField("clock") else 0.0
    endpoints = list(client.pages(client.fleet.ListEndpoints, fleet_pb2.ListEndpointsRequest(), "endpoints"))
    return Facts(
        status=status,
        now=now,
        # Whoever asks cannot tell where on the way the clock was read.
        skew_s=0.0 if abs(skew_s) <= now - before else skew_s,
        nodes=list(client.pages(client.fleet.ListNodes, fleet_pb2.ListNodesRequest(), "nodes")),
        endpoints=endpoints,
        tenants=client.list_all(TENANTS),
        bindings=client.list_all(BINDINGS),
        models=client.list_all(MODELS),
        strategy_bindings=client.list_all(STRATEGY_BINDINGS),
        credentials=client.list_all(CREDENTIALS),
        unreached=_unreached(sorted({endpoint.address for endpoint in endpoints})) if connect else (),
    )


def _unreached(addresses: Sequence[str]) -> tuple[str, ...]:
    return tuple(address for address in addresses if not _takes_connections(address))


def _takes_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with closing(socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)):
            return True
    except (OSError, ValueError):
        return False
