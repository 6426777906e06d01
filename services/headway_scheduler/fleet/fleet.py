"""The live fleet: nodes, their devices, endpoints, and which of them may be chosen.

Everything here belongs to one event loop. Agents' messages come in as domain values; what a decision reads is the
columns, the pools and the groups.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Final

import numpy as np
import structlog
from xxhash import xxh3_64_intdigest

from headway_scheduler.domain.desired import BindingMode, DesiredState, Model
from headway_scheduler.domain.device import DeviceEvent, DeviceEventKind
from headway_scheduler.domain.endpoint import EndpointSpec, EngineRole, EngineSample, SchedulingState
from headway_scheduler.domain.measurement import MissingReason
from headway_scheduler.domain.telemetry import Hello, Sample
from headway_scheduler.errors import DuplicateNode
from headway_scheduler.fleet.arenas import Arenas, arenas_of
from headway_scheduler.fleet.columns import Columns, FloatColumn, IntColumn, Pool, Slots
from headway_scheduler.fleet.health import (
    DeviceLimits,
    EjectionConfig,
    Ejections,
    Handicap,
    HardGuard,
    SlowStart,
    Verdict,
)
from headway_scheduler.fleet.lanes import Lane, Tier, narrowed, within
from headway_scheduler.fleet.members import Endpoint, Node
from headway_scheduler.fleet.membership import Membership, Rights, owners_of, split_of
from headway_scheduler.fleet.readings import Readings, Throttles
from headway_scheduler.fleet.values import Reservation

__all__ = ["Fleet", "FleetConfig", "described"]

log = structlog.get_logger()

_FAULTS: Final = {
    DeviceEventKind.LOST: HardGuard.DEVICE_LOST,
    DeviceEventKind.XID: HardGuard.DEVICE_XID,
    DeviceEventKind.ECC_DOUBLE_BIT: HardGuard.DEVICE_ECC,
}
_NONE: Final = np.zeros(0, np.int32)
_NO_REASONS: Final[frozenset[str]] = frozenset()
_NO_FAULTS: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Times in seconds. `stale_share`: when more of the nodes went stale at once, the scheduler is the one cut off.

    While some are still heard that is believed for `freeze_s` only: a fleet may also shrink by more than half.
    `guards_off`: hard guards that never close.
    """

    stale_after_s: float = 5.0
    freeze_s: float = 60.0
    forget_after_s: float = 600.0
    stale_share: float = 0.5
    clock_skew_warning_s: float = 5.0
    ejection: EjectionConfig = field(default_factory=EjectionConfig)
    devices: DeviceLimits = field(default_factory=DeviceLimits)
    guards_off: frozenset[HardGuard] = frozenset()


