"""The live fleet: nodes, their devices, endpoints, and which of them may be chosen.

Everything here belongs to one event loop. Agents' messages come in as domain values; what a decision reads is the
columns, the pools and the groups.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import nan
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from headway_scheduler.domain.decision import Placement
from headway_scheduler.domain.desired import BindingMode, DesiredState, Model
from headway_scheduler.domain.device import Device, DeviceEvent, DeviceEventKind, DeviceSample
from headway_scheduler.domain.endpoint import EndpointSpec, EngineRole, EngineSample, SchedulingState
from headway_scheduler.domain.measurement import MissingReason
from headway_scheduler.domain.telemetry import Hello, Sample
from headway_scheduler.errors import DuplicateNode
from headway_scheduler.fleet.arenas import Arenas, arenas_of
from headway_scheduler.fleet.columns import Columns, Pool, Slots
from headway_scheduler.fleet.health import Ejections
from headway_scheduler.fleet.membership import Membership, Rights, owners_of, split_of

__all__ = ["Endpoint", "Fleet", "FleetConfig", "Lane", "Node", "Tier", "narrowed"]

_RANK_HEADER: Final = "x-data-parallel-rank"
_RANKS_BY_HEADER: Final = frozenset({"vllm", "sglang", "emulator"})
"""THE list of engines known to give a request to the data-parallel rank that this header names."""
_HOT_REASONS: Final = frozenset({"hw_slowdown", "hw_thermal", "power_brake"})
_APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that speak of the program on the GPU, not of the GPU (NVIDIA's XID catalogue): no recovery is ever reported."""
_NONE: Final = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Times in seconds. `stale_share`: when more of the nodes went stale at once, the scheduler is the one cut off.

    While some are still heard that is believed for `freeze_s` only: a fleet may also shrink by more than half.
    """

    stale_after_s: float = 5.0
    freeze_s: float = 60.0
    forget_after_s: float = 600.0
    stale_share: float = 0.5
    clock_skew_warning_s: float = 5.0


@dataclass(slots=True)
class Node:
    """A host with an agent, and what the agent said last. Times are the scheduler's clock, in seconds.

    `connection` counts the agent's streams: only the newest one speaks for the node.
    """

    id: str
    hello: Hello
    connection: int = 0
    connected: bool = False
    stale: bool = False
    heard_at: float = 0.0
    sequence: int = 0
    clock_skew_s: float = 0.0
    state: SchedulingState = SchedulingState.ACTIVE
    samples: dict[str, DeviceSample] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    endpoints: dict[str, "Endpoint"] = field(default_factory=dict)
    devices: dict[str, Device] = field(init=False)
    """What its Hello named, by UUID."""

    def __post_init__(self) -> None:
        self.greet(self.hello)

    def greet(self, hello: Hello) -> None:
        """Its agent said Hello."""
        self.hello = hello
        self.devices = {device.uuid: device for device in hello.devices}


@dataclass(slots=True)
class Endpoint:
    """One engine rank that an agent announced.

    `failed`: why its devices cannot serve, or empty. `boot_id`: the engine's, as last known.
    """

    id: str
    slot: int
    spec: EndpointSpec
    node: Node
    state: SchedulingState = SchedulingState.ACTIVE
    ready: bool = True
    sample: EngineSample | None = None
    failed: str = ""
    boot_id: str = ""
    contested: bool = False
    """It is in dedicated groups of several tenants, and so nobody's."""
    placement: Placement = field(init=False)
    """As answers name it."""
    shares_address: bool = False
    """It is one of several ranks behind one server."""

    def __post_init__(self) -> None:
        self.place(shares_address=False)

    def place(self, *, shares_address: bool) -> None:
        """Where it is. Of several ranks at one address a header tells which is meant, where the engine knows it."""
        self.shares_address = shares_address
        named = shares_address and self.spec.engine in _RANKS_BY_HEADER
        headers = {_RANK_HEADER: str(self.spec.dp_rank)} if named else {}
        self.placement = Placement(self.spec, self.node.id, headers)

    def respecify(self, spec: EndpointSpec) -> None:
        """Its agent says something else of it now."""
        self.spec, self.ready = spec, spec.ready
        self.place(shares_address=self.shares_address)

    @property
    def node_id(self) -> str:
        """Its node's."""
        return self.node.id

    @property
    def labels(self) -> dict[str, str]:
        """Its own labels over its node's."""
        return {**self.node.hello.labels, **self.spec.labels}


@dataclass(frozen=True, slots=True)
class Tier:
    """Endpoints of equal standing for a tenant and model. `burst`: only borrowed, those who own them go first."""

    pool: Pool
    burst: bool = False


@dataclass(frozen=True, slots=True)
class Lane:
    """The tiers of one of a model's splits, in order; a model without splits has one lane.

    `weight`: its share of the requests; 0: of none while another lane is there.
    """

    split: str
    weight: float
    tiers: tuple[Tier, ...]


