"""From the agent's values to the wire."""

import pytest
from fakes.agent import change, collected, device, endpoint
from google.protobuf.duration_pb2 import Duration
from headway.telemetry.v1 import telemetry_pb2 as pb
from headway_agent import convert
from headway_agent.devices.base import DeviceEvent, DeviceEventKind, DeviceKind, MissingReason
from headway_agent.inventory import Inventory, NodeIdentity
from hypothesis import given
from hypothesis import strategies as st

WHO = NodeIdentity("n1", "1.0", "boot", "instance", {"zone": "a"})


@pytest.mark.parametrize(
    ("reason", "wire"),
    [
        (MissingReason.UNSUPPORTED, pb.MISSING_REASON_UNSUPPORTED),
        (MissingReason.LOST, pb.MISSING_REASON_LOST),
        (MissingReason.STALE, pb.MISSING_REASON_STALE),
        (MissingReason.NO_PERMISSION, pb.MISSING_REASON_NO_PERMISSION),
    ],
)
def test_each_missing_reason_is_its_own(reason, wire):
    hello = convert.hello(WHO, Inventory((device("GPU-a", memory_total_bytes=reason),)), 0.0).hello
    total = hello.devices[0].memory_total_bytes
    assert (total.WhichOneof("kind"), total.missing) == ("missing", wire)


def test_zero_is_a_value():
    hello = convert.hello(WHO, Inventory((device("GPU-a", memory_total_bytes=0.0),)), 0.0).hello
    assert hello.devices[0].memory_total_bytes.WhichOneof("kind") == "value"


def test_a_hello_is_the_full_state():
    hello = convert.hello(
        WHO, Inventory((device("MIG-1", kind=DeviceKind.MIG, parent_uuid="GPU-a"),), (endpoint(),)), 12.5
    ).hello
    assert (hello.node, hello.agent_version, hello.boot_id, hello.instance_id) == (
        "n1",
        "1.0",
        "boot",
        "instance",
    )
    assert (hello.devices[0].kind, hello.devices[0].parent_uuid) == (pb.DEVICE_KIND_MIG, "GPU-a")
    one = hello.endpoints[0]
    assert (one.address, one.dp_rank, one.role, list(one.models), list(one.device_uuids), one.ready) == (
        "10.0.0.1:8000", 0, pb.ENGINE_ROLE_BOTH, ["m"], ["GPU-a"], True,
    )  # fmt: skip
    assert (hello.clock.seconds, hello.clock.nanos) == (12, 500_000_000)


def test_a_sample():
    sample = convert.sample(collected(7).sample).sample
    assert (sample.sequence, sample.taken.seconds) == (7, 1007)
    assert sample.devices[0].power_w.value == 250.0
    assert sample.engines[0].ready
    assert sample.engines[0].running.missing == pb.MISSING_REASON_UNSUPPORTED


@pytest.mark.parametrize("kind", list(DeviceEventKind))
def test_every_kind_of_event_has_its_own_name_on_the_wire(kind):
    event = convert.event(DeviceEvent("GPU-a", kind, 1.5, 79, "why")).device_event
    assert pb.DeviceEventKind.Name(event.kind) == f"DEVICE_EVENT_KIND_{kind.name}"
    assert (event.uuid, event.xid, event.detail, event.at.nanos) == ("GPU-a", 79, "why", 500_000_000)


def test_an_endpoint_change():
    assert convert.event(change()).endpoint_change.endpoint.address == "10.0.0.1:8000"


@given(st.floats(0, 4e9))
def test_times_survive(at_s):
    clock = convert.hello(WHO, Inventory(), at_s).hello.clock
    assert clock.seconds + clock.nanos / 1e9 == pytest.approx(at_s, abs=1e-6)


def test_durations():
    assert convert.seconds(Duration(seconds=2, nanos=500_000_000)) == 2.5
