"""The credentials of a first start, in a real database."""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from headway_scheduler.bootstrap import create_missing
from headway_scheduler.domain.desired import Credential, Role
from headway_scheduler.store.base import Write
from headway_scheduler.store.postgres import PostgresStore
from structlog.testing import capture_logs

BY_HAND = Write(principal="admin", method="Test")


def sha256(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


AGENT = Credential("agent-a", Role.AGENT, sha256("agent"), node="node-a")
GATEWAY = Credential("gateway", Role.ROUTER, sha256("gateway"), tenants=("*",))


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(database_url)
    yield store
    await store.close()


async def held(store: PostgresStore) -> dict[str, Credential]:
    return {key: replace(value, meta=None) for key, value in (await store.load()).credentials.items()}


async def test_they_are_created_once_and_audited(store: PostgresStore) -> None:
    await create_missing(store, [AGENT, GATEWAY])
    before = await store.load()
    await create_missing(store, [AGENT, GATEWAY])
    assert await held(store) == {"agent-a": AGENT, "gateway": GATEWAY}
    assert (await store.load()).version == before.version  # the second start wrote nothing
    entries = await store.audit(before_id=None, limit=10)
    assert [(entry.principal, entry.method, entry.resource) for entry in entries] == [
        ("scheduler", "Bootstrap", "credentials/gateway"),
        ("scheduler", "Bootstrap", "credentials/agent-a"),
    ]


async def test_what_an_admin_revoked_or_changed_stays_so(store: PostgresStore) -> None:
    revoked = replace(AGENT, revoked=True)
    rotated = replace(GATEWAY, token_sha256=sha256("newer"))
    await store.create(revoked, BY_HAND)
    await store.create(rotated, BY_HAND)
    with capture_logs() as logs:
        await create_missing(store, [AGENT, GATEWAY])
    assert await held(store) == {"agent-a": revoked, "gateway": rotated}
    assert [(line["event"], line["credential"]) for line in logs] == [("bootstrap_token_ignored", "gateway")]


async def test_what_cannot_be_created_is_left_out_and_said(store: PostgresStore) -> None:
    stranger = Credential("stranger", Role.ROUTER, sha256("stranger"), tenants=("nobody",))
    same_token = Credential("copy", Role.VIEWER, AGENT.token_sha256)
    with capture_logs() as logs:
        await create_missing(store, [stranger, AGENT, same_token])
    assert await held(store) == {"agent-a": AGENT}
    refused = [line["credential"] for line in logs if line["event"] == "bootstrap_credential_refused"]
    assert refused == ["stranger", "copy"]
