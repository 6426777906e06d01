"""The emulator's command line."""

import pytest
from headway_sim.emulator.config import parse_arguments


def test_defaults():
    config = parse_arguments([])
    assert (config.hardware.name, config.models, config.ports) == ("a100-40g-8b", ("demo",), (0,))


def test_everything_can_be_said():
    config = parse_arguments(
        [
            "--hardware",
            "cpu-8b",
            "--model",
            "a",
            "--model",
            "b",
            "--port",
            "9000",
            "--engines",
            "3",
            "--speedup",
            "20",
            "--waiting-limit",
            "4",
            "--kv-tokens",
            "1600",
            "--stream-interval-ms",
            "5",
            "--port-file",
            "p",
            "--host",
            "127.0.0.2",
        ]
    )
    assert config.ports == (9000, 9001, 9002)
    assert config.models == ("a", "b")
    assert (config.speedup, config.waiting_limit, config.kv_tokens) == (20.0, 4, 1600)


def test_a_port_for_each_engine():
    assert parse_arguments(["--port", "9000", "--port", "9005"]).ports == (9000, 9005)


@pytest.mark.parametrize(
    "line",
    [
        "--speedup 0",
        "--speedup nan",
        "--kv-tokens 15",
        "--port 70000",
        "--engines 0",
        "--port 1 --port 2 --engines 2",
        "--waiting-limit 0",
        "--hardware abacus",
    ],
)
def test_nonsense_is_refused(line, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(line.split())
    assert "error" in capsys.readouterr().err
