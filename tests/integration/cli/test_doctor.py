"""Ten misconfigurations, planted one by one; the doctor finds each, and says what to do."""

import contextlib
import json
import re
import ssl
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from fakes.headway import Headway, connected_agent, running_scheduler
from fakes.postgres import connect
from fakes.postgres_pooler import transaction_pooler
from headway.telemetry.v1 import telemetry_pb2 as telemetry
from headway_cli.doctor.envoy_file import examine_envoy

TLS = Path(__file__).parents[2] / "golden" / "tls"
DEPLOY = Path(__file__).parents[3] / "deploy" / "envoy"


@contextlib.contextmanager
def site(database_url, hello=lambda _: None, sample=lambda _: None, **settings):
    """A scheduler with one agent, whose words may be changed, and the command line."""
    with (
        running_scheduler(database_url, stale_after_s=600, **settings) as running,
        connected_agent(running.address, "gpu-7", ["10.0.0.7:8000"], change_hello=hello, change_sample=sample),
    ):
        yield Headway(running.address), running


def planted(headway, check, where, severity, fix):
    """The finding is there, with its severity and its fix; the exit code is at least as bad."""
    code = {"warning": 1, "error": 2}[severity]
    result = headway.run("doctor", "-o", "json", code=code)
    found = {(each["check"], each["where"]): each for each in json.loads(result.stdout)}
    assert (check, where) in found, found.keys()
    assert found[check, where]["severity"] == severity
    assert fix in found[check, where]["fix"]
    shown = headway.run("doctor", code=code).stdout
    assert f"[{check}]" in shown
    assert fix in shown
    return found


def well(hello):
    hello.agent_version = "0.1.0"


def test_a_deployment_that_is_well_is_said_to_be(database_url):
    with site(database_url, well) as (headway, running):
        assert "warning" not in [line.split()[0] for line in headway.text("doctor").splitlines()]
        running.call(lambda: None)


def test_1_an_agents_clock_is_off(database_url):
    def late(hello):
        well(hello)
        hello.clock.FromSeconds(int(time.time()) - 90)

    with site(database_url, late) as (headway, _):
        found = planted(headway, "clock_skew", "nodes/gpu-7", "warning", "timedatectl set-ntp true")
        assert "-90" in found["clock_skew", "nodes/gpu-7"]["what"]


def test_2_an_agent_is_too_old(database_url):
    with site(database_url, lambda hello: setattr(hello, "agent_version", "0.4.0")) as (headway, _):
        planted(headway, "version_skew", "nodes/gpu-7", "error", "the scheduler first")


def test_3_an_engine_cannot_be_reached(database_url):
    def down(hello):
        well(hello)
        hello.endpoints[0].ready = False

    with site(database_url, down, lambda sample: setattr(sample.engines[0], "ready", False)) as (headway, _):
        planted(headway, "engine_unreachable", "endpoints/10.0.0.7:8000@0", "error", "curl http://10.0.0.7:8000/health")


def test_4_an_agent_never_came(database_url):
    with site(database_url, well) as (headway, _):
        headway.run("credentials", "create", "gpu-9", "role=agent", "node=gpu-9")
        planted(headway, "agent_missing", "nodes/gpu-9", "error", "systemctl status headway-agent")


def test_5_a_node_has_no_devices(database_url):
    def bare(hello):
        well(hello)
        del hello.devices[:]
        del hello.endpoints[0].device_uuids[:]

    with site(database_url, bare, lambda sample: sample.devices.__delitem__(slice(None))) as (headway, _):
        planted(headway, "node_without_devices", "nodes/gpu-7", "warning", "nvidia-smi")


def test_6_the_certificate_ends_soon(database_url, tmp_path):
    certificate = tmp_path / "certificate.pem"
    der = ssl.PEM_cert_to_DER_cert((TLS / "loopback-certificate.pem").read_text())
    soon = (datetime.now(UTC) + timedelta(days=8, hours=12)).strftime("%Y%m%d%H%M%SZ").encode()
    (end,) = re.findall(rb"\d{14}Z", der)
    certificate.write_text(ssl.DER_cert_to_PEM_cert(der.replace(end, soon)))  # whoever trusts it checks no signature
    key = TLS / "loopback-key.pem"
    with running_scheduler(database_url, tls_certificate=certificate, tls_key=key) as running:
        headway = Headway(running.address)
        result = headway.run("--ca", str(certificate), "doctor", code=2)  # it has no agent, either
        assert "its certificate ends at" in result.stdout
        assert "renew the files of tls_certificate and tls_key" in result.stdout
        assert "in 8 days" in result.stdout


