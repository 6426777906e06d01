"""Pages of lists. A token is opaque to callers and bound to the list it came from."""

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from headway_scheduler.errors import InvalidField

__all__ = ["check_size", "make_token", "page_of", "read_number", "read_token"]

T = TypeVar("T")

_DEFAULT_SIZE: Final = 100
_LARGEST_SIZE: Final = 1000
_LONGEST_NUMBER: Final = 18


def check_size(page_size: int) -> int:
    """How many to answer: 0 asks for the default, and more than the most gets the most (AIP-158)."""
    if page_size < 0:
        raise InvalidField("page_size", "must be >= 0")
    return min(page_size or _DEFAULT_SIZE, _LARGEST_SIZE)


def make_token(listing: str, last: str) -> str:
    """The token of the page after `last` in this listing (its method and parent)."""
    return base64.urlsafe_b64encode(json.dumps([listing, last]).encode()).decode()


def read_token(listing: str, token: str) -> str | None:
    """The last key of the page before, None for the first page. Raises InvalidField."""
    if not token:
        return None
    try:
        made_for, last = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, TypeError, RecursionError):
        raise InvalidField("page_token", "is not one that this scheduler made") from None
    if made_for != listing or not isinstance(last, str):
        raise InvalidField("page_token", "belongs to another list")
    return last


def read_number(listing: str, token: str) -> int | None:
    """Like `read_token`, of a list whose keys are numbers."""
    last = read_token(listing, token)
    if last is None:
        return None
    if not (last.isascii() and last.isdigit() and len(last) <= _LONGEST_NUMBER):
        raise InvalidField("page_token", "is not one that this scheduler made")
    return int(last)


def page_of(
    listing: str, items: Iterable[T], key: Callable[[T], str], page_size: int, page_token: str
) -> tuple[list[T], str]:
    """One page of the items in the order of their keys, and the token of the next one (empty: no more).

    Stable under change: an item added or removed between two pages moves no other across them.
    """
    size = check_size(page_size)
    after = read_token(listing, page_token)
    rest = sorted((item for item in items if after is None or key(item) > after), key=key)
    page = rest[:size]
    return page, make_token(listing, key(page[-1])) if len(rest) > size else ""
