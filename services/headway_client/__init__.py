"""The library a data plane links: Route, reports, coalesced streams, fail-open."""

from headway_client.client import HeadwayClient, KeyTenants
from headway_client.errors import RouteRefused
from headway_client.options import ClientOptions
from headway_client.reservation import Reservation
from headway_client.stats import ClientStats

__all__ = ["ClientOptions", "ClientStats", "HeadwayClient", "KeyTenants", "Reservation", "RouteRefused"]
