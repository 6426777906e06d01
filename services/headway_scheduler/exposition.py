"""What Prometheus sees of a scheduler: read from its state when scraped, so that nothing sits on the hot path.

docs/metrics.md explains each name; a test holds the page to this file.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headway_scheduler.app import Scheduler
from headway_scheduler.fleet.columns import Columns, Slots
from headway_scheduler.fleet.members import Endpoint
from headway_scheduler.metrics.counts import OTHER, Histogram, Series

__all__ = ["SchedulerCollector"]

_SERIES: Final = ("tenant", "model")
_US: Final = 1e6


class SchedulerCollector(Collector):
    """Everything, as of now."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._most = scheduler.config.metrics_series

    def collect(self) -> Iterable[Metric]:
        """Every metric."""
        yield from self._scheduler_itself()
        yield from self._decisions()
        yield from self._traffic()
        yield from self._shares()
        yield from self._health()
        yield from self._endpoints()
        yield from self._pools()
        yield from self._observers()
        yield from _watched(self._scheduler)

    def _scheduler_itself(self) -> Iterable[Metric]:
        scheduler, dispatcher = self._scheduler, self._scheduler.dispatcher
        discovery, authentication = scheduler.discovery, scheduler.authentication
        yield _gauge("headway_leader", "1: answers Route.", scheduler.leadership.leads())
        yield _gauge("headway_draining", "1: going away.", scheduler.draining)
        yield _gauge("headway_store_available", "1: Postgres answers.", scheduler.store.available)
        yield _gauge("headway_nodes", "Nodes known.", len(scheduler.fleet.nodes))
        yield _gauge("headway_guards_frozen", "1: most agents went silent at once.", scheduler.fleet.guards_frozen)
        yield _gauge("headway_reservations", "Reservations held.", len(scheduler.ledger.reservations))
        yield _gauge("headway_holds", "Routes held.", len(dispatcher.holds))
        yield _gauge("headway_index_blocks", "Distinct blocks in the index.", len(scheduler.index))
        yield _gauge("headway_kv_blocks", "Distinct blocks that engines say they hold.", len(scheduler.kv))
        yield _gauge("headway_kv_feeds", "Endpoints with KV events.", scheduler.kv.feeds.bit_count())
        yield _gauge("headway_envoys", "Envoys that follow the fleet.", discovery.streams)
        yield _counter("headway_discovery_answers", "Answers sent to Envoys.", discovery.answers)
        yield _counter("headway_discovery_rejections", "Answers that an Envoy rejected.", discovery.rejections)
        yield _labelled(
            CounterMetricFamily,
            "headway_authentication_failures",
            "Calls whose credential did not count.",
            "answer",
            {"refused": authentication.failed, "too_many": authentication.limited},
        )

    def _decisions(self) -> Iterable[Metric]:
        scheduler = self._scheduler
        yield _counter("headway_routes", "Routes answered with an endpoint.", scheduler.dispatcher.routes)
        refusals: Mapping[str, float] = scheduler.refusals
        yield _labelled(CounterMetricFamily, "headway_refusals", "Routes refused.", "reason", refusals)
        yield _labelled(
            CounterMetricFamily,
            "headway_fail_open_routes",
            "Routes that data planes made by themselves.",
            "tenant",
            _folded(scheduler.fail_open_routes, self._most),
        )
        installed = scheduler.registry.installed
        for name, text, value in (
            ("decisions", "Pricings that counted.", {key: float(each.decisions) for key, each in installed.items()}),
            ("failures", "Pricings discarded.", {key: float(each.failures) for key, each in installed.items()}),
        ):
            yield _labelled(CounterMetricFamily, f"headway_strategy_{name}", text, "strategy", value)
        family = HistogramMetricFamily("headway_decision_seconds", "What a Route takes to decide, without holds.")
        _add_histogram(family, [], scheduler.counts.decision)
        yield family

    def _traffic(self) -> Iterable[Metric]:
        """By tenant and model."""
        every = self._scheduler.counts.all_series()
        for name, text, read in _COUNTED:
            counter = CounterMetricFamily(f"headway_{name}", text, labels=_SERIES)
            for series in every:
                counter.add_metric([series.tenant, series.model], read(series))
            yield counter
        for name, text, label, of in _COUNTED_BY:
            counter = CounterMetricFamily(f"headway_{name}", text, labels=[*_SERIES, label])
            for series in every:
                for key, count in of(series).items():
                    counter.add_metric([series.tenant, series.model, key], count)
            yield counter
        for name, text, observed in _OBSERVED:
            histogram = HistogramMetricFamily(f"headway_{name}", text, labels=_SERIES)
            for series in every:
                _add_histogram(histogram, [series.tenant, series.model], observed(series))
            yield histogram

    def _shares(self) -> Iterable[Metric]:
        """What tenants that compete got, and how far each is ahead of the least served."""
        labels = ("arena", "tenant")
        service = CounterMetricFamily("headway_tenant_service", "Service got, in tokens as counted.", labels=labels)
        ahead = GaugeMetricFamily("headway_tenant_ahead", "Its counter above the least, by weight.", labels=labels)
        held = GaugeMetricFamily("headway_tenant_holds", "Routes held, by tenant.", labels=labels)
        dispatcher = self._scheduler.dispatcher
        shares = sorted(dispatcher.fair.shares(), key=lambda share: (share.tenant, share.arena))
        for share in shares[: self._most]:
            place = [share.arena, share.tenant]
            service.add_metric(place, share.service)
            ahead.add_metric(place, share.ahead)
            held.add_metric(place, dispatcher.holds.tenants.get(share.tenant, 0))
        if rest := shares[self._most :]:
            service.add_metric([OTHER, OTHER], sum(share.service for share in rest))
            ahead.add_metric([OTHER, OTHER], max(share.ahead for share in rest))
            held.add_metric([OTHER, OTHER], sum(dispatcher.holds.tenants.get(share.tenant, 0) for share in rest))
        yield from (service, ahead, held)

    def _health(self) -> Iterable[Metric]:
        fleet, retries = self._scheduler.fleet, self._scheduler.dispatcher.retries
        by_reason = {reason.value: float(count) for reason, count in fleet.ejections.counts.items()}
        yield _labelled(CounterMetricFamily, "headway_ejections", "Endpoints ejected.", "reason", by_reason)
        yield _counter("headway_ejections_spared", "Ejections not made.", fleet.ejections.spared)
        panics = fleet.in_panic()
        ejected, retrying = {m: fleet.ejected_of(m) for m in panics}, {m: retries.now.get(m, 0) for m in panics}
        refused: Mapping[str, float] = retries.refused
        for kind, name, text, values in (
            (
                GaugeMetricFamily,
                "endpoints_ejected",
                "Ejected or probed now.",
                ejected,
            ),
            (GaugeMetricFamily, "panic", "1: a failing endpoint stays in, as too few are left.", panics),
            (GaugeMetricFamily, "retries", "Retries in progress.", retrying),
            (CounterMetricFamily, "retries_refused", "Retries beyond the budget.", refused),
        ):
            yield _labelled(kind, f"headway_{name}", text, "model", _folded(values, self._most))

    def _endpoints(self) -> Iterable[Metric]:
        scheduler = self._scheduler
        endpoints = sorted(scheduler.fleet.endpoints.values(), key=lambda each: each.id)
        most = scheduler.config.metrics_endpoints
        named = [([each.id], _slots([each])) for each in endpoints[:most]]
        rest = [([OTHER], _slots(endpoints[most:]))] if len(endpoints) > most else []
        for name, text, read in _OF_SLOTS:
            yield _by_slots(
                f"headway_endpoint_{name}", text, "endpoint", [*named, *rest], read, scheduler.fleet.columns
            )
        ejected = GaugeMetricFamily("headway_endpoint_ejected", "1: ejected or probed.", labels=["endpoint"])
        out = scheduler.fleet.ejections.out
        for each in endpoints[:most]:
            ejected.add_metric([each.id], int(each.id in out))
        if rest:
            ejected.add_metric([OTHER], sum(each.id in out for each in endpoints[most:]))
        yield ejected

    def _pools(self) -> Iterable[Metric]:
        """By model. An endpoint that serves several counts in each."""
        fleet = self._scheduler.fleet
        by_model: dict[str, list[Endpoint]] = {}
        for endpoint in fleet.endpoints.values():
            for model in endpoint.spec.models:
                by_model.setdefault(model, []).append(endpoint)
        models = sorted(by_model)
        pools = [([model], _slots(by_model[model])) for model in models[: self._most]]
        others = {each.id: each for model in models[self._most :] for each in by_model[model]}
        if others:
            pools.append(([OTHER], _slots(others.values())))
        for name, text, read in (("endpoints", "Endpoints that serve it.", _count), *_OF_SLOTS):
            yield _by_slots(f"headway_pool_{name}", text, "model", pools, read, fleet.columns)

    def _observers(self) -> Iterable[Metric]:
        record, export = self._scheduler.record, self._scheduler.export
        yield _gauge("headway_record_entries", "Decisions and refusals remembered.", len(record))
        yield _gauge("headway_record_bytes", "Memory that they take, at most.", record.size_bytes)
        yield _counter("headway_export_lines", "Requests written to the export.", 0 if export is None else export.lines)
        yield _counter("headway_export_lost", "Requests it had no time for.", 0 if export is None else export.lost)


