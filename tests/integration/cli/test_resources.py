"""Every verb of every kind of resource, against a real scheduler."""

import json

import pytest
import yaml

# Of each kind: a name, fields to create it with, fields to update, what the update must show. Later ones need earlier.
KINDS = [
    ("models", "llama-3-8b", ["aliases=llama,small"], ["max_context_tokens=8192"], {"max_context_tokens": 8192}),
    ("groups", "gold", ["selector.tier=gold", "nodes=gpu-7"], ["display_name=Gold"], {"display_name": "Gold"}),
    ("tenants", "acme", ["weight=2"], ["quotas.max_inflight=3"], {"quotas": {"max_inflight": 3}}),
    ("bindings", "acme/gold", ["mode=dedicated"], ["mode=burst", "order=2"], {"mode": "burst", "order": 2}),
    (
        "strategies",
        "careful",
        ["algorithm=gpu_aware", "parameters.memory_weight=8"],
        ["parameters.memory_weight=9", "display_name=Careful"],
        {"parameters": {"memory_weight": 9}, "display_name": "Careful"},
    ),
    ("strategy-bindings", "acme", ["strategy=careful", "tenant=acme"], ["shadow=true"], {"shadow": True}),
    (
        "credentials",
        "gateway-1",
        ["role=router", "tenants=acme"],
        ["tenants=acme,default"],
        {"tenants": ["acme", "default"]},
    ),
]


def _holds(part, whole):
    return all(_holds(part[k], whole[k]) if isinstance(part[k], dict) else whole[k] == part[k] for k in part)


def test_every_kind_is_created_shown_listed_updated_and_deleted(headway):
    for command, name, create, update, shown in KINDS:
        created = headway.json(command, "create", name, *create)
        assert headway.json(command, "get", name) == {k: v for k, v in created.items() if k != "token"}
        full = created["name"]
        assert full in {row["name"] for row in headway.json(command, "list")}
        assert full in headway.text(command, "list")
        updated = headway.json(command, "update", full, *update)
        assert _holds(shown, updated), updated
        assert updated["etag"] != created["etag"]
        assert yaml.safe_load(headway.text(command, "get", name, "-o", "yaml")) == updated
        assert full in headway.text(command, "get", name)
    for command, name, *_ in reversed(KINDS):
        assert "deleted" in headway.text(command, "delete", name)
        assert "does not exist" in headway.error(command, "get", name)


def test_a_dry_run_writes_nothing(headway):
    assert headway.text("tenants", "create", "acme", "--dry-run") == "tenants/acme is valid\n"
    assert "UNKNOWN_TENANT" in headway.error("tenants", "get", "acme")
    assert headway.text("tenants", "update", "default", "weight=4", "--dry-run") == "tenants/default is valid\n"
    assert headway.json("tenants", "get", "default")["weight"] == 1


def test_an_update_leaves_other_fields_and_other_labels_alone(headway):
    headway.run("groups", "create", "gold", "selector.tier=gold", "selector.zone=a", "display_name=Gold")
    updated = headway.json("groups", "update", "gold", "selector.zone=b")
    assert (updated["selector"], updated["display_name"]) == ({"tier": "gold", "zone": "b"}, "Gold")
    assert headway.json("groups", "update", "gold", "selector.zone=")["selector"] == {"tier": "gold"}


def test_a_stale_etag_is_refused_and_the_right_one_is_not(headway):
    old = headway.json("tenants", "create", "acme")["etag"]
    new = headway.json("tenants", "update", "acme", "weight=2")["etag"]
    assert "error: STALE_ETAG: etag:" in headway.error("tenants", "update", "acme", "weight=3", "--etag", old)
    assert "STALE_ETAG" in headway.error("tenants", "delete", "acme", "--etag", old)
    headway.run("tenants", "delete", "acme", "--etag", new)


def test_what_hangs_on_a_resource_goes_only_by_force(headway):
    headway.run("tenants", "create", "acme")
    headway.run("bindings", "create", "acme/all")
    assert "IN_USE" in headway.error("tenants", "delete", "acme")
    headway.run("tenants", "delete", "acme", "--force")
    assert headway.json("bindings", "list") == [headway.json("bindings", "get", "default/all")]


