"""Envoy's discovery: the state-of-the-world Aggregated Discovery Service, for clusters and their endpoints.

One stream an Envoy. Each answer has a version and a nonce; Envoy acknowledges it, or rejects it and keeps what it had.
Only what changed is sent: the list of clusters when it changed, an assignment when it changed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import ads_pb2, ads_pb2_grpc, discovery_pb2
from google.protobuf.message import Message
from grpc.aio import ServicerContext

from headway_scheduler.app import Scheduler
from headway_scheduler.envoy.clusters import Assignments, Scope, cluster
from headway_scheduler.envoy.feed import ClusterFeed
from headway_scheduler.rpc.authentication import current_principal

__all__ = ["CLUSTERS", "DISCOVERY", "ENDPOINTS", "TENANTS_KEY", "DiscoveryService"]

log = structlog.get_logger()

DISCOVERY: Final[str] = ads_pb2.DESCRIPTOR.services_by_name["AggregatedDiscoveryService"].full_name
"""The service's full name."""
CLUSTERS: Final = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
ENDPOINTS: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
TENANTS_KEY: Final = "headway.tenants"
"""Node metadata: the tenants whose clusters this Envoy wants; without it all that its credential may name."""

_LONGEST_PROBLEM: Final = 500

Context = ServicerContext[discovery_pb2.DiscoveryRequest, discovery_pb2.DiscoveryResponse]


class DiscoveryService(ads_pb2_grpc.AggregatedDiscoveryServiceServicer):  # type: ignore[misc]  # untyped package
    """Serves Envoys from one feed."""

    def __init__(self, scheduler: Scheduler, feed: ClusterFeed) -> None:
        self._scheduler, self._feed = scheduler, feed

    async def StreamAggregatedResources(  # noqa: N802
        self, request_iterator: AsyncIterator[discovery_pb2.DiscoveryRequest], context: Context
    ) -> None:
        """Serve one Envoy until it leaves, or another scheduler leads."""
        await self._scheduler.opened()
        session = _Session(self._scheduler, self._feed, context)
        counts = self._scheduler.discovery
        counts.streams += 1
        try:
            await session.run(request_iterator)
        finally:
            counts.streams -= 1


@dataclass(slots=True)
class _Subscription:
    """What an Envoy asked for of one type, and what it was sent. `wanted` None: everything there is."""

    wanted: frozenset[str] | None
    nonce: str = ""
    last: tuple[str, ...] = ()
    """Names in the last answer: what a rejection is about."""
    sent: dict[str, bytes] = field(default_factory=dict)
    alone: list[str] = field(default_factory=list)
    """Names that were rejected together with others: each is tried again by itself."""
    answered: bool = False


