"""Docker Compose without Docker: reads a compose file and runs its services as processes on this machine.

Each service gets an address of its own in 127.0.0.0/8. Where a service's command, environment, health check or
configuration names another service, `0.0.0.0` or `127.0.0.1`, that address is put; where it names a file that Compose
would mount, the file's place on this machine is put. Nothing else differs from what Compose would run. What the reader
does not understand is an error, so that a compose file cannot say more than is run here.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml
from headway_cli.local.processes import Process, wait_for

Tree = dict[str, Any]

START_TIMEOUT_S = 60.0
SERVICE_KEYS = {
    "build", "cap_drop", "command", "configs", "depends_on", "deploy", "environment", "healthcheck", "image", "init",
    "logging", "ports", "profiles", "read_only", "restart", "secrets", "security_opt", "shm_size", "stop_grace_period",
    "tmpfs", "volumes",
}  # fmt: skip
TOP_KEYS = {"configs", "name", "secrets", "services", "volumes"}
_VARIABLE = re.compile(r"\$\$|\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}|\$(?P<bare>\w+)")
_REPLACED_LISTS = {"command", "test"}


class ComposeError(Exception):
    """The compose file says something wrong, or something that is not run here."""


def read(files: Sequence[Path], variables: Mapping[str, str]) -> Tree:
    """The files, each over the one before, with their variables put in."""
    merged: Tree = {}
    for file in files:
        merged = _merge(merged, _put_in(yaml.safe_load(file.read_text()), variables))
    return {key: value for key, value in merged.items() if not key.startswith("x-")}


def _put_in(node: Any, variables: Mapping[str, str]) -> Any:
    def value_of(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name = match["name"] or match["bare"]
        value = variables.get(name) or match["default"]
        if value is None:
            raise ComposeError(f"{name} is not set and has no default")
        return value

    if isinstance(node, dict):
        return {key: _put_in(value, variables) for key, value in node.items()}
    if isinstance(node, list):
        return [_put_in(value, variables) for value in node]
    return _VARIABLE.sub(value_of, node) if isinstance(node, str) else node


def _merge(below: Any, above: Any, key: str = "") -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        keys = [*below, *(name for name in above if name not in below)]
        return {
            name: _merge(below[name], above[name], name)
            if name in below and name in above
            else (above if name in above else below)[name]
            for name in keys
        }
    if isinstance(below, list) and isinstance(above, list) and key not in _REPLACED_LISTS:
        return [*below, *(item for item in above if item not in below)]
    return above


@dataclass(frozen=True, slots=True)
class Service:
    """One service: `mounts` are the container's paths of single files, by where they lie here."""

    name: str
    spec: Tree
    mounts: Mapping[str, Path]

    @property
    def command(self) -> list[str]:
        return [str(part) for part in self.spec.get("command", [])]

    @property
    def environment(self) -> dict[str, str]:
        return {key: str(value) for key, value in self.spec.get("environment", {}).items()}

    @property
    def depends_on(self) -> dict[str, str]:
        """Condition by service."""
        return {name: spec["condition"] for name, spec in self.spec.get("depends_on", {}).items()}


def services_of(tree: Tree, root: Path, profiles: frozenset[str] = frozenset()) -> dict[str, Service]:
    """The services that would start, each after those it depends on."""
    _known(tree, TOP_KEYS, "the compose file")
    active: dict[str, Service] = {}
    for name, spec in tree["services"].items():
        _known(spec, SERVICE_KEYS, name)
        if not spec.get("profiles") or profiles & set(spec["profiles"]):
            active[name] = Service(name, spec, mounts_of(tree, root, spec))
    ordered: dict[str, Service] = {}
    while len(ordered) < len(active):
        ready = [name for name in active if name not in ordered and set(active[name].depends_on) <= set(ordered)]
        if not ready:
            raise ComposeError(f"depend on each other, or on nothing: {sorted(active.keys() - ordered.keys())}")
        ordered.update((name, active[name]) for name in ready)
    return ordered


def _known(mapping: Tree, keys: set[str], where: str) -> None:
    if unknown := sorted(mapping.keys() - keys):
        raise ComposeError(f"{where}: {', '.join(unknown)} is not run here")


def mounts_of(tree: Tree, root: Path, spec: Tree) -> dict[str, Path]:
    """The single files that Compose would mount, by their path in the container."""
    mounts = {f"/run/secrets/{name}": root / tree["secrets"][name]["file"] for name in spec.get("secrets", ())}
    for mount in spec.get("configs", ()):
        mounts[mount["target"]] = root / tree["configs"][mount["source"]]["file"]
    return mounts