def test_a_lists_pages_are_read_to_the_end(headway, monkeypatch):
    monkeypatch.setattr("headway_cli.client._PAGE_SIZE", 3)
    assert len(headway.json("strategies", "list")) == 8
    assert len(headway.json("audit")) == 0
    for name in "abcd":
        headway.run("tenants", "create", name)
    assert [row["resource"] for row in headway.json("audit", "--limit", "4")] == [f"tenants/{c}" for c in "dcba"]
    assert [row["resource"] for row in headway.json("audit", "--resource", "tenants/b")] == ["tenants/b"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tenants", "create", "acme", "colour=red"], "colour: is no field; there are name, display_name"),
        (["tenants", "create", "acme", "weight"], "'weight' must look like FIELD=VALUE"),
        (["tenants", "create", "acme", "weight=heavy"], "weight: must be a finite number, not 'heavy'"),
        (["tenants", "create", "acme", "quotas=3"], "quotas: must be set by its parts"),
        (["tenants", "create", "acme", "quotas.max_inflight=-1"], "quotas.max_inflight: must be a whole number from 0"),
        (["tenants", "create", "acme", "quotas.none=1"], "quotas.none: is no field"),
        (["tenants", "create", "acme", "etag=x"], "etag: is set by the scheduler"),
        (["tenants", "update", "default", "name=x"], "name: is not for you to set"),
        (["bindings", "create", "acme/gold", "mode=loose"], "mode: 'loose' is none of dedicated, shared, burst"),
        (["strategies", "bind", "adaptive", "--group", "all", "--model", "m"], "--group cannot be combined"),
        (["route", "--model", "m", "--text", "a", "--tokens", "1"], "exclude each other"),
        (["route", "--model", "m", "--tokens", "1,x"], "'x' at position 1 is no whole number"),
        (["route", "--model", "m", "--priority", "high"], "'high' is none of best-effort, standard, critical"),
        (["route", "--model", "m", "--max-tokens", "4294967296"], "less than or equal to"),
        (["route", "--model", "m", "--max-wait", "1e300"], "less than or equal to"),
        (["explain", "--model", "m", "--label", "gold"], "'gold' must look like KEY=VALUE"),
        (["apply", "-f", "/nowhere/fleet.yaml"], "/nowhere/fleet.yaml: No such file"),
        (["--ca", "/nowhere/ca.pem", "tenants", "list"], "--ca: /nowhere/ca.pem: No such file"),
    ],
)
def test_a_wrong_command_line_is_usage_and_names_what_is_wrong(headway, arguments, said):
    assert said in headway.error(*arguments, code=2)


@pytest.mark.parametrize(
    ("arguments", "reason", "field"),
    [
        (["tenants", "create", "Acme"], "INVALID_FIELD", "tenant.name"),
        (["tenants", "create", "default"], "DUPLICATE_NAME", "name"),
        (["tenants", "get", "acme"], "UNKNOWN_TENANT", "name"),
        (["models", "get", "m"], "UNKNOWN_MODEL", "name"),
        (["bindings", "get", "acme"], "INVALID_FIELD", "name"),
        (["bindings", "create", "acme/all"], "UNKNOWN_TENANT", "binding.name"),
        (["strategies", "tune", "adaptive", "externality=heavy"], "INVALID_FIELD", "strategy.parameters.externality"),
        (["strategies", "tune", "adaptive", "charm=1"], "INVALID_FIELD", "strategy.parameters.charm"),
        (["strategies", "tune", "none", "charm=1"], "UNKNOWN_RESOURCE", "name"),
        (["strategies", "rollback", "adaptive", "9"], "UNKNOWN_RESOURCE", "revision"),
        (["strategies", "bind", "none"], "UNKNOWN_RESOURCE", "strategy_binding.strategy"),
        (["nodes", "cordon", "gpu-9"], "UNKNOWN_RESOURCE", "name"),
        (["credentials", "create", "x", "role=agent"], "INVALID_FIELD", "credential.node"),
        (["route", "--model", "m"], "UNKNOWN_MODEL", "model"),
        (["route", "--model", "m", "--tenant", "acme"], "UNKNOWN_TENANT", "tenant"),
    ],
)
def test_a_refusal_is_one_line_with_reason_and_field(headway, arguments, reason, field):
    said = headway.error(*arguments)
    assert said.startswith(f"error: {reason}: ")
    assert said.count("\n") == 1
    error = json.loads(headway.error(*arguments, "-o", "json"))["error"]
    assert (error["reason"], error["field"]) == (reason, field)
    assert error["message"] in said


