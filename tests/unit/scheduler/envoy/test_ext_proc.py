"""The endpoint picker's protocol, message by message."""

import asyncio
import gc
import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime

import grpc
import pytest
from fakes.ext_proc import BUFFERED, DUPLEX, GET, NONE, PARTIAL, POST, STREAMED, Process, Refused, set_headers
from fakes.faults import outcomes
from fakes.rig import Rig, desired_state, spec
from headway_openai.body import ParsedBody
from headway_scheduler.domain.desired import Binding, Credential, GpuGroup, Model, Quotas, Role, Tenant
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.report import Outcome
from headway_scheduler.domain.request import TextPrompt
from headway_scheduler.envoy.ext_proc import ExtProcService
from headway_scheduler.rpc.authentication import Authenticator
from headway_scheduler.rpc.streams import Streams

DESTINATION = "x-gateway-destination-endpoint"
TOKENS = {"router": "rr", "agent": "aa", "narrow": "nn", "user": "t-user"}
ALL_CONTROLS = {
    "x-gateway-inference-objective": "critical",
    "x-gateway-inference-fairness-id": "acme",
    "x-gateway-model-name-rewrite": "other",
    "x-slo-ttft-ms": "250",
    "x-slo-tpot-ms": "12.5",
}
LLM_D_CONTROLS = {
    "x-llm-d-inference-objective": "critical",
    "x-llm-d-inference-fairness-id": "acme",
    "x-llm-d-model-name-rewrite": "other",
    "x-llm-d-slo-ttft-ms": "250",
    "x-llm-d-slo-tpot-ms": "12.5",
}


def credential(name, role, **changes):
    return Credential(name, role, hashlib.sha256(TOKENS[name].encode()).digest(), **changes)


class World:
    """A rig with two endpoints, and its ext_proc service."""

    def __init__(self, strategy="least_request", **config):
        tenants = (Tenant("acme"), Tenant("nobody"))
        models = {each: Model(each) for each in ("m", "other")} | {"m": Model("m", aliases=("alias",))}
        state = desired_state(
            strategy,
            tenants=tenants,
            groups=(GpuGroup("one", endpoints=("10.0.0.1:8000@0",)),),
            bindings=(Binding("acme", "one"),),
            models=models,
            credentials={
                "router": credential("router", Role.ROUTER, tenants=("default", "acme")),
                "agent": credential("agent", Role.AGENT, node="n"),
                "user": credential("user", Role.TENANT, tenants=("acme",)),
                "narrow": credential("narrow", Role.ROUTER, tenants=("acme",)),
            },
        )
        self.rig = Rig(state, **config)
        self.rig.endpoints(2, models=("m", "other"), engine=config.get("engine", ""))
        authenticator = Authenticator(
            lambda: self.rig.scheduler.desired, required=False, clock=lambda: datetime.now(UTC)
        )
        streams = Streams(authenticator, lambda: datetime.now(UTC), self.rig.scheduler.clock, 1000)
        self.service = ExtProcService(self.rig.scheduler, authenticator, streams, longest_body=1_000_000)

    def process(self, *, token=None, request=DUPLEX, response=DUPLEX, told=True, **metadata):
        told_by = {f"x-headway-{key.replace('_', '-')}": value for key, value in metadata.items()}
        if token is not None:
            told_by["authorization"] = f"Bearer {token}"
        return Process(self.service, told_by, request=request, response=response, told=told)

    @property
    def outcomes(self):
        return outcomes(self.rig.fleet)

    @property
    def reservation(self):
        (found,) = self.rig.ledger.reservations.values()
        return found

    @property
    def request(self):
        return self.reservation.attachment.request


@pytest.fixture
def world():
    return World()


def chat(text="hello", **fields):
    return json.dumps({"messages": [{"role": "user", "content": text}], "model": "m", **fields}).encode()


