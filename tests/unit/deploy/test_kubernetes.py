"""The manifests hang together, and say only what the programs know."""

import os
import tomllib
from pathlib import Path

import pytest
import yaml
from headway_agent.config import AgentConfig
from headway_scheduler.config import Config

TLS = Path(__file__).parents[2] / "golden" / "tls"
FILE = Path(__file__).parents[3] / "deploy" / "kubernetes" / "headway.yaml"
OBJECTS = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(FILE.read_text())}
PODS = {name: each["spec"]["template"] for (_, name), each in OBJECTS.items() if "template" in each.get("spec", {})}


def container(name):
    (found,) = PODS[name]["spec"]["containers"]
    return found


def variables(name):
    return {each["name"]: each.get("value") for each in container(name)["env"]}


def test_there_is_a_scheduler_with_a_standby_and_an_agent_on_each_node():
    assert set(OBJECTS) == {
        ("Service", "headway"),
        ("PodDisruptionBudget", "headway-scheduler"),
        ("StatefulSet", "headway-scheduler"),
        ("ConfigMap", "headway-agent"),
        ("DaemonSet", "headway-agent"),
    }
    assert OBJECTS["StatefulSet", "headway-scheduler"]["spec"]["replicas"] == 2


@pytest.mark.parametrize("name", PODS)
def test_a_pod_may_do_nothing_that_it_need_not(name):
    spec = PODS[name]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    may = container(name)["securityContext"]
    assert may == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container(name)["resources"]["limits"]
    mounted = {mount["name"] for mount in container(name)["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_selectors_select_the_pods():
    labels = {name: pod["metadata"]["labels"] for name, pod in PODS.items()}
    assert OBJECTS["Service", "headway"]["spec"]["selector"] == labels["headway-scheduler"]
    for kind, name in (
        ("PodDisruptionBudget", "headway-scheduler"),
        ("StatefulSet", "headway-scheduler"),
        ("DaemonSet", "headway-agent"),
    ):
        assert OBJECTS[kind, name]["spec"]["selector"]["matchLabels"] == labels[name]


def test_the_scheduler_knows_every_variable_and_starts_with_them(monkeypatch):
    for name in list(os.environ):
        if name.startswith("HEADWAY_"):
            monkeypatch.delenv(name)
    here = {
        "HEADWAY_DATABASE_URL": "postgresql://u:p@db/headway",
        "HEADWAY_SCHEDULER_NAME": "s-0",
        "HEADWAY_SCHEDULER_TLS_CERTIFICATE": str(TLS / "certificate.pem"),
        "HEADWAY_SCHEDULER_TLS_KEY": str(TLS / "key.pem"),
    }
    for name, value in (variables("headway-scheduler") | here).items():
        monkeypatch.setenv(name, value)
    known = {f"HEADWAY_SCHEDULER_{name.upper()}" for name in Config.model_fields}
    known |= {str(field.validation_alias) for field in Config.model_fields.values() if field.validation_alias}
    assert set(variables("headway-scheduler")) <= known
    config = Config()
    assert config.standby
    grace_s = PODS["headway-scheduler"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > config.drain_timeout_s
    ports = {each["name"]: each["containerPort"] for each in container("headway-scheduler")["ports"]}
    assert ports == {"grpc": 7070, "http": 7071}
    assert {each["name"]: each["port"] for each in OBJECTS["Service", "headway"]["spec"]["ports"]} == ports
    assert config.listen.endswith(":7070")


def test_the_agents_file_names_both_schedulers_and_is_valid():
    settings = tomllib.loads(OBJECTS["ConfigMap", "headway-agent"]["data"]["agent.toml"])
    replicas = OBJECTS["StatefulSet", "headway-scheduler"]["spec"]["replicas"]
    assert settings["schedulers"] == [f"headway-scheduler-{n}.headway:7070" for n in range(replicas)]
    AgentConfig(**settings)
