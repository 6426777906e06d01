"""Admin's messages and domain values say the same."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from headway.admin.v1 import admin_pb2 as pb
from headway_scheduler.domain.desired import (
    Binding,
    BindingMode,
    Credential,
    GpuGroup,
    Model,
    Quotas,
    Role,
    StoredMeta,
    StrategyBinding,
    StrategyConfig,
    Tenant,
)
from headway_scheduler.errors import InvalidField
from headway_scheduler.rpc.convert import admin
from hypothesis import given
from hypothesis import strategies as st

ids = st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
loose = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,30}", fullmatch=True)
texts = st.text(st.characters(codec="utf-8"), max_size=40).filter(str.isprintable)
weights = st.floats(min_value=1e-6, max_value=1e6)
counts = st.integers(0, 2**32 - 1)
moments = st.datetimes(datetime(1970, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 -- its API
numbers = st.integers(-(2**52), 2**52) | st.floats(allow_nan=False, allow_infinity=False).filter(
    lambda number: not (number.is_integer() and abs(number) < 2**53)
)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def several(values: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(values, max_size=4, unique=True).map(tuple)


CASES = {
    admin.TENANTS: st.builds(
        Tenant,
        ids,
        texts,
        texts,
        weights,
        st.integers(-1, 1),
        st.builds(Quotas, counts, counts, counts),
        several(loose),
    ),
    admin.GPU_GROUPS: st.builds(
        GpuGroup,
        ids,
        texts,
        st.dictionaries(texts.filter(bool), texts, max_size=4),
        several(loose),
        several(loose),
        st.booleans(),
    ),
    admin.BINDINGS: st.builds(
        Binding, ids, ids, st.sampled_from(BindingMode), st.integers(-(2**31), 2**31 - 1), weights
    ),
    admin.MODELS: st.builds(Model, loose, st.just(()), texts, counts, st.booleans()),
    admin.STRATEGIES: st.builds(
        StrategyConfig,
        ids,
        ids,
        st.dictionaries(texts, json_values, max_size=4),
        st.booleans(),
        ids,
        counts,
        texts,
        st.integers(1, 1000),
    ),
    admin.STRATEGY_BINDINGS: st.one_of(
        st.builds(StrategyBinding, ids, ids, st.just("") | ids, st.just("") | loose, st.just(""), st.booleans()),
        st.builds(StrategyBinding, ids, ids, st.just(""), st.just(""), ids, st.booleans()),
    ),
    admin.CREDENTIALS: st.one_of(
        st.builds(Credential, ids, st.just(Role.AGENT), st.just(b""), loose, st.just(()), moments, st.booleans()),
        st.builds(
            Credential,
            ids,
            st.just(Role.ROUTER),
            st.just(b""),
            st.just(""),
            several(ids).filter(bool),
            st.none() | moments,
            st.booleans(),
        ),
    ),
}


@pytest.mark.parametrize("kind", list(CASES), ids=lambda kind: kind.noun)
@given(data=st.data())
def test_a_resource_survives_the_wire(kind: admin.Kind, data: st.DataObject) -> None:
    resource = data.draw(CASES[kind])
    message = kind.message.FromString(kind.to_message(resource).SerializeToString())
    assert kind.to_resource(message, resource) == resource
    assert kind.updated(resource, message, FieldMask()) == resource
    assert kind.updated(resource, message, FieldMask(paths=["*"])) == resource


@given(resource=CASES[admin.TENANTS], patch=CASES[admin.TENANTS])
def test_a_mask_changes_its_fields_and_no_other(resource: Tenant, patch: Tenant) -> None:
    message = admin.TENANTS.to_message(replace(patch, id=resource.id))
    mask = FieldMask(paths=["quotas.max_inflight", "models"])
    quotas = replace(resource.quotas, max_inflight=patch.quotas.max_inflight)
    assert admin.TENANTS.updated(resource, message, mask) == replace(resource, quotas=quotas, models=patch.models)


def test_what_the_scheduler_sets_no_caller_can() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    stored = Credential("c", Role.VIEWER, b"x" * 32, revoked=True, meta=StoredMeta("W1", now, now))
    message = pb.Credential(name="credentials/c", role=pb.ROLE_VIEWER)
    assert admin.CREDENTIALS.updated(stored, message, FieldMask(paths=["*"])).revoked
    assert not admin.CREDENTIALS.to_resource(
        pb.Credential(name="credentials/c", role=pb.ROLE_VIEWER, revoked=True), None
    ).revoked
    model = pb.Model(name="models/m", discovered=True)
    assert not admin.MODELS.to_resource(model, None).discovered
    assert admin.TENANTS.to_message(Tenant("acme", meta=stored.meta)).etag == "W1"


@pytest.mark.parametrize(
    "name", ["", "tenants", "tenants/", "tenants/acme", "tenants/acme/bindings/", "tenants//bindings/gold",
             "tenants/acme/bindings/gold/more", "gpuGroups/acme/bindings/gold", "tenants/ACME/bindings/gold"]
)  # fmt: skip
def test_a_binding_is_named_after_its_tenant_and_group(name: str) -> None:
    assert admin.BINDINGS.key("tenants/acme/bindings/gold", "name") == "acme/gold"
    with pytest.raises(InvalidField) as refused:
        admin.BINDINGS.key(name, "binding.name")
    assert refused.value.field == "binding.name"
