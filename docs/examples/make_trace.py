"""Print a small trace in Mooncake's format: 12 conversations of 5 turns, each turn with all before it as its prefix."""

import json
import random

rng = random.Random(7)
requests = []
for conversation in range(12):
    time_ms = rng.uniform(0, 15_000)
    blocks: list[int] = []  # one id stands for 512 tokens
    for _ in range(5):
        blocks = [*blocks, *(100 * conversation + len(blocks) + new for new in range(rng.randint(1, 3)))]
        requests.append((time_ms, blocks, rng.randint(50, 200)))
        time_ms += rng.uniform(4_000, 7_000)
for time_ms, blocks, output in sorted(requests):
    trace = {"timestamp": int(time_ms), "input_length": 512 * len(blocks) - 100, "output_length": output}
    print(json.dumps({**trace, "hash_ids": blocks}))
