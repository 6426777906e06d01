"""Pieces of messages joined are the messages."""

from headway.routing.v1 import routing_pb2 as pb
from headway_bench.wire import number_field, submessage
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.text(max_size=300)), max_size=5))
def test_joined_pieces_are_the_message(calls):
    whole = pb.RouteStreamRequest(
        routes=[pb.RouteCall(correlation_id=number, request=pb.RouteRequest(text=text)) for number, text in calls]
    )
    pieces = b"".join(
        submessage(1, number_field(1, number) + submessage(2, pb.RouteRequest(text=text).SerializeToString()))
        for number, text in calls
    )
    assert pb.RouteStreamRequest.FromString(pieces) == whole
