"""Nodes, endpoints, guards and groups."""

from dataclasses import replace

import numpy as np
import pytest
from fakes.rig import Rig, desired_state, device_sample, engine_sample, gpu, spec
from headway_scheduler.domain.desired import Binding, BindingMode, DesiredState, GpuGroup, Model, Split, Tenant
from headway_scheduler.domain.device import DeviceEvent, DeviceEventKind, DeviceKind, DeviceSample
from headway_scheduler.domain.endpoint import EngineRole, SchedulingState
from headway_scheduler.domain.measurement import UNKNOWN, Measurement, MissingReason
from headway_scheduler.errors import DuplicateNode
from headway_scheduler.fleet.columns import Columns
from hypothesis import given
from hypothesis import strategies as st


def slots_of(rig, tenant):
    return [sorted(slots.tolist()) for slots in rig.fleet.candidates(tenant, "m", "")]


def guards(rig, number=1):
    return rig.fleet.hard_guards(rig.fleet.endpoints[f"10.0.0.{number}:8000@0"])


class TestHello:
    def test_announces_endpoints(self):
        rig = Rig()
        rig.connect("n", spec(1), spec(2))
        assert sorted(rig.fleet.endpoints) == ["10.0.0.1:8000@0", "10.0.0.2:8000@0"]
        assert len(rig.fleet.pool("m")) == 2

    def test_is_the_full_state(self):
        rig = Rig()
        rig.connect("n", spec(1), spec(2))
        rig.connect("n", spec(2), spec(3))
        assert sorted(rig.fleet.endpoints) == ["10.0.0.2:8000@0", "10.0.0.3:8000@0"]

    def test_a_second_agent_of_that_name_is_refused(self):
        rig = Rig()
        rig.connect("n", spec(1))
        with pytest.raises(DuplicateNode):
            rig.connect("n", spec(2), instance="i2")
        assert list(rig.fleet.endpoints) == ["10.0.0.1:8000@0"]

    def test_takes_over_from_an_agent_that_fell_silent_or_left(self):
        rig = Rig()
        node = rig.connect("n", spec(1))
        rig.clock.now += 5.1
        assert rig.connect("n", spec(1), instance="i2") is node
        rig.fleet.disconnect(node, node.connection)
        rig.connect("n", spec(1), instance="i3")
        assert node.hello.instance_id == "i3"

    def test_the_end_of_an_older_stream_does_not_disconnect_the_newer(self):
        rig = Rig()
        node = rig.connect("n", spec(1))
        first = node.connection
        rig.connect("n", spec(1))
        rig.fleet.disconnect(node, first)
        assert node.connected
        rig.fleet.disconnect(node, node.connection)
        assert not node.connected

    def test_again_unchanged_it_changes_nothing(self):
        rig = Rig()
        rig.connect("n", spec(1))
        slot = rig.slot(1)
        before = rig.columns.kv_capacity[slot]
        assert before > 0, "the prior's, since the engine does not say"
        rig.connect("n", spec(1))
        assert rig.slot(1) == slot
        assert rig.columns.kv_capacity[slot] == before

    def test_an_address_that_moved_to_another_host(self):
        rig = Rig()
        rig.connect("n1", spec(1))
        rig.connect("n2", spec(1))
        assert rig.fleet.endpoints["10.0.0.1:8000@0"].node.id == "n2"
        assert not rig.fleet.nodes["n1"].endpoints

    def test_an_engine_restart_is_told_only_by_another_boot_id(self):
        rig = Rig()
        restarts = []
        rig.fleet.on_restarted.append(lambda endpoint: restarts.append(endpoint.boot_id))
        for boot in ("", "a", "", "a", "b", "", "c"):
            rig.connect("n", spec(1, engine_boot_id=boot))
        assert restarts == ["b", "c"]

    def test_removing_forgets_pools_and_slots(self):
        rig = Rig()
        rig.endpoints(2)
        rig.fleet.remove_endpoint("10.0.0.1:8000@0")
        rig.fleet.remove_endpoint("10.0.0.1:8000@0")
        assert len(rig.fleet.pool("m")) == 1
        assert slots_of(rig, "default")[0] == [rig.slot(2)]

    def test_a_reused_slot_has_no_residue(self):
        rig = Rig(desired_state("gpu_aware"))
        node = rig.connect(
            "n", spec(1, device_uuids=("g",)), devices=[gpu("g", temperature_slowdown_c=Measurement(90.0))]
        )
        rig.sample(node, engine_sample(spec(1), 3, 1, 0.5), devices=[device_sample("g", 50, temperature_c=99)])
        rig.hold("r", text="x" * 999)
        slot = rig.slot(1)
        assert rig.dispatcher.guards.peek(frozenset(["heat"]), slot)
        rig.fleet.remove_endpoint("10.0.0.1:8000@0")
        rig.connect("n", spec(2))
        assert rig.slot(2) == slot
        fresh = Columns()
        for name in ("inflight", "external", "kv_use", "memory_pressure", "temperature_c", "last_chosen", "sampled_at"):
            assert np.array_equal(getattr(rig.columns, name)[slot], getattr(fresh, name)[0], equal_nan=True), name
        assert not rig.dispatcher.guards.peek(frozenset(["heat", "memory_pressure"]), slot)
        assert rig.scheduler.index.blocks(slot) == 0

    def test_columns_grow(self):
        rig = Rig()
        rig.endpoints(40)
        assert len(rig.fleet.pool("m")) == 40
        assert len({rig.where(rig.route()) for _ in range(40)}) == 40


