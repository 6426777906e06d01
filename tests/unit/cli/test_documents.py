"""YAML files: what they may say, and how they are told what they may not."""

import pytest
import yaml
from headway_cli.documents import exported, parse_documents, to_document
from headway_cli.errors import FileProblems
from headway_cli.kinds import BINDINGS, GPU_GROUPS, KINDS, STRATEGIES, TENANTS
from hypothesis import given
from hypothesis import strategies as st


def problems(text):
    with pytest.raises(FileProblems) as caught:
        parse_documents(text, "f.yaml")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\n", "f.yaml:2:1: is no YAML: expected ',' or ']', but got '<stream end>'"),
        (
            "kind: Tenant\nname: a\n\tweight: 1\n",
            "f.yaml:3:1: is no YAML: found character '\\t' that cannot start any token",
        ),
        ("- 1\n", "f.yaml:1: document 1: must be a mapping with `kind` and `name`"),
        ("kind: Tenant\n", "f.yaml:1: document 1 (Tenant): name: is required, as text"),
        ("kind: Tenant\nname: 7\n", "f.yaml:2: document 1 (Tenant): name: must be text, not 7"),
        ("kind: Tenant\nname: a\nname: b\n", "f.yaml:3: document 1 (Tenant b): name: is there twice"),
        (
            "kind: Tenant\nname: a\nquotas:\n  max_inflight: many\n",
            "f.yaml:4: document 1 (Tenant a): quotas.max_inflight: "
            "must be a whole number from 0 to 4294967295, not 'many'",
        ),
        (
            "kind: Tenant\nname: a\nquotas:\n  speed: 1\n",
            "f.yaml:4: document 1 (Tenant a): quotas.speed: is no field; "
            "there are requests_per_minute, tokens_per_minute, max_inflight",
        ),
        ("kind: Tenant\nname: a\nquotas: 3\n", "f.yaml:3: document 1 (Tenant a): quotas: must be a mapping, not 3"),
        ("kind: Tenant\nname: a\nmodels: m\n", "f.yaml:3: document 1 (Tenant a): models: must be a list, not 'm'"),
        (
            "kind: Tenant\nname: a\nmodels:\n- m\n- 1.0\n",
            "f.yaml:5: document 1 (Tenant a): models[1]: must be text, in quotes, not 1.0",
        ),
        ("kind: Tenant\nname: a\netag: x\n", "f.yaml:3: document 1 (Tenant a): etag: is set by the scheduler"),
        (
            "kind: GpuGroup\nname: g\nall: 1\n",
            "f.yaml:3: document 1 (GpuGroup g): all: must be true or false, not 1",
        ),
        (
            "kind: GpuGroup\nname: g\nselector:\n  on: yes\n",
            "f.yaml:3: document 1 (GpuGroup g): selector.True: must be text, not true: put it in quotes",
        ),
        (
            "kind: Binding\nname: a/b\nmode: loose\n",
            "f.yaml:3: document 1 (Binding a/b): mode: 'loose' is none of dedicated, shared, burst",
        ),
        (
            "kind: Strategy\nname: s\nparameters:\n  x: .nan\n",
            "f.yaml:4: document 1 (Strategy s): parameters.x: must be a finite number, text, true, false, "
            "a list or a mapping, not nan",
        ),
        (
            "kind: Credential\nname: c\nexpire_time: tomorrow\n",
            "f.yaml:3: document 1 (Credential c): expire_time: "
            "must be a time like 2027-01-31T12:00:00Z, not 'tomorrow'",
        ),
        ("kind: &x\n  a: *x\n", "f.yaml: is no YAML: an alias stands within what it names"),
        ("kind: !!python/object:os.system {}\n", None),
        ("at: 2027-02-31\n", "f.yaml: is no YAML: day is out of range for month"),
    ],
)
def test_a_wrong_file_is_told_its_line_and_field(text, expected):
    found = problems(text)
    assert expected in found if expected else found[0].startswith("f.yaml:1:7: is no YAML: could not determine")


def test_every_problem_is_told_at_once():
    text = "kind: Tenant\nname: a\nweight: x\npriority: y\n---\nkind: Nothing\n"
    assert [line.split(":")[1] for line in problems(text)] == ["3", "4", "6", "6"]


def test_empty_documents_and_comments_are_nothing():
    assert parse_documents("---\n# nothing\n---\n", "f.yaml") == []


def test_a_document_means_what_the_scheduler_answers():
    (binding,) = parse_documents("kind: Binding\nname: acme/gold\n", "f.yaml")
    assert (binding.kind, binding.place) == (BINDINGS, "f.yaml:1")
    assert to_document(binding.kind, binding.message) == {
        "kind": "Binding",
        "name": "tenants/acme/bindings/gold",
        "gpu_group": "gpuGroups/gold",
        "mode": "shared",
        "weight": 1,
    }
    (strategy,) = parse_documents("kind: Strategy\nname: s\nalgorithm: least_request\n", "f.yaml")
    assert (strategy.message.enabled, strategy.message.fallback_algorithm) == (True, "round_robin")
    (group,) = parse_documents("kind: GpuGroup\nname: g\nnodes: [nodes/a, b]\n", "f.yaml")
    assert list(group.message.nodes) == ["a", "b"]
    (model,) = parse_documents("kind: Model\nname: org/llama:8b\n", "f.yaml")
    assert model.message.name == "models/org/llama:8b"


def test_a_zero_that_an_admin_chose_is_kept():
    (strategy,) = parse_documents("kind: Strategy\nname: s\nenabled: false\nparameters: {a: 0, b: {}}\n", "f.yaml")
    document = to_document(STRATEGIES, strategy.message)
    assert (document["enabled"], document["parameters"]) == (False, {"a": 0, "b": {}})


_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)
_JSON = st.recursive(
    st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.builds(
        lambda name, text, weight, inflight, models: TENANTS.message(
            name=f"tenants/{name}",
            display_name=text,
            weight=weight,
            quotas={"max_inflight": inflight},
            models=models,
        ),
        st.from_regex(r"[a-z][a-z0-9]{0,9}", fullmatch=True),
        _TEXT,
        st.floats(0.01, 1e6),
        st.integers(0, 2**32 - 1),
        st.lists(_TEXT.filter(lambda text: not text.startswith("models/")), max_size=3),
    )
)
def test_any_tenant_survives_being_written_and_read(tenant):
    assert _again(TENANTS, tenant) == to_document(TENANTS, tenant)


@given(st.dictionaries(_TEXT, _JSON, max_size=4), st.booleans(), st.dictionaries(_TEXT, _TEXT, max_size=3))
def test_any_parameters_and_labels_survive_being_written_and_read(parameters, enabled, labels):
    strategy = STRATEGIES.message(name="strategies/s", algorithm="a", fallback_algorithm="b", enabled=enabled)
    strategy.parameters.update(parameters)
    assert _again(STRATEGIES, strategy) == to_document(STRATEGIES, strategy)
    group = GPU_GROUPS.message(name="gpuGroups/g", selector=labels)
    assert _again(GPU_GROUPS, group) == to_document(GPU_GROUPS, group)


def _again(kind, message):
    (document,) = parse_documents(exported([(kind, message)]), "f.yaml")
    return to_document(kind, document.message)


@given(_JSON)
def test_no_content_breaks_the_reader(content):
    for kind in KINDS:
        values = {"kind": kind.name, "name": "x", **dict.fromkeys(kind.fields, content)}
        try:
            parse_documents(yaml.safe_dump(values), "f.yaml")
        except FileProblems as error:
            assert all(problem.place.startswith("f.yaml:") for problem in error.problems)
