"""The gateway's configuration: a TOML or JSON file, overridden by `HEADWAY_GATEWAY_…` variables."""

import ipaddress
import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any

from headway_tracing.build import problem_of
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

__all__ = ["SYSTEM_ROOTS", "ConfigError", "GatewaySettings", "load_settings"]

SYSTEM_ROOTS = Path("system")
"""Instead of a PEM file: trust what this system trusts."""

_PREFIX = "HEADWAY_GATEWAY_"
_CONFIG_VARIABLE = "HEADWAY_GATEWAY_CONFIG"

_Seconds = Annotated[float, Field(gt=0)]


class ConfigError(Exception):
    """Everything that is wrong with the configuration, one problem a line."""


class GatewaySettings(BaseSettings):
    """One gateway. In the environment lists and tables are written as JSON."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    """0 takes a free port."""
    insecure: bool = False
    """Listen beyond loopback, where API keys and prompts travel as plain text: behind a proxy that speaks TLS."""
    port_file: Path | None = None
    """Written once it listens: the port, in decimal."""
    schedulers: list[str] = Field(default=["127.0.0.1:7070"], min_length=1)
    """`host:port` of each scheduler: the first that answers is used, the others are for failover."""
    scheduler_ca: Path | None = None
    """Speak TLS to the schedulers and trust this PEM file, or `system` for the system's roots. None: plain text."""
    scheduler_certificate: Path | None = None
    """PEM file of a client certificate for schedulers that want one, with `scheduler_key`; read at each connect."""
    scheduler_key: Path | None = None
    token: SecretStr = SecretStr("")
    """The gateway's own credential at the scheduler, with the role router."""
    token_file: Path | None = None
    """A file that holds it instead, read again at each connect."""
    api_keys: dict[str, str] = {}
    """API key → tenant. The key is what users send as `Authorization: Bearer …`; it goes no further."""
    user_keys: bool = False
    """Ask the scheduler whose key it is that `api_keys` does not list: credentials of the role tenant."""
    anonymous_tenant: str = ""
    """Tenant of requests without a key. Empty: they are refused with 401."""
    trust_tenant_header: bool = False
    """Whether `x-headway-tenant` names the tenant. Only behind a proxy that sets or strips it."""
    allow_priority_header: bool = False
    """Whether `x-headway-priority` (best-effort, standard, critical) is heeded."""
    engine_api_key: SecretStr = SecretStr("")
    """Sent to engines as a bearer token, for engines started with an API key."""
    max_body_bytes: int = Field(default=16 * 1024 * 1024, gt=0)
    max_wait_s: float = Field(default=30.0, ge=0)
    """How long the scheduler may hold a request."""
    route_timeout_s: _Seconds = 35.0
    """How long a request may wait for an endpoint in all."""
    connect_timeout_s: _Seconds = 2.0
    """How long connecting to an engine may take."""
    read_timeout_s: _Seconds = 300.0
    """How long an engine may stay silent."""
    max_attempts: int = Field(default=4, ge=1)
    """Endpoints tried for one request."""
    retry_ratio: float = Field(default=0.2, ge=0)
    """Retries in progress at once, as a share of active requests …"""
    retry_min: int = Field(default=3, ge=0)
    """… and how many are always allowed."""
    fail_open: bool = True
    """Whether to route on the last view while no scheduler answers."""
    fail_open_after_s: _Seconds = 1.0
    progress_interval_s: _Seconds = 30.0
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long requests in flight may take to finish after SIGTERM."""
    debug_headers: bool = False
    """Whether answers carry the decision: `x-headway-strategy`, `-matched-tokens`, …"""
    trace_endpoint: str = ""
    """An OpenTelemetry collector (OTLP over HTTP), `http://HOST:4318`; empty: nothing is traced."""
    trace_share: float = Field(default=0.01, ge=0, le=1)
    """Of the requests that come without a trace context; else that decides."""
    log_requests: bool = False
    """Whether each request is logged (never its content)."""

    @model_validator(mode="before")
    @classmethod
    def _read_token(cls, values: dict[str, Any]) -> dict[str, Any]:  # not validated yet
        if not (file := values.get("token_file")):
            return values
        if values.get("token"):
            raise ValueError("token and token_file exclude each other")
        try:
            return {**values, "token": Path(file).read_text(encoding="ascii").strip()}
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not ASCII"
            raise ValueError(f"token_file: {file} cannot be read: {why}") from error

    @model_validator(mode="after")
    def _check(self) -> "GatewaySettings":
        paths = (self.scheduler_certificate, self.scheduler_key)
        problems = [f"there is no file {path}" for path in paths if path is not None and not path.is_file()]
        if (self.scheduler_certificate is None) != (self.scheduler_key is None):
            problems.append("scheduler_certificate and scheduler_key go together")
        if self.scheduler_certificate is not None and self.scheduler_ca is None:
            problems.append("scheduler_certificate needs scheduler_ca")
        if problem := problem_of(self.trace_endpoint):
            problems.append(f"trace_endpoint: {problem}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def current_token(self) -> str:
        """The gateway's own token, as its file has it now. Raises OSError."""
        if self.token_file is None:
            return self.token.get_secret_value()
        try:
            return self.token_file.read_text(encoding="ascii").strip()
        except UnicodeDecodeError:
            raise OSError(f"{self.token_file} is not ASCII") from None

    @model_validator(mode="after")
    def _check_host(self) -> "GatewaySettings":
        if not (self.insecure or _is_loopback(self.host)):
            raise ValueError("host: beyond loopback needs insecure = true: the gateway itself speaks no TLS")
        return self

    @field_validator("scheduler_ca")
    @classmethod
    def _check_ca(cls, path: Path | None) -> Path | None:
        if path is not None and path != SYSTEM_ROOTS and not path.is_file():
            raise ValueError(f"there is no file {path}")
        return path

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let the environment win over the file."""
        return env_settings, init_settings


def load_settings(path: Path | None = None) -> GatewaySettings:
    """Read the file (`path`, or what HEADWAY_GATEWAY_CONFIG names) and the environment.

    Raises ConfigError with every problem found.
    """
    named = os.environ.get(_CONFIG_VARIABLE, "")
    path = path or (Path(named) if named else None)
    problems = _unknown_variables()
    try:
        settings = GatewaySettings(**(_read(path) if path is not None else {}))
    except ValidationError as error:
        problems += [_problem(dict(item)) for item in error.errors(include_url=False, include_input=False)]
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _unknown_variables() -> list[str]:
    known = {_PREFIX + name.upper() for name in GatewaySettings.model_fields} | {_CONFIG_VARIABLE}
    return [
        f"{name}: no such setting"
        for name in sorted(os.environ)
        if name.upper().startswith(_PREFIX) and name.upper() not in known
    ]


def _read(path: Path) -> dict[str, Any]:  # a file's values have any type until they are validated
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a table of settings is wanted")
    return content


def _problem(item: dict[str, Any]) -> str:  # pydantic's own error record
    place = ".".join(str(part) for part in item["loc"])
    return f"{place}: {'no such setting' if item['type'] == 'extra_forbidden' else item['msg']}"