async def ask(process, raw=None, headers=None):
    """A POST with a body, all at once; its headers' reply, and the body sent on."""
    process.headers(POST | (headers or {}))
    process.body(chat() if raw is None else raw)
    reply = (await process.reply("request_headers")).request_headers.response
    await settle()
    pieces, end = await process.pieces()
    assert end
    return reply, b"".join(pieces)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def refusal(process):
    refused = Refused(await process.reply("immediate_response"))
    await process.ended()
    error = json.loads(refused.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return refused, error


async def finish(process, status="200", data=b'{"model":"m"}'):
    process.headers({":status": status, "content-type": "application/json"}, kind="response_headers")
    process.body(data, kind="response_body")
    await process.reply("response_headers")
    await process.reply("response_body")
    process.half_close()
    await process.ended()


class TestRequest:
    async def test_the_headers_wait_for_the_bodys_end(self, world):
        process = world.process()
        raw = chat()
        process.headers(POST)
        for byte in raw[:-1]:
            process.body(bytes([byte]), end=False)
        await settle()
        assert process.silent() and world.rig.is_empty()
        process.body(raw[-1:])
        reply = (await process.reply("request_headers")).request_headers.response
        assert reply.clear_route_cache
        assert set_headers(reply.header_mutation)[DESTINATION] == "10.0.0.1:8000,10.0.0.2:8000"
        assert await process.pieces() == ([raw], True)
        await finish(process)
        assert world.rig.is_empty()

    async def test_metadata_says_the_same_as_the_header(self, world):
        process = world.process()
        process.headers(POST)
        process.body(chat())
        reply = await process.reply("request_headers")
        lb = reply.dynamic_metadata.fields["envoy.lb"].struct_value
        destination = set_headers(reply.request_headers.response.header_mutation)[DESTINATION]
        assert lb.fields[DESTINATION].string_value == destination
        process.half_close()
        await process.ended()

    async def test_big_bodies_go_on_in_pieces_that_fit(self, world):
        process = world.process()
        raw = chat("x" * 400_000)
        process.headers(POST)
        for start in range(0, len(raw), 16_384):
            process.body(raw[start : start + 16_384], end=start + 16_384 >= len(raw))
        await process.reply("request_headers")
        await settle()
        pieces, end = await process.pieces()
        assert end and b"".join(pieces) == raw
        assert max(map(len, pieces)) == 62_000 and len(pieces) == 7
        process.half_close()
        await process.ended()

    @pytest.mark.parametrize("size", [61_999, 62_000, 62_001, 124_000])
    async def test_no_piece_is_empty_at_the_edges(self, world, size):
        raw = chat()
        raw += b" " * (size - len(raw))
        reply, body = await ask(process := world.process(), raw)
        assert body == raw
        assert "content-length" not in set_headers(reply.header_mutation)
        process.half_close()
        await process.ended()

    async def test_a_rank_is_named_where_several_share_an_address(self, world):
        ranks = [spec(9, models=("ranked",), engine="vllm", dp_rank=rank) for rank in (0, 1)]
        alone = spec(8, models=("ranked",), engine="vllm")
        world.rig.connect("ranks", *ranks, alone)
        seen = {}
        for number in range(6):
            process = world.process()
            process.headers({**POST, "x-data-parallel-rank": "7", "x-request-id": f"r{number}"})
            process.body(chat(model="ranked"))
            mutation = (await process.reply("request_headers")).request_headers.response.header_mutation
            found = set_headers(mutation)
            assert "x-data-parallel-rank" in mutation.remove_headers
            seen.setdefault(found[DESTINATION], set()).add(found.get("x-data-parallel-rank"))
        assert seen == {"10.0.0.9:8000": {"0", "1"}, "10.0.0.8:8000": {None}}, "no fallback would fit the header"

    async def test_trailers_may_end_the_body(self, world):
        process = world.process()
        process.headers(POST)
        process.body(chat(), end=False)
        process.trailers()
        await process.reply("request_headers")
        piece = (await process.reply("request_body")).request_body.response.body_mutation.streamed_response
        assert (piece.body, piece.end_of_stream) == (chat(), False)
        await process.reply("request_trailers")
        process.half_close()
        await process.ended()

    @pytest.mark.parametrize("mode", [NONE, STREAMED, BUFFERED, DUPLEX])
    async def test_headers_that_end_the_request_are_answered_at_once(self, world, mode):
        process = world.process(request=mode)
        process.headers(GET, end=True)
        reply = (await process.reply("request_headers")).request_headers.response
        assert set_headers(reply.header_mutation)[DESTINATION] in ("10.0.0.1:8000", "10.0.0.2:8000")
        assert world.rig.is_empty()
        process.half_close()
        await process.ended()

    async def test_without_a_body_only_the_tenants_own_endpoints_serve(self, world):
        process = world.process(tenant="acme")
        process.headers(GET, end=True)
        reply = (await process.reply("request_headers")).request_headers.response
        assert set_headers(reply.header_mutation)[DESTINATION] == "10.0.0.1:8000"
        process.half_close()
        await process.ended()

    async def test_buffered_bodies_are_routed_in_their_own_reply(self, world):
        process = world.process(request=BUFFERED)
        process.headers(POST | {DESTINATION: "10.9.9.9:1"})
        first = (await process.reply("request_headers")).request_headers.response
        assert list(first.header_mutation.remove_headers) == [DESTINATION]
        process.body(chat())
        reply = (await process.reply("request_body")).request_body.response
        assert set_headers(reply.header_mutation)[DESTINATION] == "10.0.0.1:8000,10.0.0.2:8000"
        assert reply.clear_route_cache and not reply.HasField("body_mutation")
        process.half_close()
        await process.ended()

    @pytest.mark.parametrize("mode", [NONE, STREAMED])
    async def test_where_no_body_comes_the_plane_names_the_model(self, world, mode):
        process = world.process(request=mode, model="other")
        process.headers(POST)
        await process.reply("request_headers")
        assert world.request.model == "other"
        process.body(b"anything", end=False)
        reply = await process.reply("request_body")
        assert not reply.request_body.response.HasField("body_mutation")
        process.half_close()
        await process.ended()
        assert world.rig.is_empty()

    @pytest.mark.parametrize("length", [10**11, 2**63 - 1, 2**64 - 1])
    async def test_a_length_that_no_prompt_has_is_not_believed(self, world, length):
        process = world.process(request=STREAMED, model="m")
        process.headers(POST | {"content-length": str(length)})
        await process.reply("request_headers")
        assert world.request.prompt_tokens == 2**24
        assert world.reservation.ttl_s == 6 * 3600
        process.half_close()
        await process.ended()
        assert world.rig.is_empty()

    async def test_where_no_body_comes_and_no_model_is_named_it_is_a_400(self, world):
        process = world.process(request=NONE)
        process.headers(POST)
        refused, error = await refusal(process)
        assert (refused.status, error["param"]) == (400, "model")

    async def test_a_body_that_was_cut_is_routed_by_its_beginning_and_sent_on_as_it_is(self, world):
        process = world.process(request=PARTIAL)
        raw = chat("x" * 40_000, model="m")
        raw = b'{"model":"m",' + raw[1:]
        process.headers(POST | {"content-length": str(len(raw))})
        await process.reply("request_headers")
        process.body(raw[:8192], end=False)
        reply = (await process.reply("request_body")).request_body.response
        assert DESTINATION in set_headers(reply.header_mutation) and not reply.HasField("body_mutation")
        assert world.request.prompt_tokens == pytest.approx(len(raw) / 4, rel=0.01)
        assert len(world.reservation.attachment.chain.hashes) == 31
        process.half_close()
        await process.ended()
        assert world.rig.is_empty()

    async def test_a_whole_body_is_read_as_one_also_where_it_could_have_been_cut(self, world):
        process = world.process(request=PARTIAL)
        process.headers(POST)
        await process.reply("request_headers")
        process.body(chat(model="alias"), end=False)  # trailers follow
        reply = (await process.reply("request_body")).request_body.response
        assert json.loads(reply.body_mutation.body)["model"] == "m"
        process.half_close()
        await process.ended()

    @pytest.mark.parametrize(
        ("raw", "settings", "status", "param"),
        [
            (b'{"messages":[{"role":"user","content":"' + b"x" * 9000, {}, 400, "model"),
            (b'{"model":"alias","messages":[{"role":"user","content":"' + b"x" * 9000, {}, 400, "model"),
            (b"<xml>", {}, 400, None),
        ],
    )
    async def test_what_a_cut_body_cannot_be_served_for(self, world, raw, settings, status, param):
        process = world.process(request=PARTIAL, **settings)
        process.headers(POST)
        await process.reply("request_headers")
        process.body(raw, end=False)
        refused, error = await refusal(process)
        assert (refused.status, error["param"]) == (status, param)
        assert world.rig.is_empty()

    async def test_planes_that_cannot_send_a_salt_serve_only_dedicated_engines(self):
        world = World()
        world.rig.connect("n", spec(1, engine="vllm"), spec(2, engine="vllm"))
        process = world.process(request=NONE, model="m", tenant="acme")
        process.headers(POST)
        refused, _ = await refusal(process)
        assert (refused.status, refused.headers["x-headway-reason"]) == (403, "NOT_PERMITTED")
        assert world.rig.is_empty()
        process = world.process(request=NONE, model="m")
        process.headers(POST, subset="10.0.0.2")  # the default tenant's alone
        await process.reply("request_headers")
        process.half_close()
        await process.ended()

    async def test_an_envoy_that_does_not_tell_its_modes_streams(self, world):
        reply, _ = await ask(process := world.process(told=False))
        assert DESTINATION in set_headers(reply.header_mutation)
        process.half_close()
        await process.ended()

    async def test_other_apis_are_routed_by_their_model(self, world):
        process = world.process()
        reply, _ = await ask(process, b'{"model":"other","input":"x"}', {":path": "/v1/responses?a=b"})
        assert DESTINATION in set_headers(reply.header_mutation)
        assert world.request.model == "other"
        process.half_close()
        await process.ended()

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/chat/completions",
            "/tenants/acme/v1/chat/completions?x=/y",
            "/chat/completions",
            "/v1/chat/%63ompletions",
        ],
    )
    async def test_a_path_counts_by_its_end(self, world, path):
        await ask(process := world.process(), headers={":path": path})
        assert world.request.prompt_tokens > 0
        process.half_close()
        await process.ended()

    async def test_a_request_id_is_made_where_there_is_none(self, world):
        reply, _ = await ask(process := world.process())
        assert set_headers(reply.header_mutation)["x-request-id"]
        process.half_close()
        await process.ended()
        reply, _ = await ask(process := world.process(), headers={"x-request-id": "own"})
        assert "x-request-id" not in set_headers(reply.header_mutation)
        process.half_close()
        await process.ended()

    async def test_two_requests_of_one_id_are_two(self, world):
        processes = [world.process() for _ in range(2)]
        for process in processes:
            await ask(process, chat(str(id(process))), {"x-request-id": "same"})
        assert len(world.rig.ledger.reservations) == 2
        for process in processes:
            process.half_close()
            await process.ended()
        assert world.rig.is_empty()