class Fleet:
    """Nodes and endpoints by id, and the columns behind them.

    `on_announced` is called with an endpoint that is new or changed, `on_removed` before its slot is reused,
    `on_restarted` when its engine lost its memory, `on_connected` with a node whose agent said Hello. `version` grows
    when it changes who may be chosen.
    """

    def __init__(self, config: FleetConfig | None = None) -> None:
        self.config = config or FleetConfig()
        self.columns = Columns()
        self.nodes: dict[str, Node] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self.by_slot: dict[int, Endpoint] = {}
        self.ejections = Ejections()
        self._at: dict[str, list[Endpoint]] = {}
        self.version = 0
        self.guards_frozen = False
        self.on_removed: list[Callable[[Endpoint], None]] = []
        self.on_restarted: list[Callable[[Endpoint], None]] = []
        self.on_announced: list[Callable[[Endpoint], None]] = []
        self.on_connected: list[Callable[[Node], None]] = []
        self._frozen_since: float | None = None
        self._free: list[int] = []
        self._used = 0
        self._desired = DesiredState()
        self._has_dedicated = False
        self._pools: dict[tuple[str, str], Slots] = {}
        self._membership: Membership | None = None
        self._rights: dict[str, Rights] = {}
        self._candidates: dict[tuple[str, str, str], tuple[Slots, Slots]] = {}
        self._lanes: dict[tuple[str, str, str], tuple[Lane, ...]] = {}
        self._open: dict[tuple[str, str, str], tuple[Lane, ...]] = {}
        self._open_version = -1
        self._alone: dict[str, int] | None = None
        self._arenas: Arenas | None = None

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
        node.connected, node.stale, node.heard_at = True, False, now
        node.connection += 1
        announced = {spec.id for spec in hello.endpoints}
        for endpoint in [e for e in node.endpoints.values() if e.id not in announced]:
            self.remove_endpoint(endpoint.id)
        for spec in hello.endpoints:
            self.put_endpoint(node, spec)
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

    def put_endpoint(self, node: Node, spec: EndpointSpec) -> Endpoint:
        """An endpoint appeared on `node`, or changed."""
        endpoint = self.endpoints.get(spec.id)
        if endpoint is not None and endpoint.node is not node:
            self.remove_endpoint(endpoint.id)  # the address moved to another host
            endpoint = None
        if endpoint is None:
            return self._add(node, spec)
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
        for listener in self.on_removed:
            listener(endpoint)
        del endpoint.node.endpoints[endpoint_id]
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
        for endpoint in node.endpoints.values():
            self._apply_devices(endpoint)
        node.stale = False
        self.refresh_guards(node.endpoints.values())
        return True

    def apply_device_event(self, node: Node, event: DeviceEvent) -> None:
        """A device failed: its endpoints are closed until it recovers. A program's fault on it does not count."""
        if event.kind is DeviceEventKind.RECOVERED:
            node.failures.pop(event.uuid, None)
        elif event.kind is DeviceEventKind.XID and event.xid in _APPLICATION_XIDS:
            return
        else:
            node.failures[event.uuid] = event.kind.value if not event.xid else f"{event.kind.value} {event.xid}"
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
        for endpoint_id in self.ejections.expire(now):
            if endpoint_id in self.endpoints:
                self.refresh_guards([self.endpoints[endpoint_id]])
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
        key = (tenant, model, adapter)
        found = self._candidates.get(key)
        if found is None:
            rights, pool = self.rights(tenant), self.pool(model, adapter)
            found = (_within(pool, rights.own_slots), _within(pool, rights.burst_slots))
            self._candidates[key] = found
        return found

    def tiers(self, tenant: str, model: str) -> tuple[Slots, ...]:
        """The same by tier, those to burst into last; a tier that serves nothing of the model is empty."""
        rights, pool = self.rights(tenant), self.pool(model)
        return tuple(_within(pool, slots) for slots in (*rights.own, *rights.burst))

    def open_lanes(self, tenant: str, model: str, adapter: str) -> tuple[Lane, ...]:
        """The candidates that no hard guard has closed, by split and tier. None of the lanes or tiers is empty.

        Found anew when `version` has grown, not at each decision.
        """
        if self._open_version != self.version:
            self._open_version = self.version
            self._open.clear()
        key = (tenant, model, adapter)
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
        found = []
        for state in (endpoint.state, endpoint.node.state):
            if state is not SchedulingState.ACTIVE and state.value not in found:
                found.append(state.value)
        if endpoint.node.stale:
            found.append("stale")
        if not endpoint.ready:
            found.append("not_ready")
        if endpoint.failed:
            found.append("device_failed")
        if endpoint.contested:
            found.append("contested")
        if self.ejections.ejected(endpoint.id):
            found.append("ejected")
        return found

    def refresh_guards(self, endpoints: Iterable[Endpoint]) -> None:
        """Recompute the `open` column of these endpoints."""
        for endpoint in endpoints:
            may_be_chosen = not self.hard_guards(endpoint)
            if may_be_chosen != self.columns.open[endpoint.slot]:
                self.columns.open[endpoint.slot] = may_be_chosen
                self.version += 1

    def find(self, name: str) -> Endpoint | None:
        """The endpoint of this id or address (the rank 0 there)."""
        return self.endpoints.get(name) or self.endpoints.get(f"{name}@0")

    def record_outcome(self, endpoint: Endpoint, failed: bool, now: float) -> None:
        """A request ended there. What keeps failing is ejected for a while, but never more than half of a pool."""
        if self.ejections.record(endpoint.id, failed, now, lambda: self._spared(endpoint)):
            self.refresh_guards([endpoint])

    # Inside

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
        endpoint.sample, endpoint.ready = sample, sample.ready
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
        throttled, failed = False, ""
        for uuid in endpoint.spec.device_uuids:
            device, sample = devices.get(uuid), node.samples.get(uuid)
            failed = failed or node.failures.get(uuid, "")
            if device is not None and device.parent_uuid:
                failed = failed or node.failures.get(device.parent_uuid, "")  # a MIG instance falls with its GPU
            if device is None or sample is None:
                continue
            if sample.memory_used_bytes.missing is MissingReason.LOST:
                failed = failed or "lost"
            memory.append(_ratio(sample.memory_used_bytes.value, device.memory_total_bytes.value))
            utilization.append(sample.utilization.or_nan())
            temperature.append(sample.temperature_c.or_nan())
            heat.append(_ratio(sample.temperature_c.value, device.temperature_slowdown_c.value))
            power.append(_ratio(sample.power_w.value, device.power_limit_w.value))
            if sample.throttle_reasons:
                throttled = throttled or not _HOT_REASONS.isdisjoint(sample.throttle_reasons)
        endpoint.failed = failed
        kv_use = columns.kv_use.item(slot)
        columns.memory_pressure[slot] = kv_use if kv_use == kv_use else _highest(memory)  # NaN is not itself
        columns.utilization[slot] = _highest(utilization)
        columns.temperature_c[slot] = _highest(temperature)
        columns.heat[slot] = _highest(heat)
        columns.power[slot] = _highest(power)
        columns.throttled[slot] = throttled

    def _cut_off(self, silent: int, now: float) -> bool:
        """Did so many of the nodes that were alive fall silent together that it must be us?"""
        alive = sum(not node.stale for node in self.nodes.values())
        if silent <= self.config.stale_share * alive:
            self._frozen_since = None
            return False
        if self._frozen_since is None:
            self._frozen_since = now
        return silent == alive or now - self._frozen_since < self.config.freeze_s

    def _spared(self, endpoint: Endpoint) -> bool:
        """Would ejecting it leave a pool with too little? Better a failing endpoint than none."""
        share = self.ejections.max_share
        for model in endpoint.spec.models:
            pool = self.pool(model).tolist()
            out = sum(self.ejections.ejected(self.by_slot[slot].id) for slot in pool)
            if out + 1 > share * len(pool):
                return True
        return False

    def _overdue(self, node: Node, now: float) -> bool:
        return now - node.heard_at > self.config.stale_after_s

    def _lanes_of(self, tenant: str, model: str, adapter: str) -> tuple[Lane, ...]:
        """Open or not. The last lane has what no split holds; a split without a weight has no lane."""
        key = (tenant, model, adapter)
        found = self._lanes.get(key)
        if found is None:
            rights, pool = self.rights(tenant), self.pool(model, adapter)
            tiers = [(_within(pool, slots), False) for slots in rights.own]
            tiers += [(_within(pool, slots), True) for slots in rights.burst]
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
        self._candidates.clear()
        self._lanes.clear()
        self._rights.clear()
        self._membership = self._alone = self._arenas = None
        touched = list(endpoints)
        for endpoint in touched:
            endpoint.contested = self._has_dedicated and len(owners_of(self._desired, endpoint)) > 1
        self.refresh_guards(touched)


