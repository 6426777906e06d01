"""The Fleet pages: is the fleet well, what does each part of it do, and take a part out of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import numpy as np
from aiohttp import web
from headway.admin.v1 import admin_pb2 as pb
from headway_scheduler.app import Scheduler
from headway_scheduler.domain.endpoint import SchedulingState
from headway_scheduler.domain.names import ENDPOINTS, NODES
from headway_scheduler.errors import DisruptionBudgetBroken, InvalidField, UnknownResource
from headway_scheduler.fleet.members import Endpoint
from headway_scheduler.strategies.base import SoftGuard
from markupsafe import Markup

from headway_console import heatmap, history
from headway_console.charts import Line, chart, sparkline
from headway_console.doorkeeper import Visit
from headway_console.history import History
from headway_console.live import Live
from headway_console.pages import PREFIX, Pages, see_other
from headway_console.writing import Admin

__all__ = ["FleetPages"]

PAGE_SIZE: Final = 50
_STATES: Final = {state.value: state for state in SchedulingState}
_ALL_GUARDS: Final = frozenset(SoftGuard)


@dataclass(frozen=True, slots=True)
class EndpointRow:
    """An endpoint as the table shows it; None: unknown."""

    id: str
    node: str
    engine: str
    models: tuple[str, ...]
    state: str
    open: bool
    hard_guards: tuple[str, ...]
    soft_guards: tuple[str, ...]
    inflight: int
    waiting: float | None
    queued_ms: float
    kv_use: float | None
    hit_ratio: float | None
    inflight_spark: Markup
    kv_spark: Markup


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that wants a person: how bad, what, and where to look."""

    severity: str
    text: str
    link: str