class TestControlHeaders:
    @pytest.mark.parametrize("headers", [ALL_CONTROLS, LLM_D_CONTROLS], ids=["gie", "llm-d"])
    async def test_trusted_they_count_and_are_stripped(self, world, headers):
        process = world.process(token="rr", trust="all")
        reply, body = await ask(process, headers=headers)
        request = world.request
        assert (request.tenant, request.model) == ("acme", "other")
        assert (request.ttft_objective_ms, request.tpot_objective_ms) == (250, 12.5)
        assert set(headers) <= set(reply.header_mutation.remove_headers)
        assert json.loads(body)["model"] == "other"
        assert set_headers(reply.header_mutation)["content-length"] == str(len(body))
        process.half_close()
        await process.ended()

    async def test_untrusted_they_are_only_stripped(self, world):
        process = world.process(token="rr")
        reply, _ = await ask(process, headers=ALL_CONTROLS)
        request = world.request
        assert (request.tenant, request.model, request.ttft_objective_ms) == ("default", "m", None)
        assert set(ALL_CONTROLS) <= set(reply.header_mutation.remove_headers)
        process.half_close()
        await process.ended()

    async def test_each_is_trusted_by_itself(self, world):
        process = world.process(token="rr", trust="slo, objective")
        await ask(process, headers=ALL_CONTROLS)
        assert (world.request.tenant, world.request.model, world.request.ttft_objective_ms) == ("default", "m", 250)
        process.half_close()
        await process.ended()

    async def test_trust_does_not_reach_beyond_the_credential(self, world):
        process = world.process(token="nn", trust="all")
        process.headers(POST | {"x-gateway-inference-fairness-id": "default"})
        process.body(chat())
        refused, error = await refusal(process)
        assert (refused.status, refused.headers["x-headway-reason"]) == (403, "TENANT_NOT_ALLOWED")
        assert error["type"] == "permission_error"

    async def test_an_objective_lowers_the_priority(self, world):
        process = world.process(trust="objective")
        await ask(process, headers={"x-gateway-inference-objective": "sheddable"})
        assert world.request.priority == -1
        process.half_close()
        await process.ended()

    @pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "1e300"])
    async def test_a_nonsense_objective_of_time_names_its_header(self, world, value):
        process = world.process(trust="slo")
        process.headers(POST | {"x-slo-ttft-ms": value})
        process.body(chat())
        refused, error = await refusal(process)
        assert (refused.status, error["param"]) == (400, "slo-ttft-ms")

    async def test_the_clients_own_destination_picks_nothing(self, world):
        process = world.process(trust="all")
        headers = [*POST.items(), (DESTINATION, "10.9.9.9:1"), (DESTINATION, "10.9.9.8:1")]
        process.headers(headers)
        process.body(chat())
        reply = (await process.reply("request_headers")).request_headers.response
        assert DESTINATION in reply.header_mutation.remove_headers
        assert set_headers(reply.header_mutation)[DESTINATION] == "10.0.0.1:8000,10.0.0.2:8000"
        process.half_close()
        await process.ended()

    async def test_settings_that_make_no_sense_are_told(self, world):
        for settings in ({"trust": "everything"}, {"message_timeout": "10"}, {"include_usage": "maybe"}):
            process = world.process(**settings)
            process.headers(POST)
            refused, error = await refusal(process)
            (name,) = settings
            assert (refused.status, error["param"]) == (400, f"x-headway-{name.replace('_', '-')}")


