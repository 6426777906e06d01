"""Credentials made behind a scheduler's back, in its database."""

from headway_scheduler.domain.desired import Credential, Role
from headway_scheduler.domain.tokens import new_token, token_sha256
from headway_scheduler.store.base import Write

BY_HAND = Write(principal="test", method="Test")


def bearer(token):
    """The metadata that shows a token."""
    return (("authorization", f"Bearer {token}"),)


async def make(store, id_, role, **fields):
    """A credential in the store; returns its token."""
    token = new_token()
    if role is Role.AGENT:
        fields = {"node": "n"} | fields
    if role in (Role.ROUTER, Role.TENANT):
        fields = {"tenants": ("default",)} | fields
    await store.create(Credential(id_, role, token_sha256(token), **fields), BY_HAND)
    return token


async def credential(served, id_, role, **fields):
    """The same for a running scheduler, which knows of it at once."""
    token = await make(served.store, id_, role, **fields)
    await served.scheduler.refresh()
    return token
