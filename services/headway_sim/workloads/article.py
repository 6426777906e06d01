"""The article's benchmark: sessions of several turns, a fixed number of them at a time (ARTICLE.md)."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from headway_sim.engine import TOKEN_BYTES
from headway_sim.filler import filler_text

Message = dict[str, str]
"""An OpenAI chat message: `role` and `content`."""

SessionTurns = Generator["Turn", str, None]
"""A session: yields each turn, is sent the answer to it, and then yields the next one."""

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: the whole conversation so far and the new input.

    It is sent `think_ms` after the answer before it. `max_tokens` is the limit that the request states, if any.
    """

    session_id: str
    index: int
    messages: tuple[Message, ...]
    output_tokens: int
    think_ms: float = 0.0
    tenant: str = "default"
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ArticleWorkload:
    """A closed loop: `concurrency` sessions are active at a time, each one's turns follow each other.

    A session's prompts differ from every other's from the first byte on (for the first 62 sessions; from the
    first bytes on beyond), unless `shared_system_prompt_tokens` puts a common system message before all.
    """

    sessions: int = 60
    turns: int = 5
    concurrency: int = 20
    input_tokens: int = 200
    output_tokens: int = 800
    shared_system_prompt_tokens: int = 0
    seed: int = 0

    @property
    def requests(self) -> int:
        """Requests in all."""
        return self.sessions * self.turns

    def conversations(self) -> Iterator[SessionTurns]:
        """Every session, in the order in which they start."""
        for session in range(self.sessions):
            yield self.conversation(session)

    def schedule(self) -> Iterator[tuple[float, SessionTurns]]:
        """Every session and when it may start, in milliseconds: at once, as `concurrency` allows."""
        for conversation in self.conversations():
            yield 0.0, conversation

    def conversation(self, session: int) -> SessionTurns:
        """One session. Start it with `next`, go on with `send(answer)`; it ends after its last turn."""
        session_id = f"session-{session}"
        messages: list[Message] = []
        if self.shared_system_prompt_tokens:
            system = filler_text(xxh3_64_intdigest(b"system", self.seed), 0, self.shared_system_prompt_tokens)
            messages.append({"role": "system", "content": system})
        for index in range(self.turns):
            messages.append({"role": "user", "content": self._input(session, index)})
            answer = yield Turn(session_id, index, tuple(messages), self.output_tokens, max_tokens=self.output_tokens)
            messages.append({"role": "assistant", "content": answer})

    def _input(self, session: int, turn: int) -> str:
        """New input of exactly `input_tokens` tokens."""
        label = f"{_digits_backwards(session)}.{turn} "
        seed = xxh3_64_intdigest(f"{session}.{turn}".encode(), self.seed)
        return (label + filler_text(seed, 0, self.input_tokens))[: self.input_tokens * TOKEN_BYTES]


def _digits_backwards(number: int) -> str:
    """The number in base 62, its fastest digit first."""
    digits = _DIGITS[number % 62]
    while number := number // 62:
        digits += _DIGITS[number % 62]
    return digits
