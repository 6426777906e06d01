"""Turns text prompts into token ids as the model's own tokenizer does, so that engines' KV events can be matched.

A model of the catalogue names its tokenizer: a `tokenizer.json` below the configured folder, or a folder that holds
one. Chats are rendered by the two families of templates whose markers the tokenizer knows (ChatML, Llama 3). Where an
engine renders a chat otherwise, its events never match, and the approximate image goes on being believed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog

from headway_scheduler.domain.desired import Model
from headway_scheduler.domain.request import TextPrompt
from headway_scheduler.errors import InvalidField
from headway_scheduler.index.kv import Ids

__all__ = ["Tokenizers"]

log = structlog.get_logger()

_FILE: Final = "tokenizer.json"
_MOST_BYTES: Final = 65_536
"""Of a longer text only the beginning is tokenised: a decision may not take that long."""
_UNSURE_TOKENS: Final = 16
"""At a cut, the last tokens might have been others."""


@dataclass(frozen=True, slots=True)
class _Template:
    """How a family of chat templates writes a message."""

    markers: tuple[str, ...]
    begin: str
    message: str
    answer: str
    strips: bool = False

    def render(self, messages: Iterable[tuple[str, str]]) -> str:
        parts = [self.begin]
        for role, content in messages:
            parts.append(self.message.format(role=role, content=content.strip() if self.strips else content))
        return "".join((*parts, self.answer))


_TEMPLATES: Final = (
    _Template(
        ("<|im_start|>", "<|im_end|>"), "", "<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n"
    ),
    _Template(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        strips=True,
    ),
)


@dataclass(frozen=True, slots=True)
class _Loaded:
    tokenizer: Any  # tokenizers.Tokenizer, which ships no types
    template: _Template | None


@dataclass(slots=True)
class Tokenizers:
    """Tokenizers by model. Without a `folder`, nothing is tokenised."""

    folder: Path | None = None
    _files: dict[Path, _Loaded] = field(default_factory=dict)
    _by_model: dict[str, _Loaded] = field(default_factory=dict)

    def check(self, model: Model) -> None:
        """Raise InvalidField where the model names a tokenizer that this scheduler is to use and cannot."""
        if self.folder is not None and model.tokenizer:
            try:
                self._load(model.tokenizer)
            except ValueError as error:
                raise InvalidField("model.tokenizer", str(error)) from None

    def set_models(self, models: Iterable[Model]) -> None:
        """Load what they name. Reads files: not to be called on the event loop. What cannot be used is logged."""
        found: dict[str, _Loaded] = {}
        for model in models if self.folder is not None else ():
            if not model.tokenizer:
                continue
            try:
                found[model.id] = self._load(model.tokenizer)
            except ValueError as error:
                log.error("tokenizer_not_loaded", model=model.id, problem=str(error))
        self._by_model = found

    def ids(self, model: str, prompt: TextPrompt) -> Ids | None:
        """The prompt's token ids; None where they cannot be known."""
        loaded = self._by_model.get(model)
        if loaded is None:
            return None
        text, whole = prompt.data[:_MOST_BYTES].decode(errors="ignore"), len(prompt.data) <= _MOST_BYTES
        if prompt.chat:
            messages = _messages(text)
            if loaded.template is None or messages is None:
                return None
            text = loaded.template.render(messages)
        encoded = loaded.tokenizer.encode(text, add_special_tokens=not prompt.chat).ids
        ids = np.array(encoded if whole else encoded[:-_UNSURE_TOKENS], "<u4")
        return Ids(ids.tobytes(), whole, prompt.chat)

    def _load(self, name: str) -> _Loaded:
        """Raises ValueError: what is wrong with the file."""
        assert self.folder is not None  # noqa: S101 - the callers have looked
        folder = self.folder.resolve()
        path = (folder / name).resolve()
        if not path.is_relative_to(folder):
            raise ValueError(f"{name!r} is outside the folder of tokenizers")
        path = path / _FILE if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"there is no file {name!r} in the folder of tokenizers")
        loaded = self._files.get(path)
        if loaded is None:
            from tokenizers import Tokenizer  # an extra: only who configures a folder needs it

            try:
                tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:  # the binding raises its plainest class
                raise ValueError(f"{name!r} is no tokenizer: {error}") from None
            template = next((t for t in _TEMPLATES if all(map(tokenizer.token_to_id, t.markers))), None)
            loaded = self._files[path] = _Loaded(tokenizer, template)
        return loaded


def _messages(text: str) -> list[tuple[str, str]] | None:
    """Role and content of a canonical chat (rpc/convert/routing.py). None: with tools or names, which vary by model."""
    before, *parts = text.split("\x01")
    messages = []
    for part in parts:
        role, _, rest = part.partition("\x02")
        name, _, content = rest.partition("\x03")
        if name:
            return None
        messages.append((role, content))
    return None if before else messages