def narrowed(lanes: Iterable[Lane], keep: Callable[[Slots], Slots]) -> tuple[Lane, ...]:
    """The lanes with what `keep` leaves of each tier's slots; what is empty then is left out."""
    found = []
    for lane in lanes:
        kept = ((keep(tier.pool.slots), tier.burst) for tier in lane.tiers)
        tiers = tuple(Tier(Pool.of(slots), burst) for slots, burst in kept if len(slots))
        if tiers:
            found.append(Lane(lane.split, lane.weight, tiers))
    return tuple(found)


def _who_may_use_what(desired: DesiredState) -> tuple[object, ...]:
    """All that candidates follow from, of what admins configured."""
    domains = {tenant.id: tenant.domain for tenant in desired.tenants.values()}
    splits = {model.id: model.splits for model in desired.models.values() if model.splits}
    return desired.groups, desired.bindings, domains, splits


def _has_dedicated(desired: DesiredState) -> bool:
    return any(binding.mode == BindingMode.DEDICATED for binding in desired.bindings)


def _within(pool: Slots, allowed: frozenset[int]) -> Slots:
    if not allowed or not len(pool):
        return _NONE
    return np.array([slot for slot in pool.tolist() if slot in allowed], np.int32)


def _ratio(value: float | None, limit: float | None) -> float:
    return nan if value is None or not limit else value / limit


def _highest(values: list[float]) -> float:
    if len(values) == 1:
        return values[0]
    known = [value for value in values if value == value]  # NaN is not itself
    return max(known, default=nan)
