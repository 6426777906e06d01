"""What Envoy's flags and status say of how a request ended."""

import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from headway_scheduler.domain.report import Outcome
from headway_scheduler.envoy.access_log import outcome_of


@pytest.mark.parametrize(
    ("status", "flags", "complete", "outcome"),
    [
        (200, (), True, Outcome.SUCCESS),
        (200, ("downstream_connection_termination",), False, Outcome.CANCELLED),
        (200, ("downstream_connection_termination",), True, Outcome.SUCCESS),
        (0, ("downstream_remote_reset",), False, Outcome.CANCELLED),
        (0, (), False, Outcome.CANCELLED),
        (404, (), True, Outcome.CLIENT_ERROR),
        (429, (), True, Outcome.CLIENT_ERROR),
        (500, (), True, Outcome.SERVER_ERROR),
        (503, ("upstream_connection_failure", "upstream_retry_limit_exceeded"), False, Outcome.CONNECT_ERROR),
        (503, ("no_healthy_upstream",), False, Outcome.CONNECT_ERROR),
        (200, ("upstream_connection_termination",), False, Outcome.SERVER_ERROR),
        (200, ("upstream_remote_reset",), False, Outcome.SERVER_ERROR),
        (504, ("upstream_request_timeout",), False, Outcome.TIMEOUT),
        (408, ("stream_idle_timeout",), False, Outcome.TIMEOUT),
    ],
)
def test_outcome(status, flags, complete, outcome):
    entry = accesslog_pb2.HTTPAccessLogEntry()
    entry.response.response_code.value = status
    for flag in flags:
        setattr(entry.common_properties.response_flags, flag, True)
    if complete:
        entry.common_properties.time_to_last_upstream_rx_byte.FromMilliseconds(9)
    assert outcome_of(entry) is outcome