class TestSamples:
    def test_the_newest_wins(self):
        rig = Rig()
        node = rig.connect("n", spec(1))
        rig.sequence = 4
        assert rig.sample(node, engine_sample(spec(1), 5))
        rig.sequence = 2
        assert not rig.sample(node, engine_sample(spec(1), 9))
        assert rig.columns.external[rig.slot(1)] == 5

    def test_a_new_agent_counts_from_one_again(self):
        rig = Rig()
        node = rig.connect("n", spec(1))
        rig.sequence = 100
        rig.sample(node)
        rig.fleet.disconnect(node, node.connection)
        rig.connect("n", spec(1), instance="i2")
        rig.sequence = 0
        assert rig.sample(node, engine_sample(spec(1), 5))

    def test_in_flight_is_ours_and_what_the_engine_has_beyond(self):
        rig = Rig()
        node = rig.connect("n", spec(1))
        slot = rig.slot(1)
        for _ in range(3):
            rig.route()
        rig.sample(node, engine_sample(spec(1), 4, 1))
        assert rig.columns.external[slot] == 2
        rig.sample(node, engine_sample(spec(1), 1, 0))
        assert rig.columns.external[slot] == 0, "what we sent may not be there yet; never negative"

    def test_missing_is_unknown_and_not_zero(self):
        rig = Rig()
        node = rig.connect("n", spec(1, device_uuids=("g",)), devices=[gpu("g")])
        rig.sample(node, engine_sample(spec(1), 5, 1, 0.5), devices=[device_sample("g", 20)])
        slot = rig.slot(1)
        assert rig.columns.memory_pressure[slot] == 0.5
        rig.sample(node, engine_sample(spec(1)), devices=[device_sample("g", 20)])
        assert np.isnan(rig.columns.kv_use[slot])
        assert rig.columns.memory_pressure[slot] == 0.2, "NVML's where the engine does not say"
        assert rig.columns.external[slot] == 0, "an engine that says no more is not believed to be as busy for ever"
        rig.sample(node, engine_sample(spec(1)), devices=[device_sample("g")])
        assert np.isnan(rig.columns.memory_pressure[slot])
        assert np.isnan(rig.columns.utilization[slot])

    def test_the_busiest_and_hottest_of_several_devices(self):
        rig = Rig()
        devices = [gpu("a", temperature_slowdown_c=Measurement(90.0), power_limit_w=Measurement(400.0)), gpu("b")]
        node = rig.connect("n", spec(1, device_uuids=("a", "b")), devices=devices)
        rig.sample(
            node,
            devices=[
                device_sample("a", 10, utilization=0.3, temperature_c=45, power_w=100),
                device_sample("b", 60, utilization=0.9, temperature_c=40, throttle_reasons=["hw_slowdown"]),
            ],
        )
        slot, c = rig.slot(1), rig.columns
        assert (c.memory_pressure[slot], c.utilization[slot], c.temperature_c[slot]) == (0.6, 0.9, 45)
        assert (c.heat[slot], c.power[slot]) == (0.5, 0.25)
        assert rig.fleet.by_slot[slot].throttles == {"hw_slowdown"}

    def test_an_engine_that_is_not_ready_is_closed(self):
        rig = Rig()
        node = rig.connect("n", spec(1))
        rig.sample(node, engine_sample(spec(1), ready=False))
        assert guards(rig) == ["not_ready"]
        assert not rig.columns.open[rig.slot(1)]
        rig.fleet.put_endpoint(node, spec(1))
        assert rig.columns.open[rig.slot(1)]

    def test_samples_of_strangers_are_ignored(self):
        rig = Rig()
        node = rig.connect("n", spec(1))
        rig.connect("n2", spec(2))
        rig.sample(node, engine_sample(spec(2), 9), engine_sample(spec(7), 9), devices=[device_sample("x", 1)])
        assert rig.columns.external[rig.slot(2)] == 0


