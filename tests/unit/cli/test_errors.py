"""One line for people, one object for programs, one exit code."""

import json

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from headway_cli.errors import CliError, FileProblems, Problem, from_rpc, report


class Failed(grpc.RpcError):
    """What a stub raises."""

    def __init__(self, code, details="", status=None):
        self._code, self._details, self._status = code, details, status

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return [
            ("other", "x"),
            *([("grpc-status-details-bin", self._status.SerializeToString())] if self._status else []),
        ]


def status(reason, message, retry=None, **facts):
    details = [error_details_pb2.ErrorInfo(reason=reason, domain="headway", metadata=facts)]
    if retry is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=Duration(nanos=retry)))
    packed = [Any() for _ in details]
    for any_, detail in zip(packed, details, strict=True):
        any_.Pack(detail)
    return status_pb2.Status(message=message, details=packed)


def test_a_refusal_says_reason_message_and_when_to_try_again(capsys):
    said = status("SATURATED", "all are busy", retry=250_000_000, field="model")
    error = from_rpc(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "all are busy", said), "a:1")
    report(error, as_json=False)
    assert capsys.readouterr() == ("", "error: SATURATED: all are busy (retry after 0.25 s)\n")
    report(error, as_json=True)
    assert json.loads(capsys.readouterr().err) == {
        "error": {
            "reason": "SATURATED",
            "message": "all are busy",
            "retry_after_s": 0.25,
            "field": "model",
            "facts": {"field": "model"},
        }
    }


@pytest.mark.parametrize(
    ("failed", "reason", "exit_code"),
    [
        (Failed(grpc.StatusCode.UNAVAILABLE, "refused\nmore"), "UNREACHABLE", 3),
        (Failed(grpc.StatusCode.DEADLINE_EXCEEDED), "UNREACHABLE", 3),
        (Failed(grpc.StatusCode.UNIMPLEMENTED, "no such method"), "UNIMPLEMENTED", 1),
        (Failed(grpc.StatusCode.UNAVAILABLE, "x", status("NO_ENDPOINTS", "none")), "NO_ENDPOINTS", 1),
    ],
)
def test_only_silence_is_unreachable(failed, reason, exit_code):
    error = from_rpc(failed, "a:1")
    assert (error.reason, error.exit_code) == (reason, exit_code)
    assert "\n" not in error.message


def test_a_files_problems_are_a_line_each():
    error = FileProblems([Problem("f:1", "", "", "bad"), Problem("f:2", "document 1", "x.y", "worse")])
    assert error.lines() == [
        "error: INVALID_FILE: f:1: bad",
        "error: INVALID_FILE: f:2: document 1: x.y: worse",
    ]
    assert isinstance(error, CliError)