_COUNTED: Final[tuple[tuple[str, str, Callable[[Series], float]], ...]] = (
    ("requests_routed", "Requests given an endpoint.", lambda s: s.routed),
    ("prompt_tokens", "Prompt tokens, as engines counted them.", lambda s: s.prompt_tokens),
    ("cached_tokens", "Prompt tokens found cached, as engines counted them.", lambda s: s.cached_tokens),
    ("matched_tokens", "Prompt tokens that decisions believed to be cached.", lambda s: s.matched_tokens),
    ("completion_tokens", "Tokens answered.", lambda s: s.completion_tokens),
)
_COUNTED_BY: Final[tuple[tuple[str, str, str, Callable[[Series], dict[str, int]]], ...]] = (
    (
        "request_refusals",
        "Requests refused whose tenant and model are known.",
        "reason",
        lambda s: s.refusals,
    ),
    ("request_outcomes", "How requests ended.", "outcome", lambda s: s.outcomes),
)
_OBSERVED: Final[tuple[tuple[str, str, Callable[[Series], Histogram]], ...]] = (
    ("hold_seconds", "How long those that were held and routed were held.", lambda s: s.hold),
    ("ttft_seconds", "Time to first token, as data planes measured it.", lambda s: s.ttft),
    ("tpot_seconds", "Time per output token after the first.", lambda s: s.tpot),
    ("ttft_prediction_ratio", "Actual over predicted TTFT.", lambda s: s.prediction),
)


