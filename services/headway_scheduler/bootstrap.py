"""The credentials of a first start: made where they are missing, so that agents and gateways need no admin to come in.

A TOML file lists them, and names for each the file that holds its token: the same file that its owner reads.

    [[credentials]]
    id = "agent-a"
    role = "agent"
    node = "node-a"
    token_file = "/run/secrets/agent-a.token"
"""

import os
import tomllib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import structlog
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from headway_scheduler.domain import names
from headway_scheduler.domain.desired import Credential, Role
from headway_scheduler.domain.tokens import new_token, token_sha256
from headway_scheduler.errors import DuplicateName, InvalidField, UnknownResource
from headway_scheduler.store.base import DesiredStore, Write

__all__ = ["FIRST_ADMIN", "Bootstrap", "create_first_admin", "create_missing", "read_bootstrap"]

log = structlog.get_logger()

FIRST_ADMIN: Final = "admin"
"""The credential that a scheduler makes for itself where there is no admin."""
_PARTIAL: Final = ".partial"
_SHORTEST_TOKEN: Final = 16
_LONGEST_TOKEN: Final = 512


def _digest(token_file: object) -> bytes:
    """The SHA-256 of the token in a file; the token itself is not kept."""
    if not isinstance(token_file, str | Path):
        raise ValueError("must be a path")
    try:
        token = Path(token_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{token_file} cannot be read: {_reason(error)}") from error
    if not _SHORTEST_TOKEN <= len(token) <= _LONGEST_TOKEN or len(token.split()) != 1:
        raise ValueError(f"{token_file} must hold one token of {_SHORTEST_TOKEN} to {_LONGEST_TOKEN} characters")
    return token_sha256(token)


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or "no reason given" if isinstance(error, OSError) else "it is not ASCII"


class BootstrapCredential(BaseModel):
    """One credential. An agent has a node, a router has tenants (`*` for any), as in the Admin service."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    role: Role
    token_sha256: Annotated[bytes, BeforeValidator(_digest)] = Field(validation_alias="token_file")
    node: str = ""
    tenants: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "BootstrapCredential":
        problems = [*_wrong_names(self), *_wrong_scope(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def credential(self) -> Credential:
        """As the store keeps it."""
        return Credential(self.id, self.role, self.token_sha256, self.node, self.tenants)


def _wrong_names(entry: BootstrapCredential) -> list[str]:
    ids = [(names.CREDENTIALS, entry.id, "id"), *((names.TENANTS, t, "tenants") for t in entry.tenants if t != "*")]
    if entry.node:
        ids.append((names.NODES, entry.node, "node"))
    problems = []
    for collection, identifier, field in ids:
        try:
            names.check_id(collection, identifier, field)
        except InvalidField as error:
            problems.append(error.message)
    return problems


def _wrong_scope(entry: BootstrapCredential) -> list[str]:
    problems = []
    if (entry.role is Role.AGENT) != bool(entry.node):
        problems.append("node: is required for an agent, and only for an agent")
    if entry.role is Role.ROUTER and not entry.tenants:
        problems.append("tenants: is required for a router, `*` for any")
    if entry.role in {Role.AGENT, Role.VIEWER} and entry.tenants:
        problems.append("tenants: is only for routers, admins and end users' keys")
    if entry.role is Role.TENANT and (len(entry.tenants) != 1 or "*" in entry.tenants):
        problems.append("tenants: an end user's key is of exactly one tenant")
    return problems


class Bootstrap(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    credentials: tuple[BootstrapCredential, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "Bootstrap":
        ids = Counter(entry.id for entry in self.credentials)
        problems = [f"credentials: {id_!r} is listed twice" for id_, count in ids.items() if count > 1]
        if len({entry.token_sha256 for entry in self.credentials}) < len(self.credentials):
            problems.append("credentials: two have the same token")
        if problems:
            raise ValueError("; ".join(problems))
        return self


def read_bootstrap(path: object) -> Any:  # whatever the file holds: Bootstrap checks it
    """The contents of the file, with its relative paths taken from where it lies. Raises ValueError."""
    if not isinstance(path, str | Path):
        return path
    file = Path(path)
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    entries = content.get("credentials")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("token_file"), str):
            entry["token_file"] = file.parent / entry["token_file"]
    return content


async def create_missing(store: DesiredStore, credentials: Sequence[Credential]) -> None:
    """Add those whose id is not in the store; those that are stay as they are, revoked ones too. Raises StoreDown.

    What cannot be added is logged and left out: a scheduler that serves is worth more than one that waits for it.
    """
    held = (await store.load()).credentials
    for wanted in credentials:
        kept = held.get(wanted.id)
        if kept is None:
            await _create(store, wanted)
        elif kept.token_sha256 != wanted.token_sha256:
            log.warning("bootstrap_token_ignored", credential=wanted.id, why="it exists with another token")


async def _create(store: DesiredStore, credential: Credential) -> None:
    try:
        await store.create(credential, Write(principal="scheduler", method="Bootstrap"))
    except DuplicateName:
        log.debug("bootstrap_credential_exists", credential=credential.id)  # another scheduler was faster
    except (InvalidField, UnknownResource) as error:
        log.error("bootstrap_credential_refused", credential=credential.id, problem=error.message)
    else:
        log.info("bootstrap_credential_created", credential=credential.id, role=credential.role.value)


async def create_first_admin(store: DesiredStore, file: Path) -> None:
    """Make an admin's credential where there is none, and write its token into `file`, for its owner alone to read.

    Nobody else ever sees the token: it is not logged, and the store keeps its hash. Where the file cannot be written,
    nothing is made, and the log says so. Where it is cut off in between, the next start finds the token. Raises
    StoreDown.
    """
    held = (await store.load()).credentials
    if any(credential.role is Role.ADMIN for credential in held.values()):
        _finish(file, held.get(FIRST_ADMIN))
        return
    token = new_token()
    partial = file.with_name(f"{file.name}.{os.getpid()}{_PARTIAL}")
    try:
        _write_secret(partial, token)
    except OSError as error:
        log.error("first_admin_not_created", file=str(file), problem=error.strerror)
        return
    credential = Credential(FIRST_ADMIN, Role.ADMIN, token_sha256(token))
    try:
        await store.create(credential, Write(principal="scheduler", method="Bootstrap"))
    except DuplicateName as error:  # another scheduler was faster, or something else has its name
        partial.unlink(missing_ok=True)
        log.warning("first_admin_not_created", file=str(file), problem=error.message)
    else:
        _finish(file, credential)


def _finish(file: Path, credential: Credential | None) -> None:
    """Give the file with this credential's token its name, also if an earlier start could not; others count no more."""
    for partial in file.parent.glob(f"{file.name}.*{_PARTIAL}"):
        with suppress(OSError, UnicodeDecodeError):
            token = partial.read_text(encoding="ascii").strip()
            if credential is not None and token_sha256(token) == credential.token_sha256:
                partial.rename(file)
                log.warning("first_admin_created", credential=FIRST_ADMIN, token_in=str(file))
            else:
                partial.unlink()


def _write_secret(file: Path, secret: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(f"{secret}\n")
