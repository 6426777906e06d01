"""N and N-1: yesterday's agents, clients and database with today's scheduler, and the other way round.

Yesterday's protos are `protos/baseline.binpb`, what was accepted last (`make baseline`); yesterday's database is every
revision that there ever was. docs/operations.md, Upgrades, says what is promised.
"""

from pathlib import Path

import msgspec
import pytest
from fakes.postgres import connect
from fakes.scheduler import serving
from fakes.waiting import eventually
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from headway.admin.v1 import admin_pb2
from headway.fleet.v1 import fleet_pb2
from headway.routing.v1 import routing_pb2
from headway.telemetry.v1 import telemetry_pb2
from headway_scheduler.domain.request import TaskClass
from headway_scheduler.learning.history import History
from headway_scheduler.store import migrate
from headway_scheduler.store.base import Write
from headway_scheduler.store.postgres import PostgresStore

BASELINE = Path(__file__).parents[2] / "protos" / "baseline.binpb"
TODAY = {
    message.full_name: message
    for module in (admin_pb2, fleet_pb2, routing_pb2, telemetry_pb2)
    for message in module.DESCRIPTOR.message_types_by_name.values()
}
REVISIONS = ("0001", "0002", "0003", "0004")


def yesterdays():
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(BASELINE.read_bytes()).file:
        pool.Add(file)
    return pool


POOL = yesterdays()


def old(name):
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


def there_was(name):
    try:
        return POOL.FindMessageTypeByName(name) is not None
    except KeyError:
        return False


def filled(message, depth=0):
    """A message with something in every field, so far down as it matters."""
    for field in message.DESCRIPTOR.fields:
        if depth > 3:
            return message
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.message_type is not None:
            inner = getattr(message, field.name)
            filled(inner.add() if field.is_repeated else inner, depth + 1)
            if not field.is_repeated:
                inner.SetInParent()
            continue
        value = {"string": "x", "bytes": b"x"}.get(_kind(field), 1)
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


def _kind(field):
    return {field.TYPE_STRING: "string", field.TYPE_BYTES: "bytes"}.get(field.type, "number")


@pytest.mark.parametrize("name", sorted(name for name in TODAY if there_was(name)))
def test_yesterdays_messages_mean_the_same_today_and_todays_are_read_yesterday(name):
    sent = filled(old(name)())
    today = message_factory.GetMessageClass(TODAY[name]).FromString(sent.SerializeToString())
    assert old(name).FromString(today.SerializeToString()) == sent
    new = filled(message_factory.GetMessageClass(TODAY[name])())
    for field, _ in old(name).FromString(new.SerializeToString()).ListFields():
        assert field.name in TODAY[name].fields_by_name


async def test_yesterdays_client_and_agent_are_served(database_url):
    async with serving(database_url) as served:
        agent_side = served.channel.stream_stream(
            "/headway.telemetry.v1.Telemetry/Connect",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=old("headway.telemetry.v1.ConnectResponse").FromString,
        )
        route = served.channel.unary_unary(
            "/headway.routing.v1.Router/Route",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=old("headway.routing.v1.RouteResponse").FromString,
        )
        call = agent_side()
        hello = old("headway.telemetry.v1.ConnectRequest")()
        hello.hello.node, hello.hello.instance_id = "n", "i1"
        hello.hello.endpoints.add(address="10.0.0.1:8000", models=["m"], ready=True)
        await call.write(hello)
        assert (await call.read()).HasField("welcome")
        sample = old("headway.telemetry.v1.ConnectRequest")()
        sample.sample.sequence = 1
        await call.write(sample)
        assert (await call.read()).ack.sequence == 1
        answer = await route(old("headway.routing.v1.RouteRequest")(model="m", text="hello"))
        assert answer.endpoint.address == "10.0.0.1:8000"
        assert (await served.finish(answer)) == [1]
        call.cancel()
        await eventually(lambda: not served.reservations)


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_database_of_each_revision_is_upgraded_with_what_is_in_it(empty_database_url, revision):
    migrate.upgrade(empty_database_url, revision)
    with connect(empty_database_url) as connection:
        _insert_tenant(connection, "acme")
    assert migrate.upgrade(empty_database_url) == migrate.head()
    store = PostgresStore(empty_database_url)
    try:
        loaded = await store.load()
        acme = loaded.tenants["acme"]
        assert (acme.weight, acme.quotas.max_inflight, acme.routed_percent) == (2.0, 8, 100)
        assert not loaded.bypassed
        assert await store.schema_revision() == migrate.head()
    finally:
        await store.close()


async def test_yesterdays_scheduler_writes_and_reads_todays_database(database_url):
    """Expand first, contract a release later: what the version before does not know has a default."""
    with connect(database_url) as connection:
        _insert_tenant(connection, "acme")
    store = PostgresStore(database_url)
    try:
        assert (await store.load()).tenants["acme"].routed_percent == 100
        await store.set_bypass("acme", True, Write(principal="test", method="Test"))
        assert (await store.load()).bypasses("acme")
    finally:
        await store.close()


async def test_what_yesterdays_scheduler_learned_is_known_today_and_goes_into_parts(database_url):
    history = History()
    history.finished("default", "m", TaskClass.CHAT, 77, 1.5)
    store = PostgresStore(database_url)
    await store.save_learned({"cost_model": b'{"format":1,"endpoints":{}}', "history": history.dump()})
    async with serving(database_url) as served:
        assert served.scheduler.history.dump() == history.dump()
    learned = await store.load_learned()
    await store.close()
    assert not {"cost_model", "history"} & set(learned)
    async with serving(database_url) as served:
        assert msgspec.json.decode(served.scheduler.history.dump()) == msgspec.json.decode(history.dump())


def _insert_tenant(connection, name):
    """As the first version wrote it."""
    connection.execute(
        "INSERT INTO tenants (id, display_name, isolation_domain, weight, priority, requests_per_minute,"
        " tokens_per_minute, max_inflight, models, version, create_time, update_time)"
        " VALUES (%s, '', '', 2, 0, 60, 0, 8, '{}', 1, now(), now())",
        (name,),
    )
