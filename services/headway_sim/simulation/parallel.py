"""Runs tasks on the machine's cores, with progress bars on standard error."""

import multiprocessing
import os
import queue
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import Queue
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from headway_sim.simulation.metrics import Measured
from headway_sim.simulation.scenario import Task, run_task

__all__ = ["ProcessRunner", "cores"]

_POLL_S: Final = 0.2

_progress: "Queue[tuple[int, int]] | None" = None


def cores() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ProcessRunner:
    """Runs tasks in up to `processes` processes of their own; in this one if that is 1. A context manager."""

    def __init__(self, processes: int, *, quiet: bool = False) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._processes = processes
        self._console = Console(stderr=True)
        self._quiet = quiet
        self._queue: Queue[tuple[int, int]] = self._context.Queue()
        self._pool = (
            ProcessPoolExecutor(processes, self._context, initializer=_take_queue, initargs=(self._queue,))
            if processes > 1
            else None
        )

    def __enter__(self) -> "ProcessRunner":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._queue.close()

    def run(self, tasks: list[Task]) -> list[Measured]:
        """Every task's result, in order. An exception of one of them is raised."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, disable=self._quiet) as progress:
            bars = [progress.add_task(_title(task), total=task.scenario.source().total) for task in tasks]
            return self._here(tasks, progress, bars) if self._pool is None else self._there(tasks, progress, bars)

    def _here(self, tasks: list[Task], progress: Progress, bars: list[TaskID]) -> list[Measured]:
        results = []
        for task, bar in zip(tasks, bars, strict=True):
            results.append(run_task(task, lambda ended, bar=bar: progress.update(bar, completed=ended)))  # type: ignore[misc]
            _complete(progress, bar)
        return results

    def _there(self, tasks: list[Task], progress: Progress, bars: list[TaskID]) -> list[Measured]:
        assert self._pool is not None  # noqa: S101  for the type checker
        done = threading.Event()
        listener = threading.Thread(target=self._listen, args=(progress, bars, done), daemon=True)
        listener.start()
        try:
            futures = [self._pool.submit(_run, number, task) for number, task in enumerate(tasks)]
            for future, bar in zip(futures, bars, strict=True):
                future.add_done_callback(lambda _, bar=bar: _complete(progress, bar))  # type: ignore[misc]
            return [future.result() for future in futures]
        finally:
            done.set()
            listener.join()

    def _listen(self, progress: Progress, bars: list[TaskID], done: threading.Event) -> None:
        while not done.is_set():
            try:
                number, ended = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if number < len(bars) and not progress.tasks[number].finished:
                progress.update(bars[number], completed=ended)


def _complete(progress: Progress, bar: TaskID) -> None:
    total = progress.tasks[bar].total
    progress.update(bar, completed=total)


def _title(task: Task) -> str:
    suffix = f" seed {task.seed}" if task.seed else ""
    return f"{task.policy.name}{suffix}{' reordered' if task.reordered else ''} rate {task.scenario.rate:.3g}"


def _take_queue(progress: "Queue[tuple[int, int]]") -> None:
    """In a worker: remember where to report."""
    global _progress
    _progress = progress


def _run(number: int, task: Task) -> Measured:
    def report(ended: int) -> None:
        if _progress is not None and ended % 500 == 0:
            _progress.put((number, ended))

    return run_task(task, report)
