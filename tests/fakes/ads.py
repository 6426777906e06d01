"""An Envoy's side of the aggregated discovery stream, scripted."""

import asyncio
import contextlib

from envoy.config.cluster.v3 import cluster_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2
from fakes.waiting import eventually
from google.rpc import status_pb2
from headway_scheduler.envoy.discovery import CLUSTERS, ENDPOINTS, TENANTS_KEY

HEALTH = {1: "HEALTHY", 2: "UNHEALTHY", 3: "DRAINING"}


class AdsClient:
    """Collects what it is told; acknowledges it, or rejects what names a cluster in `rejects`."""

    def __init__(self, channel, token=None, node="envoy-1", tenants=()):
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.call = ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel).StreamAggregatedResources(metadata=metadata)
        self.node, self.tenants = node, tenants
        self.answers = []
        self.clusters = []
        self.assignments = {}
        self.rejects = set()
        self.wanted = {CLUSTERS: [], ENDPOINTS: []}
        self.last = {}
        self.reader = asyncio.create_task(self._read())
        self.reader.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def ask(self, type_url, names=()):
        self.wanted[type_url] = list(names)
        await self._send(type_url, self.last.get(type_url))

    async def _send(self, type_url, answer=None, problem=None):
        request = discovery_pb2.DiscoveryRequest(type_url=type_url, resource_names=self.wanted[type_url])
        request.node.id = self.node
        if self.tenants:
            request.node.metadata.update({TENANTS_KEY: list(self.tenants)})
        if answer is not None:
            request.response_nonce, request.version_info = answer.nonce, answer.version_info
        if problem is not None:
            request.error_detail.CopyFrom(status_pb2.Status(code=3, message=problem))
        await self.call.write(request)

    async def _read(self):
        async for answer in self.call:
            self.answers.append(answer)
            self.last[answer.type_url] = answer
            kind = cluster_pb2.Cluster if answer.type_url == CLUSTERS else endpoint_pb2.ClusterLoadAssignment
            resources = []
            for packed in answer.resources:
                resource = kind()
                assert packed.Unpack(resource)
                resources.append(resource)
            names = [getattr(each, "name", None) or each.cluster_name for each in resources]
            if self.rejects & set(names):
                await self._send(answer.type_url, answer, "no thanks")
                continue
            if kind is cluster_pb2.Cluster:
                self.clusters = names
            else:
                self.assignments.update(zip(names, resources, strict=True))
            await self._send(answer.type_url, answer)

    async def until(self, condition):
        await eventually(lambda: condition() or self.reader.done())
        if self.reader.done():
            await self.reader
        assert condition()

    def holds(self, name):
        """`{address: (health, priority)}`."""
        found = self.assignments.get(name)
        return found and {
            f"{(a := host.endpoint.address.socket_address).address}:{a.port_value}": (
                HEALTH[host.health_status],
                group.priority,
            )
            for group in found.endpoints
            for host in group.lb_endpoints
        }

    def weights(self, name):
        return {
            host.endpoint.address.socket_address.address: host.load_balancing_weight.value
            for group in self.assignments[name].endpoints
            for host in group.lb_endpoints
        }

    def told(self, type_url, after=0):
        """The names in each answer of a type, from the `after`th on."""
        return [len(a.resources) for a in self.answers[after:] if a.type_url == type_url]

    async def leave(self):
        self.call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.reader
