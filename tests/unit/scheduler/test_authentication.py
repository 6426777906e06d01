"""Bearer tokens."""

import contextlib
import hashlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from headway_scheduler.domain.desired import Credential, DesiredState, Principal, Role
from headway_scheduler.errors import NoCredential
from headway_scheduler.rpc.authentication import LOCAL, Authenticator, Shown

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


def sha256(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def test_of_a_rotated_credential_both_tokens_count_until_the_overlap_is_over() -> None:
    rotated = credential("old").rotated(sha256("new"), NOW, timedelta(minutes=5))
    desired = Desired(rotated)
    authenticator = desired.authenticator()
    assert authenticator.identify("Bearer old").shown is Shown.PREVIOUS_TOKEN
    assert authenticator.identify("Bearer old").expires == NOW + timedelta(minutes=5)
    assert authenticator.identify("Bearer new").shown is Shown.TOKEN
    desired.now += timedelta(minutes=5)
    with pytest.raises(NoCredential):
        authenticator.identify("Bearer old")
    assert authenticator.identify("Bearer new").principal.id == "c"


@pytest.mark.parametrize(
    ("overlaps", "counts"),
    [((0,), {"3"}), ((60,), {"1", "3"}), ((60, 60), {"1", "3"}), ((60, 0), {"3"}), ((0, 60), {"2", "3"})],
)
def test_which_tokens_count_after_rotations(overlaps: tuple[int, ...], counts: set[str]) -> None:
    """Within an overlap the token of before it stays; without one only the newest counts."""
    rotated = credential("1")
    for number, overlap in enumerate(overlaps):
        token = "3" if number == len(overlaps) - 1 else "2"
        rotated = rotated.rotated(sha256(token), NOW, timedelta(seconds=overlap))
    authenticator = Desired(rotated).authenticator()
    found = set()
    for token in ("1", "2", "3"):
        with contextlib.suppress(NoCredential):
            authenticator.identify(f"Bearer {token}")
            found.add(token)
    assert found == counts


def test_a_certificate_counts_only_where_they_are_looked_at_and_where_there_is_no_token() -> None:
    held = credential("hw_x", certificate_identity="spiffe://x/a")
    other = replace(credential("hw_y", certificate_identity="b.test"), id="other")
    desired = Desired(held, other)
    looking = Authenticator(lambda: desired.state, required=True, clock=lambda: NOW, certificates=True)
    blind = desired.authenticator()
    shows = Call((), b"spiffe://x/a", b"another name")
    assert looking.identify_call(shows).principal.id == "c"
    with pytest.raises(NoCredential):
        blind.identify_call(shows)
    for names in ((b"spiffe://x/z",), (b"spiffe://x/a", b"b.test"), (b"\xff",), ()):
        with pytest.raises(NoCredential):
            looking.identify_call(Call((), *names))
    wrong_token = Call([("authorization", "Bearer hw_z")], b"spiffe://x/a")
    with pytest.raises(NoCredential):
        looking.identify_call(wrong_token)
    desired.replace(replace(held, revoked=True))
    with pytest.raises(NoCredential):
        looking.identify_call(shows)


def test_a_key_is_its_tenants_as_long_as_it_counts() -> None:
    key = credential("k", Role.TENANT, tenants=("acme",), expire_time=NOW + timedelta(hours=1))
    desired = Desired(key, replace(credential("r"), id="router"))
    authenticator = desired.authenticator()
    told = [authenticator.tenant_of(sha256(token)) for token in ("k", "r", "x")]
    assert told == ["acme", "", ""]
    assert authenticator.user_tenant("Bearer k") == "acme"
    with pytest.raises(NoCredential):
        authenticator.user_tenant("Bearer r")
    for gone in (replace(key, revoked=True), replace(key, tenants=())):
        desired.replace(gone)
        assert authenticator.tenant_of(sha256("k")) == ""
        with pytest.raises(NoCredential):
            authenticator.user_tenant("Bearer k")
    desired.replace(key)
    desired.now += timedelta(hours=1)
    assert authenticator.tenant_of(sha256("k")) == ""
