"""Bearer tokens."""

import hashlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from headway_scheduler.domain.desired import Credential, DesiredState, Principal, Role
from headway_scheduler.errors import NoCredential
from headway_scheduler.rpc.authentication import LOCAL, Authenticator

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def credential(token: str, role: Role = Role.ROUTER, **more: object) -> Credential:
    return Credential("c", role, hashlib.sha256(token.encode()).digest(), **more)  # type: ignore[arg-type]


class Desired:
    """A snapshot that the test replaces."""

    def __init__(self, *credentials: Credential) -> None:
        self.replace(*credentials)
        self.now = NOW

    def replace(self, *credentials: Credential) -> None:
        self.state = DesiredState(credentials={str(n): made for n, made in enumerate(credentials)})

    def authenticator(self, *, required: bool = True) -> Authenticator:
        return Authenticator(lambda: self.state, required=required, clock=lambda: self.now)


class Call:
    """What gRPC says of a call."""

    def __init__(self, metadata: object, *names: bytes, peer: str = "ipv4:10.0.0.1:4711") -> None:
        self._metadata, self._names, self._peer = metadata, names, peer

    def invocation_metadata(self) -> object:
        return self._metadata

    def auth_context(self) -> object:
        return {"peer_uri": list(self._names)} if self._names else {}

    def peer(self) -> str:
        return self._peer


def test_a_token_makes_its_principal() -> None:
    authenticator = Desired(credential("hw_x", tenants=("acme",))).authenticator()
    expected = Principal("c", Role.ROUTER, "", ("acme",))
    for authorization in ("Bearer hw_x", "bearer hw_x", "Bearer  hw_x "):
        assert authenticator.authenticate(authorization) == expected
    assert authenticator.identify_call(Call([("x", b"y"), ("authorization", "Bearer hw_x")])).principal == expected


def test_an_agent_keeps_its_node_and_an_admin_may_name_any_tenant() -> None:
    desired = Desired(credential("a", Role.AGENT, node="gpu-1"), credential("b", Role.ADMIN))
    agent = desired.authenticator().authenticate("Bearer a")
    assert (agent.node, agent.may_name("acme")) == ("gpu-1", False)
    assert desired.authenticator().authenticate("Bearer b").may_name("acme")


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "hw_x",
        "Bearer",
        "Bearer ",
        "Basic hw_x",
        "Bearer hw_y",
        "Bearer hw_x,hw_x",
        "Bearer \udcff",
        "Bearer " + "x" * 9999,
    ],
)
def test_a_bad_credential_is_refused_even_where_none_is_required(authorization: str, required: bool) -> None:
    with pytest.raises(NoCredential) as refused:
        Desired(credential("hw_x")).authenticator(required=required).authenticate(authorization)
    assert "hw_" not in refused.value.message


def test_without_a_credential() -> None:
    with pytest.raises(NoCredential):
        Desired().authenticator(required=True).identify_call(Call(None))
    assert Desired().authenticator(required=False).identify_call(Call(())).principal is LOCAL
    assert (LOCAL.id, LOCAL.role, LOCAL.tenants) == ("local", Role.ADMIN, ("*",))


def test_expiry_is_checked_on_every_call() -> None:
    desired = Desired(credential("hw_x", expire_time=NOW + timedelta(hours=1)))
    authenticator = desired.authenticator()
    authenticator.authenticate("Bearer hw_x")
    desired.now += timedelta(hours=1)
    with pytest.raises(NoCredential):
        authenticator.authenticate("Bearer hw_x")


def test_a_new_snapshot_counts_at_once() -> None:
    made = credential("hw_x")
    desired = Desired(made)
    authenticator = desired.authenticator()
    authenticator.authenticate("Bearer hw_x")
    desired.replace(replace(made, revoked=True))
    with pytest.raises(NoCredential):
        authenticator.authenticate("Bearer hw_x")
    desired.replace()
    with pytest.raises(NoCredential):
        authenticator.authenticate("Bearer hw_x")
    desired.replace(made)
    authenticator.authenticate("Bearer hw_x")