def test_7_an_engine_lacks_metrics(database_url):
    def mute(sample):
        sample.engines[0].kv_use.missing = telemetry.MISSING_REASON_UNSUPPORTED
        sample.engines[0].waiting.missing = telemetry.MISSING_REASON_UNSUPPORTED

    with site(database_url, well, mute) as (headway, _):
        found = planted(headway, "metrics_missing", "endpoints/10.0.0.7:8000@0", "warning", "--disable-log-stats")
        assert "waiting, kv_use" in found["metrics_missing", "endpoints/10.0.0.7:8000@0"]["what"]


def test_8_a_pooler_forgets_listen(database_url):
    with transaction_pooler(database_url) as url, site(url, well) as (headway, running):
        store = running.scheduler.store
        eventually_now(lambda: store.notified.value == "missing")
        planted(headway, "notifications_missing", "scheduler test", "warning", "pool_mode=session")
    with site(database_url, well) as (_, running):
        eventually_now(lambda: running.scheduler.store.notified.value == "delivered")


def test_9_a_binding_gives_nothing_and_a_bound_strategy_is_off(database_url):
    with site(database_url, well) as (headway, _):
        headway.run("groups", "create", "platinum", "selector.tier=platinum")
        headway.run("bindings", "create", "default/platinum")
        headway.run("strategies", "disable", "adaptive")
        where = "tenants/default/bindings/platinum"
        found = planted(headway, "group_empty", where, "error", "headway groups get platinum")
        off = found["strategy_disabled", "strategyBindings/default"]
        assert (off["severity"], off["fix"]) == ("warning", "headway strategies enable adaptive")


def test_10_envoy_gives_up_before_a_hold_is_over(database_url, tmp_path):
    config = (DEPLOY / "fail-open.yaml").read_text()
    wrong = tmp_path / "envoy.yaml"
    wrong.write_text(
        config.replace("message_timeout: 35s", "message_timeout: 5s").replace("timeout: 0s", "timeout: 20s")
    )
    with site(database_url, well) as (headway, _):
        shown = headway.run("doctor", "--envoy", str(wrong), code=2).stdout
        assert "message_timeout is 5 s, but a request may be held for 30 s" in shown
        assert "message_timeout: 35s" in shown
        assert "[envoy_route_timeout]" in shown
        assert "virtual host acme" in shown
        assert headway.run("doctor", "--envoy", str(DEPLOY / "fail-open.yaml")).exit_code == 0


def test_and_more_two_tenants_claim_one_endpoint_and_one_has_no_group(database_url):
    with running_scheduler(database_url, stale_after_s=600) as running:
        headway = Headway(running.address)
        for tenant in ("acme", "globex", "nobody"):
            headway.run("tenants", "create", tenant)
        headway.run("groups", "create", "a", "selector.tier=gold")
        headway.run("groups", "create", "b", "nodes=gpu-7")
        headway.run("bindings", "create", "acme/a", "mode=dedicated")
        headway.run("bindings", "create", "globex/b", "mode=dedicated")
        with connected_agent(running.address, "gpu-7", ["10.0.0.7:8000"], change_hello=well):
            planted(headway, "endpoint_contested", "endpoints/10.0.0.7:8000@0", "error", "mode=shared")
            planted(headway, "tenant_unbound", "tenants/nobody", "error", "headway bindings create nobody/all")


def test_and_more_a_bypass_that_was_forgotten(database_url):
    with site(database_url, well) as (headway, _):
        assert "bypassed: everybody" in headway.text("bypass", "on")
        planted(headway, "bypassed", "everybody", "warning", "headway bypass off")
        assert headway.json("bypass", "show") == {"bypassed": ["*"]}
        assert "nothing is bypassed" in headway.text("bypass", "off")
        assert "nothing was watched yet" in headway.text("observe", "report")


