"""Strategies as configured: bindings, fallbacks, tripping, shadows, third parties."""

from importlib.metadata import EntryPoint

import numpy as np
import pytest
import structlog
from fakes.rig import Rig, desired_state, spec
from headway_scheduler.domain.desired import Binding, GpuGroup, StrategyBinding, StrategyConfig, Tenant
from headway_scheduler.errors import InvalidField, UnknownResource
from headway_scheduler.strategies import catalog
from headway_scheduler.strategies.base import Costs, Parameters
from headway_scheduler.strategies.catalog import BUILT_IN
from headway_scheduler.strategies.registry import StrategyRegistry
from headway_scheduler.strategies.stopwatch import Stopwatch


class Timer:
    """CPU time that a strategy seems to take."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Odd:
    """A third party's strategy that does as `behave` says."""

    name, classic, guards, parameters_type = "odd", False, frozenset(), Parameters
    behave = staticmethod(lambda view: view.inflight)

    def __init__(self, parameters):
        pass

    def cost(self, request, view, now):
        return Costs(type(self).behave(view))


@pytest.fixture
def odd():
    """A rig with Odd bound to everything, and with a timer of its own."""

    class Mine(Odd):
        pass

    rig = Rig()
    registry = rig.scheduler.registry
    registry.algorithms = {**registry.algorithms, "odd": Mine}
    rig.timer = Timer()
    registry.stopwatch = Stopwatch(rig.timer, rig.timer)
    rig.bind("odd", time_budget_us=1000)
    rig.endpoints(3)
    rig.odd = Mine
    return rig


def raising(_view):
    raise KeyError("a secret prompt")


class TestSafetyNet:
    def test_sound_it_decides(self, odd):
        odd.odd.behave = lambda view: np.array([2.0, 0.0, 1.0])
        decision = odd.route()
        assert odd.where(decision) == "2"
        assert (decision.why.strategy, decision.why.fell_back_from) == ("odd", "")

    @pytest.mark.parametrize(
        ("behave", "reason"),
        [
            (raising, "failed: KeyError"),
            (lambda view: np.array([np.nan, 1.0, 2.0]), "failed: ValueError"),
            (lambda view: np.zeros(2), "failed: ValueError"),
            (lambda view: [1, 2, 3], "failed: AttributeError"),
            (lambda view: None, "failed: AttributeError"),
        ],
        ids=["raises", "nan", "too_few", "a_list", "nothing"],
    )
    def test_otherwise_its_classic_stands_in(self, odd, behave, reason):
        odd.odd.behave = behave
        decision = odd.route()
        assert decision.why.strategy == "least_request"
        assert decision.why.fell_back_from == "odd"
        assert decision.why.fallback_reason == reason
        installed = odd.scheduler.registry.installed["odd"]
        assert (installed.failures, installed.decisions) == (1, 0)
        assert "secret" not in installed.last_error

    def test_a_predicted_ttft_that_is_no_number(self, odd):
        odd.odd.cost = lambda self, request, view, now: Costs(view.inflight, np.array([np.nan, 1.0, 1.0]))
        assert odd.route().why.fell_back_from == "odd"

    def test_over_its_budget_its_answer_is_discarded(self, odd):
        def slow(view):
            odd.timer.now += 0.0011
            return np.array([9.0, 9.0, 0.0])

        odd.odd.behave = slow
        decision = odd.route()
        assert odd.where(decision) == "1"
        assert decision.why.fallback_reason == "over its time budget"

    def test_within_its_budget_it_is_not(self, odd):
        def brisk(view):
            odd.timer.now += 0.0009
            return np.array([9.0, 9.0, 0.0])

        odd.odd.behave = brisk
        assert odd.where(odd.route()) == "3"

    def test_even_a_broken_classic_loses_nothing(self, odd):
        class Broken(Odd):
            name, classic = "broken", True
            behave = staticmethod(raising)

        registry = odd.scheduler.registry
        registry.algorithms = {**registry.algorithms, "broken": Broken}
        odd.bind("odd", fallback_algorithm="broken", time_budget_us=0)
        odd.odd.behave = raising
        assert [odd.where(odd.route()) for _ in range(3)] == ["1", "2", "3"]

    def test_it_trips_after_five_in_a_row_and_says_so(self, odd):
        odd.odd.behave = raising
        with structlog.testing.capture_logs() as logs:
            reasons = [odd.route().why.fallback_reason for _ in range(6)]
        assert reasons == ["failed: KeyError"] * 5 + ["tripped"]
        assert [entry["event"] for entry in logs] == ["strategy_tripped"]
        assert "secret" not in str(logs)

    def test_it_recovers(self, odd):
        odd.odd.behave = raising
        for _ in range(5):
            odd.route()
        odd.odd.behave = lambda view: view.inflight
        assert odd.route().why.fallback_reason == "tripped"
        odd.clock.now += 30
        assert odd.route().why.fell_back_from == ""
        odd.odd.behave = raising
        assert [odd.route().why.fallback_reason for _ in range(5)] == ["failed: KeyError"] * 5

    def test_still_broken_it_trips_again_at_once(self, odd):
        odd.odd.behave = raising
        for _ in range(5):
            odd.route()
        odd.clock.now += 30
        assert [odd.route().why.fallback_reason for _ in range(2)] == ["failed: KeyError", "tripped"]

    def test_a_success_in_between_starts_the_count_anew(self, odd):
        for _ in range(4):
            odd.odd.behave = raising
            for _ in range(4):
                assert odd.route().why.fallback_reason == "failed: KeyError"
            odd.odd.behave = lambda view: view.inflight
            assert odd.route().why.fell_back_from == ""


