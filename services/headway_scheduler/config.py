"""The scheduler's configuration: environment variables `HEADWAY_SCHEDULER_…`, read here only."""

import ipaddress
import os
import secrets
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, Self

from headway_tracing.build import problem_of
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from headway_scheduler.admission.guards import GuardConfig
from headway_scheduler.admission.holds import HoldOrder
from headway_scheduler.admission.retries import RetryConfig
from headway_scheduler.bootstrap import Bootstrap, read_bootstrap
from headway_scheduler.fleet.health import DeviceLimits, EjectionConfig, HardGuard, SlowStart
from headway_scheduler.strategies.base import SoftGuard

__all__ = ["Config", "ConfigError", "load"]

_PREFIX: Final = "HEADWAY_SCHEDULER_"
_ALWAYS_ON: Final = frozenset({HardGuard.NOT_READY, HardGuard.PROBING})
_LISTS: Final = {
    "guards_off": frozenset(guard.value for guard in (*SoftGuard, *HardGuard)) - _ALWAYS_ON,
    # Those that agents report, but the power brake, which has its own guard.
    "throttle_reasons": frozenset({"sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal"}),
    "slow_start_after": frozenset(each.value for each in SlowStart),
}
"""Settings that list names, and the names that there are."""
_POSTGRES: Final = frozenset({"postgresql", "postgres"})


class ConfigError(Exception):
    """Everything wrong with the configuration, one problem a line."""