def _count(_columns: Columns, slots: Slots) -> float:
    return len(slots)


def _mean_of(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Of those that are known; NaN if none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


_OF_SLOTS: Final[tuple[tuple[str, str, Callable[[Columns, Slots], float]], ...]] = (
    ("open", "Endpoints without a hard guard.", lambda c, slots: float(c.open[slots].sum())),
    ("inflight", "Reservations held.", lambda c, slots: float(c.inflight[slots].sum())),
    (
        "queued_prefill_seconds",
        "Predicted prefill to do.",
        lambda c, slots: float(c.prefill_us[slots].sum()) / _US,
    ),
    ("kv_use", "KV cache in use, 0 to 1; mean of those that say.", lambda c, slots: _mean_of(c.kv_use[slots])),
    ("memory_pressure", "0 to 1; mean of those that say.", lambda c, slots: _mean_of(c.memory_pressure[slots])),
)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, float(value))


def _labelled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


def _by_slots(
    name: str,
    text: str,
    label: str,
    groups: Iterable[tuple[list[str], Slots]],
    read: Callable[[Columns, Slots], float],
    columns: Columns,
) -> Metric:
    """A gauge of each group of slots; what nobody knows is left out: missing is never zero."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for labels, slots in groups:
        value = read(columns, slots)
        if value == value:  # not NaN
            family.add_metric(labels, value)
    return family


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    """Buckets as Prometheus wants them: cumulative."""
    cumulative, buckets = 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        cumulative += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(cumulative)))
    family.add_metric(labels, buckets, histogram.total)


def _folded(values: Mapping[str, float], most: int) -> dict[str, float]:
    """The first so many by name, and the others' sum."""
    names = sorted(values)
    found = {name: float(values[name]) for name in names[:most]}
    if len(names) > most:
        found[OTHER] = sum(values[name] for name in names[most:])
    return found


def _slots(endpoints: Iterable[Endpoint]) -> Slots:
    return np.array([each.slot for each in endpoints], np.int32)


def _watched(scheduler: Scheduler) -> Iterable[Metric]:
    """What was watched, and what is bypassed. Seconds are sums over `headway_observed_compared`'s requests."""
    labels = ["tenant", "model"]
    seen = CounterMetricFamily("headway_observed_requests", "Requests that others placed.", labels=labels)
    agreed = CounterMetricFamily("headway_observed_agreed", "Those that went where we would send them.", labels=labels)
    compared = CounterMetricFamily("headway_observed_compared", "Those with both predictions.", labels=labels)
    served = CounterMetricFamily("headway_observed_served_seconds", "TTFT predicted where they went.", labels=labels)
    chosen = CounterMetricFamily("headway_observed_chosen_seconds", "TTFT predicted at our choice.", labels=labels)
    for key, tally in scheduler.observations.tallies.items():
        seen.add_metric(key, tally.requests)
        agreed.add_metric(key, tally.agreed)
        compared.add_metric(key, tally.compared)
        served.add_metric(key, tally.predicted_served_ms / 1e3)
        chosen.add_metric(key, tally.predicted_chosen_ms / 1e3)
    unpriced = CounterMetricFamily("headway_observed_unpriced", "Requests nothing can be said of.", labels=["reason"])
    for reason, count in scheduler.observations.unpriced.items():
        unpriced.add_metric([reason], count)
    bypassed = GaugeMetricFamily("headway_bypassed", "1: these requests are left alone.", labels=["tenant"])
    for tenant in scheduler.desired.bypassed:
        bypassed.add_metric([tenant], 1)
    return [seen, agreed, compared, served, chosen, unpriced, bypassed]
