"""What is wrong with a JSON body is said by its field's path."""

import json

import pytest
from headway.admin.v1 import admin_pb2 as apb
from headway.routing.v1 import routing_pb2 as pb
from headway_scheduler.errors import InvalidField
from headway_scheduler.rpc.json_bodies import from_json


@pytest.mark.parametrize(
    ("message", "body", "field", "problem"),
    [
        (pb.RouteRequest, {"maxTokens": 1.5}, "maxTokens", "Couldn't parse integer: 1.5"),
        (pb.RouteRequest, {"maxTokens": True}, "maxTokens", "Bool value True is not acceptable for integer field"),
        (pb.RouteRequest, {"maxTokens": -1}, "maxTokens", "Value out of range: -1"),
        (pb.RouteRequest, {"maxWait": "x"}, "maxWait", 'Duration must end with letter "s": x'),
        (pb.RouteRequest, {"tokens": {"ids": [1, 1.5]}}, "tokens.ids[1]", "Couldn't parse integer: 1.5"),
        (
            pb.ReportRequest,
            {"reports": [{}, {"finished": {"usage": {"promptTokens": 1.5}}}]},
            "reports[1].finished.usage.promptTokens",
            "Couldn't parse integer: 1.5",
        ),
        (
            apb.CreateTenantRequest,
            {"tenant": {"quotas": {"maxInflight": 1.5}}},
            "tenant.quotas.maxInflight",
            "Couldn't parse integer: 1.5",
        ),
        (pb.ReportRequest, {"reports": 5}, "reports", "repeated field reports must be in [] which is 5"),
        (pb.RouteRequest, {"nope": 5}, "nope", "there is no such field"),
        (pb.RouteRequest, {"model": 5}, "model", "expected string or bytes-like object, got 'int'"),
        # What looks like a place is not one where it is the caller's.
        (pb.RouteRequest, {"maxTokens": "x at Other.field"}, "maxTokens", None),
        (pb.RouteRequest, {"maxTokens": "x at RouteRequest.model"}, "maxTokens", None),
        (pb.RouteRequest, {"maxWait": "x at RouteRequest.model"}, "maxWait", None),
    ],
)
def test_where_it_is(message, body, field, problem):
    with pytest.raises(InvalidField) as refusal:
        from_json(json.dumps(body).encode(), message())
    assert refusal.value.field == field
    assert problem is None or refusal.value.problem == problem
