"""Writes are done once, whatever happens to their answers."""

import grpc
import pytest
from headway.admin.v1 import admin_pb2 as pb
from headway_cli import client as module
from headway_cli.client import Client
from headway_cli.errors import CliError, Unreachable
from headway_cli.kinds import TENANTS
from headway_cli.strategies import _slug


class Lost(grpc.RpcError):
    """A connection that broke before the answer came."""

    def code(self):
        return grpc.StatusCode.UNAVAILABLE

    def details(self):
        return "connection reset"

    def trailing_metadata(self):
        return ()


class Method:
    """An rpc that loses its first answers."""

    def __init__(self, losses):
        self.losses, self.seen = losses, []

    def __call__(self, request, *, timeout, metadata):
        self.seen.append((request.request_id, timeout, metadata))
        if len(self.seen) <= self.losses:
            raise Lost
        return pb.CreateTenantResponse(tenant=request.tenant)


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        yield Client(channel, scheduler="127.0.0.1:1", token="t", timeout_s=7)


def test_a_lost_write_is_repeated_under_the_same_request_id(client):
    method = Method(losses=2)
    client.write(method, pb.CreateTenantRequest())
    assert len(method.seen) == 3
    assert len({request_id for request_id, *_ in method.seen}) == 1
    assert method.seen[0][1:] == (7, (("authorization", "Bearer t"),))


def test_two_writes_have_two_request_ids(client):
    method = Method(losses=0)
    client.write(method, pb.CreateTenantRequest())
    client.write(method, pb.CreateTenantRequest())
    assert len({request_id for request_id, *_ in method.seen}) == 2


def test_a_write_that_stays_lost_is_unreachable(client):
    with pytest.raises(Unreachable):
        client.write(Method(losses=9), pb.CreateTenantRequest())


def test_an_edit_starts_over_when_another_came_between(client, monkeypatch):
    etags = iter(["1", "2"])
    tried = []

    def update(kind, message, fields, *, validate_only):
        tried.append((message.etag, fields))
        if message.etag == "1":
            raise CliError("STALE_ETAG", "changed")
        return message

    monkeypatch.setattr(client, "get", lambda kind, name: pb.Tenant(name=name, etag=next(etags)))
    monkeypatch.setattr(client, "update", update)
    assert client.edit(TENANTS, "tenants/a", lambda message: ["weight"]).etag == "2"
    assert tried == [("1", ["weight"]), ("2", ["weight"])]


@pytest.mark.parametrize("text", ["default", "acme-llama", "8b", "Org/Llama-3.1", "gpu_aware", "x" * 200, "ü", "-"])
def test_a_bindings_name_is_one_that_the_scheduler_takes(text):
    from headway_scheduler.domain.names import STRATEGY_BINDINGS, check_id

    assert check_id(STRATEGY_BINDINGS, _slug(text), "name") == _slug(text)
    assert _slug(text) != _slug(f"{text}.")
