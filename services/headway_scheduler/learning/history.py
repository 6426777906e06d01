"""What requests turned out to cost: output lengths, durations and bytes a token, learned from reports."""

from dataclasses import dataclass, field
from typing import Final

import msgspec

from headway_scheduler.domain.request import TaskClass

__all__ = ["SHORT_TOKENS", "History", "classify", "task_weight"]

SHORT_TOKENS: Final = 64
LONG_TOKENS: Final = 512
LONG_PROMPT_TOKENS: Final = 4096

_WEIGHTS: Final = {TaskClass.SHORT: 1.0, TaskClass.CHAT: 1.5, TaskClass.LONG: 3.0}
_EXPECTED_OUTPUT: Final = {TaskClass.SHORT: 32.0, TaskClass.CHAT: 256.0, TaskClass.LONG: 800.0}
_RATE: Final = 0.05
_BYTES_PER_TOKEN: Final = 4.0
_SECONDS_PER_TOKEN: Final = 0.03


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
    """How much one request of this class counts for: SHORT 1, CHAT 1.5, LONG 3."""
    return _WEIGHTS[task_class]


class _Mean(msgspec.Struct):
    value: float
    count: int = 0

    def add(self, observed: float) -> None:
        self.count += 1
        self.value += (observed - self.value) * max(_RATE, 1.0 / self.count)


class _State(msgspec.Struct):
    outputs: dict[str, _Mean] = msgspec.field(default_factory=dict)
    seconds_per_token: dict[str, _Mean] = msgspec.field(default_factory=dict)
    bytes_per_token: dict[str, _Mean] = msgspec.field(default_factory=dict)


@dataclass(slots=True)
class History:
    """Exponentially weighted means; `time_scale` divides the first guess of a token's time."""

    time_scale: float = 1.0
    _state: _State = field(default_factory=_State)

    def expected_output(self, tenant: str, model: str, task_class: TaskClass, max_tokens: int | None) -> float:
        """Output tokens to expect of such a request, never above its limit."""
        mean = self._state.outputs.get(_key(tenant, model, task_class))
        expected = _EXPECTED_OUTPUT[task_class] if mean is None else mean.value
        return expected if max_tokens is None else min(expected, float(max_tokens))

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
        _mean(self._state.outputs, _key(tenant, model, task_class), output_tokens).add(output_tokens)
        if output_tokens > 0 and seconds > 0:
            _mean(self._state.seconds_per_token, model, seconds / output_tokens).add(seconds / output_tokens)

    def prompt_measured(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """An engine told how many tokens a prompt of that many bytes was. Ratios beyond 1 to 16 are not believed."""
        if prompt_tokens > 0 and 1.0 <= prompt_bytes / prompt_tokens <= 16.0:
            _mean(self._state.bytes_per_token, model, _BYTES_PER_TOKEN).add(prompt_bytes / prompt_tokens)

    def dump(self) -> bytes:
        """The learned state, for the store."""
        return msgspec.json.encode(self._state)

    def restore(self, state: bytes) -> None:
        """Take over a saved state."""
        self._state = msgspec.json.decode(state, type=_State)


def _key(tenant: str, model: str, task_class: TaskClass) -> str:
    return f"{tenant}\0{model}\0{task_class.value}"


def _mean(means: dict[str, _Mean], key: str, first: float) -> _Mean:
    return means.setdefault(key, _Mean(first))
