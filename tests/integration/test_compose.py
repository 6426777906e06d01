"""docker-compose.yml, run without Docker: its own services as processes, Postgres and Envoy from their wheels."""

import contextlib
import copy
import hashlib
import json
import os
import re
import socket
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from fakes.compose import Compose, ComposeError, Service, Translation, read, services_of
from fakes.compose_rules import problems
from fakes.postgres import FAST, connect
from headway.admin.v1 import admin_pb2, admin_pb2_grpc
from headway.fleet.v1 import fleet_pb2, fleet_pb2_grpc
from headway_cli.local.processes import wait_for
from headway_scheduler.store.embedded import EmbeddedPostgres, _binaries
from psycopg import sql

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
GPU_FILE = ROOT / "docker-compose.gpu.yml"
VARIABLES = {"SPEEDUP": "20", "POSTGRES_PASSWORD": "a-password-of-this-test"}


def start_postgres(service: Service, address: str, directory: Path) -> ExitStack:
    """What the image does with its environment, done to the Postgres of the wheel: by TCP, and by password only."""
    given = service.environment
    directory.mkdir(parents=True, exist_ok=True)
    access = directory / "hba.conf"
    access.write_text("local all postgres trust\nhost all all all scram-sha-256\n")
    access.chmod(0o644)
    server = EmbeddedPostgres(directory, settings={**FAST, "listen_addresses": address, "hba_file": str(access)})
    server.start()
    with connect(server.url) as connection:
        user, database = sql.Identifier(given["POSTGRES_USER"]), sql.Identifier(given["POSTGRES_DB"])
        password = sql.Literal(given["POSTGRES_PASSWORD"])
        connection.execute(sql.SQL("CREATE ROLE {} SUPERUSER LOGIN PASSWORD {}").format(user, password))
        connection.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, user))
    closers = ExitStack()
    closers.callback(server.stop)
    return closers


SUBSTITUTES = {"postgres": start_postgres}
"""Third parties' images; Envoy's needs none: the wheel brings the program that its command names."""


# What the files say


@pytest.fixture
def tree() -> dict[str, Any]:
    return read([FILE], {})


def test_the_file_is_consistent(tree: dict[str, Any], tmp_path: Path) -> None:
    assert problems(tree, ROOT, tmp_path) == []


def test_the_file_with_the_gpu_override_is_consistent(tmp_path: Path) -> None:
    merged = read([FILE, GPU_FILE], {})
    assert problems(merged, ROOT, tmp_path) == []
    names = set(services_of(merged, ROOT))
    assert names == {"postgres", "scheduler", "vllm", "agent-a", "gateway", "envoy"}
    agent = tomllib.loads((ROOT / merged["configs"]["agent-a"]["file"]).read_text())
    assert [engine["address"].partition(":")[0] for engine in agent["engines"]] == ["vllm"]
    assert [device["kind"] for device in agent["devices"]] == ["nvml"]
    for name in ("vllm", "agent-a"):
        (device,) = merged["services"][name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"


def test_the_image_is_this_version_and_runs_as_nobody_special(tree: dict[str, Any]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    built = [spec["image"] for spec in tree["services"].values() if "build" in spec]
    assert built == [f"headway:{version}"]  # by one service only: two would race for the name
    ours = {spec["image"] for spec in tree["services"].values() if spec["image"].startswith("headway:")}
    assert ours == set(built)
    steps = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:1].isupper()]
    assert ["USER", "10001:10001"] in steps
    copied = [word for words in steps if words[0] == "COPY" and not words[1].startswith("--") for word in words[1:-1]]
    assert [word for word in copied if not (ROOT / word).exists()] == []
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert admitted == set(copied)


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(tree: dict[str, Any]) -> None:
        *above, last = path.split("/")
        node = tree
        for key in above:
            node = node[key]
        if value is None:
            del node[last]
        else:
            node[last] = value

    return apply


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (change("services/gateway/healthcheck", None), "gateway: healthcheck: lacks"),
        (change("services/envoy/image", "envoyproxy/envoy:latest"), "envoy: image: .*latest is not pinned"),
        (change("services/envoy/image", "envoyproxy/envoy"), "envoy: image: .* is not pinned"),
        (change("services/envoy/ports", ["8080:8080"]), "envoy: ports: 8080:8080 is not on loopback only"),
        (change("services/scheduler/environment/HEADWAY_SCHEDULER_LISTN", "x"), "LISTN: no such setting"),
        (change("services/scheduler/environment/HEADWAY_GATEWAY_PORT", "1"), "no setting of headway-scheduler"),
        (change("services/scheduler/environment/HEADWAY_DATABASE_URL", None), "HEADWAY_DATABASE_URL is required"),
        (change("services/scheduler/environment/HEADWAY_SCHEDULER_INSECURE", "false"), "beyond loopback needs tls"),
        (change("services/scheduler/secrets", ["admin.token"]), "secrets: agent-a.token is not used|agent-b.token"),
        (change("services/gateway/environment/HEADWAY_GATEWAY_PORT", "x"), "gateway: port: "),
        (change("services/agent-a/environment/HEADWAY_AGENT_NODDE", "x"), "agent-a: .*NODDE is not a setting"),
        (change("services/engines-a/command", ["python", "-m", "headway_sim.emulator", "--x"]), "emulator does not"),
        (change("services/gateway/depends_on/nobody", {"condition": "service_healthy"}), "there is no nobody"),
        (change("services/gateway/read_only", None), "gateway: read_only: must be True"),
        (change("services/gateway/deploy", {}), "gateway: deploy: has no limits"),
        (change("secrets/gateway.token", None), "secrets: gateway.token is not declared"),
        (change("secrets/gateway.token/file", "absent"), "gateway.token: there is no absent"),
        (change("volumes/postgres-data", None), "volumes: postgres-data is not declared"),
        (change("configs/spare", {"file": "README.md"}), "configs: spare is not used"),
    ],
)
def test_what_would_be_wrong_is_found(
    tree: dict[str, Any], tmp_path: Path, wrong: Callable[[dict[str, Any]], None], said: str
) -> None:
    broken = copy.deepcopy(tree)
    wrong(broken)
    found = "\n".join(problems(broken, ROOT, tmp_path))
    assert re.search(said, found), found


