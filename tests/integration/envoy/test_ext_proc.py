"""The endpoint picker behind the real Envoy, before engines that count what reaches them."""

import asyncio
import base64
import json

import aiohttp
import pytest
from fakes.openai_engine import USAGE, WORDS
from fakes.waiting import eventually
from headway.admin.v1 import admin_pb2 as apb
from headway.telemetry.v1 import telemetry_pb2 as tpb

DUPLEX = {"request": "FULL_DUPLEX_STREAMED", "response": "FULL_DUPLEX_STREAMED"}
BUFFERED = {"request": "BUFFERED", "response": "STREAMED", "message_timeout": "5s"}
MODES = pytest.mark.parametrize("picker", [DUPLEX, BUFFERED], ids=["duplex", "buffered"])
DESTINATION = "x-gateway-destination-endpoint"


def chat(text="hello", **fields):
    return {"messages": [{"role": "user", "content": text}], "model": "m", **fields}


def seen(plane):
    return [request for engine in plane.engines for request in engine.seen]


def words(text):
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


async def alias(plane, name):
    """`name` means the model m too."""
    model = apb.Model(name="models/m", aliases=[name])
    request = apb.UpdateModelRequest(model=model, update_mask={"paths": ["aliases"]})
    await plane.served.admin.UpdateModel(request)


