"""The store on Postgres."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final, TypeVar

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Row,
    Table,
    Text,
    TextClause,
    and_,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from headway_scheduler.domain import names
from headway_scheduler.domain.desired import (
    EVERYBODY,
    AuditEntry,
    Binding,
    BindingMode,
    Credential,
    DesiredState,
    GpuGroup,
    Model,
    Role,
    StrategyBinding,
    StrategyConfig,
    StrategyRevision,
    Tenant,
)
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.resources import key_of, name_of, noun_of, resource_name, unknown
from headway_scheduler.domain.usage import Interval, Usage
from headway_scheduler.errors import DuplicateName, GroupNotFree, HeadwayError, InUse, InvalidField, StaleEtag, Standby
from headway_scheduler.store import schema
from headway_scheduler.store.base import Notified, Resource, Write
from headway_scheduler.store.connection import Availability, Database
from headway_scheduler.store.listener import CHANNEL, Probe, listen
from headway_scheduler.store.rows import (
    SHAPES,
    Shape,
    audit_document,
    document,
    resource_of,
    revision_document,
)
from headway_scheduler.store.violations import broken_by_delete, broken_by_write

__all__ = ["PostgresStore"]

R = TypeVar("R", bound=Resource)
T = TypeVar("T")
Json = Mapping[str, Any]  # a JSON object

_REMEMBERED_FOR: Final = timedelta(days=1)

# Nobody takes the leadership over before this is done: FOR SHARE waits for who does, and then sees the new epoch.
_SAVE_LEARNED: Final = """
WITH mine AS (SELECT FROM leadership WHERE CAST(:epoch AS bigint) IS NULL OR epoch = :epoch FOR SHARE)
INSERT INTO learned_state (key, state, update_time)
SELECT key, state, now() FROM mine, (VALUES {rows}) AS new (key, state)
ON CONFLICT (key) DO UPDATE SET state = excluded.state, update_time = excluded.update_time
"""
_FORGET_LEARNED: Final = text("""
WITH mine AS (SELECT FROM leadership WHERE CAST(:epoch AS bigint) IS NULL OR epoch = :epoch FOR SHARE),
gone AS (DELETE FROM learned_state USING mine WHERE key = ANY(CAST(:keys AS text[])))
SELECT FROM mine
""")


@lru_cache(256)
def _save_learned(count: int) -> TextClause:
    """So many states under so many keys, each a parameter of its own: those are sent as they are.

    An array of them is written as text, which took 30 ms for 2.7 MB, during which nothing else ran.
    """
    rows = ", ".join(f"(CAST(:key_{row} AS text), CAST(:state_{row} AS bytea))" for row in range(count))
    return text(_SAVE_LEARNED.format(rows=rows))


class PostgresStore:
    """DesiredStore, LearnedStore and UsageStore on one Postgres.

    It connects on first use and again whenever needed. `available` says whether the latest attempt reached Postgres;
    `on_available` hears of every change of it.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 2.0,
        poll_s: float = 5.0,
        on_available: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._availability = Availability(on_available)
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._probe = Probe()
        self._database = Database(url, timeout_s=timeout_s, availability=self._availability)

    @property
    def available(self) -> bool:
        """Could Postgres be reached at the latest attempt?"""
        return self._availability.available

    async def close(self) -> None:
        """Close every connection; one that listens closes when `changes()` is closed."""
        await self._database.close()

    @property
    def notified(self) -> Notified:
        """Does news of writes arrive at once, as it was tried when it connected?"""
        return self._probe.notified

    async def schema_revision(self) -> str:
        """The revision that the database is at."""
        return await self._database.read(_revision)

    # Desired state: reading

    async def load(self) -> DesiredState:
        """The whole desired state, as one consistent snapshot."""
        return await self._database.read(_load)

    def changes(self) -> AsyncGenerator[int]:
        """The version after every (re)connect, then each newer one."""
        return listen(
            self._database.url,
            timeout_s=self._timeout_s,
            poll_s=self._poll_s,
            availability=self._availability,
            probe=self._probe,
        )

    async def get(self, kind: type[R], key: str) -> R:
        """One resource as it is now."""
        found = await self._database.read(lambda connection: _find(connection, kind, key))
        if found is None:
            raise unknown(kind, key)
        return found

    async def strategy_revisions(self, strategy: str) -> Sequence[StrategyRevision]:
        """All revisions, newest first."""
        table = schema.strategy_revisions
        query = select(table).where(table.c.strategy_id == strategy).order_by(table.c.revision.desc())
        rows = await self._database.read(lambda connection: _all(connection, query))
        if not rows:
            raise unknown(StrategyConfig, strategy)
        return [StrategyRevision(resource_of(StrategyConfig, row.config), row.create_time, row.author) for row in rows]

    async def audit(
        self,
        *,
        before_id: int | None,
        limit: int,
        principal: str = "",
        resource: str = "",
        since: datetime | None = None,
    ) -> Sequence[AuditEntry]:
        """Audit entries with an id below `before_id`, newest first."""
        table = schema.audit
        query = select(table).order_by(table.c.id.desc()).limit(limit)
        if before_id is not None:
            query = query.where(table.c.id < before_id)
        if principal:
            query = query.where(table.c.principal == principal)
        if resource:
            below = table.c.resource.startswith(f"{resource.rstrip('/')}/", autoescape=True)
            query = query.where(or_(table.c.resource == resource, below))
        if since is not None:
            query = query.where(table.c.time >= since)
        rows = await self._database.read(lambda connection: _all(connection, query))
        return [AuditEntry(**row._mapping) for row in rows]

    async def recall(self, kind: type[R], write: Write) -> tuple[R | None] | None:
        """What an earlier try of this write answered."""
        if not write.request_id:
            return None
        row = await self._database.read(lambda connection: _remembered(connection, write))
        return None if row is None else (_answer(kind, row),)

    # Desired state: writing

    async def create(self, resource: R, write: Write) -> R:
        """Add a resource."""

        async def change(step: _Step) -> R:
            return await step.insert(resource)

        return await self._save(resource, write, change)

    async def update(self, resource: R, write: Write, *, etag: str = "", allow_missing: bool = False) -> R:
        """Replace a resource."""

        async def change(step: _Step) -> R:
            before = await _find(step.connection, type(resource), key_of(resource))
            if before is None:
                if not allow_missing:
                    raise unknown(type(resource), key_of(resource))
                return await step.insert(resource)
            _check_etag(before, etag)
            return await step.replace(before, resource)

        return await self._save(resource, write, change)

    async def delete(self, kind: type[R], key: str, write: Write, *, etag: str = "", force: bool = False) -> None:
        """Remove a resource; with `force` also the bindings that hang on it."""

        async def work(connection: AsyncConnection) -> None:
            step = await _Step.begin(connection, write)
            if await _remembered(connection, write) is not None:
                await connection.rollback()
                return
            before = await _find(connection, kind, key)
            if before is None:
                raise unknown(kind, key)
            _check_etag(before, etag)
            await step.remove(before, force=force)
            await step.finish(resource_name(kind, key), before, None)

        try:
            await self._database.write(work, keep=not write.validate_only)
        except IntegrityError as error:
            raise _translated(error, broken_by_delete(_constraint(error), kind, key)) from error

    async def set_node_state(self, node: str, state: SchedulingState, write: Write) -> None:
        """Cordon, drain or uncordon a node."""
        await self._set_state(schema.node_states, f"{names.NODES}/{node}", node, state, write)

    async def set_endpoint_state(self, endpoint: str, state: SchedulingState, write: Write) -> None:
        """Cordon, drain or uncordon an endpoint."""
        await self._set_state(schema.endpoint_states, f"{names.ENDPOINTS}/{endpoint}", endpoint, state, write)

    async def set_bypass(self, tenant: str, on: bool, write: Write) -> None:
        """Leave a tenant's requests alone, or everybody's (`*`), or no more."""
        table = schema.bypasses

        async def work(connection: AsyncConnection) -> None:
            step = await _Step.begin(connection, write)
            if await _remembered(connection, write) is not None:
                await connection.rollback()
                return
            removed = await connection.execute(delete(table).where(table.c.tenant == tenant))
            if on:
                await connection.execute(insert(table).values(tenant=tenant))
            name = names.BYPASS if tenant == EVERYBODY else resource_name(Tenant, tenant)
            await step.record(name, {"bypass": bool(removed.rowcount)}, {"bypass": on})
            await step.remember(None)

        await self._database.write(work, keep=not write.validate_only)

    # Learned state and usage

    async def load_learned(self) -> Mapping[str, bytes]:
        """Everything saved, by key."""
        rows = await self._database.read(lambda connection: _all(connection, select(schema.learned_state)))
        return {row.key: bytes(row.state) for row in rows}

    async def save_learned(self, states: Mapping[str, bytes], *, epoch: int | None = None) -> None:
        """Replace the states under these keys, in one statement with the look at who leads."""
        if not states:
            return
        # In the order of the keys, here and below: two writers of the same rows then cannot deadlock.
        values: dict[str, Any] = {"epoch": epoch}
        for row, key in enumerate(sorted(states)):
            values |= {f"key_{row}": key, f"state_{row}": states[key]}
        await self._as_leader(_save_learned(len(states)), values)

    async def forget_learned(self, keys: Collection[str], *, epoch: int | None = None) -> None:
        """Remove these keys, in one statement with the look at who leads."""
        if keys:
            await self._as_leader(_FORGET_LEARNED, {"keys": sorted(keys), "epoch": epoch})

    async def _as_leader(self, statement: TextClause, values: dict[str, Any]) -> None:
        async def work(connection: AsyncConnection) -> int:
            return (await connection.execute(statement, values)).rowcount

        if await self._database.write_once(work) == 0:
            raise Standby(f"epoch {values['epoch']} is over, another scheduler took it over")

    async def keep_learned(self, key: str, state: bytes) -> bytes:
        """Save the state if there is none under this key."""
        table = schema.learned_state
        statement = upsert(table).values(key=key, state=state, update_time=func.now()).on_conflict_do_nothing()
        await self._database.write(lambda connection: _execute(connection, statement))
        return (await self.load_learned())[key]

    async def record_usage(self, rows: Sequence[Usage], batch: str = "") -> None:
        """Add these amounts, all or nothing, and a batch only once."""
        table = schema.usage
        summed: dict[tuple[str, str, datetime], dict[str, Any]] = {}
        for row in rows:
            minute = row.minute.replace(second=0, microsecond=0)
            key = {"tenant": row.tenant, "model": row.model, "minute": minute}
            total = summed.setdefault((row.tenant, row.model, minute), key | dict.fromkeys(_AMOUNTS, 0))
            for amount in _AMOUNTS:
                total[amount] += getattr(row, amount)
        if not summed:
            return
        statement = upsert(table).values([summed[key] for key in sorted(summed)])
        statement = statement.on_conflict_do_update(
            index_elements=list(table.primary_key.columns),
            set_={amount: table.c[amount] + statement.excluded[amount] for amount in _AMOUNTS},
        )

        async def work(connection: AsyncConnection) -> None:
            if await _is_new(connection, batch):
                await connection.execute(statement)

        await self._database.write(work)

    async def usage(
        self,
        *,
        since: datetime,
        until: datetime,
        tenant: str = "",
        model: str = "",
        interval: Interval = Interval.MINUTE,
        after: tuple[datetime, str, str] | None = None,
        limit: int | None = None,
    ) -> Sequence[Usage]:
        """Usage in minutes of [since, until), added up by interval."""
        table = schema.usage
        start: Any = (  # an expression of a time
            literal(since, table.c.minute.type)
            if interval is Interval.TOTAL
            else func.date_trunc(literal(interval.value, Text), table.c.minute, literal("UTC", Text))
        )
        amounts = [func.sum(table.c[amount]).cast(BigInteger).label(amount) for amount in _AMOUNTS]
        summed = (
            select(start.label("minute"), table.c.tenant, table.c.model, *amounts)
            .where(table.c.minute >= since, table.c.minute < until)
            .where(*([table.c.tenant == tenant] if tenant else []), *([table.c.model == model] if model else []))
            .group_by(text("1"), table.c.tenant, table.c.model)
            .subquery()
        )
        key = (summed.c.minute, summed.c.tenant, summed.c.model)
        query = select(summed).order_by(*key).limit(limit)
        if after is not None:
            seen = [literal(part, column.type) for part, column in zip(after, key, strict=True)]
            query = query.where(tuple_(*key) > tuple_(*seen))
        rows = await self._database.read(lambda connection: _all(connection, query))
        return [Usage(**row._mapping) for row in rows]

    async def forget_usage(self, before: datetime) -> int:
        """Delete the usage of earlier minutes."""
        statement = delete(schema.usage).where(schema.usage.c.minute < before)

        async def work(connection: AsyncConnection) -> int:
            return (await connection.execute(statement)).rowcount

        return await self._database.write(work)

    async def _save(self, resource: R, write: Write, change: "Callable[[_Step], Awaitable[R]]") -> R:
        kind = type(resource)

        async def work(connection: AsyncConnection) -> R:
            step = await _Step.begin(connection, write)
            row = await _remembered(connection, write)
            if row is not None:
                await connection.rollback()
                return _given_before(kind, row, write)
            before = await _find(connection, kind, key_of(resource))
            after = await change(step)
            await step.finish(name_of(after), before, after)
            return after

        try:
            return await self._database.write(work, keep=not write.validate_only)
        except IntegrityError as error:
            raise _translated(error, broken_by_write(_constraint(error), resource)) from error
        except DataError as error:
            # The edges check every field, so this is a value that none of them knows Postgres cannot hold.
            raise InvalidField(noun_of(kind), "holds a value that cannot be stored") from error

    async def _set_state(self, table: Table, name: str, key: str, state: SchedulingState, write: Write) -> None:
        (column,) = table.primary_key.columns

        async def work(connection: AsyncConnection) -> None:
            step = await _Step.begin(connection, write)
            if await _remembered(connection, write) is not None:
                await connection.rollback()
                return
            removed = await connection.execute(delete(table).where(column == key).returning(table.c.state))
            before = removed.scalar_one_or_none() or SchedulingState.ACTIVE.value
            if state is not SchedulingState.ACTIVE:
                await connection.execute(insert(table).values({column.name: key, "state": state.value}))
            await step.record(name, {"state": before}, {"state": state.value})
            await step.remember(None)

        await self._database.write(work, keep=not write.validate_only)


