import numpy as np
from fakes.views import view_of
from headway_sim.policies.choice import least, only, random_ties
from hypothesis import given
from hypothesis import strategies as st


@given(
    st.lists(st.sampled_from([-1e9, -1.0, 0.0, 1e-12, 1.0, 1.0000001, 1e15]), min_size=1, max_size=9),
    st.integers(0, 99),
)
def test_random_ties_keep_every_real_difference(numbers, seed):
    ranked = random_ties(np.array(numbers), view_of([0] * len(numbers), random=seed))
    for a, low in zip(ranked, numbers, strict=True):
        for b, high in zip(ranked, numbers, strict=True):
            assert not (low < high and a >= b)


def test_least_is_the_lowest_then_fewest_in_flight_then_longest_not_chosen():
    assert least(np.array([2.0, 1.0, 1.5]), view_of([0, 9, 0])) == 1
    assert least(np.array([1.0, 1.0, 2.0]), view_of([3, 2, 0])) == 1
    assert least(np.array([1.0, 2.0, 1.0]), view_of([3, 0, 3], last_chosen=[8, 1, 7])) == 2


def test_only_one_is_lowest():
    assert only(1, 3).cost.tolist() == [1.0, 0.0, 1.0]
