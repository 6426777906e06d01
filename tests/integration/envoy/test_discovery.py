"""The discovery service, told by a scripted Envoy; the real one is in test_configurations.py."""

import contextlib
import hashlib

import grpc
import pytest
from fakes.ads import CLUSTERS, ENDPOINTS, AdsClient
from fakes.scheduler import endpoint, refused, serving
from fakes.waiting import eventually
from headway.telemetry.v1 import telemetry_pb2 as tpb
from headway_scheduler.domain.desired import Binding, BindingMode, Credential, GpuGroup, Role, Tenant
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.store.base import Write

HEALTHY, DRAINING, UNHEALTHY = ("HEALTHY", 0), ("DRAINING", 0), ("UNHEALTHY", 0)
E1, E2, E3 = (f"10.0.0.{n}:8000" for n in (1, 2, 3))


@pytest.fixture
async def served(database_url):
    async with serving(database_url) as found:
        yield found


@pytest.fixture
async def connect(served):
    """Makes scripted Envoys that ask for all clusters."""
    async with contextlib.AsyncExitStack() as closers:

        async def make(*names, **how):
            envoy = AdsClient(served.channel, **how)
            closers.push_async_callback(envoy.leave)
            await envoy.ask(CLUSTERS)
            if names:
                await envoy.until(lambda: envoy.clusters)
                await envoy.ask(ENDPOINTS, names)
                await envoy.until(lambda: set(names) <= set(envoy.assignments))
            return envoy

        yield make


async def create(served, *resources):
    """What admins do."""
    for resource in resources:
        await served.store.create(resource, Write(principal="test", method="Create"))
    await served.scheduler.refresh()


def digest(token):
    return hashlib.sha256(token.encode()).digest()


async def set_state(served, name, state):
    await served.store.set_endpoint_state(name, state, Write(principal="test", method="Set"))
    await served.scheduler.refresh()


async def test_clusters_are_by_model_and_by_tenant(served, connect):
    await served.agent("n", endpoint(1, models=("m", "big/model")), endpoint(2))
    envoy = await connect("models/m", "models/big/model", "tenants/default", "tenants/default/models/m")
    assert sorted(envoy.clusters) == sorted(
        ["models/m", "models/big/model", "tenants/default", "tenants/default/models/m",
         "tenants/default/models/big/model"]
    )  # fmt: skip
    both = {E1: HEALTHY, E2: HEALTHY}
    assert envoy.holds("models/m") == envoy.holds("tenants/default") == envoy.holds("tenants/default/models/m") == both
    assert envoy.holds("models/big/model") == {E1: HEALTHY}


async def test_it_follows_the_fleet_and_sends_what_changed_alone(served, connect):
    agent = await served.agent("n", endpoint(1), endpoint(2, models=("other",)))
    envoy = await connect("models/m", "models/other")
    before = len(envoy.answers)
    await agent.hello(endpoint(1), endpoint(3), endpoint(2, models=("other",)))
    await envoy.until(lambda: envoy.holds("models/m") == {E1: HEALTHY, E3: HEALTHY})
    assert envoy.told(ENDPOINTS, before) == [1]
    assert envoy.told(CLUSTERS, before) == []

    await set_state(served, f"{E1}@0", SchedulingState.CORDONED)
    await envoy.until(lambda: envoy.holds("models/m") == {E1: DRAINING, E3: HEALTHY})
    await agent.sample(tpb.EngineSample(address=E3, ready=False))
    await envoy.until(lambda: envoy.holds("models/m") == {E1: DRAINING, E3: UNHEALTHY})
    await agent.hello(endpoint(2, models=("other",)))
    await envoy.until(lambda: envoy.holds("models/m") == {})
    assert "models/m" in envoy.clusters, "a model of the catalogue keeps its cluster"
    assert set(envoy.told(ENDPOINTS, before)) == {1}


async def test_a_new_model_makes_a_cluster(served, connect):
    agent = await served.agent("n", endpoint(1))
    envoy = await connect("models/m")
    await agent.hello(endpoint(1), endpoint(2, models=("new",)))
    await envoy.until(lambda: "models/new" in envoy.clusters)
    await envoy.ask(ENDPOINTS, ["models/m", "models/new"])
    await envoy.until(lambda: envoy.holds("models/new") == {E2: HEALTHY})
    assert envoy.told(ENDPOINTS)[-1] == 1, "what it has is not sent again"


async def test_what_nobody_knows_is_empty(connect):
    envoy = await connect("models/nonsense")
    assert envoy.holds("models/nonsense") == {}


async def test_a_tenant_has_its_groups_alone_and_bursts_last(served, connect):
    await served.agent("n", endpoint(1, labels={"tier": "gold"}), endpoint(2, labels={"tier": "spare"}), endpoint(3))
    modes = {"gold": BindingMode.DEDICATED, "spare": BindingMode.BURST}
    await create(served, Tenant("acme"), *[GpuGroup(tier, selector={"tier": tier}) for tier in modes])
    await create(served, *[Binding("acme", tier, mode) for tier, mode in modes.items()])
    envoy = await connect("tenants/acme", "tenants/acme/models/m", "tenants/default/models/m")
    mine = {E1: HEALTHY, E2: ("HEALTHY", 1)}
    await envoy.until(lambda: envoy.holds("tenants/acme/models/m") == envoy.holds("tenants/acme") == mine)
    await envoy.until(lambda: envoy.holds("tenants/default/models/m") == {E2: HEALTHY, E3: HEALTHY})


