"""The endpoint picker behind the real Envoy."""

import json

import pytest
from fakes.openai_engine import USAGE, WORDS
from fakes.waiting import eventually

DUPLEX = {"request": "FULL_DUPLEX_STREAMED", "response": "FULL_DUPLEX_STREAMED"}
BUFFERED = {"request": "BUFFERED", "response": "STREAMED", "message_timeout": "5s"}
MODES = pytest.mark.parametrize("picker", [DUPLEX, BUFFERED], ids=["duplex", "buffered"])


def chat(text="hello", **fields):
    return {"messages": [{"role": "user", "content": text}], "model": "m", **fields}


def seen(plane):
    return [request for engine in plane.engines for request in engine.seen]


@MODES
async def test_a_chat_streams(planes, picker):
    async with planes(picker) as plane:
        async with plane.post(chat(stream=True)) as answer:
            text = await answer.text()
            assert answer.status == 200, (text, plane.envoy.log)
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "".join(WORDS)
        assert text.endswith("data: [DONE]\n\n")
        await plane.settled()
        (request,) = seen(plane)
        print(request.headers)
        assert request.body["stream_options"] == {"include_usage": True}
        assert "usage" not in text
        print(plane.envoy.log)
