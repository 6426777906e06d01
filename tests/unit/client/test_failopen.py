"""Whom the client chooses when it is alone."""

import random

from headway.routing.v1 import routing_pb2 as pb
from headway_client.failopen import FailOpenRouter
from hypothesis import given
from hypothesis import strategies as st

NAMES = [f"10.0.0.{i}:80" for i in range(6)]
entries = st.lists(
    st.builds(
        lambda address, models, tenants, inflight: pb.FailOpenView.Entry(
            endpoint=pb.Endpoint(name=f"endpoints/{address}@0", address=address),
            models=models,
            tenants=tenants,
            inflight=inflight,
        ),
        st.sampled_from(NAMES),
        st.sets(st.sampled_from(["m", "n"])),
        st.sets(st.sampled_from(["tenants/acme", "rival", "*"])),
        st.integers(0, 9),
    ),
    max_size=6,
    unique_by=lambda entry: entry.endpoint.address,
)


@given(
    view=entries,
    tenant=st.sampled_from(["acme", "tenants/rival", ""]),
    model=st.sampled_from(["m", "n"]),
    excluded=st.sets(st.sampled_from(NAMES)),
)
def test_never_outside_what_is_allowed_and_never_busier_than_need_be(
    view: list[pb.FailOpenView.Entry], tenant: str, model: str, excluded: set[str]
) -> None:
    router = FailOpenRouter(random.Random(0))
    router.update(pb.FailOpenView(endpoints=view))
    own = tenant.removeprefix("tenants/")
    allowed = {
        e.endpoint.address: e.inflight
        for e in view
        if model in e.models
        and ("*" in e.tenants or (own and {own, f"tenants/{own}"} & set(e.tenants)))
        and e.endpoint.address not in excluded
    }
    request = pb.RouteRequest(model=model, tenant=tenant, excluded_endpoints=excluded)
    answer = router.choose(request, "failopen-1")
    if answer is None:
        assert not allowed
        return
    offered = [answer.endpoint.address, *(e.address for e in answer.fallbacks)]
    assert [allowed[a] for a in offered] == sorted(allowed.values())[: len(offered)]
    assert len(set(offered)) == len(offered)


def test_own_requests_count_on_top_of_the_view() -> None:
    router = FailOpenRouter(random.Random(0))
    a, b = (f"endpoints/{name}@0" for name in NAMES[:2])
    router.begin(a)
    router.update(
        pb.FailOpenView(
            endpoints=[
                pb.FailOpenView.Entry(endpoint=pb.Endpoint(name=n), models=["m"], tenants=["*"], inflight=i)
                for n, i in ((a, 3), (b, 4))
            ]
        )
    )

    def chosen() -> str:
        answer = router.choose(pb.RouteRequest(model="m"), "x")
        assert answer is not None
        return answer.endpoint.name

    assert chosen() == a  # Its 3 hold the one of ours.
    router.begin(a)
    router.begin(a)
    assert chosen() == b
    for _ in range(3):
        router.end(a)
    assert chosen() == a


def test_a_large_pool_is_sampled() -> None:
    router = FailOpenRouter(random.Random(0))
    router.update(
        pb.FailOpenView(
            endpoints=[
                pb.FailOpenView.Entry(endpoint=pb.Endpoint(name=str(i)), models=["m"], tenants=["*"])
                for i in range(1000)
            ]
        )
    )
    chosen = {router.choose(pb.RouteRequest(model="m"), "x").endpoint.name for _ in range(200)}
    assert len(chosen) > 100


def test_a_request_without_a_tenant_is_the_default_ones() -> None:
    entry = pb.FailOpenView.Entry(
        endpoint=pb.Endpoint(name="endpoints/a@0", address="a"), models=["m"], tenants=["acme"]
    )
    router = FailOpenRouter(random.Random(0))
    router.update(pb.FailOpenView(endpoints=[entry], default_tenant="acme"))
    answer = router.choose(pb.RouteRequest(model="m"), "failopen-1")
    assert answer is not None
    assert answer.endpoint.address == "a"
    assert router.models("") == ["m"]
    router.update(pb.FailOpenView(endpoints=[entry], default_tenant="rival"))
    assert router.choose(pb.RouteRequest(model="m"), "failopen-2") is None
