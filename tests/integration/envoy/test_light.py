"""ext_authz and the access log in the real Envoy (deploy/envoy/light.yaml)."""

import asyncio
import json

import pytest
from fakes.deployed import ACME, TOKEN, WRITE, deployed
from fakes.standin import Standin, told
from fakes.waiting import eventually
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_scheduler.domain.desired import Binding, Model, Tenant
from headway_scheduler.domain.report import Finished

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**CHAT, "stream": True}
LONG = {"messages": [{"role": "user", "content": "naïve " * 20_000}], "model": "m"}


@pytest.fixture(params=["light", "light-http"])
def start(request, database_url, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_TOKEN", TOKEN)
    return lambda **settings: deployed(request.param, database_url, tmp_path / "envoy", **settings)


@pytest.fixture
def over_http(request):
    return request.node.callspec.params["start"] == "light-http"


def by_route(model):
    """Have acme's virtual host name the model."""

    def change(config):
        (listener,) = config["static_resources"]["listeners"]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        acme = manager["route_config"]["virtual_hosts"][0]["typed_per_filter_config"]
        if "envoy.filters.http.ext_authz" in acme:
            acme["envoy.filters.http.ext_authz"]["check_settings"]["context_extensions"]["model"] = model
        else:
            header = {"key": "x-headway-model", "value": model}
            mutation = {"append": {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}}
            acme["envoy.filters.http.header_mutation"]["mutations"]["request_mutations"].append(mutation)

    return change


async def refusal(plane, body, headers=None):
    async with plane.post(body, headers) as answer:
        error = await answer.json()
        assert answer.content_type == "application/json"
        assert set(error["error"]) == {"message", "type", "param", "code"}
        return answer.status, answer.headers["x-headway-reason"], answer.headers


async def test_a_long_body_is_judged_by_its_beginning_and_reaches_the_engine_whole(start):
    async with start(change=by_route(model="m")) as plane:
        asked = []
        dispatcher = plane.served.scheduler.dispatcher
        plane.served.scheduler.dispatcher = Standin(
            dispatcher, submit=lambda request, *rest: asked.append(request) or dispatcher.submit(request, *rest)
        )
        name = await plane.served_by(LONG, ACME)
        (seen,) = plane.engines[name].seen
        assert seen.body == LONG
        (request,) = asked
        assert request.prompt is not None
        size = len(json.dumps(LONG))
        assert 0.9 < request.prompt_tokens / (size / 4) < 1.1, "by the whole body's length, not by that of the part"
        await plane.settled()


async def test_a_model_that_is_nowhere_is_refused_with_a_reason(start):
    async with start() as plane:
        assert (await refusal(plane, LONG))[:2] == (400, "MODEL_NOT_SEEN")
        model_first = {"model": "m", **LONG}
        await plane.served_by(model_first)
        assert (await refusal(plane, {"messages": []}))[:2] == (400, "INVALID_ARGUMENT")
        await plane.settled()


async def test_refusals_are_those_of_route(start, over_http):
    async with start() as plane:
        assert (await refusal(plane, {**CHAT, "model": "nonsense"}))[:2] == (404, "UNKNOWN_MODEL")
        await plane.announce("shared")
        await plane.until_cluster("tenants/default")
        if over_http:  # a 5xx is a failure to Envoy, which then finds no engine itself
            async with plane.post(CHAT) as answer:
                assert answer.status == 503
        else:
            assert (await refusal(plane, CHAT))[:2] == (503, "NO_ENDPOINTS")
        assert not any(plane.seen().values())


async def test_what_is_busy_is_429_and_says_when_to_come_back(start):
    async with start(max_wait_s=0.0) as plane:
        await plane.served.bind("gpu_aware")
        use = {name: engine.address for name, engine in plane.engines.items()}
        await _fill(plane, [use["shared1"], use["shared2"]])
        status, reason, headers = await refusal(plane, CHAT)
        assert (status, reason) == (429, "SATURATED")
        assert int(headers["retry-after"]) >= 1


async def test_a_client_that_leaves_while_it_is_held_leaves_no_trace(start):
    async with start() as plane:
        await plane.served.bind("gpu_aware")
        await _fill(plane, [plane.engines["shared1"].address, plane.engines["shared2"].address])
        holds = plane.served.scheduler.dispatcher.holds
        call = asyncio.create_task(plane.served_by())
        await eventually(lambda: len(holds) == 1)
        (waiter,) = next(iter(holds)).waiters
        assert 25 < waiter.until - plane.served.scheduler.clock() < 35, "the filter's own timeout is known"
        call.cancel()
        await eventually(lambda: not len(holds))
        await plane.settled()


async def test_a_client_that_leaves_in_the_middle_ends_its_reservation(start):
    async with start() as plane:
        for engine in plane.engines.values():
            engine.script.pause_after = 2
        async with plane.post(STREAM) as answer:
            await answer.content.readany()
            assert len(plane.served.reservations) == 1
        await plane.settled()
        await eventually(lambda: sum(engine.aborted for engine in plane.engines.values()) == 1)


async def test_who_really_served_is_told(start):
    async with start() as plane:
        ends = []
        fleet = plane.served.scheduler.fleet
        plane.served.scheduler.ledger.on_end.append(
            lambda reservation, cause, _: ends.append((fleet.by_slot[reservation.slot].spec.address, cause.value))
        )
        await plane.engines["shared1"].stop()
        for _ in range(4):
            assert await plane.served_by() == "shared2"
        await plane.settled()
        assert ends == [(plane.engines["shared2"].address, "reported")] * 4


async def test_a_get_goes_to_an_engine_of_the_tenant_without_a_reservation(start):
    async with start() as plane:
        async with plane.http.get(f"{plane.envoy.url}/v1/models", headers=ACME) as answer:
            assert answer.status == 404, "the fake engine's own answer"
        assert plane.served.scheduler.dispatcher.routes == 0
        assert not plane.served.reservations


@pytest.mark.parametrize(("engine", "streams", "learned"), [("sglang", True, True), ("sglang", False, False),
                                                           ("vllm", True, False)])  # fmt: skip
async def test_the_first_byte_is_a_ttft_where_it_is_a_tokens(start, engine, streams, learned):
    async with start(prompt_header_engines=f"sglang, {engine if learned else 'other'}") as plane:
        reports = told(plane.served.scheduler)
        await plane.announce("shared", "shared1", "shared2", engine=engine)
        found = plane.served.scheduler.fleet.endpoints
        await eventually(lambda: sum(each.spec.engine == engine for each in found.values()) >= 2)
        await plane.served_by(STREAM if streams else CHAT)
        await plane.settled()
        (finished,) = (each for each in reports if isinstance(each, Finished))
        assert (finished.ttft_ms is not None) == learned
        assert finished.duration_ms > 0
        assert finished.usage.completion_tokens is None, "nothing is billed by a log"


async def test_what_would_need_another_body_is_refused(start):
    async with start() as plane:
        await plane.served.store.update(Model("m", aliases=("nick",)), WRITE)
        await plane.served.store.create(Tenant("rival"), WRITE)
        await plane.served.scheduler.refresh()
        assert (await refusal(plane, {**CHAT, "model": "nick"}))[:2] == (400, "INVALID_FIELD")
        await plane.served.store.create(Binding("rival", "all"), WRITE)
        await plane.served.scheduler.refresh()
        status, reason, _ = await refusal(plane, CHAT)
        assert (status, reason) == (403, "NOT_PERMITTED"), "rival shares the engines, and no salt can be sent"
        assert await plane.served_by(headers=ACME) in ("gold1", "gold2"), "acme's are its own"
        await plane.settled()


async def test_without_its_credential_nobody_is_served(start, monkeypatch):
    async with start() as plane:
        for credential in plane.served.scheduler.desired.credentials.values():
            await plane.served.store.delete(type(credential), credential.id, WRITE)
        await plane.served.scheduler.refresh()
        assert (await refusal(plane, CHAT))[:2] == (401, "NO_CREDENTIAL")
        assert not any(plane.seen().values())


async def _fill(plane, addresses):
    full = tpb.Measurement(value=0.99)
    await plane.agents["shared"].sample(
        *[tpb.EngineSample(address=address, kv_use=full, ready=True) for address in addresses]
    )


async def test_an_entry_that_was_dropped_ends_by_expiry(start):
    def without_log(config):
        (listener,) = config["static_resources"]["listeners"]
        del listener["filter_chains"][0]["filters"][0]["typed_config"]["access_log"]

    async with start(change=without_log) as plane:
        await plane.served_by()
        (reservation,) = plane.served.reservations.values()
        scheduler = plane.served.scheduler
        scheduler.core.tick(reservation.expires_at - 1)
        assert len(scheduler.ledger.reservations) == 1
        scheduler.core.tick(reservation.expires_at)
        assert not scheduler.ledger.reservations
