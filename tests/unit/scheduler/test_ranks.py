"""Data-parallel ranks behind one address."""

import pytest
from fakes.rig import Rig, desired_state, spec
from headway_scheduler.rpc.convert.routing import decision_to_proto

RANK = "x-data-parallel-rank"


def rig(*specs):
    one = Rig(desired_state("round_robin"))
    one.connect("n", *specs)
    return one


def told(one, count=4):
    return [dict(decision_to_proto(one.route(request_id=str(n))).headers) for n in range(count)]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "emulator"])
def test_each_rank_is_named_in_the_headers(engine):
    one = rig(spec(1, engine=engine), spec(1, engine=engine, dp_rank=1))
    assert sorted(headers[RANK] for headers in told(one)) == ["0", "0", "1", "1"]


def test_an_engine_of_its_own_needs_no_header():
    assert told(rig(spec(1, engine="vllm"), spec(2, engine="vllm"))) == [{}] * 4


def test_an_engine_that_knows_no_ranks_is_sent_none():
    assert told(rig(spec(1, engine="tgi"), spec(1, engine="tgi", dp_rank=1))) == [{}] * 4


def test_the_last_rank_at_an_address_is_alone_again():
    one = rig(spec(1, engine="vllm"), spec(1, engine="vllm", dp_rank=1))
    one.fleet.remove_endpoint("10.0.0.1:8000@1")
    assert told(one) == [{}] * 4


def test_a_retry_that_goes_elsewhere_names_the_other_rank():
    one = rig(spec(1, engine="vllm"), spec(1, engine="vllm", dp_rank=1))
    first = one.route("r")
    again = one.route("r", excluded=frozenset({first.endpoint.spec.id}))
    assert again.endpoint.spec.dp_rank == 1 - first.endpoint.spec.dp_rank
    assert again.endpoint.headers == {RANK: str(again.endpoint.spec.dp_rank)}
