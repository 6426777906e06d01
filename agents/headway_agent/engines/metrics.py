"""Prometheus text, read cheaply: only the lines of the metrics that are asked for."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_LABELS = r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}'
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Series:
    """One line: labels and a value, which may be NaN."""

    labels: dict[str, str]
    value: float


class MetricsParser:
    """Knows which metrics to look for; compile once, parse often."""

    def __init__(self, names: Iterable[str]) -> None:
        either = "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True))
        self._line = re.compile(rf"^({either})(?:{_LABELS})?[ \t]+(\S+)", re.MULTILINE)

    def parse(self, text: str) -> dict[str, list[Series]]:
        """The series of each wanted metric that is there; a line whose value is no number is skipped."""
        found: dict[str, list[Series]] = {}
        for name, labels, raw in self._line.findall(text):
            try:
                value = float(raw)
            except ValueError:
                continue
            found.setdefault(name, []).append(Series(_labels(labels), value))
        return found


def numbers(series: Iterable[Series]) -> list[float]:
    """The values that are numbers."""
    return [s.value for s in series if math.isfinite(s.value)]


def _labels(text: str) -> dict[str, str]:
    return {name: _unescape(value) for name, value in _LABEL.findall(text)}


def _unescape(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], value)
