"""The whole of Headway on this machine, as real processes: Postgres, scheduler, engines, agents, gateway."""

import fcntl
import json
import shutil
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import grpc
from headway.admin.v1 import admin_pb2, admin_pb2_grpc
from headway.fleet.v1 import fleet_pb2, fleet_pb2_grpc

if TYPE_CHECKING:
    from headway_scheduler.store.embedded import EmbeddedPostgres

from headway_cli.local.processes import LocalStackError, Process, wait_for

__all__ = ["LocalStack", "NodeOptions", "StackOptions", "TenantOptions"]

_START_S: Final = 60.0
_BIN: Final = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """A host: an agent and as many simulated GPUs as engines. `tier` is its label."""

    name: str
    tier: str
    engines: int = 4


@dataclass(frozen=True, slots=True)
class TenantOptions:
    """A tenant that has the GPU group `group`, the nodes of the tier of that name, to itself. `key`: its API key."""

    name: str
    group: str

    @property
    def key(self) -> str:
        """What its users send as a bearer token."""
        return f"{self.name}-key"


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What to start. Port 0 takes a free one. Without tenants everyone is `default` and may use every GPU."""

    data_dir: Path
    nodes: tuple[NodeOptions, ...] = (NodeOptions("node-a", "gold"), NodeOptions("node-b", "silver"))
    tenants: tuple[TenantOptions, ...] = ()
    hardware: str = "a100-40g-8b"
    product: str = "NVIDIA A100-SXM4-40GB"
    model: str = "demo-8b"
    speedup: float = 1.0
    waiting_limit: int | None = None
    scheduler_port: int = 0
    gateway_port: int = 0
    extra_scheduler_environment: dict[str, str] = field(default_factory=dict)


class LocalStack:
    """Starts everything on entering, in order; stops everything on leaving, in reverse, whatever happened."""

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.run_dir = options.data_dir / "run"
        self.scheduler_port = options.scheduler_port
        self.http_port = 0
        self.gateway_port = options.gateway_port
        self.postgres: EmbeddedPostgres | None = None
        self.database_url = ""
        self.engines: list[Process] = []
        self.engine_addresses: list[str] = []
        self.agents: list[Process] = []
        self.scheduler: Process | None = None
        self.gateway: Process | None = None
        self._closers = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as closers:
            self._lock(closers)
            shutil.rmtree(self.run_dir, ignore_errors=True)
            self.run_dir.mkdir(parents=True)
            self.database_url = self._start_postgres(closers)
            closers.callback(self.stop)
            self.start_engines()
            self.scheduler = self.start_scheduler()
            for node in range(len(self.options.nodes)):
                self.agents.append(self._start_agent(node))
            self._configure_tenants()
            self.gateway = self._start_gateway()
            self.wait_ready()
            self._closers = closers.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closers.close()

    # Parts

    @property
    def processes(self) -> list[Process]:
        """Every process but Postgres, in the order of their start."""
        parts = [*self.engines, self.scheduler, *self.agents, self.gateway]
        return [process for process in parts if process is not None]

    @property
    def scheduler_address(self) -> str:
        """Where the scheduler answers gRPC."""
        return f"127.0.0.1:{self.scheduler_port}"

    @property
    def gateway_url(self) -> str:
        """Where the gateway answers HTTP."""
        return f"http://127.0.0.1:{self.gateway_port}"

    def channel(self) -> grpc.Channel:
        """A channel to the scheduler."""
        return grpc.insecure_channel(self.scheduler_address)

    def status(self) -> fleet_pb2.GetStatusResponse:
        """How the scheduler does."""
        with self.channel() as channel:
            return fleet_pb2_grpc.FleetStub(channel).GetStatus(fleet_pb2.GetStatusRequest(), timeout=5)

    def use_strategy(self, strategy: str) -> None:
        """Bind `strategy` as the default; the next Route uses it."""
        binding = admin_pb2.StrategyBinding(name="strategyBindings/default", strategy=f"strategies/{strategy}")
        with self.channel() as channel:
            admin_pb2_grpc.AdminStub(channel).UpdateStrategyBinding(
                admin_pb2.UpdateStrategyBindingRequest(strategy_binding=binding), timeout=10
            )

    def clear_caches(self) -> None:
        """Empty every engine's prefix cache."""
        for address in self.engine_addresses:
            request = urllib.request.Request(f"http://{address}/reset_prefix_cache", method="POST")
            with urllib.request.urlopen(request, timeout=10):  # noqa: S310
                pass

    def stop(self) -> None:
        """Stop every process, data plane first; ask all of a kind before waiting for any."""
        for kind in ([self.gateway], self.agents, [self.scheduler], self.engines):
            started = [process for process in kind if process is not None]
            for process in started:
                process.terminate()
            for process in started:
                process.join()

    # Starting

    def _lock(self, closers: ExitStack) -> None:
        """Keep every other stack out of `data_dir` until this one has stopped; the file itself stays."""
        directory = self.options.data_dir
        directory.mkdir(parents=True, exist_ok=True)
        lock = closers.enter_context((directory / "up.lock").open("ab"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another stack runs in {directory}; stop it, or give another --data-dir"
            raise LocalStackError(message) from None

    def _start_postgres(self, closers: ExitStack) -> str:
        # Only here: the command line must work where the scheduler is not installed.
        from headway_scheduler.store.embedded import EmbeddedPostgres

        self.postgres = EmbeddedPostgres(self.options.data_dir)
        closers.callback(self.postgres.stop)
        return self.postgres.start()

    def start_engines(self) -> None:
        """Start the engines, each on a free port: `engines` and `engine_addresses` are theirs."""
        options = self.options
        files = []
        for number in range(sum(node.engines for node in options.nodes)):
            port_file = self.run_dir / f"engine-{number}.port"
            files.append(port_file)
            limit = [] if options.waiting_limit is None else ["--waiting-limit", str(options.waiting_limit)]
            self.engines.append(
                self.start_process(
                    f"engine-{number}",
                    [
                        sys.executable,
                        "-m",
                        "headway_sim.emulator",
                        "--hardware",
                        options.hardware,
                        "--model",
                        options.model,
                        "--speedup",
                        str(options.speedup),
                        "--port-file",
                        str(port_file),
                        *limit,
                    ],
                    {},
                )
            )
        wait_for("engines listen", lambda: all(file.exists() for file in files), _START_S, self.engines)
        self.engine_addresses = [f"127.0.0.1:{file.read_text().split()[0].rpartition(':')[2]}" for file in files]

    def start_scheduler(self) -> Process:
        """Start the scheduler, on the port it had if it ran before."""
        port_file = self.run_dir / "scheduler.json"
        port_file.unlink(missing_ok=True)
        process = self.start_process(
            "scheduler",
            [str(_BIN / "headway-scheduler")],
            {
                "HEADWAY_DATABASE_URL": self.database_url,
                "HEADWAY_SCHEDULER_NAME": "local",
                "HEADWAY_SCHEDULER_LISTEN": f"127.0.0.1:{self.scheduler_port}",
                "HEADWAY_SCHEDULER_LISTEN_HTTP": f"127.0.0.1:{self.http_port}",
                "HEADWAY_SCHEDULER_PORT_FILE": str(port_file),
                "HEADWAY_SCHEDULER_TIME_SCALE": str(self.options.speedup),
                "HEADWAY_SCHEDULER_DRAIN_TIMEOUT_S": "2",
                **self.options.extra_scheduler_environment,
            },
        )
        wait_for("scheduler listens", port_file.exists, _START_S, [process])
        ports = json.loads(port_file.read_text())
        self.scheduler_port, self.http_port = ports["grpc"], ports["http"]
        return process

    def agent_config(self, number: int) -> dict[str, Any]:
        """What the agent of a node is told of its devices and engines."""
        node = self.options.nodes[number]
        first = sum(other.engines for other in self.options.nodes[:number])
        return {
            "devices": [{"kind": "simulated", "count": node.engines, "product": self.options.product}],
            "engines": [
                {
                    "address": self.engine_addresses[first + index],
                    "engine": "emulator",
                    "hardware": self.options.hardware,
                    "device_indexes": [index],
                }
                for index in range(node.engines)
            ],
        }

    def _start_agent(self, number: int) -> Process:
        node = self.options.nodes[number]
        config = {
            "node": node.name,
            "labels": {"tier": node.tier},
            "schedulers": [self.scheduler_address],
            **self.agent_config(number),
        }
        return self._configured("headway-agent", node.name, config)

    def start_agent(self, number: int) -> None:
        """Start an agent again, after it was killed."""
        self.agents[number] = self._start_agent(number)

    def _start_gateway(self) -> Process:
        port_file = self.run_dir / "gateway.port"
        tenants = self.options.tenants
        config = {
            "port": self.gateway_port,
            "port_file": str(port_file),
            "schedulers": [self.scheduler_address],
            "api_keys": {tenant.key: tenant.name for tenant in tenants},
            "anonymous_tenant": "" if tenants else "default",
            "drain_timeout_s": 2.0,
        }
        process = self._configured("headway-gateway", "gateway", config)
        wait_for("gateway listens", port_file.exists, _START_S, [process])
        self.gateway_port = int(port_file.read_text())
        return process

    def _configure_tenants(self) -> None:
        with self.channel() as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            for tenant in self.options.tenants:
                group = admin_pb2.GpuGroup(name=f"gpuGroups/{tenant.group}", selector={"tier": tenant.group})
                admin.UpdateGpuGroup(admin_pb2.UpdateGpuGroupRequest(gpu_group=group, allow_missing=True), timeout=10)
                owner = admin_pb2.Tenant(name=f"tenants/{tenant.name}")
                admin.UpdateTenant(admin_pb2.UpdateTenantRequest(tenant=owner, allow_missing=True), timeout=10)
                binding = admin_pb2.Binding(
                    name=f"tenants/{tenant.name}/bindings/{tenant.group}",
                    gpu_group=group.name,
                    mode=admin_pb2.BINDING_MODE_DEDICATED,
                )
                admin.UpdateBinding(admin_pb2.UpdateBindingRequest(binding=binding, allow_missing=True), timeout=10)

    def wait_ready(self) -> None:
        """Wait until every endpoint may be chosen and the gateway has heard of them."""
        count = len(self.engine_addresses)
        wait_for("endpoints are healthy", lambda: self.status().endpoints_healthy == count, _START_S, self.processes)
        wait_for("gateway is ready", self._gateway_ready, _START_S, self.processes)

    def _gateway_ready(self) -> bool:
        """Has the gateway heard of engines for everyone? Only then can it go on without a scheduler."""
        keys = [tenant.key for tenant in self.options.tenants] or [""]
        return all(self._offers_model(key) for key in keys)

    def _offers_model(self, key: str) -> bool:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"{self.gateway_url}/v1/models", headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310
                listed = json.load(response)["data"]
        except (urllib.error.URLError, OSError):
            return False
        return self.options.model in [model["id"] for model in listed]

    def _configured(self, program: str, name: str, config: dict[str, Any]) -> Process:
        path = self.run_dir / f"{name}.json"
        path.write_text(json.dumps(config, indent=2))
        return self.start_process(name, [str(_BIN / program), "--config", str(path)], {})

    def start_process(self, name: str, command: list[str], environment: dict[str, str]) -> Process:
        """Start a process, its log `name`.log in `run_dir`. What `processes` does not list, its starter stops."""
        if not Path(command[0]).exists():
            raise LocalStackError(f"{command[0]} is not installed; install headway with the extra [local]")
        process = Process(name, command, self.run_dir / f"{name}.log", environment)
        process.start()
        return process
