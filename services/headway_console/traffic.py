"""The Traffic pages: how much, how fast, what was refused, and one decision opened."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from aiohttp import web
from headway_scheduler.app import Scheduler
from headway_scheduler.errors import UnknownResource
from markupsafe import Markup

from headway_console.charts import Line, chart
from headway_console.decisions import Candidate, DecisionLog, DecisionRow, Summary, summary_of
from headway_console.doorkeeper import Visit
from headway_console.history import History
from headway_console.pages import Pages

__all__ = ["TrafficPages"]

_LOOKED_AT: Final = 2_000
_SHOWN: Final = 100
_BINS: Final = 60
_SPAN_S: Final = 600.0
_MOST_GROUPS: Final = 50
_MOST_REASONS: Final = 6


class TrafficPages:
    """Traffic as a whole, and its decisions. `wall` is the wall's clock, in seconds."""

    def __init__(
        self, scheduler: Scheduler, past: History, log: DecisionLog, pages: Pages, wall: Callable[[], float]
    ) -> None:
        self._scheduler, self._past, self._log = scheduler, past, log
        self._pages, self._wall = pages, wall

    async def overview(self, visit: Visit) -> web.Response:
        """Rates, times, refusals, and the latest decisions."""
        query = visit.query
        every = self._log.newest(_LOOKED_AT)
        shown = [row for row in every if _wanted(row, query)]
        scheduler = self._scheduler
        return await self._pages.page(
            visit,
            "traffic.html",
            query=query,
            summary=summary_of(shown),
            routes=self._past.routes_per_second(),
            holds=len(scheduler.dispatcher.holds),
            refusals=sorted(scheduler.refusals.items(), key=lambda item: -item[1]),
            rate_chart=chart([Line("Routes", self._past.route_rates())], "Routes a second", unit="/s"),
            hold_chart=chart([Line("Held", self._past.holds())], "Routes held"),
            refusal_lines=[reason for reason, _ in self._worst()],
            refusal_chart=self._refusal_chart(),
            ttft_chart=self._ttft_chart(shown),
            groups=_grouped(shown),
            rows=shown[:_SHOWN],
            recorded=bool(every),
            tenants=sorted({row.tenant for row in every}),
            models=sorted({row.model for row in every}),
        )

    async def decision(self, visit: Visit) -> web.Response:
        """One decision: every candidate, its guards and cost, and what came of it."""
        request_id = visit.request.match_info["request_id"]
        row = self._log.get(request_id)
        if row is None:
            raise UnknownResource(f"decisions/{request_id}")
        candidates = sorted(row.candidates, key=_by_cost)
        return await self._pages.page(visit, "decision.html", row=row, candidates=candidates)

    def _worst(self) -> list[tuple[str, int]]:
        return sorted(self._scheduler.refusals.items(), key=lambda item: -item[1])[:_MOST_REASONS]

    def _refusal_chart(self) -> Markup:
        lines = [
            Line(reason, self._past.refusal_rates(reason), number + 1)
            for number, (reason, _) in enumerate(self._worst())
        ]
        return chart(lines or [Line("Refusals", self._past.refusal_rates(""))], "Refusals a second", unit="/s")

    def _ttft_chart(self, rows: Sequence[DecisionRow]) -> Markup:
        """The medians and the 99th percentiles, predicted and actual, in bins of ten seconds."""
        now, bins = self._wall(), defaultdict[int, list[DecisionRow]](list)
        for row in rows:
            number = _BINS - 1 - int((now - row.time) / (_SPAN_S / _BINS))
            if 0 <= number < _BINS:
                bins[number].append(row)
        summaries = [summary_of(bins[number]) if number in bins else Summary() for number in range(_BINS)]
        lines = [
            Line("p50 actual", [_or_nan(each.actual_p50) for each in summaries], 1),
            Line("p50 predicted", [_or_nan(each.predicted_p50) for each in summaries], 2),
            Line("p99 actual", [_or_nan(each.actual_p99) for each in summaries], 3),
            Line("p99 predicted", [_or_nan(each.predicted_p99) for each in summaries], 4),
        ]
        return chart(lines, "Time to first token", unit=" ms")


def _wanted(row: DecisionRow, query: "dict[str, str]") -> bool:
    return (
        query.get("tenant", "") in ("", row.tenant)
        and query.get("model", "") in ("", row.model)
        and query.get("q", "").strip() in row.request_id
    )


def _grouped(rows: Iterable[DecisionRow]) -> list[tuple[str, str, Summary]]:
    """By tenant and model, the busiest first."""
    groups = defaultdict[tuple[str, str], list[DecisionRow]](list)
    for row in rows:
        groups[row.tenant, row.model].append(row)
    busiest = sorted(groups.items(), key=lambda item: -len(item[1]))[:_MOST_GROUPS]
    return [(tenant, model, summary_of(each)) for (tenant, model), each in busiest]


def _by_cost(candidate: Candidate) -> tuple[bool, float]:
    return (not candidate.chosen, float("inf") if candidate.cost is None else candidate.cost)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
