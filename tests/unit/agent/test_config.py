"""Configuration: where it comes from, and what is said about mistakes."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from headway_agent.config import AgentConfig, ConfigError, load
from headway_agent.main import main

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in os.environ:
        if name.startswith("HEADWAY_AGENT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def written(tmp_path):
    def write(text, name="agent.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def problems(path):
    with pytest.raises(ConfigError) as caught:
        load(path)
    return [p.removeprefix(f"{path}: ") for p in caught.value.problems]


def test_nothing_is_a_configuration():
    config = load()
    assert config.interval_s == 1.0
    assert config.node


def test_the_example_is_valid_and_toml_and_json_say_the_same(written):
    example = ROOT / "deploy" / "agent.toml"
    config = load(example)
    assert config.devices
    assert config.engines
    assert load(written(json.dumps(tomllib.loads(example.read_text())), "agent.json")) == config


def test_the_environment_goes_over_the_file(written, monkeypatch):
    path = written('node = "file"\ninterval_s = 5\n[labels]\nzone = "a"\n')
    monkeypatch.setenv("HEADWAY_AGENT_NODE", "environment")
    monkeypatch.setenv("HEADWAY_AGENT_SCHEDULERS", "s1:7070, s2:7070")
    monkeypatch.setenv("HEADWAY_AGENT_DEVICES", '[{"kind": "simulated", "count": 4}]')
    monkeypatch.setenv("HEADWAY_AGENT_TLS__SERVER_NAME", "headway")
    config = load(path)
    assert (config.node, config.interval_s, config.labels) == ("environment", 5.0, {"zone": "a"})
    assert config.schedulers == ["s1:7070", "s2:7070"]
    assert config.devices[0].count == 4
    assert config.tls.server_name == "headway"


def test_the_file_can_be_named_by_the_environment(written, monkeypatch):
    monkeypatch.setenv("HEADWAY_AGENT_CONFIG", str(written('node = "n"\n')))
    assert load().node == "n"


def test_all_problems_are_told_at_once_with_their_places(written, monkeypatch):
    monkeypatch.setenv("HEADWAY_AGENT_NODDE", "x")
    found = problems(
        written(
            'colour = "blue"\ninterval_s = 0\nschedulers = ["nowhere"]\n'
            '[[devices]]\nkind = "gpu"\n[[devices]]\nkind = "simulated"\ncount = 0\n'
            '[[engines]]\naddress = "a:1"\nengine = "vlm"\nspeed = 1\n'
        )
    )
    assert {p.partition(":")[0] for p in found} == {
        "environment",
        "colour",
        "interval_s",
        "schedulers.0",
        "devices.0",
        "devices.1.simulated.count",
        "engines.0.engine",
        "engines.0.speed",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[[engines]]\naddress = "a:1"\n[[engines]]\naddress = "a:1"\n',
            "engines: a:1 rank 0 is listed twice",
        ),
        ('schedulers = ["a:1", "a:1"]\n', "schedulers: a:1 is listed twice"),
        ("schedulers = []\n", "schedulers: at least one is needed"),
        ('[[devices]]\nkind = "cpu"\n[[devices]]\nkind = "cpu"\n', "devices: cpu is listed twice"),
        ('token = "a"\ntoken_file = "b"\n', "token and token_file exclude each other"),
        ('[tls]\ncert_file = "a"\n', "tls: cert_file and key_file go together"),
        (
            '[[devices]]\nkind = "simulated"\ncount = 2\nfaults = [{kind = "lost", at_s = 1, device = 2}]\n',
            "devices.0.simulated: faults.0.device: there are only 2 devices",
        ),
        ("not toml\n", "Expected '=' after a key in a key/value pair (at line 1, column 5)"),
    ],
)
def test_what_is_said(written, text, said):
    assert problems(written(text)) == [said]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:5557", "must start with tcp:// or ipc://"),
        ("tcp://127.0.0.1", "must end with a port, tcp://HOST:PORT"),
        ("tcp://127.0.0.1:", "must end with a port, tcp://HOST:PORT"),
        ("tcp://127.0.0.1:0", "must end with a port, tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65536", "must end with a port, tcp://HOST:PORT"),
        ("ipc://", "must name a socket, in at most 107 bytes"),
        ("ipc:///" + "a" * 107, "must name a socket, in at most 107 bytes"),
    ],
)
def test_an_address_that_zmq_cannot_use_is_said_before_it_tries(written, address, said):
    text = f'[[engines]]\naddress = "a:1"\n[engines.kv_events]\naddress = "{address}"\n'
    assert problems(written(text)) == [f"engines.0.kv_events.address: {said}"]


def test_a_missing_file_and_a_list(written, tmp_path):
    assert problems(tmp_path / "none.toml") == ["No such file or directory"]
    assert problems(written("[]", "agent.json")) == ["must be a table of settings"]


def test_a_broken_list_in_the_environment(monkeypatch):
    monkeypatch.setenv("HEADWAY_AGENT_ENGINES", "[{")
    assert any("engines" in p for p in problems(None))


def test_a_token_is_never_shown(written):
    assert "s3cret" not in repr(AgentConfig(token="s3cret"))
    assert "s3cret" not in str(problems(written('token = "s3cret"\ninterval_s = "s3cret"\n')))


def test_validate_says_valid_or_every_problem(written, capsys):
    main(["--config", str(written('node = "n"\n')), "--validate"])
    assert capsys.readouterr().out == "the configuration is valid\n"
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(written("a = 1\nb = 2\n")), "--validate"])
    assert [line.split(": ")[1] for line in ended.value.code.splitlines()] == ["a", "b"]
