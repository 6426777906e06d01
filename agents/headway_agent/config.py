"""The agent's configuration: a TOML or JSON file, and the environment over it.

Read here and nowhere else. Unknown keys are errors, and all problems are reported at once, each in its place.
"""

import ipaddress
import itertools
import json
import os
import socket
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FilePath,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

ENV_PREFIX = "HEADWAY_AGENT_"
_ENV_CONFIG = f"{ENV_PREFIX}CONFIG"


class ConfigError(Exception):
    """The configuration cannot be used; `problems` holds one line each, with its place."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def _host_port(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536) or "/" in address:
        raise ValueError("must be HOST:PORT")
    return address


def _http_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    return url.rstrip("/")


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    times = [t for t, _ in points]
    if any(b <= a for a, b in itertools.pairwise(times)):
        raise ValueError("the points' seconds must grow")
    return points


Address = Annotated[str, AfterValidator(_host_port)]
Url = Annotated[str, AfterValidator(_http_url)]
Curve = Annotated[list[tuple[float, float]], AfterValidator(_rising)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NvmlDevices(_Section):
    """NVIDIA GPUs and MIG instances, all of them."""

    kind: Literal["nvml"]
    request_timeout_s: float = Field(default=2.0, gt=0, le=60)
    """How long one device may take to answer before the reading process is killed."""
    open_timeout_s: float = Field(default=30.0, gt=0, le=600)
    """How long `nvmlInit` may take."""
    library: str = "pynvml"
    """The Python module that speaks NVML."""


class CpuDevice(_Section):
    """The host's processors as one device."""

    kind: Literal["cpu"]


class Curves(_Section):
    """Lists of (second, value); straight between points, constant beyond the ends."""

    memory: Curve = Field(default=[(0.0, 0.9)], min_length=1)
    """Share of the memory used. Engines reserve about 0.9 of it at start."""
    utilization: Curve = Field(default=[(0.0, 0.0)], min_length=1)
    temperature_c: Curve = []
    """Empty: follows the utilisation."""
    power_w: Curve = []
    """Empty: follows the utilisation."""


class Fault(_Section):
    """Something that goes wrong with a simulated device."""

    kind: Literal["lost", "xid", "hot", "stale"]
    at_s: float = Field(ge=0)
    for_s: float | None = Field(default=None, gt=0)
    """Absent: for ever. An `xid` is a moment."""
    device: int = Field(default=0, ge=0)
    xid: int = Field(default=79, gt=0)

    def active(self, t: float) -> bool:
        """Is it so at second `t`?"""
        return self.at_s <= t and (self.for_s is None or t < self.at_s + self.for_s)


class SimulatedDevices(_Section):
    """GPUs that do not exist."""

    kind: Literal["simulated"]
    count: int = Field(default=1, ge=1, le=1024)
    product: str = "NVIDIA A100-SXM4-40GB"
    memory_gib: float = Field(default=40.0, gt=0)
    power_limit_w: float = Field(default=400.0, gt=0)
    idle_w: float = Field(default=55.0, ge=0)
    idle_c: float = 32.0
    temperature_slowdown_c: float = 92.0
    seed: str = ""
    """Names the UUIDs; empty: the node's name. The same seed gives the same UUIDs."""
    follow_engines: bool = True
    """Utilisation follows the engines on the device, where they report."""
    curves: Curves = Curves()
    faults: list[Fault] = []

    @model_validator(mode="after")
    def _faults_hit_devices(self) -> "SimulatedDevices":
        for number, fault in enumerate(self.faults):
            if fault.device >= self.count:
                raise ValueError(f"faults.{number}.device: there are only {self.count} devices")
        return self


DeviceSettings = NvmlDevices | CpuDevice | SimulatedDevices


def _is_loopback(address: str) -> bool:
    """Is this ZMQ address on this host alone?"""
    kind, _, place = address.partition("://")
    if kind in ("ipc", "inproc"):
        return True
    host = place.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_MAX_SOCKET_PATH: Final = 107
"""What the kernel takes for the path of a socket."""


