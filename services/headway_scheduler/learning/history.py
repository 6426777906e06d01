"""What requests turned out to cost: output lengths, task weights, times and bytes a token, learned from reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import msgspec

from headway_scheduler.domain.request import TaskClass
from headway_scheduler.learning.parts import Parts
from headway_scheduler.learning.saved import HISTORY_FORMAT, Mean, SavedHistory
from headway_scheduler.learning.sketch import Sketch

__all__ = ["SHORT_TOKENS", "History", "classify", "task_weight"]

SHORT_TOKENS: Final = 64
LONG_TOKENS: Final = 512
LONG_PROMPT_TOKENS: Final = 4096

_WEIGHTS: Final = {TaskClass.SHORT: 1.0, TaskClass.CHAT: 1.5, TaskClass.LONG: 3.0}
_EXPECTED_OUTPUT: Final = {TaskClass.SHORT: 32.0, TaskClass.CHAT: 256.0, TaskClass.LONG: 800.0}
_BYTES_PER_TOKEN: Final = 4.0
_SECONDS_PER_TOKEN: Final = 0.03
_ENOUGH: Final = 50
"""Requests of a class before its measured cost says anything of its weight."""
_LOWEST_WEIGHT: Final = 1.0
_HIGHEST_WEIGHT: Final = 3.0
_ANYONE: Final = ""
"""In a sketch's key: all tenants together, for those who have sent nothing of that class yet."""


def classify(hint: TaskClass | None, max_tokens: int | None, prompt_tokens: int) -> TaskClass:
    """The task class (ARTICLE.md, Our task classes): the hint, else by max_tokens, else by the prompt's length."""
    if hint is not None:
        return hint
    if max_tokens is not None and max_tokens <= SHORT_TOKENS:
        return TaskClass.SHORT
    if (max_tokens is not None and max_tokens >= LONG_TOKENS) or prompt_tokens >= LONG_PROMPT_TOKENS:
        return TaskClass.LONG
    return TaskClass.CHAT


def task_weight(task_class: TaskClass) -> float:
    """How much one request of this class counts for before anything is known: SHORT 1, CHAT 1.5, LONG 3."""
    return _WEIGHTS[task_class]


