"""A collector that does not answer loses spans and nothing else."""

import logging
import socket
import time

import structlog
from headway_tracing.build import tracing_to
from headway_tracing.library_logs import adopt_library_logs
from headway_tracing.tracing import Tracing
from opentelemetry.sdk.trace.export import SpanExporter


class Patient(SpanExporter):
    """Never gets rid of what it is given, until it is shut down."""

    def __init__(self):
        self.over = False

    def export(self, spans):
        while not self.over:
            time.sleep(0.01)

    def shutdown(self):
        self.over = True


def test_closing_does_not_wait_for_it():
    exporter = Patient()
    tracing = Tracing(exporter, "test", 1.0, patience_s=0.2)
    tracing.start("one", {}).end()
    began = time.monotonic()
    with structlog.testing.capture_logs() as lines:
        tracing.close()
    assert time.monotonic() - began < 5.0
    assert exporter.over
    assert [line["event"] for line in lines] == ["spans_lost"]


def test_nor_for_one_that_accepts_and_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        tracing = tracing_to(f"http://127.0.0.1:{silent.getsockname()[1]}", "test", 1.0)
        tracing.start("one", {}).end()
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < 8.0


def test_what_a_library_says_is_a_line_of_our_log(capfd):
    adopt_library_logs()
    with structlog.testing.capture_logs() as lines:
        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").warning(
            "Transient error %s", "UNAVAILABLE"
        )
        try:
            raise ValueError("what somebody sent")
        except ValueError:
            logging.getLogger("aiohttp.server").exception("Error handling request")
    said = [(line["event"], line["library"], line["said"], line.get("error_type")) for line in lines]
    assert said == [
        ("library_said", "opentelemetry.exporter.otlp.proto.grpc.exporter", "Transient error UNAVAILABLE", None),
        ("library_said", "aiohttp.server", "Error handling request", "ValueError"),
    ]
    assert capfd.readouterr().err == ""
