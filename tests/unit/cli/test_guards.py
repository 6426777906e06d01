"""What stands against an endpoint, in a cell."""

from headway.fleet.v1 import fleet_pb2
from headway.routing.v1 import routing_pb2
from headway_cli.guards import guards_of, guards_with_details


def test_an_ejected_one_says_why_and_until_when() -> None:
    ejection = fleet_pb2.EndpointEjection(phase="ejected", reason="failure_rate", remaining_s=11.6)
    endpoint = fleet_pb2.EndpointState(hard_guards=["stale", "ejected"], soft_guards=["heat"], ejection=ejection)
    assert guards_of(endpoint) == ["stale", "ejected (failure_rate, 12 s left)", "(heat)"]


def test_one_that_is_probed_says_so() -> None:
    ejection = fleet_pb2.EndpointEjection(phase="probing", reason="failure_rate")
    assert guards_of(fleet_pb2.EndpointState(hard_guards=["probing"], ejection=ejection)) == ["probing"]


def test_explain_shows_what_closed_each() -> None:
    row = routing_pb2.ExplainRow(
        hard_guards=["cordoned", "device_xid"],
        soft_guards=["heat"],
        guard_details={"device_xid": "GPU-1 XID 79", "heat": "1.01 of the slowdown temperature: GPU-1 101 °C of 100"},
    )
    assert guards_with_details(row) == [
        "cordoned",
        "device_xid: GPU-1 XID 79",
        "(heat: 1.01 of the slowdown temperature: GPU-1 101 °C of 100)",
    ]