class TestDevices:
    @pytest.mark.parametrize(
        ("kind", "closed"),
        [
            (DeviceEventKind.LOST, "device_lost"),
            (DeviceEventKind.ECC_DOUBLE_BIT, "device_ecc"),
            (DeviceEventKind.XID, "device_xid"),
        ],
    )
    def test_a_failed_device_closes_its_endpoints_until_it_recovers(self, kind, closed):
        rig = Rig()
        node = rig.connect(
            "n", spec(1, device_uuids=("a",)), spec(2, device_uuids=("b",)), devices=[gpu("a"), gpu("b")]
        )
        rig.fleet.apply_device_event(node, DeviceEvent("a", kind, 79))
        assert guards(rig) == [closed]
        assert guards(rig, 2) == []
        rig.fleet.apply_device_event(node, DeviceEvent("a", DeviceEventKind.RECOVERED))
        assert guards(rig) == []

    @pytest.mark.parametrize("xid", [13, 31, 43, 45])
    def test_a_programs_own_fault_fails_no_device(self, xid):
        rig = Rig()
        node = rig.connect("n", spec(1, device_uuids=("a",)), devices=[gpu("a")])
        rig.fleet.apply_device_event(node, DeviceEvent("a", DeviceEventKind.XID, xid))
        assert guards(rig) == []

    def test_which_xids_are_programs_own_is_a_setting(self):
        for ignored, closed in (("13,79", []), ("", ["device_xid"])):
            rig = Rig(ignored_xids=ignored)
            node = rig.connect("n", spec(1, device_uuids=("a",)), devices=[gpu("a")])
            rig.fleet.apply_device_event(node, DeviceEvent("a", DeviceEventKind.XID, 79))
            assert guards(rig) == closed

    @pytest.mark.parametrize(("limit", "errors", "closed"), [(1, 0, False), (1, 1, True), (3, 2, False), (0, 9, False)])
    def test_uncorrected_ecc_errors_close_at_a_limit(self, limit, errors, closed):
        rig = Rig(ecc_errors=limit)
        node = rig.connect("n", spec(1, device_uuids=("a",)), devices=[gpu("a")])
        rig.sample(node, devices=[device_sample("a", 10, ecc_errors=errors)])
        assert guards(rig) == (["device_ecc"] if closed else [])
        rig.sample(node, devices=[device_sample("a", 10, ecc_errors=0)])
        assert guards(rig) == []

    @pytest.mark.parametrize("guard", ["device_lost", "device_xid", "device_ecc", "stale"])
    def test_each_can_be_off(self, guard):
        rig = Rig(guards_off=guard)
        node = rig.connect("n", spec(1, device_uuids=("a", "b", "c")), devices=[gpu("a"), gpu("b"), gpu("c")])
        kinds = [DeviceEventKind.LOST, DeviceEventKind.ECC_DOUBLE_BIT, DeviceEventKind.XID]
        for uuid, kind in zip("abc", kinds, strict=True):
            rig.fleet.apply_device_event(node, DeviceEvent(uuid, kind, 79))
        node.stale = True
        assert set(guards(rig)) == {"device_lost", "device_xid", "device_ecc", "stale"} - {guard}

    def test_each_says_what_closed_it(self):
        rig = Rig()
        node = rig.connect("n", spec(1, device_uuids=("a", "b")), devices=[gpu("a"), gpu("b")])
        rig.fleet.apply_device_event(node, DeviceEvent("a", DeviceEventKind.XID, 79))
        rig.sample(node, devices=[device_sample("b", 10, ecc_errors=2)])
        node.stale = True
        assert rig.fleet.why_closed(rig.fleet.endpoints["10.0.0.1:8000@0"]) == {
            "stale": "nothing heard of n",
            "device_xid": "a XID 79",
            "device_ecc": "b 2 uncorrected ECC errors",
        }

    def test_a_mig_instance_falls_with_its_gpu(self):
        rig = Rig()
        devices = [gpu("GPU-1"), gpu("MIG-1", kind=DeviceKind.MIG, parent_uuid="GPU-1")]
        node = rig.connect("n", spec(1, device_uuids=("MIG-1",)), devices=devices)
        rig.fleet.apply_device_event(node, DeviceEvent("GPU-1", DeviceEventKind.XID, 79))
        assert guards(rig) == ["device_xid"]

    def test_an_endpoint_announced_on_a_failed_device_is_closed(self):
        rig = Rig()
        node = rig.connect("n", devices=[gpu("a")])
        rig.fleet.apply_device_event(node, DeviceEvent("a", DeviceEventKind.LOST))
        rig.fleet.put_endpoint(node, spec(1, device_uuids=("a",)))
        assert guards(rig) == ["device_lost"]
        rig.connect("n", spec(1, device_uuids=("a",)), devices=[gpu("a")])
        assert guards(rig) == ["device_lost"], "the same agent connected again: nothing recovered"

    def test_a_new_agent_starts_without_failures(self):
        rig = Rig()
        node = rig.connect("n", spec(1, device_uuids=("a",)), devices=[gpu("a")])
        rig.fleet.apply_device_event(node, DeviceEvent("a", DeviceEventKind.LOST))
        rig.fleet.disconnect(node, node.connection)
        rig.connect("n", spec(1, device_uuids=("a",)), devices=[gpu("a")], instance="i2")
        assert guards(rig) == []

    def test_a_lost_device_in_a_sample(self):
        rig = Rig()
        node = rig.connect("n", spec(1, device_uuids=("a",)), devices=[gpu("a")])
        rig.sample(node, devices=[DeviceSample("a", Measurement(None, MissingReason.LOST))])
        assert guards(rig) == ["device_lost"]
        rig.sample(node, devices=[DeviceSample("a", Measurement(None, MissingReason.UNSUPPORTED))])
        assert guards(rig) == []

    def test_a_host_cpu_gets_its_own_prior(self):
        rig = Rig()
        cpu = gpu("CPU-1", kind=DeviceKind.CPU)
        rig.connect("n", spec(1, device_uuids=("CPU-1",)), spec(2, device_uuids=("a",)), devices=[cpu, gpu("a")])
        assert rig.columns.tok_ms[rig.slot(1)] > 10 * rig.columns.tok_ms[rig.slot(2)]
        assert rig.columns.kv_capacity[rig.slot(1)] == 60_000


