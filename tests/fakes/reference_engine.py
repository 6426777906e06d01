"""vLLM v1's scheduling written the slow and obvious way: block by block, request by request.

The engine model must agree with it step by step (tests/unit/sim/test_engine_reference.py).
"""

from collections import deque

BLOCK = 16


class ReferenceRequest:
    def __init__(self, name, prompt, output, keys, keyed_blocks):
        self.name, self.prompt, self.output = name, prompt, output
        self.keys, self.keyed_blocks = keys, keyed_blocks
        self.computed = 0
        self.generated = 0
        self.decoding = False
        self.blocks = []
        self.cached_tokens = None

    @property
    def tokens(self):
        return self.prompt + self.generated


class ReferenceEngine:
    def __init__(self, hardware):
        self.hardware = hardware
        count = hardware.kv_tokens // BLOCK
        self.hashes = [None] * count
        self.refs = [0] * count
        self.free = deque(range(count))
        self.cache = {}
        self.waiting = deque()
        self.running = []

    def add(self, request):
        self.waiting.append(request)

    def cancel(self, name):
        for request in list(self.waiting):
            if request.name == name:
                self.waiting.remove(request)
        for request in list(self.running):
            if request.name == name:
                self.running.remove(request)
                self._release(request)

    def step(self):
        """(duration, first tokens, finished, preempted) by name, or None."""
        budget = self.hardware.step_budget_tokens
        scheduled, preempted = {}, []
        context, pairs = 0, 0.0
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            count = min(request.tokens - request.computed, budget)
            needed = -(-(request.computed + count) // BLOCK) - len(request.blocks)
            while needed > len(self.free) and request in self.running:
                victim = self.running.pop()
                self._release(victim)
                victim.computed = 0
                victim.decoding = False
                self.waiting.appendleft(victim)
                preempted.append(victim.name)
            if request not in self.running:
                break
            if request.decoding:
                context += request.computed
            else:
                pairs += count * (request.computed + count / 2)
            self._allocate(request, max(0, needed))
            self._cache_full(request, request.computed + count)
            scheduled[request] = count
            budget -= count
            index += 1
        while not preempted and self.waiting and budget and len(self.running) < self.hardware.max_sequences:
            request = self.waiting[0]
            hits = self._hits(request)
            needed = -(-request.tokens // BLOCK) - len(hits)
            if needed > len(self.free) - sum(not self.refs[block] for block in hits):
                break
            self.waiting.popleft()
            for block in hits:
                if not self.refs[block]:
                    self.free.remove(block)
                self.refs[block] += 1
            request.blocks = list(hits)
            self._allocate(request, needed)
            request.computed = len(hits) * BLOCK
            if request.cached_tokens is None:
                request.cached_tokens = request.computed
            count = min(request.tokens - request.computed, budget)
            pairs += count * (request.computed + count / 2)
            self._cache_full(request, request.computed + count)
            self.running.append(request)
            scheduled[request] = count
            budget -= count
        if not scheduled:
            return None
        first, finished = [], []
        for request, count in scheduled.items():
            prefilling = request.computed + count < request.tokens
            first_one = not request.generated
            request.computed += count
            if prefilling:
                continue
            request.generated += 1
            request.decoding = True
            if first_one:
                first.append(request.name)
            if request.generated == request.output:
                finished.append(request)
        for request in finished:
            self.running.remove(request)
            self._release(request)
        duration = self.hardware.step_ms(sum(scheduled.values()), pairs, context)
        return duration, set(first), {request.name for request in finished}, preempted

    def _hits(self, request):
        hits = []
        for key in request.keys[: min(request.keyed_blocks, (request.tokens - 1) // BLOCK)]:
            if not self.cache.get(key):
                break
            hits.append(self.cache[key][0])
        return hits

    def _allocate(self, request, count):
        for _ in range(count):
            block = self.free.popleft()
            if self.hashes[block] is not None:
                self.cache[self.hashes[block]].remove(block)
                self.hashes[block] = None
            self.refs[block] = 1
            request.blocks.append(block)

    def _cache_full(self, request, computed):
        for index in range(min(computed // BLOCK, request.keyed_blocks)):
            block = request.blocks[index]
            if self.hashes[block] is None:
                self.hashes[block] = request.keys[index]
                self.cache.setdefault(request.keys[index], []).append(block)

    def _release(self, request):
        for block in reversed(request.blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)
        request.blocks = []
