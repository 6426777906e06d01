"""What an emulated engine says of its cache is what is in it."""

import pytest
from headway_sim.emulator.config import parse_arguments
from headway_sim.emulator.kv_events import Encoding
from headway_sim.engine import HARDWARE, Engine, EngineRequest
from hypothesis import given, settings
from hypothesis import strategies as st


class Recorder:
    """Adds up what it hears."""

    def __init__(self):
        self.keys = set()

    def stored(self, key):
        assert key not in self.keys, "stored twice"
        self.keys.add(key)

    def removed(self, key):
        self.keys.remove(key)

    def cleared(self):
        self.keys.clear()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(1, 40), st.booleans()), max_size=25))
def test_events_add_up_to_the_cache(requests):
    """Conversations that share beginnings in a cache far too small for all of them; some are cancelled, one resets."""
    engine = Engine(HARDWARE["a100-40g-8b"], kv_tokens=40 * 16)
    engine.pool.listener = heard = Recorder()
    now = 0.0
    for number, (talk, blocks, answer, cancelled) in enumerate(requests):
        keys = [hash((talk, n)) for n in range(blocks + answer // 16)]
        tokens = len(keys) * 16
        engine.add(EngineRequest(str(number), blocks * 16, answer, keys=keys, keyed_tokens=tokens), now)
        for _ in range(3 if cancelled else 60):
            step = engine.step(now)
            if step is None:
                break
            now = step.end_ms
            assert heard.keys == {run.key for run in engine.pool.cached_runs()}
        if cancelled:
            engine.cancel(str(number))
    while (step := engine.step(now)) is not None:
        now = step.end_ms
    assert heard.keys == {run.key for run in engine.pool.cached_runs()}
    assert engine.reset_prefix_cache()
    assert not heard.keys


def test_the_command_line_names_ports_and_encoding():
    assert parse_arguments([]).kv_events_port is None
    given = parse_arguments(["--kv-events-port", "5557", "--kv-events-encoding", "map"])
    assert (given.kv_events_port, given.kv_events_encoding) == (5557, Encoding.MAP)
    with pytest.raises(SystemExit):
        parse_arguments(["--kv-events-encoding", "xml"])
