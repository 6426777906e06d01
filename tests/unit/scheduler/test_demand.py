"""Which prefixes are in demand, and what of a prefill is an investment."""

import numpy as np
import pytest
from headway_scheduler.index.demand import Demand
from headway_scheduler.index.values import Chain
from headway_scheduler.strategies.pricing import at_depth, invested_by_depth
from hypothesis import given
from hypothesis import strategies as st

BLOCK = 128.0


def chain(*hashes):
    return Chain(0, list(hashes), BLOCK)


def invested(demand, wanted, *hits, uses=1.0):
    """Of the tokens that each candidate lacks, those that others will use there; None: none anywhere."""
    depths, asking = demand.asked(wanted)
    found = invested_by_depth(np.array(hits, float), depths, asking, uses)
    return [found[-1] - at_depth(float(each), depths, found) for each in hits] if found[-1] else None


def test_nothing_in_flight_is_no_demand():
    assert invested(Demand(), chain(1, 2), 0.0) is None


def test_one_request_may_be_the_same_sessions():
    demand = Demand()
    demand.begin(chain(1, 2, 3))
    assert invested(demand, chain(1, 2, 9), 0.0) is None


def test_an_investment_is_shared_by_those_in_flight():
    """Four ask for blocks 1 and 2, one endpoint of two has them: the new copy serves half of them, itself pays half."""
    demand = Demand()
    for last in (7, 8, 9, 10):
        demand.begin(chain(1, 2, last))
    assert invested(demand, chain(1, 2, 11), 2 * BLOCK, 0.0) == [0.0, BLOCK]
    assert invested(demand, chain(1, 2, 11), 2 * BLOCK, BLOCK) == [0.0, pytest.approx(BLOCK / 2)]
    assert invested(demand, chain(1, 2, 11), 2 * BLOCK, 0.0, uses=2.0) == [0.0, pytest.approx(1.5 * BLOCK)]


def test_many_holders_need_no_more():
    demand = Demand()
    for last in (7, 8):
        demand.begin(chain(1, last))
    assert invested(demand, chain(1, 9), BLOCK, BLOCK, 0.0) is None


def test_demand_ends_with_its_requests():
    demand = Demand()
    for _ in range(3):
        demand.begin(chain(1, 2, 3, 4, 5))
    for _ in range(3):
        demand.end(chain(1, 2, 3, 4, 5))
    assert len(demand) == 0
    assert invested(demand, chain(1, 2), 0.0) is None


def test_long_prompts_are_counted_at_few_depths():
    demand = Demand()
    demand.begin(chain(*range(1, 4097)))
    assert len(demand) <= 25


def test_an_empty_prompt():
    demand = Demand()
    demand.begin(chain())
    demand.end(chain())
    assert invested(demand, chain(), 0.0) is None


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.lists(st.floats(0, 40 * BLOCK), min_size=1, max_size=5),
    st.floats(0.1, 50.0),
)
def test_never_more_than_what_is_missing(depths, hits, uses):
    demand = Demand()
    for depth in depths:
        demand.begin(chain(*range(1, depth + 1)))
    wanted = chain(*range(1, 41))
    found = invested(demand, wanted, *hits, uses=uses)
    if found is not None:
        found = np.array(found)
        assert (found >= -1e-9).all()
        assert (found <= np.maximum(0.0, 40 * BLOCK - np.array(hits)) + 1e-6).all()