def _zmq_address(address: str) -> str:
    if address and not address.startswith(("tcp://", "ipc://")):
        raise ValueError("must start with tcp:// or ipc://")
    kind, _, place = address.partition("://")
    if kind == "tcp":
        port = place.rpartition(":")[2] if ":" in place else ""
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
            raise ValueError("must end with a port, tcp://HOST:PORT")
    elif address and not 0 < len(place.encode()) <= _MAX_SOCKET_PATH:
        raise ValueError(f"must name a socket, in at most {_MAX_SOCKET_PATH} bytes")
    return address


ZmqAddress = Annotated[str, AfterValidator(_zmq_address)]


class KvEventSettings(_Section):
    """Where an engine publishes what its KV cache gains and loses."""

    address: ZmqAddress
    """The publisher's, `tcp://127.0.0.1:5557`; with `bind`, ours, where the engine connects to."""
    bind: bool = False
    replay_address: ZmqAddress = ""
    """The engine's replay socket. Without one, whatever is missed means to forget the whole cache."""
    replay_timeout_s: float = Field(default=3.0, gt=0, le=60)
    topic: str = ""
    """Only messages whose topic begins so."""
    max_blocks: int = Field(default=262_144, ge=1)
    """Engine blocks remembered at most; about 600 bytes each."""
    remote: bool = False
    """Allow addresses beyond this host: events name what tenants' prompts have in common, and are not encrypted."""

    @model_validator(mode="after")
    def _local(self) -> "KvEventSettings":
        for name, address in (("address", self.address), ("replay_address", self.replay_address)):
            if address and not self.remote and not _is_loopback(address):
                raise ValueError(f"{name}: {address} is not on this host; set remote = true if that is meant")
        return self


class EngineSettings(_Section):
    """One engine rank on this host."""

    address: Address
    """As data planes reach it."""
    url: Url = ""
    """As this agent reaches it; empty: http://ADDRESS."""
    metrics_url: Url = ""
    """Where `/metrics` is, if not at `url`; Triton's is on port 8002."""
    engine: Literal["vllm", "sglang", "tensorrt_llm", "triton", "tgi", "llama_cpp", "openai", "emulator"] = "vllm"
    dp_rank: int | None = Field(default=None, ge=0)
    """The rank whose metrics these are. Absent: one endpoint for the whole engine, its ranks added up."""
    role: Literal["both", "prefill", "decode"] = "both"
    labels: dict[str, str] = {}
    device_uuids: list[str] = []
    device_indexes: list[int] = []
    """GPUs of this host by index, for those whose UUIDs are not known beforehand."""
    hardware: str = ""
    """A key of the cost model's priors, `a100-40g-8b`; empty: derived from the device."""
    models: list[str] = []
    """Overrides what the engine lists."""
    max_num_seqs: int | None = Field(default=None, gt=0)
    """How many sequences it runs at once: vLLM does not publish it."""
    kv_events: KvEventSettings | None = None
    """Absent: the scheduler believes what it sent there to be cached."""
    pulls_prefixes: bool = False
    """It can pull cached prefixes from peers that have this set too (a KV connector)."""
    api_key_file: FilePath | None = None
    """A bearer token for the engine's own API."""

    @property
    def base_url(self) -> str:
        """Where this agent scrapes."""
        return self.url or f"http://{self.address}"


class ProbeSettings(_Section):
    """Look for engines on local ports. Off unless ports are named."""

    ports: list[int] = []
    host: str = "127.0.0.1"
    advertise_host: str = ""
    """As data planes reach this host; empty: `host`."""
    interval_s: float = Field(default=30.0, gt=0)


class TlsSettings(_Section):
    """TLS towards the schedulers. Without this section the streams are plain text."""

    ca_file: Path | None = None
    """Empty: the system's roots."""
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str = ""
    """The name in the scheduler's certificate, where it is not the address."""

    @model_validator(mode="after")
    def _pair(self) -> "TlsSettings":
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        return self


