"""What tenants with quotas are told of them: on answers, on refusals, on the wire and by HTTP."""

import pytest
from fakes.rig import Rig, desired_state
from google.rpc import error_details_pb2
from headway_scheduler.admission.quotas import QuotaBook
from headway_scheduler.domain.desired import Binding, Quotas, Tenant
from headway_scheduler.domain.rate_limits import RateLimit, RateLimits
from headway_scheduler.errors import HoldExpired, Saturated, TenantRequests
from headway_scheduler.rpc.convert.routing import decision_to_proto
from headway_scheduler.rpc.http_refusals import api_error
from headway_scheduler.rpc.interceptors import to_status

ALL = {f"x-ratelimit-{part}-{what}" for part in ("limit", "remaining", "reset") for what in ("requests", "tokens")}


@pytest.fixture
def rig():
    quotas = Quotas(requests_per_minute=60, tokens_per_minute=60_000)
    rig = Rig(desired_state("gpu_aware", tenants=[Tenant("t", quotas=quotas)], bindings=[Binding("t", "all")]))
    rig.endpoints(1)
    return rig


def test_an_answer_says_what_is_left(rig):
    decision = rig.route(tenant="t")
    assert decision.rate_limits == RateLimits(
        RateLimit(60, 59, 1.0), RateLimit(60_000, 60_000 - 356, pytest.approx(0.356))
    )
    assert dict(decision_to_proto(decision).answer_headers) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "60000",
        "x-ratelimit-remaining-tokens": "59644",
        "x-ratelimit-reset-tokens": "356ms",
    }


def test_those_without_quotas_are_told_nothing(rig):
    decision = rig.route()
    assert decision.rate_limits is None
    assert not decision_to_proto(decision).answer_headers


def test_a_retry_is_told_what_is_left_now(rig):
    rig.route("r", tenant="t")
    rig.route("other", tenant="t")
    assert rig.route("r", tenant="t").rate_limits.requests.remaining == 58


def test_so_is_one_that_was_held(rig):
    rig.full(1)
    _, answers = rig.hold("r", tenant="t")
    rig.full()
    rig.dispatcher.run_pass(rig.clock.now)
    assert answers[0].rate_limits.requests.remaining == 59


@pytest.mark.parametrize(("max_wait_s", "kind"), [(0.0, Saturated), (1.0, HoldExpired)])
def test_a_refusal_says_it_too_and_takes_nothing(rig, max_wait_s, kind):
    rig.full(1)
    if max_wait_s:
        _, answers = rig.hold(tenant="t", max_wait_s=max_wait_s)
        rig.pass_time(2.0)
        error = answers[0]
    else:
        with pytest.raises(Saturated) as caught:
            rig.submit(rig.request(tenant="t", max_wait_s=max_wait_s))
        error = caught.value
    assert isinstance(error, kind)
    assert set(error.facts) == ALL
    assert error.facts["x-ratelimit-remaining-requests"] == "60"


def test_what_is_used_up_says_when_it_is_back_on_the_wire_and_by_http(rig):
    for _ in range(60):
        rig.finish(rig.route(tenant="t"))
    with pytest.raises(TenantRequests) as caught:
        rig.submit(rig.request(tenant="t"))
    info = error_details_pb2.ErrorInfo()
    assert to_status(caught.value).details[0].Unpack(info)
    assert info.metadata["x-ratelimit-remaining-requests"] == "0"
    assert info.metadata["x-ratelimit-reset-requests"] == "1m0s"
    headers = api_error(caught.value).headers()
    assert set(headers) >= ALL
    assert headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0, "0ms"), (0.12, "120ms"), (8.64, "8.64s"), (10.0, "10s"), (60.0, "1m0s"), (363.0, "6m3s")],
)
def test_durations_are_written_as_openai_does(seconds, told):
    headers = RateLimits(requests=RateLimit(1, 0, seconds)).headers()
    assert headers["x-ratelimit-reset-requests"] == told
    assert len(headers) == 3


def test_a_quota_that_was_restored_and_not_used_since_says_nothing():
    book = QuotaBook()
    book.admit(Tenant("t", quotas=Quotas(requests_per_minute=10)), "m", 1.0, 0.0)
    other = QuotaBook()
    other.restore(book.dump(0.0, 0.0), 0.0, 0.0)
    assert other.standing("t", 1.0) == RateLimits()
