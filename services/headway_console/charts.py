"""Charts as SVG, drawn by the server: no script, no dependency, coloured by the style sheet."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Final

from markupsafe import Markup

__all__ = ["Line", "chart", "sparkline"]

_SPARK: Final = (96, 22)
_WIDE: Final = (640, 180)
_LEFT: Final = 44
_BOTTOM: Final = 20
_SPARKLINE: Final = Markup(
    '<svg class="spark" viewBox="0 0 %(width)d %(height)d" width="%(width)d" height="%(height)d" role="img" '
    'aria-label="%(name)s"><path d="%(path)s"/></svg>'
)
_CHART: Final = Markup('<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{name}">')
_GRID: Final = Markup('<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
_TEXT: Final = Markup('<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>')
_LINE: Final = Markup('<path class="line l{style}" d="{path}"/>')


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: its name, its values from the oldest to the newest (NaN: none), and its style's number."""

    name: str
    values: Sequence[float]
    style: int = 1


def sparkline(values: Sequence[float], name: str, top: float | None = None) -> Markup:
    """A small line, from 0 to `top` or to the largest value. `name` is read to who cannot see it."""
    width, height = _SPARK
    highest = top or _highest(values) or 1.0
    path = _path(values, 0.0, 1.0, width, height - 2, highest)
    return _SPARKLINE % {"width": width, "height": height, "name": name, "path": path}


def chart(lines: Sequence[Line], name: str, *, unit: str = "", span: str = "10 minutes ago") -> Markup:
    """Lines over one axis, with three marks on it. Its latest values are read to who cannot see it."""
    width, height = _WIDE
    top = _nice(max((_highest(line.values) for line in lines), default=0.0) or 1.0)
    plot_w, plot_h = width - _LEFT - 4, height - _BOTTOM - 8
    parts = [_CHART.format(width=width, height=height, name=_told(name, lines))]
    for share in (0.0, 0.5, 1.0):
        y = f"{6 + plot_h * (1 - share):.1f}"
        parts.append(_GRID.format(left=_LEFT, right=width - 4, y=y))
        parts.append(_TEXT.format(x=_LEFT - 6, y=f"{float(y) + 4:.1f}", anchor="end", text=_mark(top * share, unit)))
    parts.append(_TEXT.format(x=_LEFT, y=height - 4, anchor="start", text=span))
    parts.append(_TEXT.format(x=width - 4, y=height - 4, anchor="end", text="now"))
    for line in lines:
        path = _path(line.values, _LEFT, 6.0, plot_w, plot_h, top)
        parts.append(_LINE.format(style=line.style, path=path))
    return Markup("").join([*parts, Markup("</svg>")])


def _highest(values: Sequence[float]) -> float:
    return max((float(value) for value in values if isfinite(value)), default=0.0)


def _path(values: Sequence[float], left: float, above: float, width: float, height: float, top: float) -> str:
    """Move-tos and line-tos; a gap where nothing is known, a short stroke where one value stands alone."""
    step, parts, drawing = width / max(1, len(values) - 1), [], False
    for number, value in enumerate(values):
        if isnan(value):
            drawing = False
            continue
        y = above + height * (1 - min(1.0, max(0.0, value / top)))
        parts.append(f"{'L' if drawing else 'M'}{left + number * step:.1f} {y:.1f}")
        if not drawing:
            parts.append("h.1")
        drawing = True
    return "".join(parts)


def _nice(value: float) -> float:
    """1, 2 or 5 times a power of ten, not below `value`."""
    value, power = max(value, 1e-3), 1.0
    while power < value:
        power *= 10
    while power / 10 >= value:
        power /= 10
    return next(power / 10 * step for step in (1, 2, 5, 10) if power / 10 * step >= value * 0.999)


def _mark(value: float, unit: str) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M{unit}"
    return f"{value / 1e3:g}k{unit}" if value >= 1e4 else f"{value:g}{unit}"


def _told(name: str, lines: Sequence[Line]) -> str:
    latest = [f"{line.name} {line.values[-1]:.3g}" for line in lines if len(line.values) and isfinite(line.values[-1])]
    return f"{name}; now {', '.join(latest)}" if latest else f"{name}; nothing yet"