def _split(value: object) -> object:
    """`a:1,b:2` or a JSON list, as environments write lists."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [part.strip() for part in value.split(",") if part.strip()]


class AgentConfig(BaseSettings):
    """Everything an agent can be told."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, env_ignore_empty=True
    )

    node: str = Field(default_factory=socket.gethostname, min_length=1, max_length=253)
    """Unique among nodes; the agent's credential is bound to it."""
    labels: dict[str, str] = {}
    schedulers: Annotated[list[Address], NoDecode] = ["127.0.0.1:7070"]
    """Each gets its own stream."""
    interval_s: float = Field(default=1.0, ge=0.05, le=60)
    """Between samples; a scheduler's Welcome overrides it."""
    token: str = Field(default="", repr=False)
    token_file: Path | None = None
    """Read again at each connect, so that a token can be rotated."""
    tls: TlsSettings | None = None
    devices: list[Annotated[DeviceSettings, Field(discriminator="kind")]] = []
    engines: list[EngineSettings] = []
    probe: ProbeSettings = ProbeSettings()
    kv_events_interval_s: float = Field(default=0.1, ge=0.01, le=10)
    """How often what the engines' caches gained and lost is sent."""
    health_file: Path | None = None
    """Touched after each sample while a scheduler is connected: its age tells a health check how the agent does."""
    metrics_listen: str = Field(default="", pattern=r"^$|^.+:\d{1,5}$")
    """`HOST:PORT` where Prometheus finds `/metrics`; empty: nowhere."""
    log_format: Literal["json", "text"] = "json"

    @field_validator("schedulers", mode="before")
    @classmethod
    def _split_schedulers(cls, value: object) -> object:
        return _split(value)

    @model_validator(mode="after")
    def _consistent(self) -> "AgentConfig":
        problems = [*_repeats(self), *_token_twice(self), *_no_scheduler(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic-settings' signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment goes over the file."""
        return env_settings, init_settings


def _repeats(config: AgentConfig) -> list[str]:
    endpoints = Counter((e.address, e.dp_rank or 0) for e in config.engines)
    twice = [f"engines: {address} rank {rank} is listed twice" for (address, rank), n in endpoints.items() if n > 1]
    streams = Counter(config.schedulers)
    kinds = Counter(d.kind for d in config.devices if d.kind != "simulated")
    return [
        *twice,
        *(f"schedulers: {s} is listed twice" for s, n in streams.items() if n > 1),
        *(f"devices: {kind} is listed twice" for kind, n in kinds.items() if n > 1),
    ]


def _token_twice(config: AgentConfig) -> list[str]:
    return ["token and token_file exclude each other"] if config.token and config.token_file else []


def _no_scheduler(config: AgentConfig) -> list[str]:
    return [] if config.schedulers else ["schedulers: at least one is needed"]


def load(path: Path | None = None) -> AgentConfig:
    """Read the file (.toml or .json), then the environment. Raises ConfigError with every problem."""
    named = path or (Path(os.environ[_ENV_CONFIG]) if os.environ.get(_ENV_CONFIG) else None)
    values = _read(named) if named else {}
    problems = _unknown_variables(os.environ)
    try:
        config = AgentConfig(**values)
    except ValidationError as error:
        place = f"{named}: " if named else ""
        problems += [place + _line(e["loc"], e["msg"]) for e in error.errors(include_url=False)]
    except SettingsError as error:
        problems.append(f"environment: {error}")
    if problems:
        raise ConfigError(problems)
    return config


def _line(place: Sequence[int | str], message: str) -> str:
    where = ".".join(str(part) for part in place)
    return f"{where}: {message.removeprefix('Value error, ')}" if where else message.removeprefix("Value error, ")


def _read(path: Path) -> dict[str, Any]:  # any shape: validated by AgentConfig
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from error
    except ValueError as error:
        raise ConfigError([f"{path}: {error}"]) from error
    if not isinstance(values, dict):
        raise ConfigError([f"{path}: must be a table of settings"])
    return values


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = {f"{ENV_PREFIX}{name}".upper() for name in AgentConfig.model_fields} | {_ENV_CONFIG}
    return [
        f"environment: {name} is not a setting"
        for name in sorted(environ)
        if name.upper().startswith(ENV_PREFIX) and name.upper().split("__")[0] not in known
    ]
