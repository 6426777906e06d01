"""Child processes of the local stack: started, watched, and never left behind."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headway_cli.errors import CliError

__all__ = ["LocalStackError", "Process", "wait_for"]

_INTERPRETED: Final = "HEADWAY_INTERPRETED"

_STOP_S: Final = 15.0
_POLL_S: Final = 0.02
_TAIL_LINES: Final = 15


class LocalStackError(CliError):
    """A process of the local stack did not start, or died; the message ends with the end of its log."""

    def __init__(self, message: str) -> None:
        super().__init__("LOCAL_STACK", message)


@dataclass(slots=True)
class Process:
    """One child. Its output goes to `log`. Should this process die, the kernel sends it `death_signal`."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    death_signal: signal.Signals = signal.SIGKILL
    """A program with children of its own needs one that it hears, to end them too."""
    _child: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start it; of the caller's HEADWAY_ settings it inherits none but how Python runs."""
        # Only here: the command line must work where the scheduler is not installed.
        from headway_scheduler.store.child import dying_with_parent

        inherited = {
            key: value for key, value in os.environ.items() if key == _INTERPRETED or not key.startswith("HEADWAY_")
        }
        with self.log.open("ab") as output:
            self._child = subprocess.Popen(  # noqa: S603  # our own programs
                dying_with_parent(self.command, self.death_signal),
                env={**inherited, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A Ctrl-C at the terminal is ours to handle: children are stopped in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id; it must have been started."""
        if self._child is None:
            raise LocalStackError(f"{self.name} was not started")
        return self._child.pid

    @property
    def running(self) -> bool:
        """Is it alive?"""
        return self._child is not None and self._child.poll() is None

    @property
    def status(self) -> int | None:
        """What it ended with, a signal as a negative number; None if it was not started or is alive."""
        return None if self._child is None else self._child.poll()

    def check(self) -> None:
        """Raise LocalStackError if it has died."""
        if not self.running:
            raise LocalStackError(f"{self.name} ended with status {self.status}:\n{self.log_tail()}")

    def signal(self, signum: int) -> None:
        """Send a signal, if it is alive."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signum)

    def terminate(self) -> None:
        """Ask it to stop; `join` waits for it."""
        self.signal(signal.SIGCONT)  # a stopped process hears nothing else
        self.signal(signal.SIGTERM)

    def join(self) -> None:
        """Wait for its end; kill it when it takes too long."""
        if self._child is None:
            return
        try:
            self._child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def kill(self) -> None:
        """kill -9."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def log_tail(self) -> str:
        """The last lines of its output."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float, processes: Sequence[Process] = ()) -> None:
    """Return once `condition` holds. Raises LocalStackError after `timeout_s`, or when one of `processes` died."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        for process in processes:
            process.check()
        if time.monotonic() > deadline:
            logs = "\n".join(f"{process.name}:\n{process.log_tail()}" for process in processes)
            raise LocalStackError(f"{what}: not within {timeout_s:.0f} s\n{logs}")
        time.sleep(_POLL_S)
