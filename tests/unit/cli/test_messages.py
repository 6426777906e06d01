"""Messages as plain values, and `field=value` arguments."""

import pytest
from headway.admin.v1 import admin_pb2 as admin
from headway.fleet.v1 import fleet_pb2 as fleet
from headway_cli.messages import assign, from_plain, to_plain


def test_a_message_shows_every_field_but_what_is_unset():
    endpoint = fleet.EndpointState(name="endpoints/a@0", weighted_inflight=2.0, index_blocks=2**60)
    plain = to_plain(endpoint)
    assert (plain["weighted_inflight"], plain["index_blocks"], plain["healthy"]) == (2, 2**60, False)
    assert plain["role"] == "unspecified"
    assert "memory_pressure" not in plain  # unknown is not zero
    assert to_plain(endpoint, defaults=False) == {
        "name": "endpoints/a@0",
        "weighted_inflight": 2,
        "index_blocks": 2**60,
    }


def test_what_json_cannot_hold_is_null():
    assert to_plain(admin.Tenant(weight=float("inf")))["weight"] is None


def test_enums_are_read_by_short_and_long_names():
    for name in ("burst", "BURST", "BINDING_MODE_BURST"):
        binding = admin.Binding()
        assert from_plain(binding, {"mode": name}) == []
        assert binding.mode == admin.BINDING_MODE_BURST
    assert [p.path for p in from_plain(admin.Binding(), {"mode": "unspecified"})] == ["mode"]


def test_null_is_absent():
    assert from_plain(admin.Tenant(), {"weight": None, "quotas": None, "models": None}) == []


@pytest.mark.parametrize(
    ("value", "good"), [(0, True), (2**32 - 1, True), (2**32, False), (-1, False), (1.0, False), (True, False)]
)
def test_whole_numbers_have_bounds(value, good):
    assert (from_plain(admin.Quotas(), {"max_inflight": value}) == []) is good


def test_assignments_reach_nested_fields_maps_lists_and_parameters():
    values = {"selector": {"zone": "a", "tier": "gold"}}
    assert assign(admin.GpuGroup(), values, ["selector.zone=", "selector.a.b/c=x=y", "nodes=n1, n2", "all=true"]) == [
        "selector",
        "nodes",
        "all",
    ]
    assert values == {"selector": {"tier": "gold", "a.b/c": "x=y"}, "nodes": ["n1", "n2"], "all": True}
    values = {}
    assign(admin.Strategy(), values, ["parameters.x=1.5", "parameters.y=[1, a]", "display_name=1", "enabled=false"])
    assert values == {"parameters": {"x": 1.5, "y": [1, "a"]}, "display_name": "1", "enabled": False}
    values = {"quotas": {"max_inflight": 3}, "models": ["m"]}
    assign(admin.Tenant(), values, ["quotas.max_inflight=", "models="])
    assert values == {"quotas": {}, "models": []}


@pytest.mark.parametrize(
    "assignment", ["x", "=1", "x=1", "weight.x=1", "quotas=1", "selector=a", "weight={", "parameters.x=["]
)
@pytest.mark.parametrize("message", [admin.Tenant(), admin.GpuGroup(), admin.Strategy()])
def test_what_is_no_assignment_is_refused(message, assignment):
    with pytest.raises(ValueError, match=r".+"):
        assign(message, {}, [assignment])
