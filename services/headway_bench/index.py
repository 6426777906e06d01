"""What the approximate index costs: memory, matches, inserts, and how long dropping an endpoint stops everything else.

In a process of its own, since memory is that of the whole process: `python -m headway_bench.index BLOCKS ENDPOINTS`.
"""

import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import psutil
from headway_scheduler.index.chain import ChainIndex
from headway_scheduler.index.values import Chain

from headway_bench.figures import Json, percentile

__all__ = ["main", "measure_index"]

_DEPTHS: Final = (16, 256, 4096)
_CHAIN_BLOCKS: Final = 256
_SHARED_BLOCKS: Final = 16
_BLOCK_TOKENS: Final = 64.0
_MATCHES: Final = 1000


def measure_index(blocks: int, endpoints: int) -> Json:
    """Fill it with that many blocks in all, in chains that begin alike, and measure."""
    dice = random.Random(3)  # the same blocks in every run
    index = ChainIndex()
    for slot in range(endpoints):
        index.set_capacity(slot, float("inf"))
    shared = [dice.getrandbits(64) for _ in range(_SHARED_BLOCKS)]
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # as the scheduler's
    before = psutil.Process().memory_info().rss
    chains = list(_filled(index, blocks, endpoints, shared, dice))
    bytes_in_all = psutil.Process().memory_info().rss - before
    longest = [(0, _chain(shared, max(_DEPTHS), dice))]
    for slot, chain in longest:
        index.touch(slot, chain)
    found: Json = {
        "blocks": len(index),
        "megabytes": round(bytes_in_all / 1e6, 1),
        "bytes_a_block": round(bytes_in_all / max(1, blocks), 1),
        "insert_blocks_per_s": round(_insert_rate(index, endpoints, shared, dice)),
    }
    for depth in _DEPTHS:
        pool = longest if depth > _CHAIN_BLOCKS else chains
        times = [_matched(index, _cut(dice.choice(pool)[1], depth)) for _ in range(_MATCHES)]
        found[f"match_{depth}_p50_us"] = round(percentile(times, 0.5) * 1e6, 1)
        found[f"match_{depth}_p99_us"] = round(percentile(times, 0.99) * 1e6, 1)
    found["drop_endpoint_ms"] = round(_timed(lambda: index.drop(endpoints - 1)) * 1e3, 3)
    pauses = []
    while index.tidy():
        pauses.append(_timed(index.tidy) * 1e3)
    found["longest_pause_ms"] = round(max([found["drop_endpoint_ms"], *pauses]), 3)
    return found


def _filled(
    index: ChainIndex, blocks: int, endpoints: int, shared: list[int], dice: random.Random
) -> Iterator[tuple[int, Chain]]:
    """Give every endpoint chains until all hold that many blocks; some of them, to be matched."""
    chains = blocks // (_CHAIN_BLOCKS - _SHARED_BLOCKS)
    for number in range(chains):
        chain = _chain(shared, _CHAIN_BLOCKS, dice)
        index.touch(number % endpoints, chain)
        if number % max(1, chains // 50) == 0:
            yield number % endpoints, chain


def _chain(shared: list[int], depth: int, dice: random.Random) -> Chain:
    own = np.frombuffer(dice.randbytes(8 * (depth - len(shared))), np.uint64).tolist()
    return Chain(1, shared + own, _BLOCK_TOKENS)


def _cut(chain: Chain, depth: int) -> Chain:
    return Chain(chain.root, chain.hashes[:depth], chain.block_tokens)


def _insert_rate(index: ChainIndex, endpoints: int, shared: list[int], dice: random.Random) -> float:
    fresh = [_chain(shared, _CHAIN_BLOCKS, dice) for _ in range(40)]
    began = time.perf_counter()
    for number, chain in enumerate(fresh):
        index.touch(number % endpoints, chain)
    took = time.perf_counter() - began
    return len(fresh) * _CHAIN_BLOCKS / took


def _matched(index: ChainIndex, chain: Chain) -> float:
    return _timed(lambda: index.match(chain))


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    """Run as the arguments say."""
    print(json.dumps(measure_index(int(sys.argv[1]), int(sys.argv[2]))))


if __name__ == "__main__":
    main()
