"""The credentials of a first start, in a real database."""

import asyncio
import hashlib
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from headway_scheduler.bootstrap import FIRST_ADMIN, create_first_admin, create_missing
from headway_scheduler.domain.desired import Credential, Role
from headway_scheduler.errors import StoreDown
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


async def test_the_first_admins_token_is_in_a_file_of_its_owner_alone(store: PostgresStore, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "admin.token"
    with capture_logs() as logs:
        await create_first_admin(store, file)
    token = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert await held(store) == {FIRST_ADMIN: Credential(FIRST_ADMIN, Role.ADMIN, sha256(token))}
    assert token not in str(logs)
    assert [line["event"] for line in logs] == ["first_admin_created"]
    assert list(file.parent.iterdir()) == [file]  # nothing else was left there
    await create_first_admin(store, file)  # the next start
    assert file.read_text().strip() == token


async def test_where_there_is_an_admin_none_is_made_even_if_it_is_revoked(store: PostgresStore, tmp_path: Path) -> None:
    await store.create(Credential("root", Role.ADMIN, sha256("root"), revoked=True), BY_HAND)
    await create_first_admin(store, tmp_path / "admin.token")
    assert not (tmp_path / "admin.token").exists()
    assert set(await held(store)) == {"root"}


async def test_without_a_place_for_its_token_no_admin_is_made(store: PostgresStore, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with capture_logs() as logs:
        await create_first_admin(store, tmp_path / "file" / "admin.token")
    assert [line["event"] for line in logs] == ["first_admin_not_created"]
    assert await held(store) == {}


async def test_of_two_schedulers_that_start_together_one_makes_the_admin(store: PostgresStore, tmp_path: Path) -> None:
    files = [tmp_path / "a" / "admin.token", tmp_path / "b" / "admin.token"]
    await asyncio.gather(*(create_first_admin(store, file) for file in files))
    (written,) = [file for file in files if file.exists()]
    assert (await held(store))[FIRST_ADMIN].token_sha256 == sha256(written.read_text().strip())
    assert [left for file in files for left in file.parent.iterdir()] == [written]


@pytest.mark.parametrize("made", [True, False])
async def test_where_postgres_does_not_answer_the_next_start_has_the_token(
    store: PostgresStore, tmp_path: Path, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, file = store.create, tmp_path / "admin.token"

    async def cut_off(resource: Credential, write: Write) -> Credential:
        if made:
            await create(resource, write)
        raise StoreDown("it did not answer")

    with monkeypatch.context() as patch, pytest.raises(StoreDown):
        patch.setattr(store, "create", cut_off)
        await create_first_admin(store, file)
    (tmp_path / "admin.token.1.partial").write_text("of another start")
    await create_first_admin(store, file)
    admin = (await store.load()).credentials[FIRST_ADMIN]
    assert admin.token_sha256 == sha256(file.read_text().strip())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
