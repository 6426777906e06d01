"""apply, diff and export: a file and the scheduler agree, or say exactly where they do not."""

import json
from pathlib import Path

import pytest
import yaml
from fakes.headway import Headway, running_scheduler

EXAMPLE = str(Path(__file__).parents[3] / "deploy" / "examples" / "fleet.yaml")


@pytest.fixture
def write(tmp_path):
    def write(text, name="fleet.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_the_example_applies_and_then_nothing_differs(headway):
    applied = headway.text("apply", "-f", EXAMPLE)
    assert "tenants/acme created\n" in applied
    assert "strategyBindings/default unchanged\n" in applied
    assert headway.text("diff", "-f", EXAMPLE, "--exit-code") == ""
    again = headway.json("apply", "-f", EXAMPLE)
    assert {result["action"] for result in again} == {"unchanged"}


def test_export_apply_diff_is_a_round_trip_and_carries_to_another_scheduler(
    headway, write, postgres, empty_database_url
):
    from headway_scheduler.store import migrate

    headway.run("apply", "-f", EXAMPLE)
    headway.run("strategies", "disable", "random")
    headway.run("strategies", "tune", "adaptive", "externality=0")
    headway.run("credentials", "create", "ops", "role=viewer", "expire_time=2090-01-31T12:00:00Z")
    exported = headway.text("export")
    assert headway.text("diff", "-f", write(exported), "--prune", "--exit-code") == ""
    migrate.upgrade(empty_database_url)
    with running_scheduler(empty_database_url) as other:
        elsewhere = Headway(other.address)
        assert "credentials/ops created; token, shown this once: hw_" in elsewhere.text("apply", "-f", write(exported))
        assert elsewhere.text("export") == exported
        assert elsewhere.text("diff", "-f", write(exported), "--prune", "--exit-code") == ""
    documents = [document for document in yaml.safe_load_all(exported) if document]
    assert headway.json("export") == documents
    order = [document["kind"] for document in documents]
    assert order == sorted(
        order,
        key=["GpuGroup", "Model", "Tenant", "Binding", "Strategy", "StrategyBinding", "Credential"].index,
    )


def test_diff_shows_fields_and_apply_writes_only_those(headway, write):
    headway.run("tenants", "create", "acme", "weight=2", "display_name=Acme")
    file = write("kind: Tenant\nname: acme\nweight: 3\nquotas: {max_inflight: 5}\n---\nkind: GpuGroup\nname: gold\n")
    assert headway.text("diff", "-f", file, "--exit-code", code=1) == (
        "+ gpuGroups/gold\n"
        "~ tenants/acme\n"
        '    - display_name: "Acme"\n'
        "    + display_name: null\n"
        "    - weight: 2\n"
        "    + weight: 3\n"
        "    - quotas: null\n"
        '    + quotas: {"max_inflight": 5}\n'
    )
    assert headway.json("diff", "-f", file)[1]["changes"]["weight"] == {"live": 2, "file": 3}
    assert headway.text("apply", "-f", file) == (
        "gpuGroups/gold created\ntenants/acme updated (display_name, weight, quotas)\n"
    )
    acme = headway.json("tenants", "get", "acme")
    assert (acme["display_name"], acme["weight"], acme["quotas"]["max_inflight"]) == ("", 3, 5)


def test_a_dry_run_checks_with_the_scheduler_and_writes_nothing(headway, write):
    said = headway.text("apply", "-f", EXAMPLE, "--dry-run")
    assert "tenants/acme/bindings/gold would be created\n" in said
    assert len(headway.json("tenants", "list")) == 1
    bad = write("kind: Strategy\nname: s\nalgorithm: gpu_aware\nparameters: {charm: 1}\n")
    assert "fleet.yaml:1: strategies/s: strategy.parameters.charm" in headway.error("apply", "-f", bad, "--dry-run")
    bad = write("kind: Binding\nname: default/none\n")
    assert "UNKNOWN_RESOURCE" in headway.error("apply", "-f", bad, "--dry-run")


def test_pruning_deletes_what_the_file_does_not_name_of_the_kinds_it_names(headway, write):
    headway.run("apply", "-f", EXAMPLE)
    token = headway.json("credentials", "create", "admin", "role=admin")["token"]
    file = write(
        "kind: Tenant\nname: acme\n---\nkind: Strategy\nname: adaptive\nalgorithm: adaptive\n---\n"
        "kind: StrategyBinding\nname: other\nstrategy: adaptive\ntenant: acme\n---\n"
        "kind: Binding\nname: acme/gold\n---\nkind: Credential\nname: x\nrole: viewer\n"
    )
    would = headway.text("apply", "-f", file, "--prune", "--dry-run")
    assert "tenants/globex would be deleted\n" in would
    headway.run("apply", "-f", file, "--prune")
    assert {row["name"] for row in headway.json("tenants", "list")} == {"tenants/acme", "tenants/default"}
    assert {row["name"] for row in headway.json("bindings", "list")} == {"tenants/acme/bindings/gold"}
    assert "strategies/cautious" not in headway.text("strategies", "list")
    assert len(headway.json("strategies", "list")) == 8
    assert {row["name"] for row in headway.json("strategy-bindings", "list")} == {
        "strategyBindings/default",
        "strategyBindings/other",
    }
    assert len(headway.json("groups", "list")) == 3  # the file names none
    headway.run("tenants", "list", "--token", token)
    assert headway.text("diff", "-f", file, "--prune") == ""


def test_what_the_scheduler_refuses_is_told_all_at_once_and_nothing_is_applied(headway, write):
    file = write(
        "kind: Tenant\nname: acme\n---\nkind: Binding\nname: acme/none\n---\n"
        "kind: Strategy\nname: s\nalgorithm: gpu_aware\nparameters: {charm: 1}\n"
    )
    for dry_run in ([], ["--dry-run"]):
        result = headway.run("apply", "-f", file, *dry_run, code=1)
        assert result.stdout == ""
        missing, charm = result.stderr.splitlines()
        assert missing.startswith("error: UNKNOWN_RESOURCE: ")
        assert "fleet.yaml:4: tenants/acme/bindings/none: " in missing
        assert charm.startswith("error: INVALID_FIELD: ")
        assert "fleet.yaml:7: strategies/s: strategy.parameters.charm" in charm
    problems = json.loads(headway.error("apply", "-f", file, "-o", "json"))["error"]["problems"]
    assert [problem["reason"] for problem in problems] == ["UNKNOWN_RESOURCE", "INVALID_FIELD"]
    assert len(headway.json("tenants", "list")) == 1
    file = write("kind: Tenant\nname: acme\n---\nkind: Binding\nname: acme/none\n")
    assert headway.error("apply", "-f", file).count("\n") == 1
    headway.run("groups", "create", "none")
    assert headway.text("apply", "-f", file) == "tenants/acme created\ntenants/acme/bindings/none created\n"


def test_a_change_that_one_before_it_makes_room_for_is_applied(headway, write):
    """Alone, each second change would be refused: GROUP_NOT_FREE, IN_USE."""
    headway.run("groups", "create", "gold")
    for tenant in ("acme", "globex"):
        headway.run("tenants", "create", tenant)
    before = (
        "kind: Binding\nname: acme/gold\nmode: {}\n---\nkind: Binding\nname: globex/{}\nmode: {}\n---\n"
        "kind: StrategyBinding\nname: a\nstrategy: adaptive\ntenant: {}\n---\n"
        "kind: StrategyBinding\nname: b\nstrategy: adaptive\ntenant: {}\n---\n"
        "kind: Model\nname: a\naliases: {}\n---\nkind: Model\nname: b\naliases: {}\n"
    )
    headway.run("groups", "create", "other")
    headway.run("apply", "-f", write(before.format("dedicated", "other", "shared", "acme", "globex", "[x]", "[]")))
    headway.run("tenants", "create", "third")
    file = write(before.format("shared", "gold", "dedicated", "third", "acme", "[]", "[x]"))
    assert headway.text("apply", "-f", file, code=1) == ""  # dedicated means alone, whatever acme's becomes
    said = headway.text("apply", "-f", write(before.format("shared", "gold", "shared", "third", "acme", "[]", "[x]")))
    assert said.startswith("models/a updated (aliases)\nmodels/b updated (aliases)\n")
    assert "tenants/globex/bindings/gold created\n" in said
    assert said.endswith("strategyBindings/a updated (tenant)\nstrategyBindings/b updated (tenant)\n")


def test_an_endpoint_that_one_before_it_gives_up_is_free(headway, write, fleet):
    """Two dedicated groups meet in an endpoint; the file makes one of them smaller, and then binds the other."""
    text = "kind: GpuGroup\nname: gold\nendpoints: [{}]\n---\nkind: GpuGroup\nname: all-of-it\nnodes: [gpu-7]\n---\n"
    text += "kind: Tenant\nname: acme\n---\nkind: Tenant\nname: beta\n---\n"
    text += "kind: Binding\nname: acme/gold\nmode: dedicated\n"
    more = "---\nkind: Binding\nname: beta/all-of-it\nmode: dedicated\n"
    headway.run("apply", "-f", write(text.format("10.0.0.7:8000@0")))
    said = headway.error("apply", "-f", write(text.format("10.0.0.7:8000@0") + more))
    assert "GROUP_NOT_FREE" in said
    assert "its endpoint '10.0.0.7:8000@0' is 'acme''s alone" in said
    assert "tenants/beta/bindings/all-of-it created" in headway.text("apply", "-f", write(text.format("") + more))


def test_a_change_in_between_is_not_overwritten(headway, write, monkeypatch):
    """The file was compared with what another admin has changed since."""
    from headway_cli import apply

    def then_another_writes(client):
        found = live(client)
        headway.run("tenants", "update", "default", "weight=7")
        return found

    live = apply.live_resources
    monkeypatch.setattr(apply, "live_resources", then_another_writes)
    said = headway.error("apply", "-f", write("kind: Tenant\nname: default\nweight: 3\n"))
    assert said.startswith("error: STALE_ETAG: ")
    assert headway.json("tenants", "get", "default")["weight"] == 7


def test_standard_input_and_several_files(headway, write):
    assert headway.text("apply", "-f", "-", stdin="kind: Tenant\nname: acme\n") == "tenants/acme created\n"
    one, two = write("kind: Tenant\nname: a\n", "one.yaml"), write("kind: Tenant\nname: tenants/a\n", "two.yaml")
    said = headway.error("apply", "-f", one, "-f", two)
    assert "two.yaml:1: Tenant tenants/a: name: is there already, at " in said


def test_every_problem_of_a_file_is_told_and_nothing_is_applied(headway, write):
    file = write("kind: Tenant\nname: acme\n---\nkind: Tenant\nname: b\nweight: heavy\n---\nkind: Tenent\nname: c\n")
    said = headway.error("apply", "-f", file)
    assert (
        f"error: INVALID_FILE: {file}:6: document 2 (Tenant b): weight: must be a finite number, not 'heavy'\n" in said
    )
    assert f"{file}:8: document 3 (Tenent c): kind: 'Tenent' is none of GpuGroup, Model, Tenant" in said
    problems = json.loads(headway.error("apply", "-f", file, "-o", "json"))["error"]["problems"]
    assert [problem["field"] for problem in problems] == ["weight", "kind"]
    assert len(headway.json("tenants", "list")) == 1
