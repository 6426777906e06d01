"""Samples applied as numbers leave a fleet as those applied by objects do: two fleets are told the same, both ways."""

import numpy as np
import pytest
from headway.telemetry.v1 import telemetry_pb2 as pb
from headway_scheduler.admission.guards import GuardConfig, SoftGuards
from headway_scheduler.domain.device import Device, DeviceEvent, DeviceEventKind, DeviceKind
from headway_scheduler.domain.endpoint import EndpointSpec
from headway_scheduler.domain.measurement import UNKNOWN, Measurement
from headway_scheduler.domain.plausible import RANGES
from headway_scheduler.domain.telemetry import Hello
from headway_scheduler.fleet.fleet import Fleet
from headway_scheduler.rpc.convert.scanning import SampleScanner
from headway_scheduler.rpc.convert.telemetry import sample_from_proto
from headway_scheduler.strategies.base import SoftGuard
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

UUIDS = ("a", "b", "c")
PORTS = (1, 2, 3)
SAMPLED = (
    *("external", "running", "waiting", "kv_use", "memory_pressure", "utilization", "temperature_c", "heat", "power"),
    *("sampled_at", "kv_capacity", "open"),
)
SCANNER = SampleScanner()
REASONS = st.lists(st.sampled_from(["hw_thermal", "sw_power_cap", "power_brake"]), max_size=2)


def measured(values):
    told = values.map(lambda value: pb.Measurement(value=value))
    return st.one_of(told, told, st.integers(0, 4).map(lambda reason: pb.Measurement(missing=reason)))


def device_samples(uuid):
    return st.builds(
        pb.DeviceSample,
        uuid=st.just(uuid),
        memory_used_bytes=measured(st.floats(0, 100)),
        utilization=measured(st.floats(0, 1)),
        temperature_c=measured(st.floats(0, 120)),
        power_w=measured(st.floats(0, 700)),
        ecc_errors=measured(st.sampled_from([0.0, 0.0, 0.0, 1.0])),
        throttle_reasons=REASONS,
    )


def engine_samples(port):
    return st.builds(
        pb.EngineSample,
        address=st.just(f"h:{port}"),
        running=measured(st.integers(0, 9).map(float)),
        waiting=measured(st.integers(0, 9).map(float)),
        kv_use=measured(st.floats(0, 1)),
        prefix_queries=measured(st.floats(0, 1e9)),
        prefix_hits=measured(st.floats(0, 1e9)),
        ready=st.sampled_from([True, True, True, False]),
    )


specs = st.builds(
    EndpointSpec,
    address=st.sampled_from(PORTS[:2]).map(lambda port: f"h:{port}"),
    models=st.just(("m",)),
    device_uuids=st.lists(st.sampled_from(UUIDS), max_size=3).map(tuple),
    ready=st.booleans(),
)
limits = st.sampled_from([UNKNOWN, Measurement(0.0), Measurement(90.0)])
devices = st.builds(
    Device,
    uuid=st.sampled_from(UUIDS),
    kind=st.just(DeviceKind.GPU),
    memory_total_bytes=limits,
    power_limit_w=limits,
    temperature_slowdown_c=limits,
)


def other_numbers(sample, data):
    """A sample of the same words: throttle reasons are none of them."""
    found = pb.Sample.FromString(sample.SerializeToString())
    for each in found.devices:
        each.throttle_reasons[:] = data.draw(REASONS)
    for each in (*found.devices, *found.engines):
        for name, value in each.ListFields():
            if isinstance(value, pb.Measurement) and value.WhichOneof("kind") == "value" and name.name != "ecc_errors":
                value.value = data.draw(st.floats(0, 1) | st.floats(0, min(120.0, RANGES[name.name][1])))
    return found


class Side:
    """A fleet and its soft guards."""

    def __init__(self):
        self.fleet = Fleet()
        self.guards = SoftGuards(self.fleet.columns, GuardConfig(dwell_s=2.0))
        self.fleet.on_sampled.append(self.guards.look)
        self.fleet.on_removed.append(lambda endpoint: self.guards.forget(endpoint.slot))

    def state(self):
        node, columns = self.fleet.nodes["n"], self.fleet.columns
        endpoints = self.fleet.endpoints.values()
        slots = [endpoint.slot for endpoint in endpoints]
        return {
            "columns": {name: getattr(columns, name)[slots].tolist() for name in SAMPLED},
            "devices": dict(node.samples),
            "engines": [(each.id, each.sample, each.ready, each.faults, each.throttles) for each in endpoints],
            "guards": [(self.guards.peek(frozenset(SoftGuard), slot), self.guards.details(slot)) for slot in slots],
            "node": (node.sequence, node.heard_at, node.stale),
        }


