"""Quotas go over to another scheduler: what was used stays used, and refills by the time that passed."""

import pytest
from headway_scheduler.admission.quotas import QuotaBook
from headway_scheduler.domain.desired import Quotas, Tenant
from headway_scheduler.errors import TenantRequests, TenantTokens

ACME = Tenant("acme", quotas=Quotas(requests_per_minute=2, tokens_per_minute=600))


def used_up():
    book = QuotaBook()
    book.admit(ACME, "m", 300.0, now=10.0)
    book.admit(ACME, "m", 300.0, now=10.0)
    for _ in range(2):
        book.settle("acme", "m", 300.0, 300.0)
    return book.dump(now=10.0, wall=1000.0)


def test_what_was_used_stays_used():
    book = QuotaBook()
    book.restore(used_up(), now=500.0, wall=1000.0)
    with pytest.raises(TenantRequests):
        book.admit(ACME, "m", 1.0, now=500.0)


def test_it_refills_by_the_time_that_passed_on_another_clock():
    book = QuotaBook()
    book.restore(used_up(), now=500.0, wall=1030.0)
    book.admit(ACME, "m", 299.0, now=500.0)
    with pytest.raises((TenantRequests, TenantTokens)):
        book.admit(ACME, "m", 299.0, now=500.0)


def test_a_wall_clock_that_was_set_back_gives_nothing_for_free():
    book = QuotaBook()
    book.restore(used_up(), now=500.0, wall=10.0)
    with pytest.raises(TenantRequests):
        book.admit(ACME, "m", 1.0, now=500.0)


def test_a_tenant_without_quotas_leaves_nothing():
    book = QuotaBook()
    book.admit(Tenant("free"), "m", 1.0, now=0.0)
    other = QuotaBook()
    other.restore(book.dump(0.0, 0.0), 0.0, 0.0)
    other.admit(Tenant("free"), "m", 1e9, now=0.0)


@pytest.mark.parametrize("state", [b"", b"{}", b'{"at": 1, "levels": {"a": [1]}}', b"\xff"])
def test_nonsense_is_a_value_error_and_changes_nothing(state):
    book = QuotaBook()
    with pytest.raises(ValueError):
        book.restore(state, 0.0, 0.0)
    assert book.dump(0.0, 0.0) == QuotaBook().dump(0.0, 0.0)
