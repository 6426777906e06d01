"""The configurations of deploy/envoy, started before engines that a scheduler picks; and what changes there."""

import contextlib
import hashlib
from pathlib import Path

import aiohttp
import yaml
from fakes.envoy import running_envoy, socket_address
from fakes.openai_engine import OpenAIEngine
from fakes.scheduler import serving
from fakes.waiting import eventually
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_scheduler.domain.desired import Binding, BindingMode, Credential, GpuGroup, Role, Tenant
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.http import HttpServer
from headway_scheduler.server import GrpcServer
from headway_scheduler.store.base import Write

DEPLOY = Path(__file__).parents[2] / "deploy" / "envoy"
TOKEN = "the-token-of-this-envoy"
ACME = {"Host": "acme.example.com"}
WRITE = Write(principal="test", method="Test")


def configuration(name, target, http_target=None):
    """A file of deploy/envoy with what it says to CHANGE changed: where to listen, and where the scheduler is."""
    config = yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())
    del config["admin"]
    (listener,) = config["static_resources"]["listeners"]
    listener["address"] = socket_address("127.0.0.1", 0)
    for cluster in config["static_resources"]["clusters"]:
        host, port = (http_target if cluster["name"] == "headway_http" else target).split(":")
        (place,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        place["endpoint"]["address"] = socket_address(host, port)
    return config


class Deployed:
    """Engines `gold1`, `gold2` are acme's alone; `shared1`, `shared2` are for the tenant default."""

    def __init__(self, served, engines, envoy, http, door):
        self.served, self.engines, self.envoy, self.http = served, engines, envoy, http
        self.agents, self.door = {}, door

    def post(self, body=None, headers=None, **options):
        body = body or {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        return self.http.post(f"{self.envoy.url}/v1/chat/completions", json=body, headers=headers, **options)

    async def served_by(self, body=None, headers=None):
        """Which engine answered it."""
        before = self.seen()
        async with self.post(body, headers) as answer:
            text = await answer.text()
            assert answer.status == 200, (answer.status, text, self.envoy.log[-500:])
        (name,) = [name for name, count in self.seen().items() if count != before[name]]
        return name

    def seen(self):
        return {name: len(engine.seen) for name, engine in self.engines.items()}

    async def announce(self, node, *names, engine="vllm"):
        """The node's agent says which engines there are."""
        tier = "gold" if node == "gold" else "shared"
        endpoints = [
            tpb.EngineEndpoint(
                address=self.engines[name].address, models=["m"], ready=True, engine=engine, labels={"tier": tier}
            )
            for name in names
        ]
        agent = self.agents.get(node)
        if agent is None:
            self.agents[node] = await self.served.agent(node, *endpoints)
        else:
            await agent.hello(*endpoints)

    async def set_state(self, name, state=SchedulingState.DRAINING):
        await self.served.store.set_endpoint_state(f"{self.engines[name].address}@0", state, WRITE)
        await self.served.scheduler.refresh()

    async def clusters(self):
        """`{cluster: {engine: health}}` as Envoy itself tells."""
        names = {engine.address: name for name, engine in self.engines.items()}
        found = {}
        for cluster in (await self.envoy.get_json("/clusters?format=json"))["cluster_statuses"]:
            hosts = {}
            for host in cluster.get("host_statuses", ()):
                address = host["address"]["socket_address"]
                name = names.get(f"{address['address']}:{address['port_value']}")
                hosts[name] = host["health_status"]["eds_health_status"]
            found[cluster["name"]] = hosts
        return found

    async def until_cluster(self, name, **hosts):
        async def same():
            return (await self.clusters()).get(name) == hosts

        await eventually(same)

    async def settled(self):
        scheduler = self.served.scheduler
        await eventually(lambda: not scheduler.ledger.reservations and not len(scheduler.dispatcher.holds))

    async def stop_scheduler(self):
        await self.served.server.stop(0)
        await self.door.stop()

    async def start_scheduler(self):
        """The same one again, on the same port."""
        config = self.served.scheduler.config.model_copy(update={"listen": f"127.0.0.1:{self.served.server.port}"})
        self.served.server = GrpcServer(self.served.scheduler, config)
        await self.served.server.start()
        port, self.door = self.door.port, HttpServer(self.served.scheduler)
        await self.door.start(f"127.0.0.1:{port}")


@contextlib.asynccontextmanager
async def deployed(name, database_url, directory, change=lambda config: None, **settings):
    """This configuration, all engines in it, until the block ends. The environment has HEADWAY_TOKEN=TOKEN."""
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(database_url, **settings))
        for resource in (
            Tenant("acme"),
            GpuGroup("gold", selector={"tier": "gold"}),
            Credential("envoy", Role.ROUTER, hashlib.sha256(TOKEN.encode()).digest(), tenants=("acme", "default")),
        ):
            await served.store.create(resource, WRITE)
        await served.store.create(Binding("acme", "gold", BindingMode.DEDICATED), WRITE)
        await served.scheduler.refresh()
        engines = {each: await OpenAIEngine().start() for each in ("gold1", "gold2", "shared1", "shared2", "spare")}
        for engine in engines.values():
            stack.push_async_callback(engine.stop)
        door = HttpServer(served.scheduler)
        await door.start("127.0.0.1:0")
        config = configuration(name, f"127.0.0.1:{served.server.port}", f"127.0.0.1:{door.port}")
        change(config)
        made = Deployed(served, engines, None, await stack.enter_async_context(aiohttp.ClientSession()), door)
        stack.push_async_callback(lambda: made.door.stop())
        await made.announce("gold", "gold1", "gold2")
        await made.announce("shared", "shared1", "shared2")
        made.envoy = await stack.enter_async_context(running_envoy(config, directory))
        await made.until_cluster("tenants/acme", gold1="HEALTHY", gold2="HEALTHY")
        await made.until_cluster("tenants/default", shared1="HEALTHY", shared2="HEALTHY")
        yield made