class Fleet:
    """Nodes and endpoints by id, and the columns behind them.

    `on_announced` is called with an endpoint that is new or changed, `on_removed` before its slot is reused,
    `on_restarted` when its engine lost its memory, `on_connected` with a node whose agent said Hello, `on_sampled` with
    a node's endpoints and their slots, once a sample is in the columns. `version` grows when it changes who may be
    chosen.
    """

    def __init__(self, config: FleetConfig | None = None) -> None:
        self.config = config or FleetConfig()
        self.columns = Columns()
        self.nodes: dict[str, Node] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self.by_slot: dict[int, Endpoint] = {}
        self.ejections = Ejections(self.config.ejection)
        self._at: dict[str, list[Endpoint]] = {}
        self.version = 0
        self.guards_frozen = False
        self.on_removed: list[Callable[[Endpoint], None]] = []
        self.on_restarted: list[Callable[[Endpoint], None]] = []
        self.on_announced: list[Callable[[Endpoint], None]] = []
        self.on_connected: list[Callable[[Node], None]] = []
        self.on_sampled: list[Callable[[Collection[Endpoint], IntColumn, float], None]] = []
        self._frozen_since: float | None = None
        self._free: list[int] = []
        self._used = 0
        self._desired = DesiredState()
        self._has_dedicated = False
        self._pools: dict[tuple[str, str], Slots] = {}
        self._adapters: frozenset[str] | None = None
        self._membership: Membership | None = None
        self._rights: dict[str, Rights] = {}
        self._candidates: dict[tuple[str, str, str], tuple[Slots, Slots]] = {}
        self._lanes: dict[tuple[str, str, str], tuple[Lane, ...]] = {}
        self._open: dict[tuple[str, str, str], tuple[Lane, ...]] = {}
        self._open_version = -1
        self._alone: dict[str, int] | None = None
        self._arenas: Arenas | None = None
        self._handicaps: dict[int, Handicap] = {}

    # What agents say

    def connect(self, hello: Hello, now: float) -> Node:
        """An agent's full state. Raises DuplicateNode while another instance of that name is connected and alive."""
        node = self.nodes.get(hello.node)
        if node is None:
            node = self.nodes[hello.node] = Node(hello.node, hello)
            node.state = self._desired.node_states.get(node.id, SchedulingState.ACTIVE)
        elif node.connected and node.hello.instance_id != hello.instance_id and not self._overdue(node, now):
            raise DuplicateNode(hello.node)
        if node.hello.instance_id != hello.instance_id:
            node.sequence = 0
            node.failures.clear()
        node.greet(hello)
        node.readings = None
        node.connected, node.stale, node.heard_at = True, False, now
        node.connection += 1
        announced = {spec.id for spec in hello.endpoints}
        for endpoint in [e for e in node.endpoints.values() if e.id not in announced]:
            self.remove_endpoint(endpoint.id)
        for spec in hello.endpoints:
            self.put_endpoint(node, spec, now)
        for endpoint in node.endpoints.values():
            self._apply_devices(endpoint)
        self._changed(node.endpoints.values())
        for listener in self.on_connected:
            listener(node)
        return node

    def disconnect(self, node: Node, connection: int) -> None:
        """That stream of the node's agent ended. Its endpoints stay until they are stale."""
        if node.connection == connection:
            node.connected = False

    def put_endpoint(self, node: Node, spec: EndpointSpec, now: float | None = None) -> Endpoint:
        """An endpoint appeared on `node`, or changed. `now` is of one that may start slowly."""
        node.readings = None
        endpoint = self.endpoints.get(spec.id)
        if endpoint is not None and endpoint.node is not node:
            self.remove_endpoint(endpoint.id)  # the address moved to another host
            endpoint = None
        if endpoint is None:
            endpoint = self._add(node, spec)
            if now is not None:
                self._start_slowly(endpoint, SlowStart.NEW, now)
            return endpoint
        before = endpoint.spec
        endpoint.respecify(spec)
        boot_id, endpoint.boot_id = endpoint.boot_id, spec.engine_boot_id or endpoint.boot_id
        if boot_id and endpoint.boot_id != boot_id:
            for listener in self.on_restarted:
                listener(endpoint)
        if before != spec:
            self.columns.kv_capacity[endpoint.slot] = spec.kv_capacity_tokens.or_nan()
            self._apply_devices(endpoint)
            self._announce(endpoint)
        else:
            self.refresh_guards([endpoint])
        return endpoint

    def remove_endpoint(self, endpoint_id: str) -> None:
        """An endpoint went away for good."""
        endpoint = self.endpoints.pop(endpoint_id, None)
        if endpoint is None:
            return
        self.columns.open[endpoint.slot] = False
        self._handicaps.pop(endpoint.slot, None)
        self._set_handicap(endpoint.slot, 0.0)
        for listener in self.on_removed:
            listener(endpoint)
        del endpoint.node.endpoints[endpoint_id]
        endpoint.node.readings = None
        del self.by_slot[endpoint.slot]
        self._at[endpoint.spec.address].remove(endpoint)
        self._share_address(endpoint.spec.address)
        self.ejections.forget(endpoint_id)
        self._free.append(endpoint.slot)
        self._changed()

    def apply_sample(self, node: Node, sample: Sample, now: float) -> bool:
        """A reading; False if a newer one was applied before it."""
        if sample.sequence <= node.sequence:
            return False
        node.sequence, node.heard_at = sample.sequence, now
        for reading in sample.devices:
            node.samples[reading.uuid] = reading
        for engine in sample.engines:
            endpoint = node.endpoints.get(engine.id)
            if endpoint is not None:
                self._apply_engine(endpoint, engine, now)
        node.readings = None
        endpoints = node.endpoints.values()
        for endpoint in endpoints:
            self._apply_devices(endpoint)
        self._sampled(endpoints, np.array([endpoint.slot for endpoint in endpoints], np.int64), now)
        node.stale = False
        self.refresh_guards(endpoints)
        return True

    def expect_numbers(self, node: Node, sample: Sample, words: bytes, numbers: FloatColumn) -> None:
        """More samples of these words will come: so was this one, which was just applied, with these numbers."""
        kept = node.samples.keys() & node.devices.keys()
        if not kept <= {each.uuid for each in sample.devices}:
            return  # an older sample of a device counts, too
        readings = Readings(words, sample, node.devices, node.endpoints.values())
        if np.array_equal(readings.numbers, numbers):  # in the order that is expected
            node.readings = readings

    def apply_numbers(
        self, node: Node, sequence: int, words: bytes, numbers: FloatColumn, throttles: Throttles, now: float
    ) -> bool:
        """A sample that says the same as the one before but for its numbers; False: it must be applied as a whole.

        Throttle reasons may be others, too: they come and go. Faults and readiness are as they were, so that hard
        guards need not be looked at.
        """
        readings = node.readings
        if readings is None or readings.words != words:
            return False
        if sequence <= node.sequence:
            return True
        node.sequence, node.heard_at = sequence, now
        readings.apply(numbers, self.columns, now)
        if throttles != readings.throttles:
            readings.throttles = throttles
            for endpoint, reasons in zip(node.endpoints.values(), readings.throttled(), strict=True):
                endpoint.throttles = reasons
        node.said(readings)
        self._sampled(node.endpoints.values(), readings.slots, now)
        if node.stale:
            node.stale = False
            self.refresh_guards(node.endpoints.values())
        return True

    def apply_device_event(self, node: Node, event: DeviceEvent) -> None:
        """A device failed: its endpoints are closed until it recovers. A program's fault on it does not count."""
        if event.kind is DeviceEventKind.RECOVERED:
            node.failures.pop(event.uuid, None)
        elif event.kind is DeviceEventKind.XID and event.xid in self.config.devices.ignored_xids:
            return
        else:
            node.failures[event.uuid] = event
        for endpoint in node.endpoints.values():
            self._apply_devices(endpoint)
        self.refresh_guards(node.endpoints.values())

    # What admins want

    def set_desired(self, desired: DesiredState) -> None:
        """Take over groups, bindings and scheduling states. What did not change costs nothing: fleets are large."""
        before, self._desired = self._desired, desired
        had_dedicated, self._has_dedicated = self._has_dedicated, _has_dedicated(desired)
        changed: list[Endpoint] = []
        for node_id in before.node_states.keys() | desired.node_states.keys():
            node, state = self.nodes.get(node_id), desired.node_states.get(node_id, SchedulingState.ACTIVE)
            if node is not None and node.state is not state:
                node.state = state
                changed.extend(node.endpoints.values())
        for endpoint_id in before.endpoint_states.keys() | desired.endpoint_states.keys():
            endpoint = self.endpoints.get(endpoint_id)
            state = desired.endpoint_states.get(endpoint_id, SchedulingState.ACTIVE)
            if endpoint is not None and endpoint.state is not state:
                endpoint.state = state
                changed.append(endpoint)
        if _who_may_use_what(before) != _who_may_use_what(desired):
            self._changed(self.endpoints.values() if had_dedicated or self._has_dedicated else changed)
        else:
            self.refresh_guards(changed)

    def forget_node(self, node_id: str) -> None:
        """Remove a node and its endpoints."""
        node = self.nodes.pop(node_id)
        for endpoint_id in list(node.endpoints):
            self.remove_endpoint(endpoint_id)

    # What time does

    def sweep(self, now: float) -> None:
        """Mark silent nodes stale, forget those gone for long, and let ejected endpoints back in.

        When more than `stale_share` of the nodes fell silent together, the fault is on our side: guards freeze.
        """
        self._recover(now)
        overdue = [node for node in self.nodes.values() if self._overdue(node, now)]
        self.guards_frozen = self._cut_off(sum(not node.stale for node in overdue), now)
        if self.guards_frozen:
            return
        for node in overdue:
            if not node.stale:
                node.stale = True
                self.refresh_guards(node.endpoints.values())
            if not node.connected and now - node.heard_at > self.config.forget_after_s:
                self.forget_node(node.id)

    # What decisions read

    def pool(self, model: str, adapter: str = "") -> Slots:
        """Slots of the endpoints that serve `model`; with an adapter, those that say they hold it, if any does."""
        adapter = self._held(adapter)
        key = (model, adapter)
        slots = self._pools.get(key)
        if slots is None:
            # An engine that runs only prefills or only decodes cannot serve a whole request.
            whole = (e for e in self.endpoints.values() if e.spec.role is EngineRole.BOTH)
            serving = [e for e in whole if model in e.spec.models]
            holding = [e for e in serving if adapter and adapter in e.spec.adapters]
            slots = self._pools[key] = np.array(sorted(e.slot for e in holding or serving), np.int32)
        return slots

    def candidates(self, tenant: str, model: str, adapter: str) -> tuple[Slots, Slots]:
        """The pool within the tenant's GPU groups: those it may always use, and those it may burst into."""
        key = (tenant, model, adapter := self._held(adapter))
        found = self._candidates.get(key)
        if found is None:
            rights, pool = self.rights(tenant), self.pool(model, adapter)
            found = (within(pool, rights.own_slots), within(pool, rights.burst_slots))
            self._candidates[key] = found
        return found

    def tiers(self, tenant: str, model: str) -> tuple[Slots, ...]:
        """The same by tier, those to burst into last; a tier that serves nothing of the model is empty."""
        rights, pool = self.rights(tenant), self.pool(model)
        return tuple(within(pool, slots) for slots in (*rights.own, *rights.burst))

    def open_lanes(self, tenant: str, model: str, adapter: str) -> tuple[Lane, ...]:
        """The candidates that no hard guard has closed, by split and tier. None of the lanes or tiers is empty.

        Found anew when `version` has grown, not at each decision.
        """
        if self._open_version != self.version:
            self._open_version = self.version
            self._open.clear()
        key = (tenant, model, self._held(adapter))
        found = self._open.get(key)
        if found is None:
            is_open = self.columns.open
            found = self._open[key] = narrowed(self._lanes_of(*key), lambda slots: slots[is_open[slots]])
        return found

    def rights(self, tenant: str) -> Rights:
        """Which slots the tenant may use, whatever they serve."""
        found = self._rights.get(tenant)
        if found is None:
            if self._membership is None:
                self._membership = Membership(self._desired, self.endpoints.values())
            found = self._rights[tenant] = self._membership.rights(tenant)
        return found

    def open_to(self, tenant: str) -> list[Endpoint]:
        """Endpoints that the tenant may use now, whatever they serve."""
        rights = self.rights(tenant)
        return [self.by_slot[slot] for slot in rights.own_slots | rights.burst_slots if self.columns.open[slot]]

    def groups_of(self, endpoint: Endpoint) -> list[str]:
        """Ids of the GPU groups an endpoint belongs to."""
        labels = endpoint.labels
        return [g.id for g in self._desired.groups.values() if g.holds(endpoint.id, endpoint.node.id, labels)]

    def tenants_of(self, endpoint: Endpoint) -> list[str]:
        """Ids of the tenants that may use an endpoint."""
        slot = endpoint.slot
        found = ((tenant, self.rights(tenant)) for tenant in self._desired.tenants)
        return [t for t, rights in found if any(slot in tier for tier in (*rights.own, *rights.burst))]

    def serving_only(self, domain: str) -> int:
        """Mask of the slots that no other isolation domain's tenants may use."""
        if self._alone is None:
            self._alone = Membership(self._desired, self.endpoints.values()).alone()
        return self._alone.get(domain, 0)

    def arenas(self) -> Arenas:
        """Who competes with whom, and where."""
        if self._arenas is None:
            competing = len(self._desired.bindings) > 1
            groups = {each.slot: self.groups_of(each) for each in self.endpoints.values()} if competing else {}
            self._arenas = arenas_of(self._desired, groups)
        return self._arenas

    def hard_guards(self, endpoint: Endpoint) -> list[str]:
        """Why it must not be chosen, the admin's word first; empty: it may."""
        return list(self.why_closed(endpoint))

    def why_closed(self, endpoint: Endpoint) -> dict[str, str]:
        """The same, each with what closed it, where there is more to say."""
        found: dict[str, str] = {}
        for state in (endpoint.state, endpoint.node.state):
            if state is not SchedulingState.ACTIVE:
                found[state.value] = ""
        if endpoint.node.stale:
            found[HardGuard.STALE.value] = f"nothing heard of {endpoint.node.id}"
        if not endpoint.ready:
            found[HardGuard.NOT_READY.value] = ""
        if endpoint.faults:
            found.update(endpoint.faults)
        if endpoint.contested:
            found["contested"] = ""
        if self.ejections.out:
            guard = self.ejections.guard(endpoint.id)
            if guard is not None:
                reason, times, _ = self.ejections.history(endpoint.id)
                found[guard.value] = f"{reason.value}, {times} times in a row" if times > 1 else reason.value
        for off in self.config.guards_off:
            found.pop(off.value, None)
        return found

    def refresh_guards(self, endpoints: Iterable[Endpoint]) -> None:
        """Recompute the `open` column of these endpoints."""
        for endpoint in endpoints:
            may_be_chosen = not self.why_closed(endpoint)
            if may_be_chosen != self.columns.open[endpoint.slot]:
                self.columns.open[endpoint.slot] = may_be_chosen
                self.version += 1

    def find(self, name: str) -> Endpoint | None:
        """The endpoint of this id or address (the rank 0 there)."""
        return self.endpoints.get(name) or self.endpoints.get(f"{name}@0")

    # What requests come to

    def record_outcome(
        self, endpoint: Endpoint, failed: bool, now: float, reservation: Reservation | None = None
    ) -> None:
        """A request ended there. What keeps failing is ejected for a while, but never too much of a pool.

        One that was placed there once fails there once, however often that is told.
        """
        if failed and reservation is not None:
            if reservation.blamed:
                return
            reservation.blamed = True
        placed_at, name = (None, "") if reservation is None else (reservation.placed_at, reservation.id)
        verdict = self.ejections.record(
            endpoint.id, failed, now, lambda: self._spared(endpoint), placed_at=placed_at, reservation=name
        )
        if verdict is not Verdict.NOTHING:
            self._judged(endpoint, verdict, now)
        elif failed and endpoint.id not in self.ejections.out and self.config.ejection.fault_load_s:
            handicap = self._handicaps.setdefault(endpoint.slot, Handicap())
            gap = self._busiest(endpoint) - float(self.columns.inflight[endpoint.slot])
            handicap.fault(max(0.0, gap), now, self.config.ejection)
            self._handicap(endpoint, now)

    def placed(self, slot: int, reservation: Reservation) -> None:
        """A request got its place there: of those that are probed, not more than a few."""
        if self.ejections.out:
            endpoint = self.by_slot[slot]
            if self.ejections.probe(endpoint.id, reservation.id):
                self.refresh_guards([endpoint])

    def answered(self, reservation: Reservation, now: float) -> None:
        """A request got its first token: where it was a probe, it has passed."""
        if self.ejections.out:
            whole = self.endpoints.get(self.ejections.answered(reservation.id, now) or "")
            if whole is not None:
                self._judged(whole, Verdict.WHOLE, now)

    def left(self, reservation: Reservation) -> None:
        """A request is over, or moved away: if it was a probe that told nothing, another may be one."""
        if self.ejections.out:
            probed = self.endpoints.get(self.ejections.probe_over(reservation.id) or "")
            if probed is not None:
                self.refresh_guards([probed])

    def lift_ejection(self, endpoint: Endpoint, now: float) -> bool:
        """An admin says that it may serve; False if it was not out."""
        lifted = self.ejections.lift(endpoint.id, now)
        if lifted:
            self._judged(endpoint, Verdict.WHOLE, now)
        return lifted

    def restarted(self, endpoint: Endpoint, now: float) -> None:
        """Its engine is new: if it was ejected, it is probed soon; what its cache held is gone."""
        self.ejections.hurry(endpoint.id, now)
        self._start_slowly(endpoint, SlowStart.RESTART, now)

    def in_panic(self) -> dict[str, bool]:
        """For each model served: does an endpoint stay in only because too little would be left?"""
        found: dict[str, bool] = {}
        for endpoint in self.endpoints.values():
            for model in endpoint.spec.models:
                found[model] = found.get(model, False) or self.ejections.failing(endpoint.id)
        return found

    def ejected_of(self, model: str) -> int:
        """How many endpoints that serve it are ejected or probed now."""
        known = (self.endpoints.get(name) for name in self.ejections.out)
        return sum(endpoint is not None and model in endpoint.spec.models for endpoint in known)

    # Inside

    def _sampled(self, endpoints: Collection[Endpoint], slots: IntColumn, now: float) -> None:
        for listener in self.on_sampled:
            listener(endpoints, slots, now)

    def _add(self, node: Node, spec: EndpointSpec) -> Endpoint:
        slot = self._free.pop() if self._free else self._used
        if slot == self._used:
            self._used += 1
            if self._used > self.columns.capacity:
                self.columns.grow()
        self.columns.reset(slot)
        endpoint = Endpoint(spec.id, slot, spec, node, ready=spec.ready, boot_id=spec.engine_boot_id)
        endpoint.state = self._desired.endpoint_states.get(endpoint.id, SchedulingState.ACTIVE)
        self.endpoints[endpoint.id] = self.by_slot[slot] = node.endpoints[endpoint.id] = endpoint
        self._at.setdefault(spec.address, []).append(endpoint)
        self._share_address(spec.address)
        self.columns.ring[slot] = xxh3_64_intdigest(endpoint.id.encode())
        self.columns.kv_capacity[slot] = spec.kv_capacity_tokens.or_nan()
        self._apply_devices(endpoint)
        self._announce(endpoint)
        return endpoint

    def _share_address(self, address: str) -> None:
        """Who is there now: data-parallel ranks behind one server are told apart by a header."""
        here = self._at[address]
        for endpoint in here:
            endpoint.place(shares_address=len(here) > 1)
        if not here:
            del self._at[address]

    def _announce(self, endpoint: Endpoint) -> None:
        self._changed([endpoint])
        for listener in self.on_announced:
            listener(endpoint)

    def _apply_engine(self, endpoint: Endpoint, sample: EngineSample, now: float) -> None:
        columns, slot = self.columns, endpoint.slot
        endpoint.tell(sample)
        columns.sampled_at[slot] = now
        columns.running[slot] = sample.running.or_nan()
        columns.waiting[slot] = sample.waiting.or_nan()
        columns.kv_use[slot] = sample.kv_use.or_nan()
        # What the engine has beyond our reservations: nothing that we know of, where it does not say. Never negative:
        # what we just sent may not be there yet.
        seen = 0.0 if sample.running.value is None else sample.running.value + (sample.waiting.value or 0.0)
        external = max(0.0, seen - float(columns.inflight[slot]))
        if external != columns.external[slot]:
            columns.external[slot] = external

    def _apply_devices(self, endpoint: Endpoint) -> None:
        node, columns, slot = endpoint.node, self.columns, endpoint.slot
        devices = node.devices
        memory, utilization, temperature, heat, power = [], [], [], [], []
        throttles: frozenset[str] = _NO_REASONS
        faults: dict[str, str] = {}
        ecc_limit = self.config.devices.ecc_errors
        for uuid in endpoint.spec.device_uuids:
            device, sample = devices.get(uuid), node.samples.get(uuid)
            if node.failures:
                # A MIG instance falls with its GPU.
                for failing in (uuid, "" if device is None else device.parent_uuid):
                    if failing in node.failures:
                        event = node.failures[failing]
                        faults[_FAULTS[event.kind].value] = described(event)
            if device is None or sample is None:
                continue
            if sample.memory_used_bytes.missing is MissingReason.LOST:
                faults[HardGuard.DEVICE_LOST.value] = f"{uuid} lost"
            errors = sample.ecc_errors.value
            if errors and 0 < ecc_limit <= errors:
                faults[HardGuard.DEVICE_ECC.value] = f"{uuid} {errors:.0f} uncorrected ECC errors"
            memory.append(_ratio(sample.memory_used_bytes.value, device.memory_total_bytes.value))
            utilization.append(sample.utilization.or_nan())
            temperature.append(sample.temperature_c.or_nan())
            heat.append(_ratio(sample.temperature_c.value, device.temperature_slowdown_c.value))
            power.append(_ratio(sample.power_w.value, device.power_limit_w.value))
            if sample.throttle_reasons:
                throttles = throttles.union(sample.throttle_reasons)
        endpoint.faults, endpoint.throttles = faults or _NO_FAULTS, throttles
        kv_use = columns.kv_use.item(slot)
        columns.memory_pressure[slot] = kv_use if kv_use == kv_use else _highest(memory)  # NaN is not itself
        columns.utilization[slot] = _highest(utilization)
        columns.temperature_c[slot] = _highest(temperature)
        columns.heat[slot] = _highest(heat)
        columns.power[slot] = _highest(power)

    def _cut_off(self, silent: int, now: float) -> bool:
        """Did so many of the nodes that were alive fall silent together that it must be us?"""
        alive = sum(not node.stale for node in self.nodes.values())
        if silent <= self.config.stale_share * alive:
            self._frozen_since = None
            return False
        if self._frozen_since is None:
            self._frozen_since = now
        return silent == alive or now - self._frozen_since < self.config.freeze_s

    def _judged(self, endpoint: Endpoint, verdict: Verdict, now: float) -> None:
        self._handicaps.pop(endpoint.slot, None)
        self._set_handicap(endpoint.slot, 0.0)
        if verdict is Verdict.WHOLE:
            self._start_slowly(endpoint, SlowStart.EJECTION, now)
            log.info("endpoint_whole", endpoint=endpoint.id)
        else:
            reason, times, for_s = self.ejections.history(endpoint.id)
            log.warning("endpoint_ejected", endpoint=endpoint.id, reason=reason.value, times=times, for_s=for_s)
        self.refresh_guards([endpoint])

    def _recover(self, now: float) -> None:
        """Probe those whose ejection is over; let those back in that are needed; let handicaps fade."""
        if self.ejections.out:
            changed = self.ejections.expire(now)
            for name in list(self.ejections.out):
                endpoint = self.endpoints.get(name)
                if endpoint is not None and self._spared(endpoint) and self.ejections.pardon(name, now):
                    changed.append(name)
                    log.warning("endpoint_let_back_in", endpoint=name)
            self.refresh_guards(self.endpoints[name] for name in changed if name in self.endpoints)
        for slot in list(self._handicaps):
            self._handicap(self.by_slot[slot], now)

    def _spared(self, endpoint: Endpoint) -> bool:
        """Would a pool, or a tenant's part of it, have too little without it? Better a failing endpoint than none."""
        out = [self.endpoints[name] for name in self.ejections.out if name in self.endpoints and name != endpoint.id]
        for model in endpoint.spec.models:
            pool = self.pool(model)
            without = 1 + sum(model in each.spec.models for each in out)
            if without * 100.0 > self.config.ejection.max_percent * len(pool) or not self._rest(endpoint, pool, out):
                return True
        # Those tenants that have routed since the fleet changed last.
        for tenant, model, adapter in list(self._lanes):
            usable = np.concatenate(self.candidates(tenant, model, adapter))
            if endpoint.slot in usable and not self._rest(endpoint, usable, out):
                return True
        return False

    def _rest(self, endpoint: Endpoint, slots: Slots, out: list[Endpoint]) -> int:
        """How many of these slots are open, without this endpoint and those that are out."""
        is_open = self.columns.open
        without = sum(bool(is_open[each.slot]) and each.slot in slots for each in (endpoint, *out))
        return int(np.count_nonzero(is_open[slots])) - without

    def _busiest(self, endpoint: Endpoint) -> float:
        """The most that one endpoint of its pools has in flight."""
        columns, found = self.columns, 0.0
        for model in endpoint.spec.models:
            pool = self.pool(model)
            if len(pool):
                found = max(found, float((columns.inflight[pool] + columns.external[pool]).max()))
        return found

    def _start_slowly(self, endpoint: Endpoint, after: SlowStart, now: float) -> None:
        config = self.config.ejection
        if config.slow_start_s and after in config.slow_start_after:
            self._handicaps.setdefault(endpoint.slot, Handicap()).started_at = now
            self._handicap(endpoint, now)

    def _handicap(self, endpoint: Endpoint, now: float) -> None:
        handicap = self._handicaps[endpoint.slot]
        load = handicap.load(self._busiest(endpoint), now, self.config.ejection)
        if not load and handicap.started_at is None:
            del self._handicaps[endpoint.slot]
        self._set_handicap(endpoint.slot, load)

    def _set_handicap(self, slot: int, load: float) -> None:
        columns = self.columns
        if columns.handicap[slot] != load:
            columns.handicap[slot] = load
            (columns.handicapped.add if load else columns.handicapped.discard)(slot)

    def _overdue(self, node: Node, now: float) -> bool:
        return now - node.heard_at > self.config.stale_after_s

    def _held(self, adapter: str) -> str:
        """The adapter, if any endpoint says that it holds it. All others are alike, and callers name what they like."""
        if not adapter:
            return ""
        if self._adapters is None:
            self._adapters = frozenset(held for e in self.endpoints.values() for held in e.spec.adapters)
        return adapter if adapter in self._adapters else ""

    def _lanes_of(self, tenant: str, model: str, adapter: str) -> tuple[Lane, ...]:
        """Open or not. The last lane has what no split holds; a split without a weight has no lane."""
        key = (tenant, model, adapter)
        found = self._lanes.get(key)
        if found is None:
            rights, pool = self.rights(tenant), self.pool(model, adapter)
            tiers = [(within(pool, slots), False) for slots in rights.own]
            tiers += [(within(pool, slots), True) for slots in rights.burst]
            rest = Lane("", 0.0, tuple(Tier(Pool.of(slots), burst) for slots, burst in tiers))
            known = self._desired.models.get(model)
            lanes = [rest] if known is None or not known.splits else [*self._split(known, rest)]
            found = self._lanes[key] = tuple(lanes)
        return found

    def _split(self, model: Model, whole: Lane) -> Iterable[Lane]:
        number = {
            slot: split_of(model, self._desired, self.by_slot[slot], self.by_slot[slot].spec.engine_version)
            for tier in whole.tiers
            for slot in tier.pool.slots.tolist()
        }

        def of(wanted: int | None) -> tuple[Tier, ...]:
            every = (
                (tier, [slot for slot in tier.pool.slots.tolist() if number[slot] == wanted]) for tier in whole.tiers
            )
            return tuple(Tier(Pool.of(np.array(slots, np.int32)), tier.burst) for tier, slots in every)

        for position, split in enumerate(model.splits):
            if split.weight > 0:
                yield Lane(split.name, split.weight, of(position))
        yield Lane("", 0.0, of(None))

    def _changed(self, endpoints: Iterable[Endpoint] = ()) -> None:
        self.version += 1
        self._pools.clear()
        self._adapters = None
        self._candidates.clear()
        self._lanes.clear()
        self._rights.clear()
        self._membership = self._alone = self._arenas = None
        touched = list(endpoints)
        for endpoint in touched:
            endpoint.contested = self._has_dedicated and len(owners_of(self._desired, endpoint)) > 1
        self.refresh_guards(touched)


def described(event: DeviceEvent) -> str:
    """A device's failure, for people."""
    what = f"XID {event.xid}" if event.kind is DeviceEventKind.XID else event.kind.value.replace("_", " ")
    return f"{event.uuid} {what}"


def _who_may_use_what(desired: DesiredState) -> tuple[object, ...]:
    """All that candidates follow from, of what admins configured, and what data planes are told beside."""
    tenants = {tenant.id: (tenant.domain, tenant.models) for tenant in desired.tenants.values()}
    models = {m.id: (m.splits, m.aliases) for m in desired.models.values() if m.splits or m.aliases}
    return desired.groups, desired.bindings, tenants, models


def _has_dedicated(desired: DesiredState) -> bool:
    return any(binding.mode == BindingMode.DEDICATED for binding in desired.bindings)


def _ratio(value: float | None, limit: float | None) -> float:
    return nan if value is None or not limit else value / limit


def _highest(values: list[float]) -> float:
    if len(values) == 1:
        return values[0]
    known = [value for value in values if value == value]  # NaN is not itself
    return max(known, default=nan)