class FleetPages:
    """Fleet: the map, the tables, one node, one endpoint, and their scheduling states."""

    def __init__(self, scheduler: Scheduler, past: History, live: Live, pages: Pages, admin: Admin) -> None:
        self._scheduler, self._fleet = scheduler, scheduler.fleet
        self._past, self._live, self._pages, self._admin = past, live, pages, admin

    async def overview(self, visit: Visit) -> web.Response:
        """Everything at a glance."""
        query, wanted = visit.query, visit.part
        values: dict[str, Any] = {"query": query}
        if wanted in ("", "glance"):
            nodes = await self._live.reading()
            values |= {"summary": self._summary(nodes), "troubles": self._troubles(nodes)}
        if wanted in ("", "endpoints"):
            rows, found, current = self._rows(query)
            values |= {"rows": rows, "found": found, "pages": -(-found // PAGE_SIZE), "current": current}
        if not wanted:
            every = self._fleet.endpoints.values()
            values |= {
                "nodes": nodes,
                "layout": heatmap.layout_of(nodes),
                "metric": query.get("by") if query.get("by") in heatmap.METRICS else "pressure",
                "models": sorted({model for each in every for model in each.spec.models}),
            }
        return await self._pages.page(visit, "fleet.html", **values)

    async def node(self, visit: Visit) -> web.Response:
        """One node: its devices and endpoints."""
        name = visit.request.match_info["node"]
        node = self._fleet.nodes.get(name)
        if node is None:
            raise UnknownResource(f"{NODES}/{name}")
        return await self._pages.page(
            visit,
            "node.html",
            node=node,
            seen=heatmap.read_node(self._fleet, node),
            rows=[self._row(endpoint) for endpoint in node.endpoints.values()],
            age_s=self._scheduler.clock() - node.heard_at,
        )

    async def endpoint(self, visit: Visit) -> web.Response:
        """One endpoint: its guards and ten minutes of it."""
        name = visit.request.match_info["endpoint"]
        endpoint = self._fleet.endpoints.get(name)
        if endpoint is None:
            raise UnknownResource(f"{ENDPOINTS}/{name}")
        return await self._pages.page(
            visit,
            "endpoint.html",
            endpoint=endpoint,
            row=self._row(endpoint),
            charts=self._charts(endpoint),
            groups=self._fleet.groups_of(endpoint),
            tenants=self._fleet.tenants_of(endpoint),
            index_blocks=self._scheduler.index.blocks(endpoint.slot),
            why_closed=self._fleet.why_closed(endpoint),
        )

    async def set_state(self, visit: Visit, form: "dict[str, str]") -> web.Response:
        """Cordon, drain or uncordon a node or an endpoint."""
        name, state, force = form.get("name", ""), _STATES.get(form.get("state", "")), form.get("force") == "true"
        if state is None:
            raise InvalidField("state", f"is none of {', '.join(_STATES)}")
        wanted = pb.SchedulingState.Value(f"SCHEDULING_STATE_{state.name}")
        try:
            if name.startswith(f"{NODES}/"):
                node = pb.SetNodeStateRequest(name=name, state=wanted, force=force)
                await self._admin.call(visit.principal, "SetNodeState", node)
            else:
                endpoint = pb.SetEndpointStateRequest(name=name, state=wanted, force=force)
                await self._admin.call(visit.principal, "SetEndpointState", endpoint)
        except DisruptionBudgetBroken as error:
            return await self._pages.page(visit, "force.html", 409, error=error, form=form, back=_back(form))
        done = {"active": "is back in service", "cordoned": "is cordoned", "draining": "drains"}[state.value]
        visit.session.notice = f"{name.partition('/')[2]} {done}."
        return see_other(_back(form))

    # What is shown

    def _summary(self, nodes: Sequence[heatmap.NodeCells]) -> dict[str, Any]:
        scheduler, columns = self._scheduler, self._fleet.columns
        slots = list(self._fleet.by_slot)
        kv_use = columns.kv_use[slots]
        known = kv_use[np.isfinite(kv_use)]
        return {
            "nodes": len(nodes),
            "devices": sum(len(node.cells) for node in nodes),
            "endpoints": len(slots),
            "open": int(np.count_nonzero(columns.open[slots])),
            "inflight": int(columns.inflight[slots].sum() + columns.external[slots].sum()),
            "holds": len(scheduler.dispatcher.holds),
            "routes": self._past.routes_per_second(),
            "queued_ms": float(columns.prefill_us[slots].mean() / 1e3) if slots else None,
            "kv_use": float(known.mean()) if len(known) else None,
            "rates": sparkline(self._past.route_rates(), "Routes a second over the last ten minutes"),
        }

    def _troubles(self, nodes: Sequence[heatmap.NodeCells]) -> list[Trouble]:
        """What is wrong, the worst first."""
        scheduler, found = self._scheduler, []
        fleet_page = f"{PREFIX}/fleet"
        if not scheduler.store.available:
            found.append(Trouble("bad", "Postgres cannot be reached. Routing goes on; changes have to wait.", ""))
        if not scheduler.leadership.leads():
            found.append(Trouble("warn", "This scheduler stands by: another one answers Route.", ""))
        if scheduler.draining:
            found.append(Trouble("warn", "This scheduler is shutting down.", ""))
        if self._fleet.guards_frozen:
            words = "Most agents fell silent at once, so this scheduler may be the one cut off: guards are frozen."
            found.append(Trouble("bad", words, ""))
        for state, words, severity in (
            ("lost", "lost", "bad"),
            ("failed", "failed", "bad"),
            ("stale", "not heard of", "bad"),
            ("throttled", "throttled", "warn"),
        ):
            hit = [node.id for node in nodes for cell in node.cells if cell.state == state]
            if hit:
                where = hit[0] if len(set(hit)) == 1 else f"{len(set(hit))} nodes"
                text = f"{_count(len(hit), 'device')} {words}, on {where}"
                found.append(Trouble(severity, text, f"{fleet_page}/nodes/{quote(hit[0], safe='')}"))
        closed = self._closed()
        for guard in ("not_ready", "ejected", "contested"):
            hit_by = closed.get(guard, [])
            if hit_by:
                link = f"{fleet_page}/endpoints/{quote(hit_by[0].id, safe='')}"
                found.append(Trouble("bad", f"{_count(len(hit_by), 'endpoint')} {guard.replace('_', ' ')}", link))
        now = scheduler.clock()
        for each in scheduler.registry.installed.values():
            if each.tripped_until is not None and now < each.tripped_until:
                words = f"Strategy {each.config.id} keeps failing; its fallback decides"
                found.append(Trouble("bad", words, f"{PREFIX}/strategies/{each.config.id}"))
        return found

    def _closed(self) -> dict[str, list[Endpoint]]:
        """Endpoints by each hard guard that closes them."""
        is_open, found = self._fleet.columns.open, dict[str, list[Endpoint]]()
        for endpoint in self._fleet.endpoints.values():
            if not is_open[endpoint.slot]:
                for guard in self._fleet.hard_guards(endpoint):
                    found.setdefault(guard, []).append(endpoint)
        return found

    def _rows(self, query: "dict[str, str]") -> tuple[list[EndpointRow], int, int]:
        """A page of those that `query` asks for, how many there are in all, and the page's number."""
        wanted = list(self._fleet.endpoints.values())
        if any(query.get(name) for name in ("q", "model", "state")):
            wanted = [each for each in wanted if self._matches(each, query)]
        wanted.sort(key=self._order(query.get("sort", "name")), reverse=query.get("sort", "name") != "name")
        page = min(max(1, _number(query.get("page", "1"))), max(1, -(-len(wanted) // PAGE_SIZE)))
        first = (page - 1) * PAGE_SIZE
        return [self._row(endpoint) for endpoint in wanted[first : first + PAGE_SIZE]], len(wanted), page

    def _matches(self, endpoint: Endpoint, query: "dict[str, str]") -> bool:
        text, model, state = query.get("q", "").lower(), query.get("model", ""), query.get("state", "")
        if model and model not in endpoint.spec.models:
            return False
        if text and text not in endpoint.id.lower() and text not in endpoint.node.id.lower():
            return False
        is_open = bool(self._fleet.columns.open[endpoint.slot])
        return state not in ("open", "closed") or is_open == (state == "open")

    def _order(self, sort: str) -> Callable[[Endpoint], Any]:
        columns = self._fleet.columns
        column = {"inflight": columns.inflight, "queued": columns.prefill_us, "kv": columns.kv_use}.get(sort)
        if column is None:
            return lambda endpoint: endpoint.id
        values = np.nan_to_num(column, nan=-1.0).tolist()
        return lambda endpoint: (values[endpoint.slot], endpoint.id)

    def _row(self, endpoint: Endpoint) -> EndpointRow:
        fleet, columns, slot, sample = self._fleet, self._fleet.columns, endpoint.slot, endpoint.sample
        hits = [value for value in self._past.of(endpoint, history.HIT_RATIO) if value == value]
        state = endpoint.state if endpoint.state is not SchedulingState.ACTIVE else endpoint.node.state
        return EndpointRow(
            id=endpoint.id,
            node=endpoint.node.id,
            engine=f"{endpoint.spec.engine} {endpoint.spec.engine_version}".strip(),
            models=endpoint.spec.models,
            state=state.value,
            open=bool(columns.open[slot]),
            hard_guards=tuple(fleet.hard_guards(endpoint)),
            soft_guards=tuple(each.value for each in self._scheduler.dispatcher.guards.peek(_ALL_GUARDS, slot)),
            inflight=int(columns.inflight[slot] + columns.external[slot]),
            waiting=None if sample is None else sample.waiting.value,
            queued_ms=float(columns.prefill_us[slot] / 1e3),
            kv_use=_known(columns.kv_use[slot]),
            hit_ratio=float(np.mean(hits)) if hits else _lifetime_ratio(endpoint),
            inflight_spark=sparkline(self._past.of(endpoint, history.INFLIGHT)[2::3], f"In flight on {endpoint.id}"),
            kv_spark=sparkline(self._past.of(endpoint, history.KV_USE)[2::3], f"KV use on {endpoint.id}", top=1.0),
        )

    def _charts(self, endpoint: Endpoint) -> list[tuple[str, Markup]]:
        past = self._past

        def one(title: str, metric: int, unit: str = "", scale: float = 1.0) -> tuple[str, Markup]:
            values = [value * scale for value in past.of(endpoint, metric)]
            return title, chart([Line(title, values)], title, unit=unit)

        return [
            one("Requests in flight", history.INFLIGHT),
            one("Prefill queued", history.QUEUED_MS, " ms"),
            one("KV cache in use", history.KV_USE, " %", 100.0),
            one("Prefix hit ratio", history.HIT_RATIO, " %", 100.0),
        ]


def _lifetime_ratio(endpoint: Endpoint) -> float | None:
    sample = endpoint.sample
    if sample is None or not sample.prefix_queries.value or sample.prefix_hits.value is None:
        return None
    return sample.prefix_hits.value / sample.prefix_queries.value


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 1


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _back(form: "dict[str, str]") -> str:
    """Where a form says it was; only within the console."""
    path = form.get("back", "")
    inside = path.startswith(f"{PREFIX}/") and "\\" not in path and path.isprintable()
    return path if inside else f"{PREFIX}/fleet"