class TestBodies:
    @MODES
    async def test_a_chat_streams(self, planes, picker):
        async with planes(picker) as plane:
            for engine in plane.engines:
                engine.script.cut = 5  # inside events and characters
            async with plane.post(chat(stream=True)) as answer:
                text = await answer.text()
            assert answer.status == 200
            assert words(text) == "".join(WORDS)
            assert text.endswith("data: [DONE]\n\n")
            assert "usage" not in text
            await plane.settled()
            (request,) = seen(plane)
            assert request.body["stream_options"] == {"include_usage": True}

    @MODES
    @pytest.mark.parametrize("size", [10, 32_768, 400_000])
    async def test_bodies_of_every_size_arrive_as_they_were(self, planes, picker, size):
        async with planes(picker) as plane:
            body = chat("ü" * (size // 6))  # six bytes each, as JSON
            async with plane.post(body) as answer:
                assert (await answer.json())["usage"] == USAGE, await plane.envoy.stats("http.http.ext_proc")
            (request,) = seen(plane)
            assert request.body == body
            assert request.headers.get("content-length", str(len(request.raw))) == str(len(request.raw))
            await plane.settled()

    @MODES
    async def test_json_split_over_many_chunks(self, planes, picker):
        raw = json.dumps(chat("Grüße " * 300), ensure_ascii=False).encode()

        async def pieces():
            for start in range(0, len(raw), 101):
                yield raw[start : start + 101]
                await asyncio.sleep(0)

        async with planes(picker) as plane:
            headers = {"content-type": "application/json"}
            async with plane.http.post(plane.url, data=pieces(), headers=headers) as answer:
                assert answer.status == 200
            (request,) = seen(plane)
            assert request.raw == raw
            await plane.settled()

    @MODES
    async def test_an_image(self, planes, picker):
        url = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 600).decode()
        body = chat([{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}])
        async with planes(picker) as plane:
            async with plane.post(body) as answer:
                assert answer.status == 200
            (request,) = seen(plane)
            assert request.body == body
            await plane.settled()

    @MODES
    async def test_a_changed_body_has_its_own_length_and_the_name_comes_back(self, planes, picker):
        async with planes(picker) as plane:
            await alias(plane, "a-much-longer-name")
            await eventually(lambda: "a-much-longer-name" in plane.served.scheduler.intake._models)
            async with plane.post(chat(model="a-much-longer-name")) as answer:
                assert (await answer.json())["model"] == "a-much-longer-name"
            async with plane.post(chat(model="a-much-longer-name", stream=True)) as answer:
                text = await answer.text()
            assert '"model": "a-much-longer-name"' in text
            assert '"model": "m"' not in text
            assert [request.body["model"] for request in seen(plane)] == ["m", "m"]
            await plane.settled()

    @MODES
    async def test_end_of_stream_on_the_headers(self, planes, picker):
        async with planes(picker) as plane:
            async with plane.http.get(f"{plane.envoy.url}/v1/models") as answer:
                assert answer.status == 404  # these engines have no such page: it is their answer
                assert answer.headers["server"] == "envoy"
            await plane.settled()
            assert not plane.served.scheduler.fleet.ejections.ejected(f"{plane.engines[0].address}@0")

    async def test_headers_only(self, planes):
        async with planes({"request": "NONE", "response": "STREAMED"}, metadata={"x-headway-model": "m"}) as plane:
            async with plane.post(chat(stream=True)) as answer:
                assert words(await answer.text()) == "".join(WORDS)
            await plane.settled()
            (request,) = seen(plane)
            assert request.body == chat(stream=True)
            assert DESTINATION in request.headers

    async def test_a_body_streamed_in_both_directions_by_a_plane_that_names_the_model(self, planes):
        async with planes({"request": "STREAMED", "response": "NONE"}, metadata={"x-headway-model": "m"}) as plane:
            async with plane.post(chat("x" * 200_000)) as answer:
                assert answer.status == 200
            await plane.settled()

    async def test_a_buffered_answer(self, planes):
        async with planes({"request": "BUFFERED", "response": "BUFFERED", "message_timeout": "5s"}) as plane:
            await alias(plane, "alias")
            await eventually(lambda: "alias" in plane.served.scheduler.intake._models)
            async with plane.post(chat(model="alias")) as answer:
                raw = await answer.read()
            assert json.loads(raw)["model"] == "alias"
            assert answer.headers["content-length"] == str(len(raw))
            await plane.settled()


class TestEnds:
    @MODES
    async def test_the_client_aborts_in_the_middle(self, planes, picker):
        async with planes(picker) as plane:
            for engine in plane.engines:
                engine.script.pause_after = 2
            async with plane.post(chat(stream=True)) as answer:
                await answer.content.readany()
                assert len(plane.ledger.reservations) == 1
                answer.close()
            await plane.settled()
            await eventually(lambda: sum(engine.aborted for engine in plane.engines) == 1)

    @MODES
    async def test_the_client_aborts_before_the_answer(self, planes, picker):
        async with planes(picker) as plane:
            for engine in plane.engines:
                engine.script.pause_before = True
            asking = asyncio.create_task(plane.http.post(plane.url, json=chat()))
            await eventually(lambda: seen(plane))
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await plane.settled()

    @MODES
    async def test_disconnect_after_done_is_a_success(self, planes, picker):
        async with planes(picker) as plane:
            used = []
            plane.served.scheduler.reporting.record_usage = lambda tenant, model, usage: used.append(usage)
            for engine in plane.engines:
                engine.script.linger = True
            async with plane.post(chat(stream=True)) as answer:
                text = b""
                while not text.endswith(b"[DONE]\n\n"):
                    text += await answer.content.readany()
                await plane.settled()
                answer.close()
            assert [each.completion_tokens for each in used] == [USAGE["completion_tokens"]]

    @MODES
    async def test_an_engine_that_breaks_off(self, planes, picker):
        async with planes(picker) as plane:
            for engine in plane.engines:
                engine.script.pause_after, engine.script.die_after = 2, 3
            with pytest.raises(aiohttp.ClientError):
                async with plane.post(chat(stream=True)) as answer:
                    await answer.content.readany()
                    for engine in plane.engines:
                        engine.script.resume.set()
                    await answer.read()
            await plane.settled()

    @MODES
    async def test_a_reset_between_headers_and_body(self, planes, picker):
        async with planes(picker) as plane:
            for engine in plane.engines:
                engine.script.die_after = 0
            async with plane.post(chat(stream=True)) as answer:
                assert answer.status == 502
            await plane.settled()

    @MODES
    async def test_4xx_never_ejects_and_5xx_counts(self, planes, picker):
        async with planes(picker) as plane:
            ejections = plane.served.scheduler.fleet.ejections
            for engine in plane.engines:
                engine.script.status = 422
            for _ in range(30):
                async with plane.post() as answer:
                    assert answer.status == 422
            names = [f"{engine.address}@0" for engine in plane.engines]
            assert not any(ejections.ejected(name) for name in names)
            plane.engines[0].script.status = 500
            plane.engines[1].script.status = 200

            async def ejected():
                async with plane.post() as answer:
                    await answer.read()
                return ejections.ejected(names[0])

            await eventually(ejected)
            await plane.settled()


class TestFailingOver:
    @MODES
    async def test_a_refused_connection_goes_to_the_second(self, planes, picker):
        async with planes(picker | {"response_attributes": ["upstream.address"]}) as plane:
            scheduler = plane.served.scheduler
            slots = [scheduler.fleet.find(engine.address).slot for engine in plane.engines]
            await plane.engines[0].stop()
            plane.engines[1].script.pause_after = 2
            answers = [await plane.post(chat(stream=True)) for _ in range(2)]  # one was meant for the first
            for answer in answers:
                assert answer.status == 200
                await answer.content.readany()
            assert [reservation.slot for reservation in plane.ledger.reservations.values()] == [slots[1]] * 2
            plane.engines[1].script.resume.set()
            for answer in answers:
                assert words("data: " + (await answer.text()).partition("data: ")[2])
            await plane.settled()

    @MODES
    async def test_nobody_can_be_reached(self, planes, picker):
        async with planes(picker) as plane:
            for engine in plane.engines:
                await engine.stop()
            async with plane.post() as answer:
                assert answer.status == 503
            await plane.settled()


class TestRefusals:
    @MODES
    async def test_every_refusal_reaches_the_client_as_it_is(self, planes, picker):
        async with planes(picker) as plane:
            for body, status, reason, param in (
                (b"{", 400, "INVALID_ARGUMENT", None),
                (b'{"messages":[{"role":"user"}]}', 400, "INVALID_ARGUMENT", "model"),
                (json.dumps(chat(model="nope")).encode(), 404, "UNKNOWN_MODEL", "model"),
            ):
                async with plane.http.post(plane.url, data=body) as answer:
                    assert (answer.status, answer.headers["x-headway-reason"]) == (status, reason)
                    assert (await answer.json())["error"]["param"] == param
            assert not seen(plane)
            await plane.settled()

    @MODES
    async def test_busy_is_429_with_retry_after(self, planes, picker):
        async with planes(picker, settings={"max_wait_s": 0.3}) as plane:
            await plane.served.bind("gpu_aware")
            await full(plane)
            async with plane.post() as answer:
                assert (answer.status, answer.headers["x-headway-reason"]) == (429, "HOLD_EXPIRED")
                assert int(answer.headers["retry-after"]) >= 1
                assert (await answer.json())["error"]["type"] == "rate_limit_error"
            await plane.settled()

    @MODES
    async def test_an_empty_pool_is_503(self, planes, picker):
        async with planes(picker) as plane:
            await plane.agent.hello()
            await eventually(lambda: not plane.served.scheduler.fleet.endpoints)
            for path in ("/v1/chat/completions", "/v1/models"):
                method = "POST" if path.endswith("completions") else "GET"
                body = chat() if method == "POST" else None
                async with plane.http.request(method, f"{plane.envoy.url}{path}", json=body) as answer:
                    assert (answer.status, answer.headers["x-headway-reason"]) == (503, "NO_ENDPOINTS")

    @MODES
    async def test_a_plane_without_a_credential_is_401(self, planes, picker):
        async with planes(picker, settings={"require_credentials": True}, agent=False) as plane, plane.post() as answer:
            assert (answer.status, answer.headers["x-headway-reason"]) == (401, "NO_CREDENTIAL")

    @MODES
    async def test_a_client_that_names_the_destination_picks_nothing(self, planes, picker):
        async with planes(picker) as plane:
            chosen = plane.engines[1].address
            for _ in range(6):
                headers = [(DESTINATION, chosen), (DESTINATION, "127.0.0.1:1"), ("x-gateway-inference-objective", "x")]
                async with plane.post(headers=headers) as answer:
                    assert answer.status == 200
            assert [len(engine.seen) for engine in plane.engines] == [3, 3]
            for request in seen(plane):
                assert set(request.headers[DESTINATION].split(",")) == {engine.address for engine in plane.engines}
                assert "x-gateway-inference-objective" not in request.headers


class TestHolds:
    @MODES
    async def test_held_until_there_is_room(self, planes, picker):
        async with planes(picker, metadata={"x-headway-message-timeout": "5s"}) as plane:
            await plane.served.bind("gpu_aware")
            await full(plane)
            asking = asyncio.create_task(plane.http.post(plane.url, json=chat()))
            await eventually(lambda: len(plane.served.scheduler.dispatcher.holds))
            await full(plane, 0.1)
            async with await asking as answer:
                assert answer.status == 200
            await plane.settled()

    @MODES
    async def test_a_client_that_leaves_while_held(self, planes, picker):
        async with planes(picker) as plane:
            await plane.served.bind("gpu_aware")
            await full(plane)
            asking = asyncio.create_task(plane.http.post(plane.url, json=chat()))
            await eventually(lambda: len(plane.served.scheduler.dispatcher.holds))
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await plane.settled()
            assert not seen(plane)

    async def test_buffered_a_hold_may_ask_for_more_time(self, planes):
        picker = BUFFERED | {"message_timeout": "0.3s", "max_message_timeout": "8s", "failure_mode_allow": False}
        metadata = {"x-headway-message-timeout": "0.3s", "x-headway-max-message-timeout": "8s"}
        async with planes(picker, metadata=metadata) as plane:
            await plane.served.bind("gpu_aware")
            await full(plane)
            asking = asyncio.create_task(plane.http.post(plane.url, json=chat()))
            await eventually(lambda: len(plane.served.scheduler.dispatcher.holds))
            await asyncio.sleep(0.8)  # well beyond message_timeout: what is tested is that nothing happens then
            assert len(plane.served.scheduler.dispatcher.holds) == 1
            await full(plane, 0.1)
            async with await asking as answer:
                assert answer.status == 200
            assert await plane.envoy.stat("http.http.ext_proc.override_message_timeout_received") == 1
            await plane.settled()

    async def test_buffered_a_hold_ends_before_envoy_gives_up(self, planes):
        async with planes(BUFFERED | {"message_timeout": "0.2s"}) as plane:
            await plane.served.bind("gpu_aware")
            await full(plane)
            async with plane.post() as answer:
                assert (answer.status, answer.headers["x-headway-reason"]) == (429, "HOLD_EXPIRED")
            assert await plane.envoy.stat("http.http.ext_proc.message_timeouts") == 0


async def full(plane, use=0.95):
    """How full the engines' KV caches are."""
    engines = [
        tpb.EngineSample(address=engine.address, kv_use=tpb.Measurement(value=use), ready=True)
        for engine in plane.engines
    ]
    await plane.agent.sample(*engines)
