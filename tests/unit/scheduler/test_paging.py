"""Pages of lists."""

import base64

import pytest
from headway_scheduler.errors import InvalidField
from headway_scheduler.rpc.paging import check_size, make_token, page_of, read_number, read_token
from hypothesis import given
from hypothesis import strategies as st


@given(items=st.sets(st.text(max_size=5), max_size=40), size=st.integers(1, 10))
def test_pages_hold_every_item_once_in_order(items: set[str], size: int) -> None:
    seen: list[str] = []
    token = ""
    for _ in range(len(items) + 1):
        page, token = page_of("List", items, str, size, token)
        assert len(page) <= size
        seen += page
        if not token:
            break
    assert seen == sorted(items)


@given(token=st.text() | st.binary().map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
def test_a_token_that_we_did_not_make_is_refused_by_name(token: str) -> None:
    if not token:
        assert read_token("List", token) is None
        return
    with pytest.raises(InvalidField) as refused:
        read_token("List", token)
    assert refused.value.field == "page_token"


@pytest.mark.parametrize("last", ["", "x", "-1", "²", "9" * 30])
def test_a_number_is_a_number(last: str) -> None:
    assert read_number("List", make_token("List", "42")) == 42
    with pytest.raises(InvalidField):
        read_number("List", make_token("List", last))


def test_sizes() -> None:
    assert [check_size(size) for size in (0, 1, 1000, 5000)] == [100, 1, 1000, 1000]
    with pytest.raises(InvalidField):
        check_size(-1)