def test_what_is_not_run_here_is_refused(tree: dict[str, Any]) -> None:
    tree["services"]["gateway"]["network_mode"] = "host"
    with pytest.raises(ComposeError, match="gateway: network_mode"):
        services_of(tree, ROOT)


def test_addresses_and_files_are_translated_and_nothing_else(tmp_path: Path) -> None:
    service = Service("web", {"tmpfs": ["/tmp"]}, {"/run/secrets/a.token": Path("/s/a.token"), "/etc/w.toml": FILE})
    translation = Translation(service, tmp_path, {"web": "127.9.9.1", "db": "127.9.9.2"})
    expected = {
        "postgresql://db:db@db:5432/db": "postgresql://db:db@127.9.9.2:5432/db",
        '["db:7070", "web-b:1"]': '["127.9.9.2:7070", "web-b:1"]',
        "socket_address: {address: db, port_value: 80}": "socket_address: {address: 127.9.9.2, port_value: 80}",
        "0.0.0.0:7070 http://127.0.0.1/ localhost": "127.9.9.1:7070 http://127.9.9.1/ 127.9.9.1",
        "10.0.0.0 127.0.0.11": "10.0.0.0 127.0.0.11",
        "/run/secrets/a.token /run/secrets/a.token.old": "/s/a.token /run/secrets/a.token.old",
        "/tmp/x /var/tmp/x": f"{tmp_path}/x /var/tmp/x",
        "/etc/w.toml": f"{tmp_path}/etc-w.toml",
    }
    assert {text: translation.text(text) for text in expected} == expected


# What runs


@pytest.fixture(scope="module")
def stack() -> Iterator[Compose]:
    services = services_of(read([FILE], VARIABLES), ROOT)
    # Not below pytest's own directory, which another run closes to all other users, and Postgres is another user.
    with tempfile.TemporaryDirectory(prefix="hw-compose-") as name:
        directory = Path(name)
        with Compose(services, directory, SUBSTITUTES, [_binaries(directory)]) as stack:
            # Compose's own `--wait` ends when agents are connected; engines show with their next sample.
            wait_for("eight engines", lambda: status(stack).endpoints_healthy == 8, 30, list(stack.processes.values()))
            yield stack
    # Each was asked to stop, and did so by itself.
    assert {name: process._child.returncode for name, process in stack.processes.items() if process._child} == (
        dict.fromkeys(stack.processes, 0)
    )
    assert [at for at in listened_on(stack) if answers(at)] == []


