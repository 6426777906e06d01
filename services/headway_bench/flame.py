"""Where the time goes: a sampling profiler of this thread, and its flame graph as an SVG."""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from types import FrameType
from typing import Final

__all__ = ["Stack", "flame_graph", "sampled"]

Stack = tuple[str, ...]
"""Function names, the outermost first."""

_EVERY_S: Final = 0.0005
_WIDTH: Final = 1200.0
_ROW: Final = 17.0
_LEAST: Final = 0.002
"""Of all samples: what is narrower is left out."""
_LETTER: Final = 6.2
_COLOURS: Final = ("#cfe8e0", "#d9e6f5", "#f5e4cf", "#efd9e6", "#e3ecc8", "#dcd9f0")


@contextmanager
def sampled(root: str) -> Iterator[Counter[Stack]]:
    """Sample by CPU time what runs below a function of this name, in the main thread, until the block ends."""
    found: Counter[Stack] = Counter()

    def take(_signal: int, frame: FrameType | None) -> None:
        stack: list[str] = []
        while frame is not None:
            stack.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}")
            if frame.f_code.co_name == root:
                found[tuple(reversed(stack))] += 1
                return
            frame = frame.f_back

    before = signal.signal(signal.SIGPROF, take)
    signal.setitimer(signal.ITIMER_PROF, _EVERY_S, _EVERY_S)
    try:
        yield found
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def flame_graph(stacks: Counter[Stack], title: str) -> str:
    """An SVG: each function as wide as its share of the samples, on those that called it."""
    total = stacks.total()
    if not total:
        raise ValueError("nothing was sampled")
    boxes: list[tuple[int, float, float, str]] = []
    _place(stacks, 0, 0.0, total, boxes)
    depth = 1 + max(level for level, *_ in boxes)
    height = (depth + 2) * _ROW
    rows = [_box(level, left, share, name, depth) for level, left, share, name in boxes]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" font-family="monospace"'
            ' font-size="10">',
            f'<rect width="{_WIDTH:g}" height="{height:g}" fill="#ffffff"/>',
            f'<text x="4" y="12" font-size="12">{escape(title)}</text>',
            *rows,
            "</svg>\n",
        ]
    )


def _place(
    stacks: Counter[Stack], level: int, left: float, total: int, boxes: list[tuple[int, float, float, str]]
) -> None:
    """The boxes of one level and all above it, side by side in the order of their names."""
    below: dict[str, Counter[Stack]] = {}
    for stack, count in stacks.items():
        if len(stack) > level:
            below.setdefault(stack[level], Counter())[stack] += count
    for name, those in sorted(below.items()):
        share = those.total() / total
        if share >= _LEAST:
            boxes.append((level, left, share, name))
            _place(those, level + 1, left, total, boxes)
        left += share


def _box(level: int, left: float, share: float, name: str, depth: int) -> str:
    x, y, width = left * _WIDTH, (depth - level) * _ROW, share * _WIDTH
    colour = _COLOURS[sum(name.partition(".")[0].encode()) % len(_COLOURS)]
    room = int((width - 4) / _LETTER)
    short = name.rpartition(".")[2] if len(name) > room else name
    text = f'<text x="{x + 2:.1f}" y="{y + 12:.1f}">{escape(short)}</text>' if len(short) <= room else ""
    return (
        f'<g><title>{escape(name)}: {share:.1%}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}"'
        f' height="{_ROW - 1:g}" fill="{colour}"/>{text}</g>'
    )
