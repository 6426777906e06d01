"""Whom a share routes, and what is summed up of requests that others placed."""

from headway_scheduler.admission.watching import Observations, Verdict, is_routed
from headway_scheduler.domain.desired import Tenant
from headway_scheduler.domain.request import Request
from hypothesis import given
from hypothesis import strategies as st

IDS = st.text(min_size=1, max_size=30)


@given(IDS, st.integers(0, 100), st.integers(0, 100))
def test_who_is_routed_at_a_lower_share_is_at_a_higher_one(session, one, other):
    low, high = sorted((one, other))
    routed = [is_routed(Tenant("t", routed_percent=percent), session, "r") for percent in (low, high)]
    assert routed in ([False, False], [False, True], [True, True])
    assert is_routed(Tenant("t", routed_percent=100), session, "r")
    assert not is_routed(Tenant("t", routed_percent=0), session, "r")


@given(IDS, IDS, IDS, st.integers(0, 100))
def test_a_session_goes_before_the_request(session, one, other, percent):
    tenant = Tenant("t", routed_percent=percent)
    assert is_routed(tenant, session, one) == is_routed(tenant, session, other)


def test_a_share_is_about_as_large_as_it_says():
    for percent in (1, 10, 50, 90):
        tenant = Tenant("t", routed_percent=percent)
        routed = sum(is_routed(tenant, "", f"request-{n}") for n in range(10_000))
        assert abs(routed / 100 - percent) < 1.5


def verdict(**fields):
    request = Request(request_id="r", tenant="t", domain="tenant/t", model="m", prompt_tokens=100)
    return Verdict(request, 0.0, **({"slots": [4, 7], "chosen": 1, "hits": [0.0, 80.0]} | fields))


def test_sums_are_of_what_can_be_compared():
    seen = Observations()
    for each, slot in (
        (verdict(ttft_ms=[50.0, 20.0]), 4),
        (verdict(ttft_ms=[50.0, 20.0]), 7),
        (verdict(ttft_ms=[50.0, 20.0], held=True), 7),
        (verdict(ttft_ms=None), 4),
        (verdict(), 9),
        (verdict(), None),
        (verdict(slots=[], refusal="NO_ENDPOINTS"), 4),
    ):
        seen.count(each, slot)
    (tally,) = seen.tallies.values()
    assert (tally.requests, tally.agreed, tally.held, tally.refused, tally.elsewhere) == (7, 1, 1, 1, 2)
    assert (tally.compared, tally.predicted_served_ms, tally.predicted_chosen_ms) == (3, 90.0, 60.0)
    assert (tally.prompt_tokens, tally.hit_tokens_served, tally.hit_tokens_chosen) == (400, 160, 320)


def test_a_first_token_is_compared_with_its_own_prediction():
    seen, known, unknown = Observations(), verdict(ttft_ms=[50.0, 20.0]), verdict()
    seen.count(known, 4)
    seen.count(unknown, 4)
    seen.first_token(known, 70.0)
    seen.first_token(unknown, 70.0)
    (tally,) = seen.tallies.values()
    assert (tally.timed, tally.actual_ms, tally.predicted_timed_ms) == (1, 70.0, 50.0)


def test_what_nobody_tells_of_is_forgotten_oldest_first():
    seen = Observations()
    first = verdict()
    for number in range(10_001):
        seen.wait(f"v{number}", first if number == 0 else verdict())
    assert seen.take("v0") is None
    assert seen.take("v1") is not None
    assert seen.take("v1") is None
