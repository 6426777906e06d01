"""The emulator over real HTTP."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from headway_sim.emulator import Emulator, EmulatorConfig
from headway_sim.engine import HARDWARE
from prometheus_client.parser import text_string_to_metric_families

DEADLINE_S = 10.0


@asynccontextmanager
async def emulator(**more):
    settings = {"speedup": 500.0, "stream_interval_ms": 2.0, **more}
    config = EmulatorConfig(HARDWARE["a100-40g-8b"], ("demo", "other"), "127.0.0.1", (0,), **settings)
    async with Emulator(config) as running, aiohttp.ClientSession(f"http://{running.addresses[0]}") as http:
        yield http


def chat(text="hello", **more):
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **more}


async def ask(http, path="/v1/chat/completions", **body):
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


async def events(http, body, path="/v1/chat/completions"):
    async with http.post(path, json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        data = (await response.read()).decode()
    assert data.endswith("\n\n")
    lines = data.split("\n\n")[:-1]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def metrics(http):
    async with http.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    return {sample.name: sample for family in families for sample in family.samples}


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.005)


async def test_a_chat_is_answered_whole():
    async with emulator() as http:
        status, body = await ask(http, **chat(max_tokens=12))
    assert status == 200
    choice = body["choices"][0]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    assert len(choice["message"]["content"]) == 48
    prompt_tokens = -(-len(b"<|user|>hello\n<|assistant|>") // 4)
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 12,
        "total_tokens": prompt_tokens + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    hardware = HARDWARE["a100-40g-8b"]
    first = hardware.step_ms(prompt_tokens, prompt_tokens**2 / 2, 0)
    decodes = sum(hardware.step_ms(1, 0, prompt_tokens + index) for index in range(11))
    assert body["headway"]["queued_ms"] == 0
    assert body["headway"]["ttft_ms"] == pytest.approx(first, abs=0.01)
    assert body["headway"]["e2e_ms"] == pytest.approx(first + decodes, abs=0.01)


async def test_a_streamed_chat_says_the_same_and_counts_usage_when_asked():
    async with emulator() as http:
        _, whole = await ask(http, **chat(max_tokens=40))
        body = chat(max_tokens=40, stream=True)
        plain = await events(http, body)
        counted = await events(http, {**body, "stream_options": {"include_usage": True}})
    for chunks in (plain, counted):
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        text = "".join(delta.get("content", "") for delta in deltas)
        assert text == whole["choices"][0]["message"]["content"]
        assert deltas[0]["role"] == "assistant"
    assert not any("usage" in chunk for chunk in plain)
    assert plain[-1]["choices"][0]["finish_reason"] == "length"
    assert counted[-1]["choices"] == []
    assert counted[-1]["usage"]["completion_tokens"] == 40
    assert counted[-1]["headway"]["e2e_ms"] > counted[-1]["headway"]["ttft_ms"] > 0


async def test_tokens_are_coalesced_but_the_first_comes_at_once():
    async with emulator(stream_interval_ms=60_000.0) as http:
        chunks = await events(http, chat(max_tokens=400, stream=True))
    sizes = [len(chunk["choices"][0]["delta"].get("content", "")) // 4 for chunk in chunks]
    assert sum(sizes) == 400
    assert sizes[0] == 1 or len(sizes) <= 3
    assert len(sizes) <= 4


async def test_the_next_turn_hits_the_answer_s_blocks_and_a_reset_forgets_them():
    async with emulator() as http:
        first = chat("x" * 1000, max_tokens=100)
        _, answer = await ask(http, **first)
        said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        turn = {**first, "messages": [*first["messages"], said, {"role": "user", "content": "and?"}]}
        _, second = await ask(http, **turn)
        prompt_and_answer = answer["usage"]["total_tokens"]
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert prompt_and_answer - 17 <= cached <= prompt_and_answer
        _, salted = await ask(http, **turn, cache_salt="t")
        assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        async with http.post("/reset_prefix_cache") as response:
            assert response.status == 200
        _, again = await ask(http, **turn)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_completions_take_text_and_token_ids():
    async with emulator() as http:
        status, text = await ask(http, "/v1/completions", model="demo", prompt="y" * 64, max_tokens=3)
        assert (status, len(text["choices"][0]["text"])) == (200, 12)
        body = {"model": "demo", "prompt": list(range(40)), "max_tokens": 2}
        _, ids = await ask(http, "/v1/completions", **body)
        assert ids["usage"]["prompt_tokens"] == 40
        _, again = await ask(http, "/v1/completions", **body)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        chunks = await events(http, {**body, "stream": True}, "/v1/completions")
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ids["choices"][0]["text"]


async def test_embeddings_are_unit_vectors_that_depend_on_the_input():
    async with emulator() as http:
        body = {"model": "demo", "input": ["one", "two", "one"], "dimensions": 8}
        status, answer = await ask(http, "/v1/embeddings", **body)
        assert status == 200
        one, two, same = (item["embedding"] for item in answer["data"])
        assert one == same != two
        assert sum(value * value for value in one) == pytest.approx(1.0)
        assert answer["usage"]["prompt_tokens"] == 3
        _, packed = await ask(http, "/v1/embeddings", **body, encoding_format="base64")
        assert isinstance(packed["data"][0]["embedding"], str)
        status, error = await ask(http, "/v1/embeddings", model="demo")
        assert (status, error["error"]["param"]) == (400, "input")


async def test_models_and_health():
    async with emulator() as http:
        async with http.get("/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["demo", "other"]
        async with http.get("/health") as response:
            assert response.status == 200


async def test_metrics_speak_vllm():
    async with emulator() as http:
        await ask(http, **chat("z" * 400, max_tokens=5))
        await ask(http, **chat("z" * 400, max_tokens=5))
        found = await metrics(http)
    assert found["vllm:num_requests_running"].value == 0
    assert found["vllm:num_requests_waiting"].value == 0
    assert found["vllm:num_requests_running"].labels["model_name"] == "demo"
    assert found["vllm:kv_cache_usage_perc"].value == 0
    tokens = -(-(400 + len("<|user|>\n<|assistant|>")) // 4)
    assert found["vllm:prefix_cache_queries_total"].value == 2 * tokens
    assert found["vllm:prefix_cache_hits_total"].value == 96
    assert found["vllm:generation_tokens_total"].value == 10
    info = found["vllm:cache_config_info"].labels
    assert (info["block_size"], info["num_gpu_blocks"]) == ("16", str(141_000 // 16))
    assert found["process_start_time_seconds"].value > 1e9


async def test_a_full_engine_answers_503_and_a_too_long_request_400():
    async with emulator(waiting_limit=1, speedup=1.0, kv_tokens=1600) as http:
        held = asyncio.create_task(ask(http, **chat("a" * 3000, max_tokens=800)))

        async def running():
            return (await metrics(http))["vllm:num_requests_running"].value == 1

        await until(running)
        waiting = asyncio.create_task(ask(http, **chat("b" * 6000, max_tokens=50)))

        async def queued():
            return (await metrics(http))["vllm:num_requests_waiting"].value == 1

        await until(queued)
        status, body = await ask(http, **chat())
        assert status == 503
        assert body["error"]["type"] == "ServiceUnavailableError"
        status, body = await ask(http, **chat("a" * 6400))
        assert status == 400
        assert body["error"]["message"].startswith("The request is too long")
        for task in (held, waiting):
            task.cancel()
        await asyncio.gather(held, waiting, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(stream):
    async with emulator(speedup=1.0) as http:
        asking = asyncio.create_task(ask(http, **chat(max_tokens=20_000, stream=stream)))

        async def running():
            return (await metrics(http))["vllm:num_requests_running"].value == 1

        await until(running)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

        async def gone():
            found = await metrics(http)
            return found["vllm:num_requests_running"].value == 0 and found["vllm:kv_cache_usage_perc"].value == 0

        await until(gone)


async def test_errors_are_openai_s():
    async with emulator() as http:
        status, body = await ask(http, **chat(max_tokens=-1))
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, "max_tokens", 400)
        status, body = await ask(http, model="demo")
        assert (status, body["error"]["param"]) == (400, "messages")
        status, body = await ask(http, **{**chat(), "model": "nope"})
        assert (status, body["error"]["type"]) == (404, "NotFoundError")
        async with http.post("/v1/chat/completions", data=b"{") as response:
            assert response.status == 400


async def test_faults_come_and_go():
    async with emulator() as http:
        await ask(http, "/emulator/fault", mode="http_500")
        assert (await ask(http, **chat()))[0] == 500
        await ask(http, "/emulator/fault", mode="refuse")
        with pytest.raises(aiohttp.ClientError):
            await ask(http, **chat())
        await ask(http, "/emulator/fault", mode="die_mid_stream", after_tokens=10)
        received = b""
        async with http.post("/v1/chat/completions", json=chat(stream=True, max_tokens=500)) as response:
            with pytest.raises(aiohttp.ClientError):
                async for data in response.content.iter_any():
                    received += data
        assert b"[DONE]" not in received
        await ask(http, "/emulator/fault", mode="hang")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(http, **chat()), 0.05)
        status, body = await ask(http, "/emulator/fault", mode="sulk")
        assert (status, body["error"]["param"]) == (400, "mode")
        await ask(http, "/emulator/fault", mode="none")
        assert (await ask(http, **chat(max_tokens=2)))[0] == 200
