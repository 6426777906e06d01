"""The retry budget."""

from contextlib import ExitStack

from headway_gateway.budget import RetryBudget
from hypothesis import given
from hypothesis import strategies as st


@given(active=st.integers(0, 200), tries=st.integers(0, 100), ratio=st.floats(0, 1), minimum=st.integers(0, 10))
def test_never_more_than_the_share_or_the_minimum(active: int, tries: int, ratio: float, minimum: int) -> None:
    budget = RetryBudget(ratio, minimum)
    with ExitStack() as requests:
        for _ in range(active):
            requests.enter_context(budget.request())
        granted = sum(budget.begin_retry() for _ in range(tries))
        assert granted == budget.retrying == min(tries, max(minimum, int(ratio * active)))
        for _ in range(granted):
            budget.end_retry()
    assert budget.active == budget.retrying == 0