@dataclass(slots=True)
class History:
    """What was learned of requests; `time_scale` divides the first guess of a token's time.

    Without `learn`, lengths and weights stay the hand-set ones.
    """

    time_scale: float = 1.0
    learn: bool = True
    _state: SavedHistory = field(default_factory=SavedHistory)
    _parts: Parts = field(default_factory=Parts)

    def expected_output(
        self, tenant: str, model: str, task_class: TaskClass, max_tokens: int | None, quantile: float | None = None
    ) -> float:
        """Output tokens to expect of such a request, on average or at a quantile; never above its limit."""
        sketch = self._outputs(tenant, model, task_class)
        if sketch is None:
            expected = _EXPECTED_OUTPUT[task_class]
        else:
            expected = sketch.mean if quantile is None else sketch.quantile(quantile)
        return expected if max_tokens is None else min(expected, float(max_tokens))

    def weight(self, model: str, task_class: TaskClass, *, capped: bool = True) -> float:
        """How much one request of this class counts for: its mean cost over that of SHORT ones.

        Before both are known from 50 requests: the hand-set one; from there on ever less of it, w = w_hand^(50/n) ·
        w_learned^(1 - 50/n). `capped`: within the article's 1 to 3.
        """
        return self.weights(model, task_class)[not capped]

    def weights(self, model: str, task_class: TaskClass) -> tuple[float, float]:
        """That weight, capped and as learned."""
        by_hand = _WEIGHTS[task_class]
        if not self.learn:
            return by_hand, by_hand
        costs = self._state.costs_ms
        own, short = costs.get(_class_key(model, task_class)), costs.get(_class_key(model, TaskClass.SHORT))
        if own is None or short is None or min(own.count, short.count) <= _ENOUGH:
            return by_hand, by_hand
        if own.value <= 0.0 or short.value <= 0.0:
            return by_hand, by_hand
        share = _ENOUGH / min(own.count, short.count)
        found = float(by_hand**share * (own.value / short.value) ** (1.0 - share))
        return max(_LOWEST_WEIGHT, min(_HIGHEST_WEIGHT, found)), found

    def seconds_per_token(self, model: str) -> float:
        """Wall time a token of output takes."""
        mean = self._state.seconds_per_token.get(model)
        return _SECONDS_PER_TOKEN / self.time_scale if mean is None else mean.value

    def bytes_per_token(self, model: str) -> float:
        """Bytes of canonical prompt a token stands for."""
        mean = self._state.bytes_per_token.get(model)
        return _BYTES_PER_TOKEN if mean is None else mean.value

    def finished(self, tenant: str, model: str, task_class: TaskClass, output_tokens: int, seconds: float) -> None:
        """A request ended well."""
        for whose in {tenant, _ANYONE}:
            key = _key(whose, model, task_class)
            sketch = self._state.outputs.get(key)
            if sketch is None:
                sketch = self._state.outputs[key] = Sketch()
                self._parts.place(key)
            sketch.add(float(max(0, output_tokens)))
            self._parts.touched.add(key)
        if output_tokens > 0 and seconds > 0:
            self._add(self._state.seconds_per_token, model, seconds / output_tokens, seconds / output_tokens)

    def served(self, model: str, task_class: TaskClass, cost_ms: float) -> None:
        """A request kept an engine busy so long, not counting what it waited."""
        if cost_ms > 0.0:
            self._add(self._state.costs_ms, _class_key(model, task_class), cost_ms, cost_ms)

    def prompt_measured(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """An engine told how many tokens a prompt of that many bytes was. Ratios beyond 1 to 16 are not believed."""
        if prompt_tokens > 0 and 1.0 <= prompt_bytes / prompt_tokens <= 16.0:
            self._add(self._state.bytes_per_token, model, _BYTES_PER_TOKEN, prompt_bytes / prompt_tokens)

    def dump(self) -> bytes:
        """All that is learned, as one document."""
        return msgspec.json.encode(self._state)

    def changed(self) -> list[int]:
        """The parts that are not saved as they are."""
        return self._parts.changed()

    def dump_part(self, part: int) -> bytes:
        """A part's document, for the store; it has not changed any more."""
        keys = self._parts.take(part)
        kept = [{key: found[key] for key in keys if key in found} for found in self._state.tables()]
        return msgspec.json.encode(SavedHistory(HISTORY_FORMAT, *kept))

    def put_back(self, part: int) -> None:
        """It was dumped, and could not be saved."""
        self._parts.put_back(part)

    def touch_all(self) -> None:
        """Nothing is saved in parts: it came from a version that knew none."""
        self._parts.touch_all()

    def restore(self, state: bytes) -> None:
        """Take over a document. Raises ValueError, and changes nothing, where it cannot be read."""
        self._replace(_read(state))

    def restore_parts(self, states: Mapping[str, bytes]) -> dict[str, ValueError]:
        """Take over these documents; where they say different things, the later one counts.

        Returns what is wrong with those that cannot be read. If that is all of them, nothing changes.
        """
        found = SavedHistory()
        problems: dict[str, ValueError] = {}
        for name, state in states.items():
            try:
                read = _read(state)
            except ValueError as error:
                problems[name] = error
            else:
                for table, more in zip(found.tables(), read.tables(), strict=True):
                    table.update(more)
        if len(problems) < len(states):
            self._replace(found)
        return problems

    def _replace(self, state: SavedHistory) -> None:
        self._state, self._parts = state, Parts()
        for table in state.tables():
            for key in table:
                self._parts.place(key)
        self._parts.settle()

    def _add(self, means: dict[str, Mean], key: str, first: float, observed: float) -> None:
        mean = means.get(key)
        if mean is None:
            mean = means[key] = Mean(first)
            self._parts.place(key)
        mean.add(observed)
        self._parts.touched.add(key)

    def _outputs(self, tenant: str, model: str, task_class: TaskClass) -> Sketch | None:
        if not self.learn:
            return None
        own = self._state.outputs.get(_key(tenant, model, task_class))
        return own or self._state.outputs.get(_key(_ANYONE, model, task_class))


@lru_cache(10_000)
def _key(tenant: str, model: str, task_class: TaskClass) -> str:
    return f"{tenant}\0{model}\0{task_class.value}"


@lru_cache(10_000)
def _class_key(model: str, task_class: TaskClass) -> str:
    return f"{model}\0{task_class.value}"


def _read(state: bytes) -> SavedHistory:
    found = msgspec.json.decode(state, type=SavedHistory)
    means = (*found.costs_ms.values(), *found.seconds_per_token.values(), *found.bytes_per_token.values())
    if found.format != HISTORY_FORMAT:
        raise ValueError(f"format {found.format} is not {HISTORY_FORMAT}")
    if not all(sketch.is_sound() for sketch in found.outputs.values()):
        raise ValueError("not a sketch")
    if not all(mean.value > 0.0 and mean.count >= 0 for mean in means):
        raise ValueError("not a mean of positive numbers")
    return found