class TestSwap:
    def test_the_next_route_uses_it(self):
        rig = Rig(desired_state("round_robin"))
        rig.endpoints(2)
        before = rig.route()
        rig.bind("random")
        assert rig.route().why.strategy == "random"
        assert rig.ledger.find(before.reservation_id), "nothing in flight is lost"

    def test_disabled_its_classic_stands_in_and_enabled_it_is_back(self):
        rig = Rig(desired_state("adaptive"))
        rig.endpoints(2)
        rig.bind("adaptive", enabled=False, fallback_algorithm="round_robin")
        decision = rig.route()
        assert (decision.why.strategy, decision.why.fell_back_from) == ("round_robin", "adaptive")
        assert decision.why.fallback_reason == "disabled"
        rig.bind("adaptive", enabled=True)
        assert rig.route().why.strategy == "adaptive"

    def test_parameters_are_taken_over(self):
        rig = Rig(desired_state("prefix_match"))
        rig.endpoints(2)
        rig.bind("prefix_match", parameters={"imbalance": 0})
        text = "the same prompt " * 40
        assert {rig.where(rig.route(text=text)) for _ in range(4)} == {"1", "2"}

    def test_nothing_bound_is_round_robin(self):
        rig = Rig(desired_state(strategy_bindings=()))
        rig.endpoints(2)
        assert [rig.where(rig.route()) for _ in range(4)] == ["1", "2", "1", "2"]

    def test_what_cannot_be_built_stays_as_it_was(self):
        rig = Rig(desired_state("adaptive"))
        rig.endpoints(2)
        with structlog.testing.capture_logs() as logs:
            rig.bind("adaptive", algorithm="not_here")
        assert [entry["event"] for entry in logs] == ["strategy_not_built"]
        assert rig.route().why.strategy == "adaptive"


class TestBindings:
    def test_the_most_specific_wins(self):
        order = [
            StrategyBinding("default", "round_robin"),
            StrategyBinding("model", "random", model="m"),
            StrategyBinding("group", "least_request", group="gold"),
            StrategyBinding("tenant", "gpu_aware", tenant="a"),
            StrategyBinding("both", "adaptive", tenant="a", model="m"),
        ]
        for count in range(1, len(order) + 1):
            for bindings in (order[:count], list(reversed(order[:count]))):
                rig = Rig(
                    desired_state(
                        tenants=[Tenant("a")],
                        groups=[GpuGroup("gold", all=True)],
                        bindings=[Binding("a", "gold")],
                        strategy_bindings=tuple(bindings),
                    )
                )
                rig.endpoints(2)
                assert rig.route(tenant="a").why.strategy == order[count - 1].strategy

    def test_others_are_not_touched(self):
        rig = Rig(desired_state("round_robin", tenants=[Tenant("a")], bindings=[Binding("a", "all")]))
        rig.endpoints(2)
        binding = StrategyBinding("t", "random", tenant="a")
        rig.desire(strategy_bindings=(*rig.store.desired.strategy_bindings, binding))
        assert rig.route(tenant="a").why.strategy == "random"
        assert rig.route().why.strategy == "round_robin"

    def test_of_two_groups_the_tenants_first_counts(self):
        bindings = (StrategyBinding("x", "random", group="g1"), StrategyBinding("y", "adaptive", group="g2"))
        rig = Rig(
            desired_state(
                tenants=[Tenant("a")],
                groups=[GpuGroup("g1", all=True), GpuGroup("g2", all=True)],
                bindings=[Binding("a", "g1", order=2), Binding("a", "g2", order=1)],
                strategy_bindings=bindings,
            )
        )
        rig.endpoints(2)
        assert rig.route(tenant="a").why.strategy == "adaptive"


