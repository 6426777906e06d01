"""How long a strategy computed, asked of the kernel only when it may have been too long."""

from collections.abc import Callable

__all__ = ["Stopwatch"]


class Stopwatch:
    """Measures a thread's CPU time by its wall time, and by its CPU time only where that is over a limit.

    Asking for CPU time is a system call, which on a busy host takes longer than a decision; the wall's clock is none.
    So the CPU's is read at most once a `limit`, and what lies between that reading and a start counts as spent before
    it: nobody is ever blamed for what others computed, and whoever takes twice the limit is always found.
    """

    __slots__ = ("_cpu", "_cpu_then", "_wall", "_wall_then")

    def __init__(self, cpu: Callable[[], float], wall: Callable[[], float]) -> None:
        self._cpu, self._wall = cpu, wall
        self._wall_then, self._cpu_then = wall(), cpu()

    def start(self, limit_s: float) -> float:
        """Begin; `limit_s`: beyond what it would be too long."""
        started = self._wall()
        if started - self._wall_then > limit_s:
            self._cpu_then = self._cpu()
            self._wall_then = started
        return started

    def over(self, started: float, limit_s: float) -> float | None:
        """The CPU seconds spent since `started`, if they are over the limit, as far as can be proven."""
        if self._wall() - started <= limit_s:
            return None
        spent = self._cpu() - self._cpu_then - (started - self._wall_then)
        return spent if spent > limit_s else None