class Config(BaseSettings):
    """Every setting; the environment variable is the name in capitals after `HEADWAY_SCHEDULER_`."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True)

    name: str = Field(default_factory=socket.gethostname, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")
    """In reservation ids and Fleet; unique among schedulers."""
    listen: str = "127.0.0.1:7070"
    """gRPC: `HOST:PORT`; port 0 takes a free one."""
    listen_http: str = "127.0.0.1:7071"
    """HTTP: the console, `/metrics`, `/healthz`, `/readyz`, and Route and Report as JSON."""
    console: bool = True
    """Serve the console on the HTTP port."""
    port_file: Path | None = None
    """Write the ports taken here, as JSON, once ready."""
    database_url: str = Field("", validation_alias="HEADWAY_DATABASE_URL")
    """Postgres; empty: an embedded one in `data_dir`, allowed on loopback only."""
    data_dir: Path = Field(Path(".headway"), validation_alias="HEADWAY_DATA_DIR")
    """Where the embedded Postgres lives."""
    standby: bool = False
    """Several schedulers share the database: one leads, the others stand by."""
    lease_s: float = Field(0.8, ge=0.2, le=60)
    """With `standby`: how long a leader that says nothing stays leader."""
    tls_certificate: Path | None = None
    """PEM; with `tls_key`, the server speaks TLS."""
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """PEM: clients show a certificate of this authority, and may do without a token."""
    listen_mtls: str = ""
    """With `tls_client_ca`: another `HOST:PORT` for those with certificates; empty: they are wanted on `listen`."""
    http_tls: bool = False
    """HTTP speaks TLS too, with the same certificate."""
    insecure: bool = False
    """Listen beyond loopback without TLS. For networks that are private by other means."""
    require_credentials: bool | None = None
    """Unset: required when listening beyond loopback."""
    bootstrap: Annotated[Bootstrap, NoDecode, BeforeValidator(read_bootstrap)] = Bootstrap()
    """A TOML file of credentials to create where they are missing; docs/deploy/bootstrap.md explains it."""
    admin_token_file: Path | None = None
    """Where the token of a first admin is written, where credentials are required and there is none; unset:
    `admin.token` in `data_dir`."""
    authentication_failures_per_minute: int = Field(60, ge=1, le=1_000_000)
    """Failures that one peer is told of and that are logged; those beyond are only answered `TOO_MANY_FAILURES`."""
    max_streams_per_credential: int = Field(50_000, ge=1)
    """Streams that one credential may have open."""
    time_scale: float = Field(1.0, gt=0, le=10_000)
    """The engines' speed-up: an emulated fleet's times are life's divided by this."""
    learn_costs: bool = True
    """Learn from reports how fast each endpoint is; else the priors stay."""
    learn_history: bool = True
    """Learn output lengths and task weights from reports; else the hand-set ones stay."""
    telemetry_interval_s: float = Field(1.0, ge=0.05, le=60)
    """How often agents send a sample."""
    stale_after_s: float = Field(5.0, gt=0, le=600)
    """A node silent for this long is stale."""
    settle_s: float = Field(5.0, ge=0, le=600)
    """After a start, how long a Route that finds no endpoint yet is held for agents to return, not refused."""
    max_wait_s: float = Field(30.0, ge=0, le=3600)
    """How long a Route may be held unless it says otherwise."""
    max_holds: int = Field(10_000, ge=0)
    """Routes held at once."""
    max_hold_bytes: int = Field(1 << 30, ge=0)
    """Memory that the prompts of all held Routes may take."""
    max_tenant_holds: int = Field(2_500, ge=0)
    """Routes of one tenant held at once."""
    max_tenant_hold_bytes: int = Field(256 << 20, ge=0)
    """Memory that the prompts of one tenant's held Routes may take."""
    hold_order: HoldOrder = HoldOrder.FAIR
    """In which order those of one priority are served."""
    fair_input: float = Field(1.0, ge=0, le=1000)
    """What a prompt token that is computed counts for in fair share."""
    fair_cached: float = Field(0.1, ge=0, le=1000)
    """What a prompt token found in the cache counts for."""
    fair_output: float = Field(2.0, ge=0, le=1000)
    """What a token of the answer counts for."""
    guards_off: str = ""
    """Guards, by comma, that never close: as `explain` names them."""
    pressure_close: float = Field(0.80, gt=0, le=1)
    """Memory pressure above which the soft guard closes."""
    pressure_open: float = Field(0.75, gt=0, le=1)
    """It opens at or below this."""
    heat_close: float = Field(1.0, gt=0, le=2)
    """Temperature over the slowdown temperature above which the soft guard closes."""
    heat_open: float = Field(0.95, gt=0, le=2)
    """It opens at or below this."""
    throttle_reasons: str = "hw_slowdown,hw_thermal"
    """NVML's reasons, by comma, for which the soft guard closes."""
    guard_dwell_s: float = Field(2.0, ge=0, le=600)
    """A soft guard opens when it has had no reason to be closed for so long."""
    ignored_xids: str = "13,31,43,45,68,109"
    """XIDs, by comma, that close no endpoint: those of the programs on a GPU."""
    ecc_errors: int = Field(1, ge=0)
    """Uncorrected ECC errors since the driver was loaded that close a device's endpoints; 0: never."""
    eject_failures: int = Field(5, ge=0)
    """Failures in a row that eject an endpoint; 0: never."""
    eject_failure_percent: float = Field(50.0, ge=0, le=100)
    """Failures in a hundred that eject an endpoint; 0: never."""
    eject_window_s: float = Field(30.0, gt=0, le=3600)
    """Over about how long they are counted."""
    eject_min_requests: int = Field(20, ge=1)
    """And of how many requests in that time at least."""
    eject_base_s: float = Field(5.0, gt=0, le=3600)
    """How long an ejection lasts, times the ejections in a row."""
    eject_max_s: float = Field(120.0, gt=0, le=86_400)
    """And at most."""
    eject_max_percent: float = Field(50.0, ge=0, le=100)
    """Never more of a pool than this; 0: never any."""
    eject_probes: int = Field(1, ge=1, le=100)
    """Requests that must be answered after an ejection before the endpoint is whole."""
    fault_load_s: float = Field(2.0, ge=0, le=600)
    """A failure counts as load for about so long; 0: not at all."""
    slow_start_s: float = Field(10.0, ge=0, le=3600)
    """How long an endpoint's share grows after one of `slow_start_after`; 0: not at all."""
    slow_start_after: str = "ejection"
    """Of `ejection`, `new` and `restart`, by comma."""
    retry_percent: float = Field(20.0, ge=0, le=100)
    """Retries at once, of a model's requests in flight; 100: no limit."""
    retry_min: int = Field(3, ge=0)
    """And how many always."""
    resume_grace_s: float = Field(10.0, ge=0, le=3600)
    """How long reservations of a lost stream wait for Resume."""
    save_interval_s: float = Field(5.0, ge=0.05, le=300)
    """How often what was learned, quotas and usage are saved: a crash loses at most this much of them."""
    usage_retention_days: int = Field(400, ge=1, le=36_500)
    """How long usage is kept."""
    drain_timeout_s: float = Field(30.0, ge=0, le=3600)
    """How long calls in progress may take after SIGTERM."""
    max_message_bytes: int = Field(64 * 1024 * 1024, ge=1024 * 1024)
    """gRPC's own limit, above our field limits, so that a big prompt meets our answer and not the transport's."""
    prompt_header_engines: str = "sglang"
    """Engines, by comma, that send a stream's headers with its first token: the access log's first byte is a TTFT."""
    record_decisions: int = Field(10_000, ge=0, le=1_000_000)
    """Decisions remembered, and as many refusals; 0: none."""
    record_bytes: int = Field(64 * 1024 * 1024, ge=0)
    """Memory that they may take; the candidates of the oldest go first."""
    export_dir: Path | None = None
    """Write decisions and what came of them into this folder, as JSON lines that `headway sim run --trace` replays."""
    export_share: float = Field(1.0, gt=0, le=1)
    """Of all sessions, or of requests that have none."""
    export_file_bytes: int = Field(64 * 1024 * 1024, ge=64 * 1024)
    """A file that has so many is followed by the next."""
    export_files: int = Field(16, ge=2, le=10_000)
    """Files kept; the oldest is deleted."""
    metrics_series: int = Field(100, ge=1, le=10_000)
    """Pairs of tenant and model with metrics of their own; the others share the label `_other`."""
    metrics_endpoints: int = Field(1_000, ge=1, le=100_000)
    """Endpoints with metrics of their own; the others share the label `_other`."""
    trace_endpoint: str = ""
    """An OpenTelemetry collector (OTLP over HTTP), `http://HOST:4318`; empty: nothing is traced."""
    trace_share: float = Field(0.01, ge=0, le=1)
    """Of the requests whose caller decided nothing; else the caller's decision counts."""
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    tokenizers_dir: Path | None = None
    """Tokenise text prompts by the `tokenizer` that a model names below this folder, to match engines' KV events."""
    seed: int = Field(default_factory=lambda: secrets.randbits(64))
    """Of every random number in decisions."""

    @property
    def engines_with_prompt_headers(self) -> frozenset[str]:
        """`prompt_header_engines`, read."""
        return _listed(self.prompt_header_engines)

    @property
    def guards(self) -> GuardConfig:
        """The soft guards' settings."""
        return GuardConfig(
            pressure_close=self.pressure_close,
            pressure_open=self.pressure_open,
            heat_close=self.heat_close,
            heat_open=self.heat_open,
            dwell_s=self.guard_dwell_s,
            throttle_reasons=_listed(self.throttle_reasons),
            off=frozenset(guard for guard in SoftGuard if guard.value in _listed(self.guards_off)),
        )

    @property
    def hard_guards_off(self) -> frozenset[HardGuard]:
        """The hard guards that never close."""
        return frozenset(guard for guard in HardGuard if guard.value in _listed(self.guards_off))

    @property
    def devices(self) -> DeviceLimits:
        """Which of its devices' faults close an endpoint."""
        return DeviceLimits(frozenset(int(xid) for xid in _listed(self.ignored_xids)), self.ecc_errors)

    @property
    def ejection(self) -> EjectionConfig:
        """When endpoints are ejected, and how they come back."""
        wanted, off = _listed(self.slow_start_after), HardGuard.EJECTED in self.hard_guards_off
        return EjectionConfig(
            failures=0 if off else self.eject_failures,
            failure_percent=0.0 if off else self.eject_failure_percent,
            window_s=self.eject_window_s,
            min_requests=self.eject_min_requests,
            base_s=self.eject_base_s,
            max_s=self.eject_max_s,
            max_percent=self.eject_max_percent,
            probes=self.eject_probes,
            fault_load_s=self.fault_load_s,
            slow_start_s=self.slow_start_s,
            slow_start_after=frozenset(each for each in SlowStart if each.value in wanted),
        )

    @property
    def retries(self) -> RetryConfig:
        """How many retries may be in progress at once."""
        return RetryConfig(self.retry_percent, self.retry_min)

    @property
    def on_loopback(self) -> bool:
        """Does it listen on this host alone?"""
        return all(_is_loopback(address) for address in (self.listen, self.listen_http, self.listen_mtls) if address)

    @property
    def http_on_loopback(self) -> bool:
        """Does HTTP listen on this host alone?"""
        return _is_loopback(self.listen_http)

    @property
    def certificate_required(self) -> bool:
        """Must every client on `listen` show a certificate?"""
        return self.tls_client_ca is not None and not self.listen_mtls

    @property
    def http_is_private(self) -> bool:
        """May credentials and prompts travel over the HTTP port?"""
        return _is_loopback(self.listen_http) or self.http_tls or self.insecure

    @property
    def credentials_required(self) -> bool:
        """Must every call carry a credential?"""
        return not self.on_loopback if self.require_credentials is None else self.require_credentials

    @field_validator("database_url")
    @classmethod
    def _check_database_url(cls, value: str) -> str:
        try:
            backend = make_url(value).get_backend_name() if value else "postgresql"
        except (ArgumentError, ValueError):
            backend = ""
        if backend not in _POSTGRES:
            # The value is not repeated: it may hold a password.
            raise ValueError("must be a URL like postgresql://user@host/database")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        addresses = {"listen": self.listen, "listen_http": self.listen_http}
        if self.listen_mtls:
            addresses["listen_mtls"] = self.listen_mtls
        problems = [
            f"{name}: {address!r} must look like HOST:PORT"
            for name, address in addresses.items()
            if not _is_address(address)
        ]
        if self.standby and not self.database_url:
            problems.append("standby: HEADWAY_DATABASE_URL is required: an embedded Postgres has one scheduler")
        if self.stale_after_s <= self.telemetry_interval_s:
            problems.append("stale_after_s must be above telemetry_interval_s: agents speak no more often")
        problems.extend(
            f"{guard}_open must not be above {guard}_close"
            for guard, opens, closes in (
                ("pressure", self.pressure_open, self.pressure_close),
                ("heat", self.heat_open, self.heat_close),
            )
            if opens > closes
        )
        for name, known in _LISTS.items():
            strangers = ", ".join(sorted(_listed(getattr(self, name)) - known))
            if strangers:
                problems.append(f"{name}: must be of {', '.join(sorted(known))}, not {strangers}")
        if not all(xid.isdecimal() for xid in _listed(self.ignored_xids)):
            problems.append("ignored_xids must be numbers, separated by commas")
        if self.eject_base_s > self.eject_max_s:
            problems.append("eject_base_s must not be above eject_max_s")
        if self.tokenizers_dir is not None and not self.tokenizers_dir.is_dir():
            problems.append(f"tokenizers_dir: there is no folder {self.tokenizers_dir}")
        if self.tokenizers_dir is not None and find_spec("tokenizers") is None:
            problems.append('tokenizers_dir: needs the extra `tokenizers`: pip install "headway[tokenizers]"')
        if problem := problem_of(self.trace_endpoint):
            problems.append(f"trace_endpoint: {problem}")
        if (self.tls_certificate is None) != (self.tls_key is None):
            problems.append("tls_certificate and tls_key must be given together")
        if self.http_tls and self.tls_certificate is None:
            problems.append("http_tls needs tls_certificate and tls_key")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            problems.append("tls_client_ca needs tls_certificate and tls_key")
        if self.listen_mtls and self.tls_client_ca is None:
            problems.append("listen_mtls needs tls_client_ca")
        files = {
            "tls_certificate": self.tls_certificate, "tls_key": self.tls_key, "tls_client_ca": self.tls_client_ca,
        }  # fmt: skip
        for name, path in files.items():
            if path is not None and not path.is_file():
                problems.append(f"{name}: there is no file {path}")
        if not problems and not self.on_loopback:
            if not self.database_url:
                problems.append("database_url: HEADWAY_DATABASE_URL is required when listening beyond loopback")
            if self.require_credentials is False and not self.insecure:
                problems.append(
                    "require_credentials: false, beyond loopback, lets everyone do everything; it needs insecure=true"
                )
            if self.tls_certificate is None and not self.insecure:
                problems.append("listen: beyond loopback needs tls_certificate and tls_key, or insecure=true")
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _listed(names: str) -> frozenset[str]:
    return frozenset(name.strip() for name in names.split(",")) - {""}


def load() -> Config:
    """Read the environment. Raises ConfigError with every problem and the variable it is in."""
    problems = _unknown_variables()
    try:
        config = Config()
    except ValidationError as error:
        problems += [_problem(item["loc"], item["msg"]) for item in error.errors()]
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _problem(loc: tuple[int | str, ...], message: str) -> str:
    """`HEADWAY_SCHEDULER_LISTEN: …`; inside a file that a variable names: `HEADWAY_SCHEDULER_BOOTSTRAP: a.b: …`."""
    place, *inside = (str(part) for part in loc or ("*",))
    variable = place if place.startswith("HEADWAY_") else f"{_PREFIX}{place.upper()}"
    return ": ".join([variable, *([".".join(inside)] if inside else []), message])


def _unknown_variables() -> list[str]:
    fields = Config.model_fields.items()
    known = {f"{_PREFIX}{name.upper()}" for name, field in fields if field.validation_alias is None}
    present = (name for name in sorted(os.environ) if name.upper().startswith(_PREFIX))
    return [f"{name}: no such setting" for name in present if name.upper() not in known]


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 65536


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