def test_a_strategy_is_switched_tuned_looked_back_at_and_rolled_back(headway):
    assert headway.text("strategies", "disable", "adaptive") == (
        "strategies/adaptive disabled; least_request stands in\n"
    )
    assert headway.json("strategies", "enable", "adaptive")["enabled"] is True
    assert headway.text("strategies", "tune", "adaptive", "externality=0.3") == (
        "strategies/adaptive tuned, revision 4\n"
    )
    assert "parameters" not in headway.json("strategies", "tune", "adaptive", "externality=")
    assert [row["revision"] for row in headway.json("strategies", "revisions", "adaptive")] == [5, 4, 3, 2, 1]
    assert "externality=0.3" in headway.text("strategies", "revisions", "adaptive")
    assert headway.text("strategies", "rollback", "adaptive", "4").endswith("which is now revision 6\n")
    assert headway.json("strategies", "get", "adaptive")["parameters"] == {"externality": 0.3}


def test_binding_a_strategy_again_moves_the_binding_of_that_scope(headway):
    headway.run("tenants", "create", "acme")
    headway.run("models", "create", "Org/Llama-3.1")
    assert headway.json("strategies", "bind", "round_robin")["name"] == "strategyBindings/default"
    first = headway.json("strategies", "bind", "random", "--tenant", "acme", "--model", "Org/Llama-3.1")
    second = headway.json("strategies", "bind", "adaptive", "--tenant", "acme", "--model", "Org/Llama-3.1")
    assert (first["name"], second["strategy"]) == (second["name"], "strategies/adaptive")
    shadow = headway.json("strategies", "shadow", "gpu_aware", "--tenant", "acme")
    assert shadow["shadow"]
    assert len(headway.json("strategy-bindings", "list")) == 3
    headway.run("strategies", "shadow", "gpu_aware", "--tenant", "acme", "--off")
    assert len(headway.json("strategy-bindings", "list")) == 2


def test_a_token_is_printed_once_and_works_until_revoked(headway):
    printed = headway.text("credentials", "create", "ops", "role=viewer")
    token = printed.partition("token: ")[2].split()[0]
    assert token not in headway.text("credentials", "get", "ops", "-o", "json")
    assert len(headway.json("--token", token, "tenants", "list")) == 1
    assert "NOT_PERMITTED" in headway.error("tenants", "create", "acme", "--token", token)
    assert headway.text("credentials", "revoke", "ops") == "credentials/ops revoked\n"
    assert "error: NO_CREDENTIAL" in headway.error("tenants", "list", HEADWAY_TOKEN=token)


def test_nodes_and_endpoints_are_cordoned_drained_and_uncordoned(headway, fleet):
    assert headway.json("nodes", "get", "gpu-7")["endpoints"] == 2
    assert headway.text("nodes", "cordon", "gpu-7") == "nodes/gpu-7 cordoned\n"
    assert "ALL_DRAINING" in headway.error("route", "--model", "llama", "--max-wait", "0")
    assert headway.json("nodes", "uncordon", "gpu-7")["state"] == "active"
    assert headway.text("endpoints", "drain", "10.0.0.7:8000@0", "--wait", "--deadline", "5") == (
        "endpoints/10.0.0.7:8000@0 draining, empty\n"
    )
    answer = headway.json("route", "--model", "llama")
    assert answer["endpoint"]["address"] == "10.0.0.7:8001"
    said = headway.error("endpoints", "drain", "10.0.0.7:8001@0", "--wait", "--deadline", "10ms", code=4)
    assert said == (
        "endpoints/10.0.0.7:8001@0: 1 in flight\n"
        "error: NOT_EMPTY: endpoints/10.0.0.7:8001@0: 1 in flight after 0 s; it goes on draining\n"
    )
    assert [row["state"] for row in headway.json("endpoints", "list")] == ["draining", "draining"]
    assert headway.json("endpoints", "get", "10.0.0.7:8001@0")["inflight"] == 1
    assert "IN_USE" in headway.error("nodes", "delete", "gpu-7")


def test_a_node_that_is_gone_is_forgotten(headway, scheduler):
    from fakes.headway import connected_agent

    with connected_agent(scheduler.address, "gpu-8", ["10.0.0.8:8000"]):
        headway.run("nodes", "get", "gpu-8")
    assert headway.text("nodes", "delete", "gpu-8") == "nodes/gpu-8 forgotten\n"
    assert headway.text("nodes", "list") == "no nodes\n"
