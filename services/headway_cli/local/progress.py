"""Progress bars of a load."""

from collections.abc import Callable

from headway_sim.driver import Outcome
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["advancing", "progress_bars"]


def progress_bars(console: Console) -> Progress:
    """Bars with a count and the time taken."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def advancing(progress: Progress, description: str, total: int) -> Callable[[Outcome], None]:
    """A bar for `total` requests, as a callback that moves it on by one."""
    bar = progress.add_task(description, total=total)

    def advance(_: Outcome) -> None:
        progress.advance(bar)

    return advance
