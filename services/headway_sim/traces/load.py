"""Finds and reads trace files."""

import csv
import dataclasses
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from headway_sim.traces.formats import TraceFormat, detect_format, read_lines
from headway_sim.traces.model import UNKNOWN_OUTPUT, LengthPrompt, RecordedPrompt, TraceError, TraceRequest

_SUFFIXES = (".jsonl", ".csv", ".jsonl.gz", ".csv.gz")


def load_trace(path: Path, *, trace_format: TraceFormat | None = None, limit: int | None = None) -> list[TraceRequest]:
    """A trace file (`.gz` or not), or every trace file in a folder as one trace, by arrival.

    The format is detected per file unless given. Time starts at the first request of all files of one
    format. `limit` keeps the first so many. Raises `TraceError`.
    """
    if limit is not None and limit < 1:
        raise ValueError("limit must be positive")
    by_format: dict[TraceFormat, list[TraceRequest]] = {}
    for file in _files(path):
        found_format, requests = _read_file(file, trace_format)
        by_format.setdefault(found_format, []).extend(requests)
    trace = [request for requests in by_format.values() for request in _from_zero(requests)]
    if not trace:
        raise TraceError(path, None, None, "holds no request")
    trace.sort(key=lambda request: request.arrival_ms)
    return _with_answers(_with_serials(trace[:limit]))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(_SUFFIXES))
    if not files:
        raise TraceError(path, None, None, f"the folder holds no trace ({', '.join(_SUFFIXES)})")
    return files


def _read_file(path: Path, trace_format: TraceFormat | None) -> tuple[TraceFormat, list[TraceRequest]]:
    try:
        if trace_format is None:
            with _open(path) as lines:
                trace_format = detect_format(path, lines.readline())
        with _open(path) as lines:
            return trace_format, list(read_lines(path, lines, trace_format))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(path, None, None, f"cannot be read: {error}") from error


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            yield file
    else:
        with path.open(encoding="utf-8", newline="") as file:
            yield file


def _from_zero(requests: list[TraceRequest]) -> list[TraceRequest]:
    start_ms = min((request.arrival_ms for request in requests), default=0.0)
    return [dataclasses.replace(request, arrival_ms=request.arrival_ms - start_ms) for request in requests]


def _with_serials(trace: list[TraceRequest]) -> list[TraceRequest]:
    """Number the bare lengths through, so that two files' lines do not share a text."""
    return [
        dataclasses.replace(request, prompt=LengthPrompt(request.prompt.tokens, serial))
        if isinstance(request.prompt, LengthPrompt)
        else request
        for serial, request in enumerate(trace)
    ]


def _with_answers(trace: list[TraceRequest]) -> list[TraceRequest]:
    """Recorded prompts, with what is known of their answers: the next turn begins with prompt and answer.

    Of a request that was refused or lost no length is known: it is given the mean one.
    """
    prompts = [request.prompt for request in trace if isinstance(request.prompt, RecordedPrompt)]
    ends = {prompt.blocks[-1] for prompt in prompts if prompt.blocks}
    answers: dict[int, tuple[int, ...]] = {}
    for prompt in prompts:
        for depth, block in enumerate(prompt.blocks[:-1], 1):
            if block in ends:
                answers.setdefault(block, prompt.blocks[depth:])
    known = [request.output_tokens for request in trace if request.output_tokens != UNKNOWN_OUTPUT]
    mean = max(1, round(sum(known) / len(known))) if known else 1
    return [_answered(request, answers, mean) for request in trace]


def _answered(request: TraceRequest, answers: dict[int, tuple[int, ...]], mean_tokens: int) -> TraceRequest:
    prompt = request.prompt
    if not isinstance(prompt, RecordedPrompt):
        return request
    output_tokens = request.output_tokens if request.output_tokens != UNKNOWN_OUTPUT else mean_tokens
    answer = answers.get(prompt.blocks[-1], ()) if prompt.blocks else ()
    end = int((prompt.tokens + output_tokens) // prompt.block_tokens) if prompt.blocks else 0
    known = answer[: max(0, end - len(prompt.blocks))]
    return dataclasses.replace(request, prompt=dataclasses.replace(prompt, answer=known), output_tokens=output_tokens)