_AMOUNTS: Final = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "refusals",
    "failures",
    "fail_open",
)


async def _is_new(connection: AsyncConnection, batch: str) -> bool:
    """Remember a batch of usage, and forget those that nobody sends again; False if it was added before."""
    if not batch:
        return True
    table = schema.usage_batches
    await connection.execute(delete(table).where(table.c.create_time < func.now() - _REMEMBERED_FOR))
    added = upsert(table).values(batch=batch, create_time=func.now()).on_conflict_do_nothing().returning(table.c.batch)
    return (await connection.execute(added)).one_or_none() is not None


class _Step:
    """One write inside its transaction: the new version is taken, and with it the lock that serialises writers."""

    def __init__(self, connection: AsyncConnection, write: Write, version: int) -> None:
        self.connection = connection
        self._write = write
        self._version = version

    @classmethod
    async def begin(cls, connection: AsyncConnection, write: Write) -> "_Step":
        """Take the next version."""
        table = schema.desired_version
        bump = update(table).values(version=table.c.version + 1).returning(table.c.version)
        version = (await connection.execute(bump)).scalar_one()
        return cls(connection, write, version)

    async def insert(self, resource: R) -> R:
        """Add a resource that is not there."""
        await _check(self.connection, resource)
        if isinstance(resource, StrategyConfig):
            resource = replace(resource, revision=1)
        shape = SHAPES[type(resource)]
        values = shape.to_row(resource) | self._stamps() | {"create_time": func.now()}
        row = (await self.connection.execute(insert(shape.table).values(values).returning(shape.table))).one()
        return await self._with_revision(shape, row, resource)

    async def replace(self, before: R, resource: R) -> R:
        """Put `resource` in the place of `before`."""
        await _check(self.connection, resource)
        _keep_default_binding(before, resource)
        if isinstance(resource, StrategyConfig) and isinstance(before, StrategyConfig):
            resource = replace(resource, revision=before.revision + 1)
        shape = SHAPES[type(resource)]
        where = _is(shape, key_of(resource))
        values = shape.to_row(resource) | self._stamps()
        row = (
            await self.connection.execute(update(shape.table).where(where).values(values).returning(shape.table))
        ).one()
        return await self._with_revision(shape, row, resource)

    async def remove(self, before: Resource, *, force: bool) -> None:
        """Delete a resource, and what hangs on it if forced."""
        _keep_defaults(before)
        if isinstance(before, Tenant):
            await self._release_credentials(before.id, force=force)
            bypasses = schema.bypasses
            await self.connection.execute(delete(bypasses).where(bypasses.c.tenant == before.id))
        elif isinstance(before, GpuGroup):
            await _check_no_split(self.connection, before)
        if force:
            await self._remove_dependents(before)
        shape = SHAPES[type(before)]
        await self.connection.execute(delete(shape.table).where(_is(shape, key_of(before))))

    async def finish(self, name: str, before: Resource | None, after: Resource | None) -> None:
        """Append to the audit trail, remember the answer, tell every scheduler at commit."""
        await self.record(name, audit_document(before), audit_document(after))
        await self.remember(None if after is None else document(after))

    async def record(self, name: str, before: Json | None, after: Json | None) -> None:
        """Append to the audit trail; tell every scheduler at commit."""
        entry = {
            "time": func.now(),
            "principal": self._write.principal,
            "method": self._write.method,
            "resource": name,
            "before": before,
            "after": after,
            "request_id": self._write.request_id,
        }
        await self.connection.execute(insert(schema.audit).values(entry))
        await self.connection.execute(select(func.pg_notify(CHANNEL, str(self._version))))

    async def remember(self, answer: Json | None) -> None:
        """Keep the answer for a retry; forget those kept long enough."""
        if not self._write.request_id:
            return
        table = schema.idempotency
        await self.connection.execute(delete(table).where(table.c.create_time < func.now() - _REMEMBERED_FOR))
        kept = {
            "principal": self._write.principal,
            "request_id": self._write.request_id,
            "method": self._write.method,
            "fingerprint": self._write.fingerprint,
            "answer": answer,
            "create_time": func.now(),
        }
        await self.connection.execute(insert(table).values(kept))

    def _stamps(self) -> dict[str, Any]:
        return {"version": self._version, "update_time": func.now()}

    async def _with_revision(self, shape: Shape, row: Row[Any], written: R) -> R:
        stored = shape.read(row)
        if isinstance(stored, StrategyConfig):
            revision = {
                "strategy_id": stored.id,
                "revision": stored.revision,
                "config": revision_document(stored),
                "create_time": func.now(),
                "author": self._write.principal,
            }
            await self.connection.execute(insert(schema.strategy_revisions).values(revision))
        return replace(written, meta=stored.meta)

    async def _remove_dependents(self, before: Resource) -> None:
        bound = schema.strategy_bindings.c
        if isinstance(before, Tenant):
            await self._remove_each(Binding, schema.bindings.c.tenant_id == before.id)
            await self._remove_each(StrategyBinding, bound.tenant_id == before.id)
        elif isinstance(before, GpuGroup):
            await self._remove_each(Binding, schema.bindings.c.group_id == before.id)
            await self._remove_each(StrategyBinding, bound.group_id == before.id)
        elif isinstance(before, StrategyConfig):
            # The default binding stays, so deleting the strategy it names is refused by the foreign key.
            scoped = or_(bound.tenant_id.is_not(None), bound.model_id.is_not(None), bound.group_id.is_not(None))
            await self._remove_each(StrategyBinding, and_(bound.strategy_id == before.id, or_(bound.shadow, scoped)))

    async def _remove_each(self, kind: type[Resource], where: ColumnElement[bool]) -> None:
        """Delete what hangs on the resource, each with an entry of its own in the audit trail."""
        shape = SHAPES[kind]
        for row in await _all(self.connection, select(shape.table).where(where).order_by(*shape.keys)):
            removed = shape.read(row)
            await self.record(name_of(removed), audit_document(removed), None)
        await self.connection.execute(delete(shape.table).where(where))

    async def _release_credentials(self, tenant: str, *, force: bool) -> None:
        table = schema.credentials
        names_it = table.c.tenants.contains([tenant])
        # An admin that is bound to no tenant may name any: one that loses its last would gain all of them.
        widened = and_(table.c.role == Role.ADMIN.value, table.c.tenants == [tenant])
        keeps = widened if force else names_it
        user = (await self.connection.execute(select(table.c.id).where(keeps).limit(1))).scalar_one_or_none()
        if user is not None:
            raise InUse(resource_name(Tenant, tenant), resource_name(Credential, user))
        shape = SHAPES[Credential]
        naming = [
            shape.read(row) for row in await _all(self.connection, select(table).where(names_it).order_by(table.c.id))
        ]
        values = {"tenants": func.array_remove(table.c.tenants, tenant)} | self._stamps()
        for before in naming:
            changed = update(table).where(table.c.id == key_of(before)).values(values).returning(table)
            after = shape.read((await self.connection.execute(changed)).one())
            await self.record(name_of(after), audit_document(before), audit_document(after))