@dataclass(frozen=True, slots=True)
class Translation:
    """From what a container sees to what is here. `addresses`: of each service; without them names stay names."""

    service: Service
    directory: Path
    addresses: Mapping[str, str] = field(default_factory=dict)

    def text(self, text: str) -> str:
        """All in one pass: what was put is not translated again."""
        return self._pattern().sub(self._replace, text)

    def write_files(self) -> None:
        """Copies of the mounted files, translated too; secrets keep their place."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for target, source in self.service.mounts.items():
            if not target.startswith("/run/secrets/"):
                self._place(target).write_text(self.text(source.read_text()))

    def _place(self, path: str) -> Path:
        if path.startswith("/run/secrets/"):
            return self.service.mounts[path]
        return self.directory / path.strip("/").replace("/", "-")

    def _pattern(self) -> re.Pattern[str]:
        paths = "|".join(re.escape(path) for path in sorted(self.service.mounts, key=len, reverse=True)) or "(?!)"
        scratch = "|".join(re.escape(path) for path in self.service.spec.get("tmpfs", ())) or "(?!)"
        hosts = "|".join(re.escape(name) for name in sorted(self.addresses, key=len, reverse=True)) or "(?!)"
        own = r"0\.0\.0\.0|127\.0\.0\.1|localhost" if self.addresses else "(?!)"
        return re.compile(
            rf"(?P<path>(?<![\w.-])(?:{paths})(?![\w.-]))"
            rf"|(?P<scratch>(?<![\w./-])(?:{scratch})(?=/))"
            rf"|(?P<host>(?<![\w.-])(?:{hosts})(?=:\d)|(?<=address: )(?:{hosts})(?![\w.-]))"
            rf"|(?P<own>(?<![\w.])(?:{own})(?![\w.]))"
        )

    def _replace(self, match: re.Match[str]) -> str:
        if match["path"]:
            return str(self._place(match["path"]))
        if match["scratch"]:
            return str(self.directory)
        return self.addresses[match["host"] or self.service.name]


Substitute = Callable[[Service, str, Path], "ExitStack"]
"""Starts what stands for a third party's image, given its address and a directory; closing the stack ends it."""


class Compose:
    """`docker compose up --wait`, and `down` on leaving. `substitutes`: by image name, for what is no process here."""

    def __init__(
        self,
        services: Mapping[str, Service],
        directory: Path,
        substitutes: Mapping[str, Substitute],
        extra_path: Sequence[Path] = (),
    ) -> None:
        # Each run has a block of addresses to itself, so that two at once do not meet.
        block = f"127.{1 + os.getpid() % 250}.{os.getpid() // 250 % 250}"
        self.addresses = {name: f"{block}.{number}" for number, name in enumerate(services, 1)}
        self.services = services
        self.processes: dict[str, Process] = {}
        self._directory = directory
        self._substitutes = substitutes
        self._path = os.pathsep.join(map(str, [Path(sys.executable).parent, *extra_path, os.environ["PATH"]]))
        self._closers = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as closers:
            for service in self.services.values():
                for name, condition in service.depends_on.items():
                    self._wait(self.services[name], condition)
                closers.push(self._start(service).pop_all())
            for service in self.services.values():
                self._wait(service, "service_healthy")
            self._closers = closers.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closers.close()

    def healthy(self, name: str) -> bool:
        """Run the service's health check once."""
        check = self.services[name].spec["healthcheck"]
        kind, *words = (self._translation(self.services[name]).text(word) for word in check["test"])
        if kind == "CMD-SHELL":
            words = ["/bin/sh", "-c", *words]
        elif kind != "CMD":
            raise ComposeError(f"{name}: a health check of kind {kind} is not run here")
        done = subprocess.run(
            words, env={**os.environ, "PATH": self._path}, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        return done.returncode == 0

    def _wait(self, service: Service, condition: str) -> None:
        if condition not in {"service_healthy", "service_started"}:
            raise ComposeError(f"{service.name}: the condition {condition} is not run here")
        if condition == "service_healthy":
            watched = [process for process in [self.processes.get(service.name)] if process]
            wait_for(f"{service.name} is healthy", lambda: self.healthy(service.name), START_TIMEOUT_S, watched)

    def _start(self, service: Service) -> ExitStack:
        translation = self._translation(service)
        translation.write_files()
        substitute = self._substitutes.get(service.spec["image"].partition(":")[0])
        if substitute is not None:
            return substitute(service, self.addresses[service.name], translation.directory)
        program, *arguments = map(translation.text, service.command)
        found = shutil.which(program, path=self._path)
        if found is None:
            raise ComposeError(f"{service.name}: there is no {program} here")
        environment = {key: translation.text(value) for key, value in service.environment.items()}
        process = Process(service.name, [found, *arguments], translation.directory / "log", environment)
        process.start()
        self.processes[service.name] = process
        closers = ExitStack()
        closers.callback(process.join)
        closers.callback(process.terminate)
        return closers

    def _translation(self, service: Service) -> Translation:
        return Translation(service, self._directory / service.name, self.addresses)