async def test_groups_of_a_later_order_are_a_lower_priority(served, connect):
    await served.agent("n", *(endpoint(number, labels={"tier": f"t{number}"}) for number in (1, 2)))
    await create(served, Tenant("acme"), *[GpuGroup(f"t{n}", selector={"tier": f"t{n}"}) for n in (1, 2)])
    await create(served, Binding("acme", "t1", order=2), Binding("acme", "t2", order=1))
    envoy = await connect("tenants/acme/models/m")
    await envoy.until(lambda: envoy.holds("tenants/acme/models/m") == {E2: HEALTHY, E1: ("HEALTHY", 1)})


async def test_a_credential_sees_its_tenants_alone_and_agents_nothing(served, connect):
    await served.agent("n", endpoint(1))
    await create(
        served,
        Credential("scoped", Role.ROUTER, digest("scoped-token"), tenants=("default",)),
        Credential("agent", Role.AGENT, digest("agent-token"), node="n"),
    )
    envoy = await connect("models/m", "tenants/default/models/m", token="scoped-token")
    assert envoy.clusters == ["tenants/default", "tenants/default/models/m"]
    assert envoy.holds("models/m") == {}
    assert envoy.holds("tenants/default/models/m") == {E1: HEALTHY}
    for token in ("agent-token", "unknown-token"):
        stranger = AdsClient(served.channel, token=token)
        refusal = await refused(stranger.reader)
        assert refusal.code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


async def test_an_envoy_may_ask_for_less(served, connect):
    await served.agent("n", endpoint(1))
    envoy = await connect("tenants/default", tenants=("default",))
    assert envoy.clusters == ["tenants/default", "tenants/default/models/m"]
    nobody = await connect(tenants=("other",))
    await nobody.until(lambda: nobody.answers)
    assert nobody.clusters == []


async def test_a_rejection_is_counted_the_last_good_stays_and_the_others_are_sent_alone(served, connect):
    agent = await served.agent("n", endpoint(1, models=("m", "o")))
    envoy = await connect("models/m", "models/o")
    envoy.rejects = {"models/m"}
    await agent.hello(endpoint(1, models=("m", "o")), endpoint(2, models=("m", "o")))
    await envoy.until(lambda: envoy.holds("models/o") == {E1: HEALTHY, E2: HEALTHY})
    await eventually(lambda: served.scheduler.discovery.rejections == 2)
    assert envoy.holds("models/m") == {E1: HEALTHY}
    envoy.rejects = set()
    await agent.hello(endpoint(1, models=("m", "o")), endpoint(3, models=("m", "o")))
    await envoy.until(lambda: envoy.holds("models/m") == {E1: HEALTHY, E3: HEALTHY})
    assert served.scheduler.discovery.rejections == 2, "what was rejected is not sent again unchanged"


async def test_a_started_scheduler_says_nothing_until_it_has_settled(database_url):
    async with serving(database_url, settle_s=1.0) as served:
        envoy = AdsClient(served.channel)
        await envoy.ask(CLUSTERS)
        await eventually(lambda: served.scheduler.discovery.streams == 1)
        assert served.scheduler.discovery.answers == 0
        await served.agent("n", endpoint(1))
        await envoy.until(lambda: envoy.clusters)
        assert served.scheduler.clock() >= served.scheduler.dispatcher.settled_at
        await envoy.leave()
        await eventually(lambda: served.scheduler.discovery.streams == 0)


async def test_a_draining_scheduler_takes_nothing_away(served, connect):
    agent = await served.agent("n", endpoint(1))
    envoy = await connect("models/m")
    served.scheduler.drain()
    await agent.hello(endpoint(2))
    late = AdsClient(served.channel, node="late")
    await late.ask(CLUSTERS)
    await late.until(lambda: late.clusters)
    assert envoy.holds("models/m") == {E1: HEALTHY}
    await late.leave()


async def test_weights_are_how_fast_engines_prefill(served, connect):
    await served.agent(
        "n", endpoint(1, hardware="a100-40g-8b"), endpoint(2, hardware="h100-8b"),
        *[endpoint(3, hardware="a100-40g-8b", dp_rank=rank) for rank in (0, 1)],
    )  # fmt: skip
    envoy = await connect("models/m")
    weights = envoy.weights("models/m")
    assert weights["10.0.0.3"] == 2 * weights["10.0.0.1"], "two ranks behind one address"
    assert 2 <= weights["10.0.0.2"] / weights["10.0.0.1"] <= 4.3


async def test_host_names_are_resolved(served, connect):
    named = endpoint(1)
    named.address = "localhost:8000"
    unknown = endpoint(2)
    unknown.address = "no-such-host.invalid:8000"
    await served.agent("n", named, unknown)
    envoy = await connect("models/m")
    await envoy.until(lambda: len(envoy.holds("models/m")) == 1)
    assert set(envoy.holds("models/m")) <= {"127.0.0.1:8000", "::1:8000"}