class TestSilence:
    def agents(self, count):
        rig = Rig()
        return rig, [rig.connect(f"n{n}", spec(n)) for n in range(1, count + 1)]

    def silence(self, rig, spoken, seconds):
        for _ in range(int(seconds)):
            rig.clock.now += 1
            for node in spoken:
                node.heard_at = rig.clock.now
            rig.fleet.sweep(rig.clock.now)

    def test_one_silent_node_is_stale_and_comes_back(self):
        rig, nodes = self.agents(3)
        self.silence(rig, nodes[1:], 6)
        assert guards(rig) == ["stale"]
        assert not rig.columns.open[rig.slot(1)]
        rig.sample(nodes[0])
        assert guards(rig) == []

    def test_when_most_fall_silent_at_once_the_guards_freeze(self):
        rig, nodes = self.agents(3)
        self.silence(rig, nodes[2:], 6)
        assert rig.fleet.guards_frozen
        assert guards(rig, 1) == guards(rig, 2) == []
        rig.sample(nodes[0])
        rig.sample(nodes[1])
        rig.fleet.sweep(rig.clock.now)
        assert not rig.fleet.guards_frozen

    def test_when_all_fall_silent_they_stay_for_as_long_as_it_takes(self):
        rig, _ = self.agents(3)
        self.silence(rig, [], 2000)
        assert rig.fleet.guards_frozen
        assert len(slots_of(rig, "default")[0]) == 3

    def test_nodes_that_leave_one_by_one_are_not_us(self):
        rig, nodes = self.agents(5)
        for count in range(1, 5):
            self.silence(rig, nodes[count:], 7)
            assert not rig.fleet.guards_frozen
            assert guards(rig, count) == ["stale"]

    def test_a_fleet_that_shrank_by_most_is_believed_after_a_minute(self):
        rig, nodes = self.agents(5)
        for node in nodes[1:]:
            rig.fleet.disconnect(node, node.connection)
        self.silence(rig, nodes[:1], 30)
        assert rig.fleet.guards_frozen
        self.silence(rig, nodes[:1], 40)
        assert not rig.fleet.guards_frozen
        assert guards(rig, 2) == ["stale"]
        self.silence(rig, nodes[:1], 600)
        assert list(rig.fleet.nodes) == ["n1"]
        assert list(rig.fleet.endpoints) == ["10.0.0.1:8000@0"]

    def test_a_silent_agent_that_is_still_connected_is_not_forgotten(self):
        rig, nodes = self.agents(3)
        self.silence(rig, nodes[1:], 1000)
        assert "n1" in rig.fleet.nodes