def listened_on(stack: Compose) -> list[tuple[str, int]]:
    ports = {"postgres": (5432,), "scheduler": (7070, 7071), "gateway": (8080,), "envoy": (8080, 9901)}
    engines = dict.fromkeys(("engines-a", "engines-b"), range(8000, 8004))
    return [(stack.addresses[name], port) for name, used in {**ports, **engines}.items() for port in used]


def answers(at: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(at, timeout=5):
        return True
    return False


def token(name: str) -> str:
    return (ROOT / f"deploy/compose/secrets/{name}.token").read_text().strip()


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token(name)}"),)


def status(stack: Compose) -> fleet_pb2.GetStatusResponse:
    with grpc.insecure_channel(f"{stack.addresses['scheduler']}:7070") as channel:
        fleet = fleet_pb2_grpc.FleetStub(channel)
        return fleet.GetStatus(fleet_pb2.GetStatusRequest(), metadata=bearer("admin"), timeout=5)


def post(stack: Compose, path: str, body: dict[str, Any], **headers: str) -> Any:
    url = f"http://{stack.addresses['envoy']}:8080{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    return urllib.request.urlopen(request, timeout=30)


CHAT = {"model": "demo-8b", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 16}


def test_a_request_goes_through_envoy_the_gateway_and_an_engine(stack: Compose) -> None:
    with post(stack, "/v1/chat/completions", CHAT) as answer:
        body = json.loads(answer.read())
        assert answer.headers["server"] == "envoy"
    assert body["choices"][0]["message"]["content"]
    assert body["usage"]["completion_tokens"] == 16


def test_a_stream_goes_through_to_its_end(stack: Compose) -> None:
    with post(stack, "/v1/chat/completions", {**CHAT, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.read().decode().splitlines() if line]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(deltas)
    assert len(deltas) > 1


def test_everyone_is_the_tenant_default_whatever_they_say(stack: Compose) -> None:
    with post(stack, "/v1/chat/completions", CHAT, **{"x-headway-tenant": "nobody"}) as answer:
        assert answer.status == 200


def test_paths_beside_the_api_stay_inside(stack: Compose) -> None:
    for path in ("/metrics", "/ready", "/v1%2f../metrics"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(stack, path, {})
        with refused.value as answer:
            assert answer.code in {400, 404}


def test_only_credentials_get_in_and_only_where_they_may(stack: Compose) -> None:
    def refusal(metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
        with (
            grpc.insecure_channel(f"{stack.addresses['scheduler']}:7070") as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            admin = admin_pb2_grpc.AdminStub(channel)
            admin.ListTenants(admin_pb2.ListTenantsRequest(), metadata=metadata, timeout=5)
        return refused.value.code()

    assert refusal(()) is grpc.StatusCode.UNAUTHENTICATED
    assert refusal((("authorization", "Bearer of-bad-news-and-no-token"),)) is grpc.StatusCode.UNAUTHENTICATED
    assert refusal(bearer("agent-a")) is grpc.StatusCode.PERMISSION_DENIED
    assert refusal(bearer("gateway")) is grpc.StatusCode.PERMISSION_DENIED


def test_the_database_asks_for_the_password_and_keeps_hashes_only(stack: Compose) -> None:
    url = f"postgresql://headway:{{}}@{stack.addresses['postgres']}:5432/headway"
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(url.format("headway-local-only"))
    with psycopg.connect(url.format(VARIABLES["POSTGRES_PASSWORD"])) as connection:
        kept = dict(connection.execute("SELECT id, token_sha256 FROM credentials").fetchall())
    names = ("admin", "agent-a", "agent-b", "gateway")
    assert {name: bytes(digest) for name, digest in kept.items()} == {
        name: hashlib.sha256(token(name).encode()).digest() for name in names
    }


def test_nothing_is_left_reserved(stack: Compose) -> None:
    with post(stack, "/v1/chat/completions", CHAT):
        pass  # leave without reading the answer
    wait_for("no reservation", lambda: status(stack).reservations == 0, 15)


def test_a_health_check_fails_when_its_service_is_gone(stack: Compose) -> None:
    """Last: it takes an agent and Envoy away."""
    for name in ("agent-b", "envoy"):
        assert stack.healthy(name)
        stack.processes[name].terminate()
        stack.processes[name].join()
    assert not stack.healthy("envoy")
    health_file = stack.processes["agent-b"].log.with_name("healthy")
    os.utime(health_file, (time.time() - 60, time.time() - 60))
    assert not stack.healthy("agent-b")
