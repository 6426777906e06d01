"""HEADWAY_SCHEDULER_BOOTSTRAP: what the file may say, and what is said about a wrong one."""

import hashlib
from pathlib import Path

import pytest
from headway_scheduler.config import ConfigError, load
from headway_scheduler.domain.desired import Credential, Role

AGENT_TOKEN = "hw_agent-token-of-a-test"
ROUTER_TOKEN = "hw_router-token-of-a-test"

GOOD = """
[[credentials]]
id = "agent-a"
role = "agent"
node = "node-a"
token_file = "agent.token"

[[credentials]]
id = "gateway"
role = "router"
tenants = ["acme", "*"]
token_file = "router.token"
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "agent.token").write_text(f"{AGENT_TOKEN}\n")
    (tmp_path / "router.token").write_text(ROUTER_TOKEN)
    return tmp_path


def read(directory: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[Credential]:
    (directory / "bootstrap.toml").write_text(text)
    monkeypatch.setenv("HEADWAY_SCHEDULER_BOOTSTRAP", str(directory / "bootstrap.toml"))
    return [entry.credential() for entry in load().bootstrap.credentials]


def test_it_reads_credentials_and_keeps_only_hashes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [
        Credential("agent-a", Role.AGENT, hashlib.sha256(AGENT_TOKEN.encode()).digest(), node="node-a"),
        Credential("gateway", Role.ROUTER, hashlib.sha256(ROUTER_TOKEN.encode()).digest(), tenants=("acme", "*")),
    ]
    assert read(directory, GOOD, monkeypatch) == expected
    assert AGENT_TOKEN not in repr(load())


def test_without_the_variable_there_is_none() -> None:
    assert load().bootstrap.credentials == ()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("agent.token", "absent.token", "credentials.0.token_file: .*absent.token cannot be read: No such file"),
        ('node = "node-a"', "", "credentials.0: .*node: is required for an agent"),
        ('tenants = ["acme", "*"]', "", "credentials.1: .*tenants: is required for a router"),
        ('tenants = ["acme", "*"]', 'tenants = ["No Slug"]', "credentials.1: .*tenants: 'No Slug' must match"),
        ('role = "agent"', 'role = "king"', "credentials.0.role: "),
        ('role = "agent"', 'role = "viewer"', "only for an agent"),
        ('id = "gateway"', 'id = "agent-a"', "'agent-a' is listed twice"),
        ("router.token", "agent.token", "two have the same token"),
        ('role = "router"', 'role = "router"\ntoken = "inline"', "credentials.1.token: "),
        ('role = "router"', "role =", "bootstrap.toml: "),
        ("router.token", "bootstrap.toml", "must hold one token of 16 to 512 characters"),
    ],
)
def test_it_says_what_is_wrong_and_where(
    directory: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, said: str
) -> None:
    assert before in GOOD
    with pytest.raises(ConfigError, match=f"HEADWAY_SCHEDULER_BOOTSTRAP: .*{said}"):
        read(directory, GOOD.replace(before, after), monkeypatch)


@pytest.mark.parametrize("token", ["", "short", "two words of a token", "x" * 513, "ünicode-token-of-a-test"])
def test_a_weak_or_odd_token_is_refused_and_not_repeated(
    directory: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    (directory / "agent.token").write_text(token, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"credentials.0.token_file: ") as refused:
        read(directory, GOOD, monkeypatch)
    assert not token or token not in str(refused.value)


def test_all_problems_are_told_at_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_SCHEDULER_LISTN", "0.0.0.0:1")
    monkeypatch.setenv("HEADWAY_SCHEDULER_DATABASE_URL", "meant: HEADWAY_DATABASE_URL")
    monkeypatch.setenv("HEADWAY_SCHEDULER_TIME_SCALE", "-1")
    with pytest.raises(ConfigError) as refused:
        read(directory, GOOD.replace('role = "agent"', 'role = "king"'), monkeypatch)
    lines = str(refused.value).splitlines()
    variables = [line.partition(":")[0].removeprefix("HEADWAY_SCHEDULER_") for line in lines]
    assert sorted(variables) == ["BOOTSTRAP", "DATABASE_URL", "LISTN", "TIME_SCALE"]
