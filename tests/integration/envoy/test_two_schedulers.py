"""The documented cluster of two schedulers: what Envoy calls is always the one that leads."""

import re
from pathlib import Path

import grpc
import yaml
from fakes.envoy import running_envoy, socket_address
from fakes.scheduler import serving
from fakes.waiting import eventually
from headway.routing.v1 import routing_pb2, routing_pb2_grpc

DOCS = Path(__file__).parents[3] / "docs" / "envoy.md"
REQUEST = routing_pb2.RouteRequest(model="m", text="hello")


def documented_cluster(*ports):
    (text,) = re.findall(r"## Two schedulers\n.*?```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (cluster,) = yaml.safe_load(text)
    hosts = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    for host, port in zip(hosts, ports, strict=True):
        host["endpoint"]["address"] = socket_address("127.0.0.1", port)
    return cluster


def passing_on(cluster):
    """A listener that passes every call on to the cluster."""
    kinds = "type.googleapis.com/envoy.extensions.filters"
    route = {"match": {"prefix": "/"}, "route": {"cluster": cluster["name"], "timeout": "5s"}}
    manager = {
        "@type": f"{kinds}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "all",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "router", "typed_config": {"@type": f"{kinds}.http.router.v3.Router"}}],
    }
    listener = {
        "name": "all",
        "address": socket_address("127.0.0.1", 0),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


async def test_the_documented_cluster_follows_the_leader(database_url, tmp_path):
    def member(name):
        return serving(database_url, name=name, standby=True, lease_s=0.5, HEADWAY_DATABASE_URL=database_url)

    async with member("a") as a:
        await eventually(a.scheduler.leadership.leads)
        async with member("b") as b:
            for served in (a, b):
                await served.agent()
            config = passing_on(documented_cluster(a.server.port, b.server.port))
            async with (
                running_envoy(config, tmp_path) as envoy,
                grpc.aio.insecure_channel(f"127.0.0.1:{envoy.port}") as channel,
            ):
                router = routing_pb2_grpc.RouterStub(channel)

                async def answered_by():
                    try:
                        return (await router.Route(REQUEST, timeout=5)).reservation_id.partition(".")[0]
                    except grpc.aio.AioRpcError as error:
                        assert error.code() is grpc.StatusCode.UNAVAILABLE
                        return None

                async def answers_alone(name):
                    return {await answered_by() for _ in range(20)} == {name}

                await eventually(lambda: answers_alone("a"))
                await a.scheduler.hand_over()
                # For as long as Envoy has not asked both, it may believe in both, or in none.
                await eventually(lambda: answers_alone("b"))