async def _load(connection: AsyncConnection) -> DesiredState:
    version = (await connection.execute(select(schema.desired_version.c.version))).scalar_one()
    tenants = await _every(connection, Tenant)
    groups = await _every(connection, GpuGroup)
    models = await _every(connection, Model)
    strategies = await _every(connection, StrategyConfig)
    credentials = await _every(connection, Credential)
    return DesiredState(
        version=version,
        tenants={tenant.id: tenant for tenant in tenants},
        groups={group.id: group for group in groups},
        bindings=tuple(await _every(connection, Binding)),
        models={model.id: model for model in models},
        strategies={strategy.id: strategy for strategy in strategies},
        strategy_bindings=tuple(await _every(connection, StrategyBinding)),
        credentials={credential.id: credential for credential in credentials},
        node_states=await _states(connection, schema.node_states),
        endpoint_states=await _states(connection, schema.endpoint_states),
        bypassed=frozenset(row.tenant for row in await _all(connection, select(schema.bypasses))),
    )


async def _revision(connection: AsyncConnection) -> str:
    return str((await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar_one())


async def _every(connection: AsyncConnection, kind: type[R]) -> list[R]:
    shape = SHAPES[kind]
    found = [shape.read(row) for row in await _all(connection, select(shape.table).order_by(*shape.keys))]
    return [resource for resource in found if isinstance(resource, kind)]


async def _states(connection: AsyncConnection, table: Table) -> Mapping[str, SchedulingState]:
    (column,) = table.primary_key.columns
    return {row._mapping[column]: SchedulingState(row.state) for row in await _all(connection, select(table))}


async def _find(connection: AsyncConnection, kind: type[R], key: str) -> R | None:
    shape = SHAPES[kind]
    row = (await connection.execute(select(shape.table).where(_is(shape, key)))).one_or_none()
    found = None if row is None else shape.read(row)
    return found if isinstance(found, kind) else None


async def _all(connection: AsyncConnection, query: Any) -> Sequence[Row[Any]]:  # any select, of rows of any shape
    return (await connection.execute(query)).all()


async def _execute(connection: AsyncConnection, statement: Any) -> None:  # any statement
    await connection.execute(statement)


def _is(shape: Shape, key: str) -> ColumnElement[bool]:
    return and_(*(shape.table.c[name] == value for name, value in shape.key_values(key).items()))


async def _remembered(connection: AsyncConnection, write: Write) -> Row[Any] | None:
    if not write.request_id:
        return None
    table = schema.idempotency
    query = select(table).where(table.c.principal == write.principal, table.c.request_id == write.request_id)
    row = (await connection.execute(query)).one_or_none()
    if row is not None and (row.method, row.fingerprint) != (write.method, write.fingerprint):
        raise _other_request(write)
    return row


def _answer(kind: type[R], row: Row[Any]) -> R | None:
    return None if row.answer is None else resource_of(kind, row.answer)


def _given_before(kind: type[R], row: Row[Any], write: Write) -> R:
    answer = _answer(kind, row)
    if answer is None:
        raise _other_request(write)
    return answer


def _other_request(write: Write) -> InvalidField:
    return InvalidField("request_id", f"{write.request_id!r} was used for a different write")


def _check_etag(before: Resource, etag: str) -> None:
    if etag and (before.meta is None or before.meta.etag != etag):
        raise StaleEtag(name_of(before))


async def _check(connection: AsyncConnection, resource: Resource) -> None:
    """Refuse what no constraint can express. The writers' lock makes it as safe as one."""
    if isinstance(resource, Binding):
        await _check_dedicated(connection, resource)
    elif isinstance(resource, Model):
        await _check_model_names(connection, resource)
        await _check_splits(connection, resource)
    elif isinstance(resource, Credential):
        await _check_tenants(connection, resource)


async def _check_dedicated(connection: AsyncConnection, binding: Binding) -> None:
    table = schema.bindings
    query = select(table.c.tenant_id).where(table.c.group_id == binding.group, table.c.tenant_id != binding.tenant)
    if binding.mode is not BindingMode.DEDICATED:
        query = query.where(table.c.mode == BindingMode.DEDICATED.value)
    other = (await connection.execute(query.limit(1))).scalar_one_or_none()
    if other is not None:
        user = resource_name(Binding, f"{other}/{binding.group}")
        field = "binding.mode" if binding.mode is BindingMode.DEDICATED else "binding.gpu_group"
        raise GroupNotFree(resource_name(GpuGroup, binding.group), user, field)


async def _check_splits(connection: AsyncConnection, model: Model) -> None:
    named = {split.group for split in model.splits if split.group}
    query = select(schema.gpu_groups.c.id).where(schema.gpu_groups.c.id.in_(named))
    known = set((await connection.execute(query)).scalars()) if named else set()
    for split in model.splits:
        if split.group and split.group not in known:
            raise unknown(GpuGroup, split.group, f"model.splits.{split.name}.gpu_group")


async def _check_no_split(connection: AsyncConnection, group: GpuGroup) -> None:
    for model in await _every(connection, Model):
        if any(split.group == group.id for split in model.splits):
            raise InUse(name_of(group), f"a split of {name_of(model)}")


async def _check_model_names(connection: AsyncConnection, model: Model) -> None:
    table = schema.models
    wanted = [model.id, *model.aliases]
    clash = or_(table.c.id.in_(wanted), table.c.aliases.overlap(wanted))
    query = select(table.c.id, table.c.aliases).where(table.c.id != model.id, clash).limit(1)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        return
    taken = {row.id, *row.aliases}
    if model.id in taken:
        raise DuplicateName(name_of(model))
    position = next(index for index, alias in enumerate(model.aliases) if alias in taken)
    raise InvalidField(f"model.aliases[{position}]", f"{model.aliases[position]!r} is a name of models/{row.id}")


async def _check_tenants(connection: AsyncConnection, credential: Credential) -> None:
    named = [tenant for tenant in credential.tenants if tenant != "*"]
    if not named:
        return
    query = select(schema.tenants.c.id).where(schema.tenants.c.id.in_(named))
    known = set((await connection.execute(query)).scalars())
    for position, tenant in enumerate(credential.tenants):
        if tenant != "*" and tenant not in known:
            raise unknown(Tenant, tenant, f"credential.tenants[{position}]")


def _is_default(resource: Resource) -> bool:
    return isinstance(resource, StrategyBinding) and not (
        resource.shadow or resource.tenant or resource.model or resource.group
    )


def _keep_default_binding(before: Resource, after: Resource) -> None:
    if _is_default(before) and not _is_default(after):
        raise InUse(name_of(before), "every call that no other strategy binding covers")


def _keep_defaults(before: Resource) -> None:
    if _is_default(before):
        raise InUse(name_of(before), "every call that no other strategy binding covers")
    if isinstance(before, Tenant) and before.id == names.DEFAULT_TENANT:
        raise InUse(name_of(before), "calls that name no tenant")


def _constraint(error: IntegrityError) -> str:
    diagnosis = getattr(error.orig, "diag", None)
    return (diagnosis.constraint_name if diagnosis else None) or ""


def _translated(error: IntegrityError, meaning: HeadwayError | None) -> Exception:
    return meaning or error