class TestGuards:
    def test_an_admins_word_comes_first(self):
        rig = Rig()
        node = rig.connect("n", spec(1))
        rig.desire(
            node_states={"n": SchedulingState.DRAINING}, endpoint_states={"10.0.0.1:8000@0": SchedulingState.CORDONED}
        )
        rig.sample(node, engine_sample(spec(1), ready=False))
        assert guards(rig) == ["cordoned", "draining", "not_ready"]
        rig.desire(node_states={}, endpoint_states={})
        rig.sample(node, engine_sample(spec(1)))
        assert guards(rig) == []

    def test_states_wait_for_nodes_and_endpoints_that_come_later(self):
        rig = Rig()
        rig.desire(
            node_states={"n": SchedulingState.CORDONED}, endpoint_states={"10.0.0.2:8000@0": SchedulingState.DRAINING}
        )
        rig.connect("n", spec(1))
        rig.connect("n2", spec(2))
        assert guards(rig) == ["cordoned"]
        assert guards(rig, 2) == ["draining"]


class TestPools:
    def test_an_endpoint_may_be_in_many(self):
        rig = Rig()
        rig.connect("n", spec(1, models=("m", "x")), spec(2, models=("x",)))
        assert len(rig.fleet.pool("m")) == 1
        assert len(rig.fleet.pool("x")) == 2
        assert len(rig.fleet.pool("none")) == 0

    def test_adapters(self):
        rig = Rig()
        rig.connect("n", spec(1, adapters=("l",)), spec(2))
        assert rig.fleet.pool("m", "l").tolist() == [rig.slot(1)]
        assert len(rig.fleet.pool("m", "unknown")) == 2, "any may load it"

    def test_models_that_agents_bring_enter_the_catalogue(self):
        rig = Rig()
        rig.connect("n", spec(1, models=("fresh",)))
        assert rig.scheduler.intake.model(Tenant("default"), "fresh") == "fresh"
        rig.fleet.remove_endpoint("10.0.0.1:8000@0")
        rig.desire(models={"m": Model("m")})
        assert "fresh" not in rig.scheduler.intake.desired.models, "deleted, and nobody serves it"


