"""A sample of what was decided and what came of it, as JSON lines that `headway sim run --trace` replays.

Prompts are in it only as keyed hashes of their blocks: equal beginnings are equal in one installation's export, and
without the installation's secret nobody can test a guess. Session ids are hashed alike.
"""

import json
import zlib
from collections import deque
from hashlib import blake2b
from pathlib import Path
from typing import Final

import structlog

from headway_scheduler.domain.request import Request
from headway_scheduler.record.entry import Entry

__all__ = ["VERSION", "Export", "line_of"]

VERSION: Final = 1
"""Of the lines' format: their key `headway`."""

_MOST_WAITING: Final = 10_000
_BYTES: Final = 8
_PURPOSE: Final = b"headway decision export"
_SUFFIX: Final = ".jsonl"
_SPACE: Final = 1 << 32

log = structlog.get_logger()


class Export:
    """Takes what ended on the event loop; writes it in a thread, at `write`. Bounded in memory and on disk."""

    def __init__(self, folder: Path, share: float, file_bytes: int, files: int) -> None:
        self.lines = 0
        """Written."""
        self.lost = 0
        """Ended while too many waited to be written, or the disk refused them."""
        self._folder, self._file_bytes, self._files = folder, file_bytes, files
        self._limit = int(share * _SPACE)
        self._waiting: deque[tuple[Entry, float, list[int]]] = deque()
        self._secret = b""
        self._number = 0

    def set_secret(self, secret: bytes) -> None:
        """The installation's own, of which a key for exports alone is made; nothing is taken before it is known."""
        self._secret = blake2b(_PURPOSE, digest_size=32, key=secret).digest()

    def wants(self, request: Request) -> bool:
        """Is it in the sample? Of a session all or nothing."""
        if self._limit >= _SPACE:
            return True
        return zlib.crc32((request.session_id or request.request_id).encode("utf-8", "surrogatepass")) < self._limit

    def take(self, entry: Entry, block_tokens: float, hashes: list[int]) -> None:
        """It has ended, or was refused."""
        if not self._secret:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self.lost += 1
            return
        self._waiting.append((entry, block_tokens, hashes))

    def write(self) -> None:
        """Write what waits. Blocks: for a thread."""
        batch = []
        while self._waiting:
            batch.append(self._waiting.popleft())
        if not batch:
            return
        try:
            self._append("".join(line_of(*each, self._secret) for each in batch))
        except OSError as error:
            self.lost += len(batch)
            log.warning("export_not_written", folder=str(self._folder), problem=error.strerror)
        else:
            self.lines += len(batch)

    def _append(self, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        mine = self._mine()
        newest = mine[-1] if mine else None
        if newest is None or newest.stat().st_size >= self._file_bytes:
            number = 1 + (int(newest.stem.rpartition("-")[2]) if newest else 0)
            newest = self._folder / f"decisions-{number:06d}{_SUFFIX}"
            for oldest in mine[: max(0, len(mine) + 1 - self._files)]:
                oldest.unlink(missing_ok=True)
        with newest.open("a", encoding="utf-8") as file:
            file.write(text)

    def _mine(self) -> list[Path]:
        return sorted(path for path in self._folder.glob(f"decisions-*{_SUFFIX}") if path.stem[10:].isdigit())


def line_of(entry: Entry, block_tokens: float, hashes: list[int], secret: bytes) -> str:
    """One line."""
    request, decision, usage = entry.request, entry.decision, entry.usage
    why = None if decision is None else decision.why
    held_ms = why.held_ms if why is not None else entry.refusal.held_ms if entry.refusal is not None else 0.0
    prompt_tokens = usage.prompt_tokens or (why.prompt_tokens if why is not None else request.prompt_tokens)
    fields = {
        "headway": VERSION,
        "timestamp": round(entry.at * 1e3 - held_ms, 3),
        "tenant": request.tenant,
        "model": request.model,
        "session_id": _keyed(request.session_id.encode("utf-8", "surrogatepass"), secret) if request.session_id else "",
        "input_length": prompt_tokens,
        "output_length": usage.completion_tokens,
        "cached_length": usage.cached_tokens,
        "max_tokens": request.max_tokens,
        "priority": request.priority,
        "task_class": request.task_class.value,
        "block_tokens": round(block_tokens, 6),
        "blocks": [_keyed(value.to_bytes(_BYTES, "little"), secret) for value in hashes],
        "outcome": entry.outcome,
        "refusal": "" if entry.refusal is None else entry.refusal.reason,
        "strategy": "" if why is None else why.strategy,
        "endpoint": entry.endpoint,
        "served_by": entry.served_by,
        "matched_length": None if why is None else why.matched_tokens,
        "predicted_ttft_ms": None if why is None else why.predicted_ttft_ms,
        "ttft_ms": entry.ttft_ms,
        "duration_ms": entry.duration_ms,
        "held_ms": round(held_ms, 3),
    }
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False) + "\n"


def _keyed(data: bytes, secret: bytes) -> str:
    return blake2b(data, digest_size=_BYTES, key=secret).hexdigest()