class TestShadows:
    def test_it_prices_and_nobody_obeys(self):
        shadow = StrategyBinding("s", "round_robin", shadow=True)
        rig = Rig(desired_state("least_request"))
        rig.desire(strategy_bindings=(*rig.store.desired.strategy_bindings, shadow))
        rig.endpoints(2)
        decisions = [rig.route() for _ in range(4)]
        assert {d.why.strategy for d in decisions} == {"least_request"}
        watched = rig.scheduler.registry.installed["round_robin"]
        assert (watched.shadow_decisions, watched.shadow_agreed) == (4, 4)

    def test_what_it_predicts_is_set_beside_what_was_done(self):
        shadow = StrategyBinding("s", "adaptive", shadow=True)
        rig = Rig(desired_state("round_robin"))
        rig.desire(strategy_bindings=(*rig.store.desired.strategy_bindings, shadow))
        rig.endpoints(2)
        for _ in range(2):
            rig.finish(rig.route(text="the same words again and again " * 200))
        watched = rig.scheduler.registry.installed["adaptive"]
        assert (watched.shadow_decisions, watched.shadow_predicted, watched.shadow_agreed) == (2, 2, 1)
        assert 0 < watched.shadow_ttft_ms < watched.shadow_taken_ttft_ms, "round robin went where nothing was cached"

    def test_a_broken_one_harms_nothing(self, odd):
        odd.odd.behave = raising
        odd.desire(strategy_bindings=(StrategyBinding("default", "random"), StrategyBinding("s", "odd", shadow=True)))
        assert [odd.route().why.strategy for _ in range(9)] == ["random"] * 9
        assert odd.scheduler.registry.installed["odd"].shadow_decisions == 0


class TestConfiguration:
    registry = StrategyRegistry({each.name: each for each in BUILT_IN}, Timer())

    @pytest.mark.parametrize(
        ("config", "field"),
        [
            ({"algorithm": "nope"}, "strategy.algorithm"),
            ({"fallback_algorithm": "nope"}, "strategy.fallback_algorithm"),
            ({"fallback_algorithm": "adaptive"}, "strategy.fallback_algorithm"),
            ({"parameters": {"externality": -1}}, "strategy.parameters.externality"),
            ({"parameters": {"externality": "much"}}, "strategy.parameters.externality"),
            ({"parameters": {"externality": float("nan")}}, "strategy.parameters.externality"),
            ({"parameters": {"unheard": 1}}, "strategy.parameters.unheard"),
        ],
    )
    def test_what_is_wrong_is_named(self, config, field):
        with pytest.raises(InvalidField) as caught:
            self.registry.check(StrategyConfig("s", **({"algorithm": "adaptive"} | config)))
        assert caught.value.field == field

    def test_an_unknown_strategy(self):
        with pytest.raises(UnknownResource) as caught:
            self.registry.get("nope", "strategy")
        assert caught.value.facts["field"] == "strategy"

    def test_one_that_cannot_be_made_names_its_algorithm(self):
        class Unmade(Odd):
            def __init__(self, parameters):
                raise RuntimeError

        registry = StrategyRegistry({**self.registry.algorithms, "odd": Unmade}, Timer())
        with pytest.raises(InvalidField, match="RuntimeError"):
            registry.check(StrategyConfig("s", "odd"))


class TestThirdParties:
    def test_entry_points(self, monkeypatch):
        entry = EntryPoint("odd", f"{__name__}:Odd", catalog.ENTRY_POINTS)
        monkeypatch.setattr(EntryPoint, "load", lambda self: Odd)
        monkeypatch.setattr(catalog, "entry_points", lambda group: [entry])
        assert catalog.algorithms()["odd"] is Odd

    def test_a_built_in_cannot_be_replaced(self, monkeypatch):
        entry = EntryPoint("adaptive", "nowhere:Odd", catalog.ENTRY_POINTS)
        monkeypatch.setattr(EntryPoint, "load", lambda self: Odd)
        monkeypatch.setattr(catalog, "entry_points", lambda group: [entry])
        assert catalog.algorithms()["adaptive"] is not Odd

    def test_a_broken_one_is_left_out(self, monkeypatch):
        entry = EntryPoint("odd", "no_such_module:Odd", catalog.ENTRY_POINTS)
        monkeypatch.setattr(catalog, "entry_points", lambda group: [entry])
        with structlog.testing.capture_logs() as logs:
            assert set(catalog.algorithms()) == {each.name for each in BUILT_IN}
        assert logs[0]["event"] == "strategy_not_loaded"

    def test_all_eight_are_there(self):
        assert len(BUILT_IN) == 8
        assert spec(1).id == "10.0.0.1:8000@0"
