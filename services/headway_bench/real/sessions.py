"""Conversations that open with a long prompt, measured in the model's own tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headway_sim.filler import filler_text
from headway_sim.workloads import Message, SessionTurns, Turn

__all__ = ["LongSessions"]


@dataclass(frozen=True, slots=True)
class LongSessions:
    """`sessions` of `turns` each. `number` tells runs apart: none shares a prompt with another."""

    tokenizer: Any  # tokenizers.Tokenizer, which ships no types
    number: int
    sessions: int
    turns: int = 5
    opening_tokens: int = 4096
    turn_tokens: int = 64
    output_tokens: int = 16

    def conversations(self) -> Iterator[SessionTurns]:
        """Every session, in the order in which they start."""
        return (self._conversation(session) for session in range(self.sessions))

    def opening(self, session: int) -> tuple[Message, ...]:
        """A session's first request."""
        return ({"role": "user", "content": self._text(session, 0)},)

    def _conversation(self, session: int) -> SessionTurns:
        messages = self.opening(session)
        for turn in range(self.turns):
            answer = yield Turn(f"{self.number}-{session}", turn, messages, self.output_tokens)
            said = (
                {"role": "assistant", "content": answer},
                {"role": "user", "content": self._text(session, turn + 1)},
            )
            messages = (*messages, *said)

    def _text(self, session: int, turn: int) -> str:
        """A text of so many tokens."""
        tokens = self.turn_tokens if turn else self.opening_tokens
        text = filler_text((self.number * self.sessions + session) * 131 + turn * 17, 0, tokens)
        return text[: self.tokenizer.encode(text).offsets[tokens - 1][1]]
