"""What every store must do, against the real Postgres."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from fakes.postgres import connect
from headway_scheduler.domain.desired import (
    Binding,
    BindingMode,
    Credential,
    DisruptionBudget,
    GpuGroup,
    Model,
    Quotas,
    Role,
    Split,
    StrategyBinding,
    StrategyConfig,
    Tenant,
)
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.resources import Resource, by_key, key_of
from headway_scheduler.domain.usage import Interval, Usage
from headway_scheduler.errors import (
    DuplicateName,
    HeadwayError,
    InUse,
    InvalidField,
    StaleEtag,
    UnknownResource,
    UnknownTenant,
)
from headway_scheduler.store.base import Write
from headway_scheduler.store.postgres import PostgresStore

HASH = hashlib.sha256(b"hw_token").digest()
TEN_S = 10.0

SPLITS = (Split("canary", 5.0, {"track": "canary"}), Split("stable", 95.0, engine_version="0.11"))
EVERY_KIND: list[Resource] = [
    Tenant("acme", "Acme", "shared-cache", 2.5, 1, Quotas(60, 1000, 8), ("llama",), ("sql",), {"llama": Quotas(6)}),
    GpuGroup("gold", "Gold", {"tier": "gold"}, ("gpu-1",), ("10.0.0.1:8000@0",), False),
    Binding("default", "gold", BindingMode.BURST, 3, 0.5),
    Model("meta/llama-3.1:8b", ("llama",), "/tokenizers/llama", 8192, True, SPLITS, DisruptionBudget(1, 0.5)),
    StrategyConfig("mine", "adaptive", {"alpha": 0.5, "deep": {"list": [1, "two", None]}}, False, "random", 50, "Mine"),
    StrategyBinding("for-default", "random", "default", "", "", True),
    Credential("gateway", Role.ROUTER, HASH, "", ("default", "*"), datetime(2030, 1, 1, tzinfo=UTC), False),
]


def write(method: str = "Test", request_id: str = "", **more: object) -> Write:
    return Write(principal="tester", method=method, request_id=request_id, **more)  # type: ignore[arg-type]


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[PostgresStore]:
    made = PostgresStore(database_url, timeout_s=TEN_S)
    yield made
    await made.close()


@pytest.fixture
async def other(database_url: str) -> AsyncIterator[PostgresStore]:
    made = PostgresStore(database_url, timeout_s=TEN_S)
    yield made
    await made.close()


async def prepare(store: PostgresStore, resource: Resource) -> None:
    if isinstance(resource, Binding):
        await store.create(GpuGroup("gold"), write())


async def test_a_new_installation_serves_the_default_tenant_with_adaptive(store: PostgresStore) -> None:
    state = await store.load()
    assert list(state.tenants) == ["default"]
    assert state.groups["all"].all
    assert [(binding.tenant, binding.group, binding.mode) for binding in state.bindings] == [
        ("default", "all", BindingMode.SHARED)
    ]
    algorithms = {
        "round_robin", "random", "least_request", "consistent_hash",
        "global_least_request", "prefix_match", "gpu_aware", "adaptive",
    }  # fmt: skip
    assert {strategy.id: strategy.algorithm for strategy in state.strategies.values()} == {n: n for n in algorithms}
    assert all(strategy.enabled and strategy.revision == 1 for strategy in state.strategies.values())
    assert {
        strategy.fallback_algorithm for strategy in state.strategies.values() if strategy.id != "least_request"
    } == {"least_request"}
    assert state.strategies["least_request"].fallback_algorithm == "round_robin"
    (binding,) = state.strategy_bindings
    assert (binding.id, binding.strategy, binding.tenant, binding.model, binding.group, binding.shadow) == (
        "default", "adaptive", "", "", "", False
    )  # fmt: skip
    for name in algorithms:
        (revision,) = await store.strategy_revisions(name)
        assert revision.config == replace(state.strategies[name], meta=None)


@pytest.mark.parametrize("resource", EVERY_KIND, ids=lambda resource: type(resource).__name__)
async def test_what_is_created_is_loaded_updated_and_deleted(store: PostgresStore, resource: Resource) -> None:
    await prepare(store, resource)
    kind, key = type(resource), key_of(resource)
    created = await store.create(resource, write())
    assert replace(created, meta=None) == resource
    assert by_key(await store.load(), kind)[key] == created
    assert await store.get(kind, key) == created

    with pytest.raises(DuplicateName) as duplicate:
        await store.create(replace(resource, **_new_token(resource)), write())
    assert key.rpartition("/")[2] in duplicate.value.facts["resource"]

    updated = await store.update(created, write(), etag=created.meta.etag)
    assert updated.meta.etag != created.meta.etag
    assert updated.meta.create_time == created.meta.create_time
    assert by_key(await store.load(), kind)[key] == updated

    with pytest.raises(StaleEtag):
        await store.update(created, write(), etag=created.meta.etag)
    with pytest.raises(StaleEtag):
        await store.delete(kind, key, write(), etag=created.meta.etag)

    await store.delete(kind, key, write(), etag=updated.meta.etag)
    assert key not in by_key(await store.load(), kind)
    for attempt in (store.get(kind, key), store.delete(kind, key, write()), store.update(resource, write())):
        with pytest.raises(UnknownResource):
            await attempt
    again = await store.update(resource, write(), allow_missing=True)
    assert again.meta.etag not in {created.meta.etag, updated.meta.etag}


def _new_token(resource: Resource) -> dict[str, bytes]:
    return {"token_sha256": hashlib.sha256(b"another").digest()} if isinstance(resource, Credential) else {}


async def test_each_write_grows_the_version_and_a_refused_one_does_not(store: PostgresStore) -> None:
    before = (await store.load()).version
    await store.create(Tenant("acme"), write())
    assert (await store.load()).version == before + 1
    with pytest.raises(DuplicateName):
        await store.create(Tenant("acme"), write())
    assert (await store.load()).version == before + 1


async def test_of_concurrent_writers_with_one_etag_exactly_one_wins(store: PostgresStore, other: PostgresStore) -> None:
    tenant = await store.create(Tenant("acme"), write())
    attempts = [
        (store if number % 2 else other).update(
            replace(tenant, display_name=str(number)), write(), etag=tenant.meta.etag
        )
        for number in range(12)
    ]
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    winners = [outcome for outcome in outcomes if isinstance(outcome, Tenant)]
    assert len(winners) == 1
    assert all(isinstance(outcome, StaleEtag) for outcome in outcomes if outcome not in winners)
    assert (await store.get(Tenant, "acme")) == winners[0]


async def test_of_concurrent_creators_exactly_one_wins(store: PostgresStore, other: PostgresStore) -> None:
    attempts = [(store if number % 2 else other).create(Tenant("acme"), write()) for number in range(8)]
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    assert sum(isinstance(outcome, Tenant) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, DuplicateName) for outcome in outcomes) == 7


async def test_validate_only_checks_and_writes_nothing(store: PostgresStore) -> None:
    before = await store.load()
    only = write(validate_only=True)
    assert (await store.create(Tenant("acme"), only)).id == "acme"
    with pytest.raises(DuplicateName):
        await store.create(Tenant("default"), only)
    await store.update(replace(before.tenants["default"], weight=9.0), only)
    await store.delete(StrategyConfig, "random", only)
    assert await store.load() == before
    assert await store.audit(before_id=None, limit=10) == []


REFUSED: list[tuple[Resource, type[HeadwayError], str]] = [
    (Tenant("acme", weight=0.0), InvalidField, "tenant.weight"),
    (Tenant("acme", priority=2), InvalidField, "tenant.priority"),
    (Tenant("acme", quotas=Quotas(-1, 0, 0)), InvalidField, "tenant.quotas"),
    (Tenant("acme", display_name="a\0b"), InvalidField, "tenant"),
    (Binding("nobody", "all"), UnknownTenant, "binding.name"),
    (Binding("default", "nothing"), UnknownResource, "binding.gpu_group"),
    (Binding("default", "all", weight=-1.0), InvalidField, "binding.weight"),
    (Model("m", max_context_tokens=-1), InvalidField, "model.max_context_tokens"),
    (StrategyConfig("s", "adaptive", time_budget_us=-1), InvalidField, "strategy.time_budget_us"),
    (StrategyBinding("b", "nothing", "default"), UnknownResource, "strategy_binding.strategy"),
    (StrategyBinding("b", "random", "nobody"), UnknownTenant, "strategy_binding.tenant"),
    (StrategyBinding("b", "random", "", "nothing"), UnknownResource, "strategy_binding.model"),
    (StrategyBinding("b", "random", "", "", "nothing"), UnknownResource, "strategy_binding.gpu_group"),
    (StrategyBinding("b", "random", "default", "", "all"), InvalidField, "strategy_binding.gpu_group"),
    (StrategyBinding("b", "random"), InUse, "name"),
    (Credential("c", Role.ROUTER, HASH, tenants=("nobody",)), UnknownTenant, "credential.tenants[0]"),
    (Credential("c", Role.ROUTER, b"short"), InvalidField, "credential.token_sha256"),
]


@pytest.mark.parametrize(("resource", "error", "field"), REFUSED, ids=lambda value: str(value)[:40])
async def test_a_broken_constraint_names_its_field(
    store: PostgresStore, resource: Resource, error: type[HeadwayError], field: str
) -> None:
    before = await store.load()
    with pytest.raises(error) as refused:
        await store.create(resource, write(request_id="one"))
    assert refused.value.facts["field"] == field
    assert await store.load() == before
    assert await store.recall(type(resource), write(request_id="one")) is None


async def test_two_credentials_never_share_a_token(store: PostgresStore) -> None:
    await store.create(Credential("one", Role.VIEWER, HASH), write())
    with pytest.raises(InvalidField) as refused:
        await store.create(Credential("two", Role.VIEWER, HASH), write())
    assert refused.value.field == "credential.token_sha256"


async def test_a_model_name_means_one_model(store: PostgresStore) -> None:
    await store.create(Model("llama-8b", ("llama", "small")), write())
    with pytest.raises(DuplicateName):
        await store.create(Model("llama"), write())
    for taken in ("llama-8b", "small"):
        with pytest.raises(InvalidField) as refused:
            await store.create(Model("other", ("free", taken)), write())
        assert refused.value.field == "model.aliases[1]"
    await store.update(Model("llama-8b", ("llama", "small", "tiny")), write())


@pytest.mark.parametrize("second", list(BindingMode))
async def test_a_dedicated_group_has_one_tenant(store: PostgresStore, second: BindingMode) -> None:
    await store.create(Tenant("acme"), write())
    await store.create(GpuGroup("gold"), write())
    await store.create(Binding("acme", "gold", BindingMode.DEDICATED), write())
    with pytest.raises(InUse) as refused:
        await store.create(Binding("default", "gold", second), write())
    assert refused.value.facts == {
        "field": "binding.mode" if second is BindingMode.DEDICATED else "binding.gpu_group",
        "resource": "gpuGroups/gold",
        "user": "tenants/acme/bindings/gold",
    }
    with pytest.raises(InUse):
        await store.create(Binding("acme", "all", BindingMode.DEDICATED), write())
    shared = await store.update(Binding("acme", "gold", BindingMode.SHARED), write())
    assert shared.mode is BindingMode.SHARED
    if second is not BindingMode.DEDICATED:
        await store.create(Binding("default", "gold", second), write())
        with pytest.raises(InUse):
            await store.update(Binding("acme", "gold", BindingMode.DEDICATED), write())


async def test_no_admin_gains_every_tenant_by_losing_its_own(store: PostgresStore) -> None:
    await store.create(Tenant("acme"), write())
    bound = Credential("bound", Role.ADMIN, HASH, tenants=("acme",))
    await store.create(bound, write())
    with pytest.raises(InUse, match="credentials/bound"):
        await store.delete(Tenant, "acme", write(), force=True)
    kept = (await store.load()).credentials["bound"]
    assert kept.tenants == ("acme",)
    await store.update(replace(kept, tenants=("acme", "default")), write())
    await store.delete(Tenant, "acme", write(), force=True)
    assert (await store.load()).credentials["bound"].tenants == ("default",)


async def test_what_is_in_use_is_deleted_only_by_force(store: PostgresStore) -> None:
    await store.create(Tenant("acme"), write())
    await store.create(GpuGroup("gold"), write())
    await store.create(Model("llama"), write())
    await store.create(Binding("acme", "gold"), write())
    await store.create(StrategyBinding("acme-random", "random", "acme"), write())
    await store.create(StrategyBinding("gold-gpu", "gpu_aware", "", "", "gold"), write())
    await store.create(StrategyBinding("llama-prefix", "prefix_match", "", "llama"), write())
    await store.create(Credential("gateway", Role.ROUTER, HASH, tenants=("default", "acme")), write())

    used: list[tuple[type[Resource], str]] = [
        (Tenant, "acme"), (GpuGroup, "gold"), (Model, "llama"), (StrategyConfig, "random"), (StrategyConfig, "adaptive")
    ]  # fmt: skip
    for kind, key in used:
        with pytest.raises(InUse):
            await store.delete(kind, key, write())
    with pytest.raises(InUse):
        await store.delete(StrategyConfig, "adaptive", write(), force=True)

    await store.delete(Tenant, "acme", write("DeleteTenant"), force=True)
    told = [(each.method, each.resource) for each in await store.audit(before_id=None, limit=4)]
    went = ["tenants/acme", "strategyBindings/acme-random", "tenants/acme/bindings/gold", "credentials/gateway"]
    assert told == [("DeleteTenant", name) for name in went], "all that a forced deletion changes is in the trail"
    (changed,) = await store.audit(before_id=None, limit=1, resource="credentials/gateway")
    assert changed.before and changed.after
    assert (changed.before["tenants"], changed.after["tenants"]) == (["default", "acme"], ["default"])
    await store.delete(GpuGroup, "gold", write(), force=True)
    await store.delete(StrategyConfig, "prefix_match", write(), force=True)
    state = await store.load()
    assert [key_of(binding) for binding in state.bindings] == ["default/all"]
    assert [binding.id for binding in state.strategy_bindings] == ["default"]
    assert state.credentials["gateway"].tenants == ("default",)


async def test_the_defaults_that_route_needs_stay(store: PostgresStore) -> None:
    for kind, key in ((StrategyBinding, "default"), (Tenant, "default")):
        with pytest.raises(InUse):
            await store.delete(kind, key, write(), force=True)
    for lost in (
        StrategyBinding("default", "adaptive", "default"),
        StrategyBinding("default", "adaptive", shadow=True),
    ):
        with pytest.raises(InUse):
            await store.update(lost, write())
    moved = await store.update(StrategyBinding("default", "random"), write())
    assert moved.strategy == "random"


async def test_a_strategy_keeps_its_revisions(store: PostgresStore) -> None:
    first = await store.create(StrategyConfig("mine", "adaptive", {"alpha": 1}), write())
    second = await store.update(replace(first, parameters={"alpha": 2}, revision=77), write())
    assert (first.revision, second.revision) == (1, 2)
    revisions = await store.strategy_revisions("mine")
    assert [revision.config for revision in revisions] == [replace(second, meta=None), replace(first, meta=None)]
    assert {revision.author for revision in revisions} == {"tester"}
    with pytest.raises(UnknownResource):
        await store.strategy_revisions("nothing")


async def test_a_retry_answers_what_the_first_try_answered(store: PostgresStore) -> None:
    first = await store.create(Tenant("acme"), write("Create", "r1", fingerprint="f"))
    assert await store.create(Tenant("acme"), write("Create", "r1", fingerprint="f")) == first
    changed = await store.update(replace(first, weight=3.0), write("Update", "r2"))
    await store.update(replace(first, weight=4.0), write("Update"))
    assert await store.update(replace(first, weight=3.0), write("Update", "r2")) == changed
    assert (await store.get(Tenant, "acme")).weight == 4.0
    assert await store.recall(Tenant, write("Update", "r2")) == (changed,)
    await store.delete(Tenant, "acme", write("Delete", "r3"))
    await store.delete(Tenant, "acme", write("Delete", "r3"))
    assert await store.recall(Tenant, write("Delete", "r3")) == (None,)
    version = (await store.load()).version
    await store.set_node_state("n", SchedulingState.CORDONED, write("Cordon", "r4"))
    await store.set_node_state("n", SchedulingState.ACTIVE, write("Uncordon"))
    await store.set_node_state("n", SchedulingState.CORDONED, write("Cordon", "r4"))
    state = await store.load()
    assert (state.version, state.node_states) == (version + 2, {})


async def test_a_request_id_is_of_one_write_by_one_principal(store: PostgresStore) -> None:
    await store.create(Tenant("acme"), write("Create", "r1", fingerprint="f"))
    for other_write in (write("Create", "r1", fingerprint="g"), write("Update", "r1", fingerprint="f")):
        with pytest.raises(InvalidField) as refused:
            await store.create(Tenant("acme"), other_write)
        assert refused.value.field == "request_id"
    with pytest.raises(DuplicateName):
        await store.create(Tenant("acme"), Write("someone else", "Create", "r1", fingerprint="f"))


async def test_concurrent_retries_write_once(store: PostgresStore, other: PostgresStore) -> None:
    attempts = [(store if n % 2 else other).create(Tenant("acme"), write("Create", "r1")) for n in range(8)]
    outcomes = await asyncio.gather(*attempts)
    assert len({tenant.meta.etag for tenant in outcomes}) == 1
    assert len(await store.audit(before_id=None, limit=10)) == 1


async def test_answers_are_remembered_for_a_day(store: PostgresStore, database_url: str) -> None:
    await store.create(Tenant("acme"), write("Create", "old"))
    with connect(database_url) as connection:
        connection.execute("UPDATE idempotency SET create_time = now() - interval '25 hours'")
    await store.create(Tenant("other"), write("Create", "new"))
    assert await store.recall(Tenant, write("Create", "old")) is None
    assert await store.recall(Tenant, write("Create", "new")) is not None


async def test_the_audit_trail_says_who_did_what(store: PostgresStore) -> None:
    tenant = await store.create(Tenant("acme"), write("CreateTenant", "r1"))
    await store.update(replace(tenant, weight=2.0), write("UpdateTenant"))
    await store.delete(Tenant, "acme", write("DeleteTenant"))
    await store.create(Credential("c", Role.VIEWER, HASH), write("CreateCredential"))
    await store.set_endpoint_state("10.0.0.1:8000@0", SchedulingState.DRAINING, write("SetEndpointState"))
    entries = await store.audit(before_id=None, limit=100)
    assert [(entry.method, entry.resource) for entry in entries] == [
        ("SetEndpointState", "endpoints/10.0.0.1:8000@0"),
        ("CreateCredential", "credentials/c"),
        ("DeleteTenant", "tenants/acme"),
        ("UpdateTenant", "tenants/acme"),
        ("CreateTenant", "tenants/acme"),
    ]
    cordon, credential, deleted, updated, created = entries
    assert (cordon.before, cordon.after) == ({"state": "active"}, {"state": "draining"})
    assert "token_sha256" not in (credential.after or {})
    assert deleted.after is None
    assert deleted.before == updated.after
    assert (updated.before or {})["weight"] == 1.0
    assert (created.principal, created.request_id, created.before) == ("tester", "r1", None)
    assert await store.audit(before_id=entries[1].id, limit=2) == entries[2:4]


@pytest.mark.parametrize("statement", ["UPDATE audit SET principal = 'x'", "DELETE FROM audit", "TRUNCATE audit"])
async def test_the_audit_trail_is_append_only(store: PostgresStore, database_url: str, statement: str) -> None:
    await store.create(Tenant("acme"), write())
    with connect(database_url) as connection, pytest.raises(psycopg.errors.RaiseException, match="append-only"):
        connection.execute(statement.encode())
    assert len(await store.audit(before_id=None, limit=10)) == 1


async def test_states_of_nodes_and_endpoints(store: PostgresStore) -> None:
    await store.set_node_state("gpu-1", SchedulingState.CORDONED, write())
    await store.set_node_state("gpu-1", SchedulingState.DRAINING, write())
    await store.set_endpoint_state("10.0.0.1:8000@0", SchedulingState.CORDONED, write())
    state = await store.load()
    assert state.node_states == {"gpu-1": SchedulingState.DRAINING}
    assert state.endpoint_states == {"10.0.0.1:8000@0": SchedulingState.CORDONED}
    await store.set_node_state("gpu-1", SchedulingState.ACTIVE, write())
    assert (await store.load()).node_states == {}


async def test_changes_of_another_process_are_heard(store: PostgresStore, other: PostgresStore) -> None:
    changes = other.changes()
    seen = await anext(changes)
    assert seen == (await store.load()).version
    for name in ("acme", "beta"):
        await store.create(Tenant(name), write())
        async with asyncio.timeout(TEN_S):
            newer = await anext(changes)
        assert newer == seen + 1
        assert name in (await other.load()).tenants
        seen = newer
    await changes.aclose()


async def test_changes_come_back_after_their_connection_is_lost(store: PostgresStore, database_url: str) -> None:
    changes = store.changes()
    version = await anext(changes)
    with connect(database_url) as connection:
        killed = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'headway-listener'"
        ).fetchall()
    assert killed
    await store.create(Tenant("acme"), write())  # while it is away
    async with asyncio.timeout(TEN_S):
        while await anext(changes) != version + 1:
            pass
    await changes.aclose()


async def test_a_missed_notification_is_made_up_for(database_url: str) -> None:
    store = PostgresStore(database_url, timeout_s=TEN_S, poll_s=0.05)
    changes = store.changes()
    version = await anext(changes)
    with connect(database_url) as connection:
        connection.execute("UPDATE desired_version SET version = version + 5")  # and no NOTIFY
    async with asyncio.timeout(TEN_S):
        assert await anext(changes) == version + 5
    await changes.aclose()
    await store.close()


async def test_learned_state_is_kept(store: PostgresStore, other: PostgresStore) -> None:
    assert await store.load_learned() == {}
    await store.save_learned({"cost/a": b"\x00\xff", "cost/b": b"1"})
    await store.save_learned({"cost/b": b"2"})
    await store.save_learned({})
    assert await other.load_learned() == {"cost/a": b"\x00\xff", "cost/b": b"2"}
    many = {f"many/{number}": bytes([number]) * 1000 for number in range(64)}
    await store.save_learned(many)
    assert await other.load_learned() == {"cost/a": b"\x00\xff", "cost/b": b"2"} | many
    await store.forget_learned([*many, "cost/a", "never/there"])
    await store.forget_learned([])
    assert await other.load_learned() == {"cost/b": b"2"}


async def test_usage_adds_up(store: PostgresStore, other: PostgresStore) -> None:
    noon = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)
    row = Usage("acme", "llama", noon, 1, 100, 40, 7)
    await store.record_usage([row, replace(row, minute=noon + timedelta(seconds=59)), replace(row, tenant="beta")])
    await asyncio.gather(*(store.record_usage([row]) for _ in range(5)), *(other.record_usage([row]) for _ in range(5)))
    await store.record_usage([])
    await store.record_usage([replace(row, minute=noon + timedelta(minutes=1))])
    window = {"since": noon, "until": noon + timedelta(minutes=1)}
    assert await store.usage(**window) == [
        Usage("acme", "llama", noon, 12, 1200, 480, 84),
        Usage("beta", "llama", noon, 1, 100, 40, 7),
    ]
    assert await store.usage(**window, tenant="beta") == [Usage("beta", "llama", noon, 1, 100, 40, 7)]


async def test_a_batch_of_usage_is_added_once(store: PostgresStore, other: PostgresStore) -> None:
    noon = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)
    row = Usage("acme", "llama", noon, 1, 100, 40, 7, refusals=3, failures=2, fail_open=1)
    await asyncio.gather(*(each.record_usage([row], "s1.e1.1") for each in (store, other, store, other)))
    assert await store.usage(since=noon, until=noon + timedelta(minutes=1)) == [row]
    await store.record_usage([row], "s1.e1.2")
    assert await store.usage(since=noon, until=noon + timedelta(minutes=1)) == [row.plus(row)]


async def test_usage_is_added_up_by_interval_and_read_in_pages(store: PostgresStore) -> None:
    start = datetime(2026, 1, 2, 23, 58, tzinfo=UTC)
    rows = [
        Usage(tenant, model, start + timedelta(minutes=minute), 1, 10)
        for tenant in ("acme", "beta")
        for model in ("a", "b")
        for minute in range(5)
    ]
    await store.record_usage(rows)
    window = {"since": start, "until": start + timedelta(minutes=5)}
    assert await store.usage(**window) == sorted(rows, key=lambda row: (row.minute, row.tenant, row.model))
    midnight = datetime(2026, 1, 3, tzinfo=UTC)
    hours = await store.usage(**window, interval=Interval.HOUR, tenant="acme", model="b")
    assert [(row.minute, row.requests) for row in hours] == [(start.replace(minute=0), 2), (midnight, 3)]
    days = await store.usage(**window, interval=Interval.DAY, tenant="acme", model="b")
    assert [(row.minute, row.requests) for row in days] == [(midnight - timedelta(days=1), 2), (midnight, 3)]
    total = await store.usage(**window, interval=Interval.TOTAL)
    assert [(row.tenant, row.model, row.minute, row.requests) for row in total] == [
        (tenant, model, start, 5) for tenant in ("acme", "beta") for model in ("a", "b")
    ]
    paged, after = [], None
    while page := await store.usage(**window, after=after, limit=3):
        paged += page
        after = (page[-1].minute, page[-1].tenant, page[-1].model)
    assert paged == list(await store.usage(**window))
    assert await store.forget_usage(midnight) == 8
    assert {row.minute for row in await store.usage(**window)} == {midnight + timedelta(minutes=n) for n in range(3)}


async def test_a_group_that_a_split_names_is_there_and_stays(store: PostgresStore) -> None:
    model = Model("llama", splits=(Split("canary", 1.0, group="gold"),))
    with pytest.raises(UnknownResource) as refused:
        await store.create(model, write())
    assert refused.value.facts["field"] == "model.splits.canary.gpu_group"
    await store.create(GpuGroup("gold"), write())
    await store.create(model, write())
    with pytest.raises(InUse):
        await store.delete(GpuGroup, "gold", write(), force=True)
