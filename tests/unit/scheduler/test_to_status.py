"""Errors as statuses."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from headway_scheduler import errors
from headway_scheduler.rpc.interceptors import to_status


def unpacked(status: status_pb2.Status) -> tuple[list[error_details_pb2.ErrorInfo], list[error_details_pb2.RetryInfo]]:
    infos, retries = [], []
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            infos.append(info)
        if detail.Unpack(retry):
            retries.append(retry)
    return infos, retries


def every_class() -> list[type[errors.HeadwayError]]:
    return [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", every_class())
def test_every_error_has_one_info_of_its_own(kind: type[errors.HeadwayError]) -> None:
    error = kind.__new__(kind)
    errors.HeadwayError.__init__(error, "it is so", field="name")
    status = to_status(error)
    (info,), retries = unpacked(status)
    assert status.code == grpc.StatusCode[kind.status].value[0]
    assert (info.reason, info.domain, dict(info.metadata)) == (kind.reason, "headway", {"field": "name"})
    assert len(retries) == (kind.status == "RESOURCE_EXHAUSTED")


def test_reasons_are_distinct() -> None:
    reasons = [kind.reason for kind in every_class()]
    assert len(reasons) == len(set(reasons))


def test_a_retry_says_when() -> None:
    _, (retry,) = unpacked(to_status(errors.Saturated("busy", retry_after_s=2.25)))
    assert retry.retry_delay.ToNanoseconds() == 2_250_000_000


def test_a_status_fits_into_headers() -> None:
    status = to_status(errors.UnknownModel("é" * 5_000_000))
    assert status.ByteSize() < 4096
    (info,), _ = unpacked(status)
    assert info.metadata["resource"].endswith("…")
