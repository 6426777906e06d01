"""The live view, as frames."""

import io
import re

from fakes.headway import Headway
from fakes.postgres import connect
from headway.fleet.v1 import fleet_pb2
from headway_cli.errors import Unreachable
from headway_cli.top import Look, frame, watch
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
        assert len(text.splitlines()) <= height
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


class Eye:
    """Looks at what a test says, one after the other."""

    def __init__(self, *looks):
        self.looks = list(looks)

    def look(self):
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def test_on_a_terminal_it_redraws_in_place_and_outlives_the_scheduler():
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, height=12, color_system=None)
    looks = [Look(1.0, status(routes=1)), Unreachable("no scheduler answers at a:1"), Look(3.0, status(routes=5))]
    watch(Eye(*looks), screen, 0.0, 3)
    drawn = screen.file.getvalue()
    assert drawn.index("routes 1 ") < drawn.index("trying again") < drawn.index("routes 2.0/s")
    assert "\x1b[?1049h" in drawn, "on a screen of its own"
    assert drawn.rindex("\x1b[?1049l") > drawn.index("routes 2.0/s"), "which it leaves behind as it was"


def test_each_frame_fits_the_size_of_its_moment():
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, height=40, color_system=None)
    look = Look(1.0, status(endpoints=60), tuple(endpoint(n, n) for n in range(60)))

    class Resizing(Eye):
        def look(self):
            screen.height = 40 if len(self.looks) == 2 else 14
            return super().look()

    watch(Resizing(look, look), screen, 0.0, 2)
    left = [int(number) for number in re.findall(r"and (\d+) more", screen.file.getvalue())]
    assert left == [28, 54]
