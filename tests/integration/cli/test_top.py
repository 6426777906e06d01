"""The live view, as frames."""

import io
import re

from fakes.headway import Headway
from fakes.postgres import connect
from headway.fleet.v1 import fleet_pb2
from headway_cli.top import Look, frame
from rich.console import Console


def shown(renderable, width=100, height=24):
    screen = Console(file=io.StringIO(), width=width, height=height)
    screen.print(renderable)
    return screen.file.getvalue()


def endpoint(number, inflight):
    return fleet_pb2.EndpointState(
        name=f"endpoints/10.0.0.{number}:8000@0", node="nodes/n", models=["m"], healthy=True, inflight=inflight
    )


def status(**fields):
    return fleet_pb2.GetStatusResponse(scheduler="s1", version="0.1.0", store_available=True, **fields)


def test_one_frame_for_scripts(headway, scheduler, fleet):
    headway.run("route", "--model", "llama", "--text", "Why?")
    frame_ = headway.text("top", "--once")
    assert "nodes 1   endpoints 2/2 healthy   in flight 1   reserved 1   held 0" in frame_
    assert "routes 1 " in frame_
    assert "refusals: none" in frame_
    rows = [line for line in frame_.splitlines() if line.startswith("10.0.0.7")]
    assert [row.split()[3] for row in rows] == ["1", "0"], "the busiest first"


def test_a_pipe_gets_frame_after_frame_with_rates(headway, fleet):
    headway.run("route", "--model", "nobody", code=1)
    frames = headway.text("top", "--interval", "0.2", "--count", "2")
    assert frames.count("nodes 1") == 2
    assert re.search(r"routes 0\.0/s", frames)
    assert "UNKNOWN_MODEL 1" in frames


def test_an_empty_fleet_says_what_to_do(headway, scheduler):
    assert "no endpoints: headway doctor says why" in headway.text("top", "--once")


def test_tenants_are_shown_by_their_usage(headway, scheduler, database_url, fleet):
    with connect(database_url) as connection:
        connection.execute(
            "INSERT INTO usage (tenant, model, minute, requests, prompt_tokens, cached_tokens, completion_tokens)"
            " VALUES ('acme', 'llama', date_trunc('minute', now()), 3, 100, 0, 20)"
        )
    frame_ = headway.text("top", "--once")
    assert re.search(r"^acme +3 +120 +0$", frame_, re.MULTILINE), frame_


def test_nobody_answers():
    assert "no scheduler answers" in Headway("127.0.0.1:1").error("top", "--once", code=3)


def test_it_fits_a_small_terminal_and_says_what_is_left_out():
    look = Look(1.0, status(endpoints=50), tuple(endpoint(n, n) for n in range(50)))
    for height in (12, 24, 60):
        text = shown(frame(look, None, height), height=height)
        assert len(text.splitlines()) <= height + 3
        assert ("more, less busy" in text) == (height < 60)
        assert "10.0.0.49:8000@0" in text


def test_rates_and_ttft_are_those_between_two_looks():
    before = Look(10.0, status(routes=100, first_tokens=10, ttft_ms_sum=1000, predicted_ttft_ms_sum=500))
    fields = {"routes": 150, "first_tokens": 20, "ttft_ms_sum": 1800, "predicted_ttft_ms_sum": 1100}
    after = Look(15.0, status(refusals={"SATURATED": 3}, bypassed=["*"], **fields))
    text = shown(frame(after, before, 24))
    assert "routes 10.0/s   TTFT 80 ms, predicted 60 ms" in text
    assert "SATURATED 3 (+3)" in text
    assert "BYPASSED: everybody" in text
    restarted = Look(20.0, status(routes=1))
    assert "routes 1 " in shown(frame(restarted, after, 24))


def test_tenants_come_busiest_first_and_no_more_than_fit():
    tenants = tuple((f"t{n}", 10 - n, 100, n) for n in range(9))
    text = shown(frame(Look(1.0, status(), (), tenants), None, 24))
    assert re.findall(r"^t(\d)", text, re.MULTILINE) == ["0", "1", "2", "3", "4"]