class TestSubset:
    @pytest.mark.parametrize("hint", ["10.0.0.2:8000", ["10.0.0.2:8000"], "10.0.0.2", "10.9.9.9:1, 10.0.0.2:8000"])
    async def test_only_what_it_names_serves(self, world, hint):
        process = world.process()
        process.headers(POST, subset=hint)
        process.body(chat())
        reply = (await process.reply("request_headers")).request_headers.response
        assert set_headers(reply.header_mutation)[DESTINATION] == "10.0.0.2:8000"
        process.half_close()
        await process.ended()

    @pytest.mark.parametrize("hint", ["", [], " , ", "10.9.9.9", ["10.0.0.1:9999"]])
    async def test_none_or_no_match_is_a_503(self, world, hint):
        process = world.process()
        process.headers(POST, subset=hint)
        process.body(chat())
        refused, _ = await refusal(process)
        assert (refused.status, refused.headers["x-headway-reason"]) == (503, "NO_ENDPOINTS")

    async def test_it_limits_requests_without_a_body_too(self, world):
        process = world.process()
        process.headers(GET, end=True, subset="10.0.0.2")
        reply = (await process.reply("request_headers")).request_headers.response
        assert set_headers(reply.header_mutation)[DESTINATION] == "10.0.0.2:8000"
        process.half_close()
        await process.ended()
        process = world.process()
        process.headers(GET, end=True, subset="10.0.0.7")
        assert (await refusal(process))[0].status == 503


BAD = {
    "no json": (b"{", None, "invalid_json"),
    "no model": (b'{"messages":[{"role":"user","content":"x"}]}', "model", "invalid_value"),
    "no messages": (b'{"model":"m"}', "messages", "invalid_value"),
    "wrong type": (b'{"model":"m","messages":[{"role":1}]}', "messages[0].role", "invalid_value"),
    "not utf-8": (b'{"model":"m\xff"}', None, "invalid_json"),
}  # fmt: skip