class BothWays(RuleBasedStateMachine):
    """What agents say, told to both."""

    @initialize(specs=st.lists(specs, max_size=2), devices=st.lists(devices, max_size=3))
    def begin(self, specs, devices):
        self.objects, self.numbers, self.now, self.sequence = Side(), Side(), 0.0, 0
        self.applied_as_numbers = 0
        self.last = pb.Sample()
        self.greet(specs, devices)

    @rule(specs=st.lists(specs, max_size=2), devices=st.lists(devices, max_size=3))
    def greet(self, specs, devices):
        unique = tuple({spec.id: spec for spec in specs}.values())
        for fleet in self.fleets():
            fleet.connect(Hello("n", "i", devices=tuple(devices), endpoints=unique), self.now)

    @rule(
        devices=st.tuples(*map(device_samples, UUIDS)),
        engines=st.tuples(*map(engine_samples, PORTS)),
        left_out=st.sets(st.sampled_from([*UUIDS, *PORTS]), max_size=1),
        data=st.data(),
    )
    def sample(self, devices, engines, left_out, data):
        told = [each for uuid, each in zip(UUIDS, devices, strict=True) if uuid not in left_out]
        engines = [each for port, each in zip(PORTS, engines, strict=True) if port not in left_out]
        self.last = pb.Sample(devices=told, engines=engines)
        self.tell(self.last)
        self.same_again(data)

    @rule(data=st.data())
    def same_again(self, data):
        self.tell(other_numbers(self.last, data))

    def tell(self, sample):
        self.now += 1.0
        self.sequence += 1
        sample.sequence = self.sequence
        message = sample_from_proto(sample)
        self.objects.fleet.apply_sample(self.objects.fleet.nodes["n"], message, self.now)
        fleet, node = self.numbers.fleet, self.numbers.fleet.nodes["n"]
        _, numbers, words, throttles = SCANNER.scan(pb.ConnectRequest(sample=sample).SerializeToString())
        if fleet.apply_numbers(node, self.sequence, words, numbers, throttles, self.now):
            self.applied_as_numbers += 1
        else:
            fleet.apply_sample(node, message, self.now)
            fleet.expect_numbers(node, message, words, numbers)

    @rule(spec=specs)
    def change(self, spec):
        for fleet in self.fleets():
            fleet.put_endpoint(fleet.nodes["n"], spec, self.now)

    @rule(number=st.integers(0, 1))
    def remove(self, number):
        for fleet in self.fleets():
            if number < len(fleet.endpoints):
                fleet.remove_endpoint(sorted(fleet.endpoints)[number])

    @rule(uuid=st.sampled_from(UUIDS), kind=st.sampled_from(DeviceEventKind))
    def fail(self, uuid, kind):
        for fleet in self.fleets():
            fleet.apply_device_event(fleet.nodes["n"], DeviceEvent(uuid, kind, 79))

    @rule(booked=st.integers(0, 9), slot=st.integers(0, 1))
    def book(self, booked, slot):
        for fleet in self.fleets():
            fleet.columns.inflight[slot] = booked

    @rule()
    def silence(self):
        self.now += 10.0
        for fleet in self.fleets():
            fleet.sweep(self.now)
            fleet.nodes["n"].stale = True
            fleet.refresh_guards(fleet.endpoints.values())

    @rule()
    def read(self):
        """Else samples of the second fleet are seldom made objects of."""
        assert self.numbers.fleet.nodes["n"].samples == self.objects.fleet.nodes["n"].samples

    def fleets(self):
        return self.objects.fleet, self.numbers.fleet

    @invariant()
    def alike(self):
        np.testing.assert_equal(self.numbers.state(), self.objects.state())


class SeldomRead(BothWays):
    """The same, compared only at the end: nothing is read in between."""

    @invariant()
    def alike(self):
        pass

    def teardown(self):
        if hasattr(self, "numbers"):
            np.testing.assert_equal(self.numbers.state(), self.objects.state())


TestBothWays = BothWays.TestCase
TestSeldomRead = SeldomRead.TestCase
TestBothWays.settings = TestSeldomRead.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


SPEC = EndpointSpec("h:1", models=("m",), device_uuids=("a",))
HELLO = Hello("n", "i", devices=(Device("a", DeviceKind.GPU),), endpoints=(SPEC, EndpointSpec("h:2", models=("m",))))