def test_and_more_of_a_tenant_that_is_routed_in_part_no_more_is_said_than_is_known(database_url):
    with site(database_url, well) as (headway, _):
        headway.run("tenants", "update", "default", "routed_percent=5")
        (finding,) = (each for each in headway.json("doctor") if each["check"] == "routed_partly")
        assert finding["severity"] == "info"
        assert finding["what"] == "5 % of its requests are routed, data planes place the others"


def test_and_more_the_schema_is_behind(database_url):
    with connect(database_url) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0004'")
    with site(database_url, well) as (headway, _):
        planted(headway, "schema_revision", "scheduler test", "error", "headway db upgrade")


def test_and_more_nobody_answers():
    shown = Headway("127.0.0.1:1").run("doctor", code=2).stdout
    assert "no scheduler answers at 127.0.0.1:1" in shown
    assert "--scheduler HOST:PORT" in shown


def test_an_engine_that_takes_no_connection_is_named(database_url):
    def local(hello):
        well(hello)
        hello.endpoints[0].address = "127.0.0.1:1"

    with site(database_url, local) as (headway, _):
        assert "127.0.0.1:1: it takes no connection" in headway.run("doctor", "--connect", code=2).stdout


@pytest.mark.parametrize("name", ["fail-open", "light", "light-http", "observe"])
def test_the_configurations_of_this_repository_are_well(name):
    config = yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())
    assert examine_envoy(config, name, 30.0) == []


@pytest.mark.parametrize(("name", "setting"), [("light", "grpc_service"), ("light-http", "server_uri")])
def test_a_light_picker_that_is_not_waited_for_is_found(name, setting):
    config = yaml.safe_load((DEPLOY / f"{name}.yaml").read_text().replace("timeout: 35s", "timeout: 1s"))
    (finding,) = examine_envoy(config, name, 30.0)
    assert (finding.check, finding.fix) == ("envoy_message_timeout", f"{setting}.timeout: 35s")


def test_a_configuration_that_refuses_while_nobody_answers_is_told_so():
    assert examine_envoy(yaml.safe_load((DEPLOY / "fail-closed.yaml").read_text()), "x", 30.0) == []


@pytest.mark.parametrize(
    ("right", "wrong", "check"),
    [
        ("ext_proc.v3.ExternalProcessor", "lua.v3.Lua", "envoy_no_picker"),
        ("value: 35s", "value: 90s", "envoy_told_timeout"),
        ("request_body_mode: BUFFERED", "request_body_mode: FULL_DUPLEX_STREAMED", "envoy_failure_mode"),
        ("failure_mode_allow: true", "failure_mode_allow: false", "envoy_failure_mode"),
        ("upstream.address, ", "", "envoy_attributes"),
        ("stream_idle_timeout: 340s", "stream_idle_timeout: 20s", "envoy_idle_timeout"),
        ("remove: x-gateway-destination-endpoint", "remove: x-other", "envoy_trusts_clients"),
        ("max_requests: 100000", "max_requests: 1024", "envoy_circuit_breaker"),
        ("name: headway\n      type", "name: tenants/acme\n      type", "envoy_override_host"),
        ("message_timeout: 35s", "observability_mode: true", "envoy_observe"),
    ],
)
def test_each_fault_of_an_envoy_is_found(right, wrong, check):
    before = (DEPLOY / "fail-open.yaml").read_text()
    after = before.replace(right, wrong)
    assert after != before
    found = examine_envoy(yaml.safe_load(after), "envoy.yaml", 30.0)
    assert check in [finding.check for finding in found]
    assert all(finding.fix and finding.where.startswith("envoy.yaml") for finding in found)


def test_of_an_envoy_before_the_gateway_nothing_is_wanted_that_only_a_picker_needs():
    (finding,) = examine_envoy(yaml.safe_load((DEPLOY / "envoy.yaml").read_text()), "envoy.yaml", 30.0)
    assert finding.check == "envoy_no_picker"
    assert "headway-gateway is behind this Envoy" in finding.fix


def test_a_file_that_is_none_is_usage(tmp_path):
    file = tmp_path / "envoy.yaml"
    file.write_text("a: [")
    assert "is no YAML" in Headway().error("doctor", "--envoy", str(file), code=2)
    assert "No such file" in Headway().error("doctor", "--envoy", str(file) + "x", code=2)


def eventually_now(condition):
    """Wait for it without a loop."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
