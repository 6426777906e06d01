"""A request's own decision, from the data plane to the console's page."""

from fakes.console import operated, words_of
from fakes.scheduler import endpoint, finished, refused
from headway.routing.v1 import routing_pb2 as pb


async def test_a_request_is_found_explained_with_what_came_of_it(database_url):
    async with operated(database_url) as (served, browser):
        await served.agent("gpu-1")
        await served.bind("adaptive")
        first = await served.route("first", text="the same words again and again " * 200)
        await served.finish(first)
        answer = await served.route("mine", text="the same words again and again " * 200)
        words = words_of((await browser.get("/console/traffic/mine")).page)
        assert "Outcome in flight" in words
        usage = pb.Usage(prompt_tokens=1500, completion_tokens=12, cached_tokens=1400)
        await served.report(finished(answer.reservation_id, ttft_ms=87.0, duration_ms=950.0, usage=usage))
        page = (await browser.get("/console/traffic")).page
        assert 'href="/console/traffic/mine"' in page
        page = (await browser.get("/console/traffic/mine")).page
        words = words_of(page)
        assert "adaptive chose 10.0.0.1:8000@0 of 2 candidates" in words
        assert "TTFT actual 87 ms" in words
        assert "Outcome success" in words
        assert "Answered 12 tokens" in words
        assert words.count("10.0.0.2:8000@0") == 1
        assert "again and again" not in page, "no prompt is shown"
        assert words_of((await browser.get(f"/console/traffic/{answer.reservation_id}")).page) == words


async def test_a_refusal_is_there_with_its_reason(database_url):
    async with operated(database_url) as (served, browser):
        await served.agent("gpu-1", endpoint(1, ready=False))
        await refused(served.route("lost", max_wait={"seconds": 0}))
        words = words_of((await browser.get("/console/traffic/lost")).page)
        assert "Refused: ALL_UNHEALTHY" in words
        assert "lost" in (await browser.get("/console/traffic")).page


async def test_one_tenants_traffic_alone(database_url):
    async with operated(database_url) as (served, browser):
        await served.agent("gpu-1")
        await served.finish(await served.route("a-request"))
        assert "a-request" in (await browser.get("/console/traffic?tenant=default&model=m")).page
        page = (await browser.get("/console/traffic?tenant=nobody")).page
        assert "a-request" not in page
        assert "No decision of these is in the record" in page