class _Session:
    """One stream."""

    def __init__(self, scheduler: Scheduler, feed: ClusterFeed, context: Context) -> None:
        self._scheduler, self._feed, self._context = scheduler, feed, context
        self._principal = current_principal()
        self._scope = Scope.of(self._principal)
        self._node = ""
        self._subscriptions: dict[str, _Subscription] = {}
        self._count = 0

    async def run(self, requests: AsyncIterator[discovery_pb2.DiscoveryRequest]) -> None:
        with self._feed.reading() as news:
            reader = asyncio.create_task(self._read(requests, news))
            try:
                await self._write(reader, news)
                await reader
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    # In

    async def _read(self, requests: AsyncIterator[discovery_pb2.DiscoveryRequest], news: asyncio.Event) -> None:
        try:
            async for request in requests:
                if request.node.id:  # only the first request must have it
                    self._introduce(request)
                self._take(request)
                news.set()
        finally:
            news.set()  # the writer looks whether the stream has ended

    def _introduce(self, request: discovery_pb2.DiscoveryRequest) -> None:
        if not self._node:
            log.info("envoy_connected", node=request.node.id, principal=self._principal.id)
        self._node = request.node.id
        asked = request.node.metadata.fields.get(TENANTS_KEY)
        if asked is not None:
            self._scope = Scope.of(self._principal, [value.string_value for value in asked.list_value.values])

    def _take(self, request: discovery_pb2.DiscoveryRequest) -> None:
        known = self._subscriptions.get(request.type_url)
        names = frozenset(request.resource_names)
        wildcard = request.type_url == CLUSTERS and (not names or "*" in names)
        wanted = None if wildcard else names
        if known is None:
            if request.type_url not in (CLUSTERS, ENDPOINTS):
                log.warning("discovery_type_unknown", node=self._node, type=request.type_url)
            self._subscriptions[request.type_url] = _Subscription(wanted)
            return
        if request.response_nonce != known.nonce:
            return  # about an answer that another has overtaken
        if request.HasField("error_detail"):
            self._rejected(request, known)
        for gone in known.sent.keys() - names if wanted is not None else ():
            del known.sent[gone]  # asked for again one day, it must be sent again
        known.wanted = wanted

    def _rejected(self, request: discovery_pb2.DiscoveryRequest, known: _Subscription) -> None:
        self._scheduler.discovery.rejections += 1
        problem = request.error_detail.message[:_LONGEST_PROBLEM]
        log.error(
            "discovery_rejected", node=self._node, type=request.type_url, resources=len(known.last), problem=problem
        )
        if len(known.last) > 1:
            known.alone.extend(known.last)

    # Out

    async def _write(self, reader: asyncio.Task[None], news: asyncio.Event) -> None:
        while not reader.done():
            news.clear()
            self._scheduler.check_serves()
            current = self._feed.assignments(self._scope)
            if current is not None:
                # Clusters first: Envoy asks for what they hold once it knows them.
                for type_url, changes in ((CLUSTERS, self._clusters), (ENDPOINTS, self._endpoints)):
                    await self._offer(type_url, changes, current)
            if not self._pending():
                await news.wait()

    def _pending(self) -> bool:
        return any(each.alone for each in self._subscriptions.values())

    async def _offer(
        self,
        type_url: str,
        changes: Callable[[_Subscription, Assignments], Mapping[str, Message] | None],
        current: Assignments,
    ) -> None:
        subscription = self._subscriptions.get(type_url)
        if subscription is None:
            return
        resources = changes(subscription, current)
        if resources is None:
            return
        self._count += 1
        subscription.nonce, subscription.last = str(self._count), tuple(resources)
        version = f"{self._scheduler.epoch}.{self._count}"
        response = discovery_pb2.DiscoveryResponse(version_info=version, type_url=type_url, nonce=subscription.nonce)
        for resource in resources.values():
            response.resources.add().Pack(resource)
        self._scheduler.discovery.answers += 1
        await self._context.write(response)

    def _clusters(self, subscription: _Subscription, current: Assignments) -> Mapping[str, Message] | None:
        """All that are wanted, if these are others than before: an answer that lacks one removes it."""
        names = [name for name in current if subscription.wanted is None or name in subscription.wanted]
        if subscription.answered and names == list(subscription.sent):
            return None
        subscription.answered, subscription.sent = True, dict.fromkeys(names, b"")
        return {name: cluster(name, self._scheduler.config.retries) for name in names}

    def _endpoints(self, subscription: _Subscription, current: Assignments) -> Mapping[str, Message] | None:
        """Those that changed. What nobody knows, or may not be seen, is empty: Envoy must not wait for it."""
        if subscription.alone:
            name = subscription.alone.pop()
            return {name: _assignment(name, current)}
        changed: dict[str, Message] = {}
        for name in sorted(subscription.wanted or ()):
            assignment = _assignment(name, current)
            data = assignment.SerializeToString(deterministic=True)
            if subscription.sent.get(name) != data:
                subscription.sent[name] = data
                changed[name] = assignment
        return changed or None


def _assignment(name: str, current: Assignments) -> endpoint_pb2.ClusterLoadAssignment:
    found = current.get(name)
    return endpoint_pb2.ClusterLoadAssignment(cluster_name=name) if found is None else found