def told(sequence, use=0.5, address="h:1", **fields):
    """A sample, and how it is scanned."""
    device = pb.DeviceSample(uuid="a", utilization=pb.Measurement(value=use), **fields)
    sample = pb.Sample(sequence=sequence, devices=[device], engines=[pb.EngineSample(address=address, ready=True)])
    return sample_from_proto(sample), SCANNER.scan(pb.ConnectRequest(sample=sample).SerializeToString())


def expecting():
    """A fleet with a node whose samples may come as numbers."""
    fleet = Fleet()
    node = fleet.connect(HELLO, 0.0)
    sample, scanned = told(1)
    fleet.apply_sample(node, sample, 1.0)
    fleet.expect_numbers(node, sample, scanned.words, scanned.numbers)
    return fleet, node


def again(fleet, node, sequence, **fields):
    """Another sample, as numbers: was it applied?"""
    _, scanned = told(sequence, **fields)
    return fleet.apply_numbers(node, scanned.sequence, scanned.words, scanned.numbers, scanned.throttles, 2.0)


def test_the_newest_numbers_count():
    fleet, node = expecting()
    assert again(fleet, node, 3, use=0.7)
    assert again(fleet, node, 2, use=0.9), "late, and so without effect"
    assert fleet.columns.utilization[fleet.endpoints["h:1@0"].slot] == 0.7
    assert node.samples["a"].utilization == Measurement(0.7)
    assert (node.sequence, node.heard_at) == (3, 2.0)


def test_a_silent_node_that_speaks_again_is_open():
    fleet, node = expecting()
    slot = fleet.endpoints["h:1@0"].slot
    node.stale = True
    fleet.refresh_guards(node.endpoints.values())
    assert not fleet.columns.open[slot]
    assert again(fleet, node, 2)
    assert fleet.columns.open[slot]


def test_throttle_reasons_come_and_go_with_numbers():
    fleet, node = expecting()
    for sequence, reasons in enumerate((["hw_thermal", "sw_power_cap"], ["sw_power_cap"], []), 2):
        assert again(fleet, node, sequence, throttle_reasons=reasons)
        assert fleet.endpoints["h:1@0"].throttles == set(reasons)
        assert node.samples["a"].throttle_reasons == tuple(reasons)
    assert fleet.endpoints["h:2@0"].throttles == frozenset()


@pytest.mark.parametrize("fields", [{"address": "h:2"}, {"ecc_errors": pb.Measurement(value=1.0)}])
def test_other_words_are_applied_as_a_whole(fields):
    fleet, node = expecting()
    assert not again(fleet, node, 2, **fields)
    assert node.sequence == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda fleet, node: fleet.connect(HELLO, 2.0),
        lambda fleet, node: fleet.put_endpoint(node, EndpointSpec("h:1", device_uuids=("a",), ready=False)),
        lambda fleet, node: fleet.put_endpoint(node, EndpointSpec("h:3")),
        lambda fleet, node: fleet.remove_endpoint("h:2@0"),
        lambda fleet, node: fleet.connect(Hello("other", "i", endpoints=(EndpointSpec("h:1"),)), 2.0),
        lambda fleet, node: fleet.apply_sample(node, told(2)[0], 2.0),
    ],
)
def test_a_node_that_changed_is_told_as_a_whole(change):
    fleet, node = expecting()
    change(fleet, node)
    assert not again(fleet, node, 3)


def test_numbers_in_another_order_than_fields_are_not_expected():
    fleet, node = expecting()
    sample, scanned = told(2)
    fleet.apply_sample(node, sample, 2.0)
    fleet.expect_numbers(node, sample, scanned.words, scanned.numbers + 1.0)
    assert not again(fleet, node, 3)


def test_a_device_left_out_still_counts():
    fleet, node = expecting()
    sample = pb.Sample(sequence=2, engines=[pb.EngineSample(address="h:1", ready=True)])
    scanned = SCANNER.scan(pb.ConnectRequest(sample=sample).SerializeToString())
    fleet.apply_sample(node, sample_from_proto(sample), 2.0)
    fleet.expect_numbers(node, sample_from_proto(sample), scanned.words, scanned.numbers)
    assert not fleet.apply_numbers(node, 3, scanned.words, scanned.numbers, {}, 3.0)
    assert fleet.columns.utilization[fleet.endpoints["h:1@0"].slot] == 0.5