class TestGroups:
    def test_by_label_node_and_endpoint(self):
        groups = [
            GpuGroup("label", selector={"tier": "gold", "zone": "a"}),
            GpuGroup("node", nodes=("n2",)),
            GpuGroup("endpoint", endpoints=("10.0.0.3:8000@0",)),
            GpuGroup("empty"),
        ]
        tenants = [Tenant(g.id) for g in groups]
        bindings = [Binding(g.id, g.id) for g in groups]
        rig = Rig(desired_state(groups=groups, tenants=tenants, bindings=bindings))
        rig.connect("n1", spec(1, labels={"tier": "gold"}), spec(4), labels={"zone": "a", "tier": "silver"})
        rig.connect("n2", spec(2))
        rig.connect("n3", spec(3))
        expected = {"label": [1], "node": [2], "endpoint": [3], "empty": []}
        assert {t: slots_of(rig, t)[0] for t in expected} == {
            t: [rig.slot(n) for n in ns] for t, ns in expected.items()
        }
        assert rig.fleet.groups_of(rig.fleet.endpoints["10.0.0.1:8000@0"]) == ["all", "label"]
        assert sorted(rig.fleet.tenants_of(rig.fleet.endpoints["10.0.0.2:8000@0"])) == ["default", "node"]

    def test_a_dedicated_group_leaves_everybody_elses(self):
        group = GpuGroup("gold", endpoints=("10.0.0.1:8000@0",))
        rig = Rig(
            desired_state(tenants=[Tenant("a")], groups=[group], bindings=[Binding("a", "gold", BindingMode.DEDICATED)])
        )
        rig.endpoints(2)
        assert slots_of(rig, "a") == [[rig.slot(1)], []]
        assert slots_of(rig, "default") == [[rig.slot(2)], []]

    def test_burst_is_apart(self):
        groups = [GpuGroup("own", endpoints=("10.0.0.1:8000@0",)), GpuGroup("spare", all=True)]
        bindings = [Binding("a", "own"), Binding("a", "spare", BindingMode.BURST)]
        rig = Rig(desired_state(tenants=[Tenant("a")], groups=groups, bindings=bindings))
        rig.endpoints(2)
        assert slots_of(rig, "a") == [[rig.slot(1)], [rig.slot(2)]]

    def test_a_tenant_without_bindings_has_nothing(self):
        rig = Rig(desired_state(tenants=[Tenant("a")]))
        rig.endpoints(2)
        assert slots_of(rig, "a") == [[], []]


def test_unknown_is_unknown():
    assert np.isnan(UNKNOWN.or_nan())


def test_engines_that_run_only_one_leg_serve_no_whole_request():
    rig = Rig()
    rig.connect("n", spec(1), spec(2, role=EngineRole.PREFILL), spec(3, role=EngineRole.DECODE))
    assert rig.fleet.pool("m").tolist() == [rig.slot(1)]


STATES = st.sampled_from(list(SchedulingState))
NAMES = st.sampled_from([f"10.0.0.{number}:8000@0" for number in range(1, 5)])
DESIRED = st.fixed_dictionaries(
    {
        "endpoint_states": st.dictionaries(NAMES, STATES, max_size=3),
        "node_states": st.dictionaries(st.sampled_from(["a", "b"]), STATES, max_size=2),
        "groups": st.sampled_from(
            [
                {"all": GpuGroup("all", all=True)},
                {"all": GpuGroup("all", nodes=("a",))},
                {"all": GpuGroup("all", endpoints=("10.0.0.4:8000@0",))},
                {"all": GpuGroup("all", all=True), "few": GpuGroup("few", nodes=("b",))},
            ]
        ),
        "models": st.sampled_from(
            [
                {},
                {"m": Model("m", splits=(Split("few", 1.0, group="few"),))},
                {"m": Model("m", splits=(Split("all", 1.0, group="all"), Split("few", 2.0, group="few")))},
            ]
        ),
        "tenants": st.sampled_from(
            [
                {"default": Tenant("default")},
                {"default": Tenant("default"), "other": Tenant("other")},
                {"default": Tenant("default", isolation_domain="x"), "other": Tenant("other")},
            ]
        ),
        "bindings": st.sampled_from(
            [
                (Binding("default", "all"),),
                (Binding("default", "all"), Binding("other", "all")),
                (Binding("other", "all", BindingMode.DEDICATED),),
                (Binding("other", "all", BindingMode.DEDICATED), Binding("default", "few", BindingMode.DEDICATED)),
                (
                    Binding("other", "all", BindingMode.BURST),
                    Binding("other", "few", order=1),
                    Binding("default", "all"),
                ),
            ]
        ),
    }
)


