"""What listens beyond loopback speaks TLS and wants credentials, or was told that it is insecure: every port."""

import pytest
from headway_agent.config import AgentConfig
from headway_gateway.config import GatewaySettings
from headway_scheduler.config import Config
from pydantic import ValidationError

AWAY = ("0.0.0.0:7070", "[::]:7070", "10.0.0.1:7070", "scheduler.example:7070")
DATABASE = {"HEADWAY_DATABASE_URL": "postgresql://x"}


@pytest.fixture
def tls(tmp_path):
    files = {"tls_certificate": tmp_path / "c", "tls_key": tmp_path / "k", "tls_client_ca": tmp_path / "a"}
    for file in files.values():
        file.touch()
    return files


def problems(kind, **settings):
    with pytest.raises(ValidationError) as error:
        kind(**settings)
    return str(error.value)


@pytest.mark.parametrize("address", AWAY)
@pytest.mark.parametrize("port", ["listen", "listen_http", "listen_mtls"])
def test_no_port_of_the_scheduler_is_plain_text_beyond_loopback(port, address, tls):
    here = {} if port != "listen_mtls" else tls
    if port != "listen_mtls":  # which needs a certificate of its own
        assert "insecure=true" in problems(Config, **DATABASE, **{port: address})
    assert "tls_certificate" in problems(Config, **DATABASE, **{port: address, "tls_key": tls["tls_key"]})
    config = Config(
        **DATABASE, **{"tls_certificate": tls["tls_certificate"], "tls_key": tls["tls_key"], **here, port: address}
    )
    assert not config.on_loopback
    assert config.credentials_required
    config = Config(**DATABASE, **here, **{port: address, "insecure": True})
    assert config.credentials_required  # insecure is about the wire: credentials are still wanted


@pytest.mark.parametrize("port", ["listen", "listen_http"])
def test_credentials_are_not_done_without_beyond_loopback_unless_told_twice(port, tls):
    pair = {"tls_certificate": tls["tls_certificate"], "tls_key": tls["tls_key"]}
    told = {port: "0.0.0.0:1", "require_credentials": False}
    assert "require_credentials" in problems(Config, **DATABASE, **pair, **told)
    assert not Config(**DATABASE, **pair, **told, insecure=True).credentials_required


def test_a_plain_http_port_beyond_loopback_carries_no_routes(tls):
    pair = {"tls_certificate": tls["tls_certificate"], "tls_key": tls["tls_key"]}
    away = {"listen_http": "0.0.0.0:1"}
    assert not Config(**DATABASE, **pair, **away).http_is_private
    assert Config(**DATABASE, **pair, **away, http_tls=True).http_is_private


def test_certificates_of_clients_need_one_of_the_server(tls):
    assert "tls_client_ca needs" in problems(Config, tls_client_ca=tls["tls_client_ca"])
    pair = {"tls_certificate": tls["tls_certificate"], "tls_key": tls["tls_key"]}
    assert "listen_mtls needs" in problems(Config, **pair, listen_mtls="127.0.0.1:1")
    assert Config(**tls).certificate_required
    assert not Config(**tls, listen_mtls="127.0.0.1:1").certificate_required


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example"])
def test_the_gateway_says_that_it_is_insecure_beyond_loopback(host):
    assert "insecure" in problems(GatewaySettings, host=host)
    assert GatewaySettings(host=host, insecure=True).host == host
    for near in ("127.0.0.1", "::1", "[::1]", "localhost"):
        assert GatewaySettings(host=near).host == near


def test_the_agent_takes_events_from_beyond_its_host_only_when_told():
    """It listens nowhere else."""
    engine = {"engine": "vllm", "address": "10.0.0.1:8000", "kv_events": {"address": "tcp://0.0.0.0:5557"}}
    assert "remote" in problems(AgentConfig, node="n", engines=[engine])
    engine["kv_events"]["remote"] = True
    assert AgentConfig(node="n", engines=[engine]).engines


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"scheduler_certificate": "c"}, "go together"),
        ({"scheduler_certificate": "c", "scheduler_key": "k"}, "needs scheduler_ca"),
        ({"scheduler_key": "/none"}, "there is no file"),
    ],
)
def test_a_gateways_certificate_is_whole(settings, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("c", "k"):
        (tmp_path / name).touch()
    assert problem in problems(GatewaySettings, **settings)