class TestRefusals:
    @pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
    @pytest.mark.parametrize("bad", BAD)
    async def test_bad_bodies(self, world, bad, mode):
        raw, param, code = BAD[bad]
        process = world.process(request=mode)
        process.headers(POST)
        if mode == BUFFERED:
            await process.reply("request_headers")
        process.body(raw)
        refused, error = await refusal(process)
        assert (refused.status, error["param"], error["code"]) == (400, param, code)
        assert refused.headers["x-headway-reason"] == "INVALID_ARGUMENT"
        assert world.rig.is_empty()

    async def test_an_unknown_model(self, world):
        process = world.process()
        process.headers(POST)
        process.body(chat(model="nope"))
        refused, error = await refusal(process)
        assert (refused.status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert refused.details == "headway_unknown_model"
        assert world.rig.scheduler.refusals == {"UNKNOWN_MODEL": 1}

    async def test_nobody_serves_it(self, world):
        process = world.process(tenant="nobody")
        process.headers(POST)
        process.body(chat())
        refused, _ = await refusal(process)
        assert (refused.status, refused.headers["x-headway-reason"]) == (503, "NO_ENDPOINTS")
        process = world.process(tenant="nobody")
        process.headers(GET, end=True)
        assert (await refusal(process))[0].status == 503

    async def test_shutting_down(self, world):
        world.rig.scheduler.drain()
        process = world.process()
        process.headers(POST)
        process.body(chat())
        refused, _ = await refusal(process)
        assert (refused.status, refused.headers["x-headway-reason"]) == (503, "SHUTTING_DOWN")

    @pytest.mark.parametrize(
        ("token", "status", "reason"), [("xx", 401, "NO_CREDENTIAL"), ("aa", 403, "NOT_PERMITTED")]
    )
    async def test_who_may_not_call(self, world, token, status, reason):
        process = world.process(token=token)
        refused, _ = await refusal(process)
        assert (refused.status, refused.headers["x-headway-reason"]) == (status, reason)

    async def test_too_large(self, world):
        process = world.process()
        process.headers(POST)
        process.body(b" " * 600_000, end=False)
        process.body(b" " * 600_000, end=False)
        refused, _ = await refusal(process)
        assert refused.status == 413

    async def test_a_fault_of_our_own_ends_the_stream_and_the_reservation(self, world, capfd):
        process = world.process()
        await ask(process)
        process.headers({":status": "no number"}, kind="response_headers")
        with pytest.raises(grpc.aio.AbortError):
            await process.ended()
        assert process.context.aborted is grpc.StatusCode.INTERNAL
        assert world.rig.is_empty()


class TestHolds:
    @pytest.fixture
    def world(self):
        world = World("gpu_aware")
        world.rig.full(1, 2)
        return world

    async def test_held_then_given(self, world):
        process = world.process()
        process.headers(POST)
        process.body(chat())
        await settle()
        assert process.silent() and len(world.rig.dispatcher.holds) == 1
        world.rig.full(1)
        world.rig.dispatcher.run_pass(world.rig.clock.now)
        reply = (await process.reply("request_headers")).request_headers.response
        assert set_headers(reply.header_mutation)[DESTINATION].startswith("10.0.0.2:8000")
        process.half_close()
        await process.ended()
        assert world.rig.is_empty()

    async def test_not_given_in_time(self, world):
        process = world.process(message_timeout="10s")
        process.headers(POST)
        process.body(chat())
        await settle()
        world.rig.pass_time(9.8)
        await settle()
        assert process.silent()
        world.rig.pass_time(0.2)
        refused, _ = await refusal(process)
        assert (refused.status, refused.headers["x-headway-reason"]) == (429, "HOLD_EXPIRED")
        assert int(refused.headers["retry-after"]) >= 1
        assert world.rig.is_empty()

    async def test_loaded_is_429_and_ill_is_503(self, world):
        """Envoy gives up at once, so that nothing is held."""

        async def told():
            process = world.process(message_timeout="0s")
            process.headers(POST)
            process.body(chat())
            refused, _ = await refusal(process)
            return refused.status, refused.headers["x-headway-reason"]

        fleet = world.rig.fleet
        world.rig.full(1, 2)
        assert await told() == (429, "SATURATED")
        for endpoint in list(fleet.endpoints.values()):
            endpoint.ready = False
        fleet.refresh_guards(fleet.endpoints.values())
        assert await told() == (503, "ALL_UNHEALTHY")
        world.rig.desire(endpoint_states=dict.fromkeys(fleet.endpoints, SchedulingState.CORDONED))
        assert await told() == (503, "ALL_DRAINING")
        assert world.rig.is_empty()

    @pytest.mark.parametrize("early", ["leaves", "leaves as it is answered", "is cancelled"])
    async def test_whoever_leaves_leaves_no_trace(self, world, early):
        process = world.process()
        process.headers(POST)
        process.body(chat())
        await settle()
        if early == "leaves as it is answered":
            world.rig.full()
            world.rig.dispatcher.run_pass(world.rig.clock.now)
        if early == "is cancelled":
            process.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await process.ended()
        else:
            process.half_close()
            await process.ended()
        assert world.rig.is_empty()

    @pytest.mark.parametrize(
        ("mode", "settings", "held_s"),
        [
            (BUFFERED, {}, 0.1),
            (BUFFERED, {"message_timeout": "5s"}, 4.9),
            (BUFFERED, {"message_timeout": "5s", "max_message_timeout": "20s"}, 19.9),
            (DUPLEX, {}, 30.0),
            (DUPLEX, {"message_timeout": "900ms"}, 0.8),
        ],
    )
    async def test_it_ends_before_the_plane_gives_up(self, world, mode, settings, held_s):
        process = world.process(request=mode, **settings)
        process.headers(POST)
        if mode == BUFFERED:
            await process.reply("request_headers")
        process.body(chat())
        await settle()
        (hold,) = world.rig.dispatcher.holds
        assert hold.waiters[0].until - world.rig.clock.now == pytest.approx(held_s)
        if "max_message_timeout" in settings:
            reply = await process.context.outgoing.get()
            assert reply.override_message_timeout.seconds == 20
        assert process.silent()
        process.half_close()
        await process.ended()
        assert world.rig.is_empty()


SSE = {":status": "200", "content-type": "text/event-stream; charset=utf-8"}
ROLE = b'data: {"model":"m","choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = 'data: {"model":"m","choices":[{"delta":{"content":"Grüße"}}]}\n\n'.encode()
USAGE = b'data: {"model":"m","choices":[],"usage":{"prompt_tokens":11,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = ROLE + WORD + WORD + USAGE + DONE


class TestAnswer:
    async def begun(self, world, raw=None, **settings):
        process = world.process(**settings)
        if settings.get("request") == BUFFERED:
            process.headers(POST)
            await process.reply("request_headers")
            process.body(raw or chat(stream=True))
            await process.reply("request_body")
        else:
            await ask(process, raw or chat(stream=True))
        return process

    async def streamed(self, process, data, end=True):
        process.body(data, end=end, kind="response_body")
        await settle()
        return await process.pieces("response_body") if not process.silent() else ([], False)

    @pytest.mark.parametrize("cut", [1, 7, 50, 10_000])
    async def test_a_stream_goes_by_and_is_measured_whatever_way_it_is_cut(self, world, cut):
        process = await self.begun(world)
        usage = []
        world.rig.scheduler.reporting.record_usage = lambda tenant, model, used: usage.append(used)
        process.headers(SSE, kind="response_headers")
        await process.reply("response_headers")
        out = b""
        for start in range(0, len(STREAM), cut):
            piece = STREAM[start : start + cut]
            world.rig.clock.now += 0.5 if start == 0 else 0
            got, _ = await self.streamed(process, piece, end=start + cut >= len(STREAM))
            out += b"".join(got)
        assert out == STREAM.replace(USAGE, b"")
        assert (usage[0].prompt_tokens, usage[0].completion_tokens) == (11, 2)
        assert world.rig.is_empty() and world.outcomes == [False]
        process.half_close()
        await process.ended()

    async def test_the_first_token_ends_the_prefill(self, world):
        process = await self.begun(world)
        process.headers(SSE, kind="response_headers")
        await process.reply("response_headers")
        await self.streamed(process, ROLE, end=False)
        assert world.reservation.first_token_at is None
        world.rig.clock.now += 0.25
        await self.streamed(process, WORD, end=False)
        assert world.reservation.attachment.ttft_ms == 250
        process.half_close()
        await process.ended()
        assert world.rig.is_empty() and world.outcomes == []

    async def test_after_done_a_disconnect_is_a_success(self, world):
        process = await self.begun(world)
        process.headers(SSE, kind="response_headers")
        await process.reply("response_headers")
        await self.streamed(process, STREAM, end=False)
        assert world.rig.is_empty() and world.outcomes == [False]
        process.half_close()
        await process.ended()

    @pytest.mark.parametrize("how", ["before the headers", "after the headers", "mid-stream", "by cancelling"])
    async def test_however_it_breaks_off_the_reservation_ends(self, world, how):
        process = await self.begun(world)
        if how != "before the headers":
            process.headers(SSE, kind="response_headers")
            await process.reply("response_headers")
        if how == "mid-stream":
            await self.streamed(process, ROLE + WORD + WORD[:20], end=False)
        if how == "by cancelling":
            process.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await process.ended()
        else:
            process.half_close()
            await process.ended()
        assert world.rig.is_empty() and world.outcomes == []

    async def test_a_json_answers_usage_is_read(self, world):
        process = await self.begun(world, chat())
        usage = []
        world.rig.scheduler.reporting.record_usage = lambda tenant, model, used: usage.append(used)
        data = b'{"model":"m","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}'
        headers = {":status": "200", "content-type": "application/json", "content-length": str(len(data))}
        process.headers(headers, kind="response_headers")
        reply = await process.reply("response_headers")
        assert not reply.response_headers.response.HasField("header_mutation")
        assert await self.streamed(process, data[:20], end=False) == ([], False)  # it means nothing before its end
        assert await self.streamed(process, data[20:]) == ([data], True)
        assert (usage[0].prompt_tokens, usage[0].completion_tokens) == (5, 3)
        assert world.rig.is_empty()
        process.half_close()
        await process.ended()

    async def test_a_big_answer_is_not_kept_until_its_end(self, world):
        process = await self.begun(world, chat())
        process.headers({":status": "200", "content-type": "application/json"}, kind="response_headers")
        await process.reply("response_headers")
        assert await self.streamed(process, b"1" * 40_000, end=False) == ([], False)
        pieces, end = await self.streamed(process, b"2" * 40_000, end=False)
        assert ([len(piece) for piece in pieces], end) == ([62_000, 18_000], False)
        assert await self.streamed(process, b"3", end=True) == ([b"3"], True)
        await process.ended()
        assert world.rig.is_empty()

    @pytest.mark.parametrize("how", ["the end", "trailers"])
    async def test_what_was_kept_goes_out(self, world, how):
        process = await self.begun(world, chat())
        process.headers({":status": "200", "content-type": "application/json"}, kind="response_headers")
        await process.reply("response_headers")
        await self.streamed(process, b"{}", end=False)
        if how == "trailers":
            process.trailers("response_trailers")
            reply = (await process.reply("response_body")).response_body.response
            assert reply.body_mutation.streamed_response.body == b"{}"
            await process.reply("response_trailers")
        else:
            assert await self.streamed(process, b"") == ([b"{}"], True)
        await process.ended()
        assert world.rig.is_empty() and world.outcomes == [False]

    @pytest.mark.parametrize("response", [STREAMED, BUFFERED, DUPLEX])
    @pytest.mark.parametrize("cut", [1, 5, 1000])
    async def test_the_model_is_called_as_the_client_called_it(self, world, response, cut):
        process = await self.begun(world, chat(model="alias"), response=response)
        data = '{"id":1,"model": "m","choices":[{"text":"say \\"model\\":\\"m\\" ü"}]}'.encode()
        cut = 1000 if response == BUFFERED else cut
        headers = {":status": "200", "content-type": "application/json", "content-length": str(len(data))}
        process.headers(headers, kind="response_headers")
        reply = (await process.reply("response_headers")).response_headers.response
        assert list(reply.header_mutation.remove_headers) == ([] if response == BUFFERED else ["content-length"])
        out = b""
        for start in range(0, len(data), cut):
            process.body(data[start : start + cut], end=start + cut >= len(data), kind="response_body")
            await settle()
            while not process.silent():
                answer = (await process.reply("response_body")).response_body.response
                mutation = answer.body_mutation
                if response == DUPLEX:
                    out += mutation.streamed_response.body
                elif not answer.HasField("body_mutation"):
                    out += data[start : start + cut]
                else:
                    out += mutation.body
                if response == BUFFERED:
                    assert set_headers(answer.header_mutation) == {"content-length": str(len(out))}
        assert out == data.replace(b'"model": "m"', b'"model": "alias"')
        process.half_close()
        await process.ended()
        assert world.rig.is_empty()

    async def test_where_no_body_goes_by_the_headers_tell_how_it_ended(self, world):
        for status, outcome in (("200", [False]), ("404", [False]), ("500", [False, True])):
            process = await self.begun(world, response=NONE)
            process.headers(SSE | {":status": status}, kind="response_headers")
            await process.reply("response_headers")
            process.half_close()
            await process.ended()
            assert world.rig.is_empty()
            assert world.outcomes == outcome

    async def test_usage_is_asked_for_only_where_it_can_be_taken_out_again(self, world):
        for settings, asked in (
            ({}, True),
            ({"response": NONE}, False),
            ({"include_usage": "false"}, False),
            ({"include_usage": "true"}, True),
        ):
            process = world.process(**settings)
            _, body = await ask(process, chat(stream=True))
            assert ("stream_options" in json.loads(body)) == asked
            process.half_close()
            await process.ended()

    async def test_usage_that_the_client_wants_stays(self, world):
        process = await self.begun(world, chat(stream=True, stream_options={"include_usage": True}))
        process.headers(SSE, kind="response_headers")
        await process.reply("response_headers")
        pieces, _ = await self.streamed(process, STREAM)
        assert b"".join(pieces) == STREAM
        process.half_close()
        await process.ended()

    async def test_trailers_end_the_answer(self, world):
        process = await self.begun(world)
        process.headers(SSE, kind="response_headers")
        await process.reply("response_headers")
        await self.streamed(process, ROLE + WORD, end=False)
        process.trailers("response_trailers")
        await process.reply("response_trailers")
        assert world.rig.is_empty() and world.outcomes == [False]
        process.half_close()
        await process.ended()

    async def test_compressed_answers_are_left_alone(self, world):
        process = await self.begun(world)
        process.headers(SSE | {"content-encoding": "gzip"}, kind="response_headers")
        await process.reply("response_headers")
        assert await self.streamed(process, b"\x1f\x8b\x08") == ([b"\x1f\x8b\x08"], True)
        assert world.rig.is_empty()
        process.half_close()
        await process.ended()

    async def test_an_error_inside_a_stream_is_the_endpoints(self, world):
        process = await self.begun(world)
        process.headers(SSE, kind="response_headers")
        await process.reply("response_headers")
        await self.streamed(process, WORD + b'data: {"error":{"message":"x"}}\n\n' + DONE)
        assert world.outcomes == [True]
        process.half_close()
        await process.ended()


class TestQuotas:
    @pytest.fixture
    def world(self):
        world = World()
        limited = replace(world.rig.store.desired.tenants["default"], quotas=Quotas(requests_per_minute=1))
        world.rig.desire(tenants={**world.rig.store.desired.tenants, "default": limited})
        return world

    async def test_the_client_is_told_what_is_left(self, world):
        process = world.process()
        await ask(process)
        process.headers({":status": "200", "content-type": "application/json"}, kind="response_headers")
        response = (await process.reply("response_headers")).response_headers.response
        told = {each.header.key: each.header.raw_value for each in response.header_mutation.set_headers}
        assert told["x-ratelimit-limit-requests"] == b"1"
        assert told["x-ratelimit-remaining-requests"] == b"0"
        process.half_close()
        await process.ended()

    async def test_and_so_it_is_when_it_is_refused(self, world):
        process = world.process()
        await ask(process)
        second = world.process()
        second.headers(POST)
        second.body(chat())
        refused, _ = await refusal(second)
        assert refused.status == 429
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(refused.headers["retry-after"]) > 0
        process.half_close()
        await process.ended()


class TestWhoServed:
    @pytest.mark.parametrize("told", ["metadata", "attributes"])
    async def test_the_reservation_moves_to_whoever_served(self, world, told):
        await ask(process := world.process())
        assert world.reservation.slot == world.rig.slot(1)
        served = {"served": "10.0.0.2:8000"} if told == "metadata" else {}
        attributes = {"attributes": {"upstream.address": "10.0.0.2:8000"}} if told == "attributes" else {}
        process.headers({":status": "200"}, kind="response_headers", **served, **attributes)
        await process.reply("response_headers")
        assert world.reservation.slot == world.rig.slot(2)
        assert world.outcomes == [True]  # the first one could not be reached
        process.half_close()
        await process.ended()
        assert world.rig.is_empty()

    @pytest.mark.parametrize("served", ["10.0.0.1:8000", "10.9.9.9:1", ""])
    async def test_else_it_stays(self, world, served):
        await ask(process := world.process())
        process.headers({":status": "200"}, kind="response_headers", served=served)
        await process.reply("response_headers")
        assert world.reservation.slot == world.rig.slot(1)
        process.half_close()
        await process.ended()

    async def test_4xx_never_ejects_5xx_does(self, world):
        for _ in range(50):
            await ask(process := world.process())
            await finish(process, "422")
        assert world.outcomes == [] and not world.rig.fleet.ejections.ejected("10.0.0.1:8000@0")
        await ask(process := world.process())
        await finish(process, "500")
        assert world.outcomes == [True]
        assert world.rig.is_empty()

    @pytest.mark.parametrize(
        ("details", "outcome"),
        [
            ("via_upstream", Outcome.SERVER_ERROR),
            ("upstream_reset_before_response_started{connection_termination}", Outcome.CONNECT_ERROR),
            ("upstream_response_timeout", Outcome.TIMEOUT),
            ("overflow", Outcome.CANCELLED),
            ("no_healthy_upstream", Outcome.CANCELLED),
        ],
    )
    async def test_whose_fault_a_503_is_envoy_may_tell(self, world, details, outcome):
        await ask(process := world.process())
        attributes = {"response.code_details": details}
        process.headers({":status": "503"}, kind="response_headers", attributes=attributes, end=True)
        await process.reply("response_headers")
        assert world.outcomes == ([True] if outcome.is_endpoints_fault else [])
        assert world.rig.is_empty()
        process.half_close()
        await process.ended()


async def test_the_domains_salt_goes_where_the_engine_knows_it():
    world = World()
    world.rig.connect("n", spec(1, engine="vllm"), spec(2, engine="sglang"), spec(3, engine="vllm"))
    reply, body = await ask(process := world.process())
    assert json.loads(body)["cache_salt"]
    assert set_headers(reply.header_mutation)["content-length"] == str(len(body))
    # What the body does not fit is no fallback.
    assert set_headers(reply.header_mutation)[DESTINATION] == "10.0.0.1:8000,10.0.0.3:8000"
    process.half_close()
    await process.ended()


async def test_no_body_is_kept_while_its_answer_goes_by(world):
    await ask(process := world.process(), chat("x" * 100_000, stream=True))
    process.headers(SSE, kind="response_headers")
    await process.reply("response_headers")
    kept = [each for each in gc.get_objects() if isinstance(each, ParsedBody | TextPrompt)]
    sizes = [len(each.raw if isinstance(each, ParsedBody) else each.data) for each in kept]
    assert max(sizes, default=0) < 100_000
    process.half_close()
    await process.ended()


async def test_many_streams_leave_nothing_behind():
    world = World()
    processes = [world.process() for _ in range(500)]
    for process in processes:
        process.headers(POST)
        process.body(chat())
    for process in processes:
        await process.reply("request_headers")
    assert len(world.rig.ledger.reservations) == 500
    for number, process in enumerate(processes):
        if number % 2:
            process.task.cancel()
        else:
            process.half_close()
    await asyncio.gather(*(process.task for process in processes), return_exceptions=True)
    assert world.rig.is_empty()


class TestUsersKeys:
    """End users show keys of their own: the tenant's, before whatever a header says, and never the engine's to see."""

    KEY = {"authorization": "Bearer t-user"}  # noqa: RUF012 -- not changed

    @pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
    async def test_a_key_names_the_tenant_and_is_stripped(self, world, mode):
        process = world.process(token=TOKENS["router"], request=mode, user_keys="required", trust="all")
        spoofed = {"x-gateway-inference-fairness-id": "default"}
        process.headers(POST | self.KEY | spoofed)
        if mode is DUPLEX:
            process.body(chat())
        reply = (await process.reply("request_headers")).request_headers.response
        assert {"authorization", *spoofed} <= set(reply.header_mutation.remove_headers)
        if mode is BUFFERED:
            process.body(chat())
            await process.reply("request_body")
        assert world.request.tenant == "acme"
        process.half_close()

    @pytest.mark.parametrize("shown", ["Bearer unknown", "Bearer aa", "Basic a2V5", "Bearer "])
    @pytest.mark.parametrize("setting", ["required", "optional"])
    async def test_what_is_no_users_key_is_refused(self, world, shown, setting):
        process = world.process(token=TOKENS["router"], user_keys=setting)
        process.headers(POST | {"authorization": shown})
        refused, error = await refusal(process)
        assert (refused.status, error["code"]) == (401, "no_credential")

    async def test_nobody_is_refused_only_where_a_key_is_required(self, world):
        process = world.process(token=TOKENS["router"], user_keys="required")
        process.headers(POST)
        assert (await refusal(process))[0].status == 401
        await ask(world.process(token=TOKENS["router"], user_keys="optional"))
        assert world.request.tenant == "default"

    async def test_without_the_setting_an_authorization_is_the_engines_unless_it_is_ours(self, world):
        for shown, stripped in (("Bearer sk-engine", False), ("Bearer hw_anything", True)):
            process = world.process(token=TOKENS["router"])
            reply, _ = await ask(process, headers={"authorization": shown})
            assert ("authorization" in reply.header_mutation.remove_headers) == stripped
            process.half_close()
            await process.ended()

    async def test_a_setting_that_is_none_is_named(self, world):
        refused, _ = await refusal(world.process(token=TOKENS["router"], user_keys="yes"))
        assert refused.status == 400
