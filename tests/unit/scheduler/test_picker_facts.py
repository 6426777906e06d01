"""What an endpoint picker must find, whoever wrote it: facts that other pickers' own tests hold on to."""

import numpy as np
import pytest
from fakes.rig import Rig, desired_state, engine_sample, spec
from fakes.views import view_of
from headway_scheduler.index.chain import ChainIndex
from headway_scheduler.index.hashing import hash_blocks
from headway_scheduler.index.values import Chain
from headway_scheduler.strategies.catalog import BUILT_IN
from headway_sim.policies.llmd import queue_score

A, B = 0, 1
SLOTS = np.array([A, B], np.int32)


def chain(ids, block):
    """Token ids in blocks of `block`."""
    return Chain(7, hash_blocks(np.array(ids, "<u4").tobytes(), 7, 4 * block, 1000), float(block))


def matched(index, of):
    return index.match(of).tokens(SLOTS, 8).tolist()


@pytest.mark.parametrize("strategy", [strategy.name for strategy in BUILT_IN])
def test_a_resident_adapter_beats_an_idle_endpoint_without_it(strategy):
    rig = Rig(desired_state(strategy))
    resident, idle = spec(1, adapters=("lora",)), spec(2)
    node = rig.connect("n", resident, idle)
    rig.sample(node, engine_sample(resident, running=4, waiting=10, kv_use=0.4), engine_sample(idle, 0, 0, 0.0))
    for _ in range(5):
        assert rig.where(rig.route(adapter="lora", text="hello")) == "1"
    # An adapter that nobody holds yet may be loaded anywhere.
    assert "2" in {rig.where(rig.route(adapter="unseen", text=str(n))) for n in range(8)}


def test_queues_score_by_where_they_stand_between_the_longest_and_the_shortest():
    def scores(*waiting):
        return queue_score(view_of([0] * len(waiting), waiting=[float(n) for n in waiting])).tolist()

    assert scores(10, 5, 0) == [0, 0.5, 1]
    assert scores(3, 3, 3) == [1, 1, 1]
    assert scores(0, 0) == [1, 1]


def test_a_prompt_that_shares_its_first_token_is_half_a_match():
    index = ChainIndex()
    index.touch(A, chain([1, 2], block=1))
    asked = chain([1, 3], block=1)
    assert [tokens / 2 for tokens in matched(index, asked)] == [0.5, 0.0]


def test_only_full_blocks_match():
    index = ChainIndex()
    prompt = chain(range(10), block=4)
    index.touch(A, prompt)
    assert len(prompt.hashes) == 2
    assert matched(index, prompt) == [8.0, 0.0]


def test_room_for_two_blocks_evicts_the_third():
    index = ChainIndex()
    index.set_capacity(A, 8.0)
    index.set_capacity(B, 8.0)
    for first in (1, 2, 3):
        index.touch(A, chain([first] * 4, block=4))
    assert index.blocks(A) == 2
    assert [matched(index, chain([first] * 4, block=4))[A] for first in (1, 2, 3)] == [0.0, 4.0, 4.0]
    index.touch(B, chain(range(12), block=4))  # a prompt longer than the room keeps its beginning
    assert matched(index, chain(range(12), block=4))[B] == 8.0
