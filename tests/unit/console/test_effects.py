"""What a change did: the decisions before it are kept when it happens."""

from dataclasses import replace

import msgspec
import pytest
from fakes.console import Log, decision
from fakes.rig import Clock, desired_state
from headway_console.decisions import NO_RECORD, summary_of
from headway_console.effects import Effects
from headway_scheduler.domain.desired import StrategyBinding


class Admins:
    """Change the desired state."""

    def __init__(self):
        self.desired = desired_state("adaptive")

    def __call__(self):
        return self.desired

    def tune(self, **parameters):
        before = self.desired.strategies["adaptive"]
        after = replace(before, parameters={**before.parameters, **parameters}, revision=before.revision + 1)
        self.desired = replace(self.desired, strategies={**self.desired.strategies, "adaptive": after})


def rows(*times, ttft):
    return [decision(n, time, actual_ttft_ms=ttft, predicted_ttft_ms=ttft) for n, time in enumerate(times)]


def test_before_is_kept_and_since_grows():
    admins, clock, log = Admins(), Clock(100.0), Log(rows(99, 98, 97, ttft=80.0))
    effects = Effects(admins, log, clock)
    assert effects.of("adaptive") == []
    admins.tune(window_ms=100.0)
    ((change, since),) = effects.of("adaptive")
    assert (change.what, change.revision) == ("tuned: window_ms", 2)
    assert (change.before.actual_p50, change.before.count, since.count) == (80.0, 3, 0)
    log.rows = rows(102, 101, ttft=40.0)
    ((change, since),) = effects.of("adaptive")
    assert (change.before.actual_p50, since.actual_p50, since.count) == (80.0, 40.0, 2)


def test_each_change_is_judged_by_what_came_before_the_next():
    admins, clock, log = Admins(), Clock(100.0), Log()
    effects = Effects(admins, log, clock)
    admins.tune(window_ms=100.0)
    effects.look()
    clock.now = 200.0
    admins.tune(window_ms=50.0)
    effects.look()
    log.rows = rows(250, 210, 150, ttft=10.0)
    assert [since.count for _, since in effects.of("adaptive")] == [2, 1]


def test_switches_and_bindings_count_and_nothing_else_does():
    admins, clock = Admins(), Clock(100.0)
    effects = Effects(admins, NO_RECORD, clock)
    before = admins.desired.strategies["adaptive"]
    changed = {**admins.desired.strategies, "adaptive": replace(before, enabled=False, revision=2)}
    admins.desired = replace(admins.desired, strategies=changed)
    effects.look()
    shadow = StrategyBinding("try", "random", shadow=True)
    admins.desired = replace(admins.desired, strategy_bindings=(*admins.desired.strategy_bindings, shadow))
    effects.look()
    admins.desired = replace(admins.desired, version=99)
    assert [change.what for change, _ in effects.of("adaptive")] == ["disabled"]
    assert [change.what for change, _ in effects.of("random")] == ["bound by try in shadow"]


def test_a_summary_of_nothing_knows_nothing():
    nothing = summary_of([])
    assert (nothing.count, nothing.actual_p50, nothing.hit_ratio, nothing.error_p50) == (0, None, None, None)


def test_a_summary_counts_what_was_refused_apart():
    some = [*rows(1, 2, ttft=100.0), decision(9, 3, refused=True, outcome="SATURATED", actual_ttft_ms=None)]
    summary = summary_of([msgspec.structs.replace(each, predicted_ttft_ms=90.0) for each in some])
    assert (summary.count, summary.refused, summary.measured) == (2, 1, 2)
    assert summary.error_p50 == pytest.approx(0.1)
    assert summary.hit_ratio == pytest.approx(0.75)
