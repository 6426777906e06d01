"""A drain that is waited for ends when somebody who knows says that nothing is in flight."""

from types import SimpleNamespace

import pytest
from headway.admin.v1 import admin_pb2 as pb
from headway_cli import live
from headway_cli.errors import NotInTime, Unreachable


class Scene:
    """What the scheduler says at each poll: who leads, and what it counts; None: it is away."""

    def __init__(self, *polls):
        self.polls, self.now = list(polls), 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if len(self.polls) > 1:
            self.polls.pop(0)

    def leader(self):
        if self.polls[0] is None:
            raise Unreachable("nobody answers")
        return self.polls[0][0]

    def read(self):
        inflight = self.polls[0][1]
        return SimpleNamespace(inflight=inflight) if isinstance(inflight, int) else inflight


@pytest.fixture
def wait(monkeypatch):
    def wait(*polls, limit_s=60.0):
        scene = Scene(*polls)
        monkeypatch.setattr(live, "time", scene)
        live._wait_empty("nodes/n", scene.read, scene.leader, limit_s)
        return scene.now

    return wait


def test_who_leads_all_along_is_believed_at_once(wait):
    assert wait(("a.1", 0)) == 0.0
    assert wait(("a.1", 2), ("a.1", 1), ("a.1", 0)) == 1.0


def test_a_standby_is_not_believed(wait, capsys):
    with pytest.raises(NotInTime, match="does not lead"):
        wait(("", 0))
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("between", [None, ("", 0)])
def test_who_leads_anew_is_believed_when_data_planes_had_time_to_come_back(wait, between):
    assert wait(("a.1", 1), between, ("b.2", 0)) >= 10.0
    assert wait(("a.1", 1), ("a.2", 0)) >= 10.0
    with pytest.raises(NotInTime):
        wait(("a.1", 1), between, ("b.2", 0), ("b.2", 1))


def test_what_no_agent_has_spoken_of_yet_is_not_empty_at_once(wait):
    assert wait(("a.1", pb.Node(name="nodes/n"))) >= 10.0
    assert wait(("a.1", pb.Endpoint(name="endpoints/e"))) >= 10.0
    assert wait(("a.1", pb.Node(name="nodes/n", endpoints=2))) == 0.0
    assert wait(("a.1", pb.Endpoint(name="endpoints/e", node="nodes/n"))) == 0.0
