"""What must hold of a compose file before anything is started."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headway_agent.config
import headway_gateway.config
import headway_scheduler.config
import pytest
from fakes.compose import Service, Translation, mounts_of
from headway_sim.emulator.config import parse_arguments

Tree = dict[str, Any]

# By program: its loader, and the HEADWAY_ variables that are its own.
LOADERS = {
    "headway-scheduler": (headway_scheduler.config.load, r"HEADWAY_(SCHEDULER_\w+|DATABASE_URL|DATA_DIR)"),
    "headway-agent": (headway_agent.config.load, r"HEADWAY_AGENT_\w+"),
    "headway-gateway": (headway_gateway.config.load_settings, r"HEADWAY_GATEWAY_\w+"),
}
_PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+(\.\d+)?(-[\w.-]+)?")
_MOUNT_KINDS = ("configs", "secrets", "volumes")


def problems(tree: Tree, root: Path, directory: Path) -> list[str]:
    """Everything wrong with it. `directory` takes copies of configuration files."""
    found = [*_references(tree, root)]
    if found:
        return found  # what follows reads the files
    for name, spec in tree["services"].items():
        found += [f"{name}: {problem}" for problem in (*_service(spec), *_dependencies(tree, spec))]
        if spec.get("image", "").startswith("headway:"):
            service = Service(name, spec, mounts_of(tree, root, spec))
            found += [f"{name}: {problem}" for problem in (*_hardening(spec), *_settings(service, directory / name))]
    return found


def _references(tree: Tree, root: Path) -> Iterator[str]:
    used: dict[str, set[str]] = {kind: set() for kind in _MOUNT_KINDS}
    for spec in tree["services"].values():
        used["secrets"] |= set(spec.get("secrets", ()))
        used["configs"] |= {mount["source"] for mount in spec.get("configs", ())}
        used["volumes"] |= {volume.partition(":")[0] for volume in spec.get("volumes", ())}
    for kind, names in used.items():
        declared = tree.get(kind, {})
        yield from (f"{kind}: {name} is not declared" for name in sorted(names - declared.keys()))
        yield from (f"{kind}: {name} is not used" for name in sorted(declared.keys() - names))
        for name, spec in declared.items():
            if kind != "volumes" and not (root / spec["file"]).is_file():
                yield f"{kind}: {name}: there is no {spec['file']}"


def _service(spec: Tree) -> Iterator[str]:
    if not _PINNED.fullmatch(spec.get("image", "")):
        yield f"image: {spec.get('image')} is not pinned"
    if missing := {"test", "interval", "timeout", "retries", "start_period"} - spec.get("healthcheck", {}).keys():
        yield f"healthcheck: lacks {', '.join(sorted(missing))}"
    for port in spec.get("ports", ()):
        if not re.fullmatch(r"127\.0\.0\.1:\d+:\d+", str(port)):
            yield f"ports: {port} is not on loopback only"
    if "restart" not in spec:
        yield "restart: is missing"


def _dependencies(tree: Tree, spec: Tree) -> Iterator[str]:
    for name, dependency in spec.get("depends_on", {}).items():
        if name not in tree["services"]:
            yield f"depends_on: there is no {name}"
        elif tree["services"][name].get("profiles") and not spec.get("profiles"):
            yield f"depends_on: {name} is started only in a profile"
        if dependency.get("condition") != "service_healthy":
            yield f"depends_on: {name} need not be healthy"


def _hardening(spec: Tree) -> Iterator[str]:
    wanted = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"], "init": True}
    yield from (f"{key}: must be {value}" for key, value in wanted.items() if spec.get(key) != value)
    if not {"cpus", "memory"} <= spec.get("deploy", {}).get("resources", {}).get("limits", {}).keys():
        yield "deploy: has no limits"


def _settings(service: Service, directory: Path) -> Iterator[str]:
    """Ask the program itself whether it takes these settings, in the very words of the compose file."""
    translation = Translation(service, directory)
    translation.write_files()
    program = service.command[0]
    if service.command[:3] == ["python", "-m", "headway_sim.emulator"]:
        try:
            parse_arguments(service.command[3:])
        except SystemExit:
            yield f"command: the emulator does not take {service.command[3:]}"
        known, load = r"(?!)", None
    elif program in LOADERS:
        load, known = LOADERS[program]
    else:
        yield f"command: {program} is none of Headway's programs"
        return
    yield from (f"{key}: is no setting of {program}" for key in service.environment if not re.fullmatch(known, key))
    if load is not None:
        with pytest.MonkeyPatch.context() as environment:
            for key in [key for key in os.environ if key.startswith("HEADWAY_")]:
                environment.delenv(key)
            for key, value in service.environment.items():
                environment.setenv(key, translation.text(value))
            try:
                load()
            except (
                headway_scheduler.config.ConfigError,
                headway_agent.config.ConfigError,
                headway_gateway.config.ConfigError,
            ) as error:
                yield str(error)
