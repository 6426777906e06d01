"""The file, the environment, and everything wrong with them at once."""

from pathlib import Path

import pytest
from headway_gateway.config import ConfigError, load_settings


def test_defaults_need_no_file() -> None:
    settings = load_settings()
    assert (settings.port, settings.trust_tenant_header, settings.anonymous_tenant) == (8080, False, "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("g.toml", 'port = 81\nschedulers = ["a:1", "b:1"]\n[api_keys]\nsk-1 = "acme"\n'),
        ("g.json", '{"port": 81, "schedulers": ["a:1", "b:1"], "api_keys": {"sk-1": "acme"}}'),
    ],
)
def test_toml_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    monkeypatch.setenv("HEADWAY_GATEWAY_PORT", "82")
    settings = load_settings(file)
    assert (settings.port, settings.schedulers, settings.api_keys) == (82, ["a:1", "b:1"], {"sk-1": "acme"})
    monkeypatch.setenv("HEADWAY_GATEWAY_CONFIG", str(file))
    assert load_settings().schedulers == ["a:1", "b:1"]


def test_all_problems_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "g.toml"
    file.write_text("prot = 1\nmax_body_bytes = 0\nretry_ratio = 'much'\n")
    monkeypatch.setenv("HEADWAY_GATEWAY_HOTS", "x")
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in sorted(lines)] == [
        "HEADWAY_GATEWAY_HOTS",
        "max_body_bytes",
        "prot",
        "retry_ratio",
    ]


@pytest.mark.parametrize("text", ["port = ", "\x00"])
def test_an_unreadable_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "g.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"g\.toml"):
        load_settings(file)
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_settings(tmp_path / "absent.toml")


def test_the_token_may_lie_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("hw_secret\n")
    monkeypatch.setenv("HEADWAY_GATEWAY_TOKEN_FILE", str(file))
    assert load_settings().token.get_secret_value() == "hw_secret"
    assert "hw_secret" not in repr(load_settings())


def test_a_token_twice_or_an_absent_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_GATEWAY_TOKEN_FILE", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"token_file: .*absent cannot be read: No such file"):
        load_settings()
    monkeypatch.setenv("HEADWAY_GATEWAY_TOKEN", "hw_secret")
    with pytest.raises(ConfigError, match="token and token_file exclude each other"):
        load_settings()


def test_who_signs_the_schedulers_certificate_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for ca in (__file__, "system"):
        monkeypatch.setenv("HEADWAY_GATEWAY_SCHEDULER_CA", ca)
        assert str(load_settings().scheduler_ca) == ca
    monkeypatch.setenv("HEADWAY_GATEWAY_SCHEDULER_CA", "/none")
    with pytest.raises(ConfigError, match=r"scheduler_ca: .*there is no file /none"):
        load_settings()
