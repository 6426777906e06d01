"""The parts that decide, connected without event loop and store."""

from headway_scheduler.core import Core, CoreConfig
from headway_scheduler.domain.decision import Decision
from headway_scheduler.domain.desired import Binding, DesiredState, GpuGroup, Tenant
from headway_scheduler.domain.endpoint import EndpointSpec
from headway_scheduler.domain.measurement import Measurement
from headway_scheduler.domain.request import Request
from headway_scheduler.domain.telemetry import Hello
from headway_scheduler.fleet.ledger import EndCause
from headway_scheduler.fleet.values import Owner
from headway_scheduler.strategies.catalog import algorithms

SPEC = EndpointSpec("10.0.0.1:8000", models=("m",), kv_capacity_tokens=Measurement(1000.0), hardware="h100-8b")


class World:
    """A core on a clock of its own."""

    def __init__(self):
        self.now = 0.0
        self.core = Core(
            CoreConfig(name="s", epoch="e", seed=1),
            algorithms=algorithms(),
            clock=lambda: self.now,
            timer=lambda: 0.0,
            record_usage=lambda tenant, model, usage: None,
        )
        self.tenant = Tenant("t")
        self.core.set_desired(
            DesiredState(
                tenants={"t": self.tenant},
                groups={"all": GpuGroup("all", all=True)},
                bindings=(Binding("t", "all"),),
            )
        )

    def route(self, request_id="r"):
        request = Request(request_id, "t", self.tenant.domain, "m", prompt_tokens=10)
        return self.core.dispatcher.submit(request, self.tenant, Owner("p", stream=True), self.now)


def test_what_agents_announce_can_be_chosen_and_is_discovered():
    world, told = World(), []
    world.core.on_discovered = lambda: told.append(list(world.core.discovered))
    world.core.fleet.connect(Hello("n", "i", endpoints=(SPEC,)), 0.0)
    assert told == [["m"]]
    assert world.core.intake.model(world.tenant, "m") == "m"
    decision = world.route()
    assert isinstance(decision, Decision)
    assert decision.endpoint.spec is SPEC
    assert world.core.fleet.columns.base_ms[0] == 5.6


def test_reservations_end_with_their_endpoint():
    world, ended = World(), []
    world.core.ledger.on_end.append(lambda reservation, cause, now: ended.append(cause))
    node = world.core.fleet.connect(Hello("n", "i", endpoints=(SPEC,)), 0.0)
    world.route()
    world.core.fleet.remove_endpoint(SPEC.id)
    assert ended == [EndCause.ENDPOINT_GONE]
    assert node.endpoints == {}


def test_a_tick_sweeps_the_fleet_now_and_then():
    world = World()
    nodes = [
        world.core.fleet.connect(Hello(name, "i", endpoints=(EndpointSpec(f"{name}:1", models=("m",)),)), 0.0)
        for name in ("a", "b", "c")
    ]
    world.core.tick(0.0)
    nodes[0].heard_at = -10.0
    world.core.tick(0.1)
    assert not nodes[0].stale
    world.core.tick(0.3)
    assert nodes[0].stale
