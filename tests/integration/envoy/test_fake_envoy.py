"""The fake that starts the real Envoy: it serves, balances by the header, and is gone afterwards."""

import aiohttp
from fakes.envoy import (
    DESTINATION,
    bootstrap,
    http_listener,
    override_host,
    retry_policy,
    route_to,
    running_envoy,
    static_cluster,
)
from fakes.openai_engine import OpenAIEngine

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def test_it_starts_follows_the_header_and_stops(tmp_path):
    engines = [await OpenAIEngine().start() for _ in range(2)]
    addresses = [engine.address for engine in engines]
    cluster = static_cluster("engines", addresses, load_balancing_policy=override_host())
    config = bootstrap([http_listener([route_to("engines", retry_policy=retry_policy())])], [cluster])
    async with running_envoy(config, tmp_path) as envoy, aiohttp.ClientSession() as http:
        url = f"{envoy.url}/v1/chat/completions"
        for _ in range(4):
            async with http.post(url, json=BODY, headers={DESTINATION: addresses[1]}) as answer:
                assert answer.status == 200
        assert [len(engine.seen) for engine in engines] == [0, 4]
        await engines[1].stop()
        async with http.post(url, json=BODY, headers={DESTINATION: f"{addresses[1]},{addresses[0]}"}) as answer:
            assert answer.status == 200
        assert len(engines[0].seen) == 1
        assert await envoy.stat("cluster.engines.upstream_cx_connect_fail") == 1
        assert await envoy.stat("cluster.engines.no_such_thing") == 0
    assert envoy.process.returncode is not None
    await engines[0].stop()
