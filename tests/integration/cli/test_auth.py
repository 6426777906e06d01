"""`headway auth`, and `headway audit`'s filters."""

from collections.abc import Iterator

import pytest
from fakes.headway import Headway, running_scheduler


def test_whoami_without_a_credential_where_none_is_required(headway: Headway) -> None:
    assert headway.json("auth", "whoami") == {
        "principal": "local", "role": "admin", "node": "", "tenants": ["*"], "shown": "none",
    }  # fmt: skip


def test_a_token_is_rotated_with_an_overlap_and_revoked(headway: Headway) -> None:
    old = headway.json("credentials", "create", "gw", "role=router", "tenants=default")["token"]
    rotated = headway.json("auth", "rotate", "gw", "--overlap", "10m")
    assert rotated["previous_token_expire_time"]
    shown = {token: headway.json("auth", "whoami", HEADWAY_TOKEN=token)["shown"] for token in (old, rotated["token"])}
    assert shown == {old: "previous_token", rotated["token"]: "token"}
    printed = headway.text("auth", "rotate", "gw", "--overlap", "0")
    assert printed.startswith("credentials/gw rotated\ntoken: hw_")
    headway.error("auth", "whoami", HEADWAY_TOKEN=old)
    (row,) = [row for row in headway.json("auth", "list") if row["name"] == "credentials/gw"]
    assert row["revoked"] is False
    assert headway.text("auth", "revoke", "credentials/gw") == "credentials/gw revoked\n"
    assert "NO_CREDENTIAL" in headway.error("auth", "whoami", HEADWAY_TOKEN=printed.split()[3])
    assert "is revoked" in headway.error("auth", "rotate", "gw")


@pytest.mark.parametrize("overlap", ["h", "-1h", "1y", "31d", "99999999999d"])
def test_an_overlap_is_a_duration_of_at_most_thirty_days(headway: Headway, overlap: str) -> None:
    headway.text("credentials", "create", "gw", "role=viewer")
    code = 1 if overlap.endswith("d") else 2
    assert "overlap" in headway.error("auth", "rotate", "gw", f"--overlap={overlap}", code=code)


def test_an_end_users_key_is_of_one_tenant_and_may_ask_who_it_is(headway: Headway) -> None:
    for wrong in ("tenants=", "tenants=*", "tenants=default,acme"):
        assert "exactly one tenant" in headway.error("credentials", "create", "u", "role=tenant", wrong)
    key = headway.json("credentials", "create", "u", "role=tenant", "tenants=default")["token"]
    assert headway.json("auth", "whoami", HEADWAY_TOKEN=key)["tenants"] == ["default"]
    assert "NOT_PERMITTED" in headway.error("tenants", "list", HEADWAY_TOKEN=key)


@pytest.mark.parametrize("identity", ["spiffe://x", "has space", "://x", "-", "a" * 300])
def test_a_certificates_identity_is_a_name(headway: Headway, identity: str) -> None:
    arguments = ("credentials", "create", "c", "role=viewer", f"certificate_identity={identity}")
    if identity in ("spiffe://x", "-"):
        assert headway.json(*arguments)["certificate_identity"] == identity
        again = headway.error("credentials", "create", "d", "role=viewer", f"certificate_identity={identity}")
        assert "another credential has this identity" in again
    else:
        assert "certificate_identity" in headway.error(*arguments)


def test_audit_is_filtered(headway: Headway) -> None:
    headway.text("tenants", "create", "acme")
    headway.text("bindings", "create", "acme/all", "mode=shared")
    headway.text("tenants", "create", "acme-2")

    def found(*filters: str) -> list[str]:
        return [entry["resource"] for entry in headway.json("audit", *filters)]

    assert found("--resource", "tenants/acme") == ["tenants/acme/bindings/all", "tenants/acme"]
    assert found("--principal", "credentials/nobody") == []
    assert len(found("--principal", "local", "--since", "1h")) == 3
    assert found("--since", "2999-01-01T00:00:00Z") == []
    for wrong in ("yesterday", "999999999d"):
        assert "--since" in headway.error("audit", "--since", wrong, code=2)


@pytest.fixture
def strict(database_url: str) -> Iterator[Headway]:
    with running_scheduler(database_url, require_credentials=True) as running:
        yield Headway(running.address)


def test_without_a_credential_where_one_is_required(strict: Headway) -> None:
    assert "NO_CREDENTIAL" in strict.error("auth", "whoami")


def test_a_certificate_needs_its_key(headway: Headway) -> None:
    assert "go together" in headway.error("--ca", "system", "--certificate", "c.pem", "auth", "whoami", code=2)