LABELS = st.dictionaries(st.sampled_from("kl"), st.sampled_from("xy"), max_size=2)


@given(
    groups=st.lists(
        st.builds(
            lambda selector, nodes, endpoints, everything: GpuGroup("g", "", selector, nodes, endpoints, everything),
            LABELS,
            st.lists(st.sampled_from(["a", "b", "c"]), max_size=2).map(tuple),
            st.lists(NAMES, max_size=2).map(tuple),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    labels=st.lists(LABELS, min_size=4, max_size=4),
    nodes=st.tuples(LABELS, LABELS),
)
def test_the_members_of_a_group_are_those_that_it_holds(groups, labels, nodes):
    groups = [replace(group, id=f"g{number}") for number, group in enumerate(groups)]
    tenants = [Tenant(group.id) for group in groups]
    rig = Rig(desired_state(tenants=tenants, groups=groups, bindings=[Binding(g.id, g.id) for g in groups]))
    specs = [spec(number + 1, labels=each) for number, each in enumerate(labels)]
    rig.connect("a", *specs[:2], labels=nodes[0])
    rig.connect("b", *specs[2:], labels=nodes[1])
    for group in groups:
        held = {e.slot for e in rig.fleet.endpoints.values() if group.holds(e.id, e.node.id, e.labels)}
        assert rig.fleet.rights(group.id).own_slots == held


def lanes_of(rig, tenant):
    return [
        (lane.split, lane.weight, [(tier.burst, tier.pool.slots.tolist()) for tier in lane.tiers])
        for lane in rig.fleet.open_lanes(tenant, "m", "")
    ]


def guards_of(rig):
    return {endpoint.id: rig.fleet.hard_guards(endpoint) for endpoint in rig.fleet.endpoints.values()}


@given(st.lists(DESIRED, min_size=1, max_size=5))
def test_what_admins_change_is_as_if_it_had_always_been_so(states):
    rig = Rig()
    fresh = None
    for number, state in enumerate(states):
        desired = DesiredState(version=number + 1, **state)
        fresh = Rig()
        for each in (rig, fresh):
            if each is fresh or number == 0:
                each.connect("a", spec(1), spec(2))
                each.connect("b", spec(3), spec(4))
            each.fleet.set_desired(desired)
        for tenant in ("default", "other"):
            assert lanes_of(rig, tenant) == lanes_of(fresh, tenant)
        assert guards_of(rig) == guards_of(fresh)
        for domain in ("tenant/default", "tenant/other", "domain/x"):
            assert rig.fleet.serving_only(domain) == fresh.fleet.serving_only(domain)


def test_adapters_that_nobody_holds_are_one():
    rig = Rig()
    rig.connect("n", spec(1, adapters=("l",)), spec(2))
    for number in range(50):
        rig.finish(rig.route(adapter=f"made-up-{number}"))
    fleet = rig.fleet
    assert fleet.open_lanes("default", "m", "made-up-1") is fleet.open_lanes("default", "m", "")
    assert max(map(len, (fleet._pools, fleet._candidates, fleet._lanes, fleet._open))) == 1
    assert rig.where(rig.route(adapter="l")) == "1"


def test_a_write_that_concerns_no_endpoint_makes_no_candidates_anew():
    rig = Rig()
    rig.endpoints(3)
    before = rig.fleet.open_lanes("default", "m", "")
    rig.bind("least_request")
    assert rig.fleet.open_lanes("default", "m", "") is before
