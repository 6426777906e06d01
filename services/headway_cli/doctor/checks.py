"""What can be wrong with a deployment. Each check reads the facts and yields what it found."""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from headway.admin.v1 import admin_pb2

from headway_cli.doctor.facts import Facts
from headway_cli.doctor.findings import Finding, Severity
from headway_cli.kinds import qualified

__all__ = ["CHECKS", "examine"]

Check = Callable[[Facts], Iterator[Finding]]

_INFO, _WARNING, _ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR
_CLOCK_S: Final = 1.0
_SILENT_MS: Final = 60_000.0
_SOON_S: Final = 21 * 86_400.0
_VERY_SOON_S: Final = 3 * 86_400.0
_VERSION: Final = re.compile(r"(\d+)\.(\d+)")
_UNREADY: Final = frozenset({"not_ready"})
_FAULTS: Final = frozenset({"device_lost", "device_xid", "device_ecc"})
_EJECTED: Final = frozenset({"ejected", "probing"})
_NEEDED: Final = {
    "running": "queues are guessed from what was routed",
    "waiting": "queues are guessed from what was routed",
    "kv_use": "memory pressure is taken from the GPU, which engines fill at their start",
}
_USEFUL: Final = ("prefix_queries", "prefix_hits")
_METRICS: Final = {
    "sglang": "start it with --enable-metrics",
    "llama_cpp": "start it with --metrics",
    "vllm": "do not start it with --disable-log-stats",
}


def examine(facts: Facts) -> list[Finding]:
    """Everything found, the worst first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: -finding.severity)


def _short(name: str) -> str:
    return name.partition("/")[2]


# The scheduler


def _scheduler(facts: Facts) -> Iterator[Finding]:
    status, where = facts.status, f"scheduler {facts.status.scheduler}"
    if not status.store_available:
        what = "Postgres cannot be reached: routes go on from memory, writes fail"
        yield Finding(_ERROR, "store_unavailable", where, what, "headway db current, with the scheduler's database URL")
    if status.guards_frozen:
        what = "most agents fell silent at once, so it takes itself for cut off and trusts what it knew last"
        yield Finding(_ERROR, "guards_frozen", where, what, "mend the network between agents and scheduler")
    if status.notifications == "missing":
        what = "a pooler in transaction mode stands before Postgres: LISTEN hears nothing, writes arrive seconds late"
        fix = "name Postgres itself in HEADWAY_DATABASE_URL, or let the pooler keep sessions (pool_mode=session)"
        yield Finding(_WARNING, "notifications_missing", where, what, fix)
    if status.schema_expected and status.schema_revision not in ("", status.schema_expected):
        older = status.schema_revision < status.schema_expected
        what = (
            f"the database is at revision {status.schema_revision}, this version is made for {status.schema_expected}"
        )
        fix = "headway db upgrade" if older else "upgrade this scheduler: another one is newer"
        yield Finding(_ERROR if older else _WARNING, "schema_revision", where, what, fix)
    if status.standing in ("standby", "taking_over"):
        yield Finding(_INFO, "standby", where, "it stands by: another one leads", "ask the leader: --scheduler")
    if status.draining:
        yield Finding(_WARNING, "draining", where, "it is shutting down", "wait, or ask another: --scheduler")


def _clocks(facts: Facts) -> Iterator[Finding]:
    fix = "let chrony or systemd-timesyncd keep its time: timedatectl set-ntp true"
    if abs(facts.skew_s) > _CLOCK_S:
        what = f"the scheduler's clock is {facts.skew_s:+.1f} s off this host's"
        yield Finding(_WARNING, "clock_skew", f"scheduler {facts.status.scheduler}", what, fix)
    for node in facts.nodes:
        if abs(node.clock_skew_s) > _CLOCK_S:
            what = f"its clock is {node.clock_skew_s:+.1f} s off the scheduler's: logs and certificates do not fit"
            yield Finding(_WARNING, "clock_skew", node.name, what, fix)


def _versions(facts: Facts) -> Iterator[Finding]:
    ours = _version(facts.status.version)
    for node in facts.nodes:
        theirs = _version(node.agent_version)
        if ours is None or theirs is None or theirs == ours:
            continue
        apart = ours[0] != theirs[0] or abs(ours[1] - theirs[1]) > 1
        what = f"agent {node.agent_version}, scheduler {facts.status.version}"
        if apart:
            fix = "bring both within one minor version (pip install 'headway[agent]==VERSION'), the scheduler first"
            yield Finding(_ERROR, "version_skew", node.name, f"{what}: more than one version apart", fix)
        else:
            fix = "finish the upgrade: the scheduler first, then the agents"
            yield Finding(_INFO, "version_skew", node.name, f"{what}: supported while you upgrade", fix)


def _version(text: str) -> tuple[int, int] | None:
    match = _VERSION.match(text)
    return None if match is None else (int(match[1]), int(match[2]))


def _certificates(facts: Facts) -> Iterator[Finding]:
    ending: list[tuple[str, Any, str]] = []  # where, a Timestamp, what to do
    if facts.status.HasField("certificate_expire_time"):
        fix = "renew the files of tls_certificate and tls_key; they are read again without a restart"
        ending.append((f"scheduler {facts.status.scheduler}", facts.status.certificate_expire_time, fix))
    ending += [
        (node.name, node.certificate_expire_time, "renew its agent's client certificate")
        for node in facts.nodes
        if node.HasField("certificate_expire_time")
    ]
    for where, moment, fix in ending:
        yield from _ends(facts.now, "certificate_ending", where, "its certificate", moment, fix)
    for credential in facts.credentials:
        if credential.HasField("expire_time") and not credential.revoked:
            fix = f"headway credentials update {_short(credential.name)} expire_time=2027-12-31T00:00:00Z"
            fix = f"{fix}, or headway credentials rotate {_short(credential.name)}"
            moment = credential.expire_time
            yield from _ends(facts.now, "credential_ending", credential.name, "it", moment, fix)


def _ends(now: float, check: str, where: str, subject: str, moment: Any, fix: str) -> Iterator[Finding]:
    left_s = moment.ToNanoseconds() / 1e9 - now
    if left_s > _SOON_S:
        return
    when = datetime.fromtimestamp(now + left_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    what = f"{subject} ended at {when}" if left_s <= 0 else f"{subject} ends at {when}, in {left_s / 86_400:.0f} days"
    yield Finding(_ERROR if left_s < _VERY_SOON_S else _WARNING, check, where, what, fix)


# Agents and engines


def _agents(facts: Facts) -> Iterator[Finding]:
    if not facts.nodes:
        fix = "install headway-agent on each GPU host, name this scheduler in its schedulers, and start it"
        yield Finding(_ERROR, "no_agents", f"scheduler {facts.status.scheduler}", "no agent has ever connected", fix)
    known = {node.name for node in facts.nodes}
    for credential in facts.credentials:
        meant = credential.role == admin_pb2.ROLE_AGENT and credential.node and not credential.revoked
        name = qualified("nodes", credential.node)
        if meant and name not in known:
            what = f"{credential.name} is of its agent, which never connected since this scheduler started"
            fix = f"systemctl status headway-agent there; or headway credentials revoke {_short(credential.name)}"
            yield Finding(_ERROR, "agent_missing", name, what, fix)
    stale = {endpoint.node for endpoint in facts.endpoints if "stale" in endpoint.hard_guards}
    for node in facts.nodes:
        if not node.connected:
            fix = f"systemctl restart headway-agent there; or headway nodes delete {_short(node.name)}"
            yield Finding(_ERROR, "agent_disconnected", node.name, "its agent is not connected", fix)
        elif node.name in stale or node.sample_age_ms > _SILENT_MS:
            what = f"its newest sample is {node.sample_age_ms / 1e3:.0f} s old"
            fix = "look at the agent's log (journalctl -u headway-agent): it hangs, or its network does"
            yield Finding(_ERROR, "agent_stale", node.name, what, fix)
        if not node.devices:
            what = "its agent sees no device: no memory, heat or faults are known"
            fix = "run nvidia-smi as the agent's user there; give it /dev/nvidia* and the driver's libraries"
            yield Finding(_WARNING, "node_without_devices", node.name, what, fix)


def _engines(facts: Facts) -> Iterator[Finding]:
    for endpoint in facts.endpoints:
        guards = set(endpoint.hard_guards)
        short = _short(endpoint.name)
        detail = next((text for name, text in endpoint.guard_details.items() if name in guards and text), "")
        if guards & _UNREADY:
            fix = f"from {endpoint.node}: curl http://{endpoint.address}/health; start the engine, or mend its address"
            what = f"its agent cannot reach it, or it is not ready{f' ({detail})' if detail else ''}"
            yield Finding(_ERROR, "engine_unreachable", endpoint.name, what, fix)
        if guards & _FAULTS:
            what = f"a device of it failed ({detail or ', '.join(sorted(guards & _FAULTS))})"
            fix = f"headway nodes drain {_short(endpoint.node)} --wait, then reset or replace the device"
            yield Finding(_ERROR, "device_failed", endpoint.name, what, fix)
        if guards & _EJECTED:
            what = f"it failed requests and is ejected ({endpoint.ejection.reason or 'ejected'})"
            yield Finding(
                _ERROR, "endpoint_ejected", endpoint.name, what, f"headway endpoints uncordon {short}, once mended"
            )
        if "contested" in guards:
            what = "dedicated groups of two tenants claim it, so neither gets it"
            fix = "headway bindings list; then headway bindings update TENANT/GROUP mode=shared, or narrow a group"
            yield Finding(_ERROR, "endpoint_contested", endpoint.name, what, fix)
    for address in facts.unreached:
        fix = "open the engine's port to data planes; in agent.toml, address is what data planes use"
        yield Finding(_ERROR, "engine_unreachable", address, "it takes no connection from this host", fix)


def _metrics(facts: Facts) -> Iterator[Finding]:
    for endpoint in facts.endpoints:
        if not endpoint.HasField("sample") or set(endpoint.hard_guards) & {"stale", *_UNREADY}:
            continue
        lacks = [name for name in _NEEDED if not _told(endpoint.sample, name)]
        fix = _METRICS.get(endpoint.engine, "let it serve /metrics: see docs/engines.md")
        if lacks:
            what = f"{endpoint.engine or 'its engine'} does not tell {', '.join(lacks)}: {_NEEDED[lacks[0]]}"
            yield Finding(_WARNING, "metrics_missing", endpoint.name, what, fix)
        elif not all(_told(endpoint.sample, name) for name in _USEFUL):
            what = "it does not tell its prefix cache's hits: the hit ratio stays unknown"
            yield Finding(_INFO, "metrics_missing", endpoint.name, what, fix)


def _told(sample: Any, name: str) -> bool:  # an EngineSample
    return bool(getattr(sample, name).WhichOneof("kind") == "value")


# What admins configured


def _tenants(facts: Facts) -> Iterator[Finding]:
    members = {group for endpoint in facts.endpoints for group in endpoint.gpu_groups}
    bound = {binding.name.partition("/bindings/")[0] for binding in facts.bindings}
    for binding in facts.bindings:
        if binding.gpu_group not in members:
            what = f"{binding.gpu_group} has no endpoint: the binding gives nothing"
            fix = f"headway groups get {_short(binding.gpu_group)}; headway fleet endpoints: labels to match"
            yield Finding(_ERROR, "group_empty", binding.name, what, fix)
    for tenant in facts.tenants:
        short = _short(tenant.name)
        if tenant.name not in bound:
            fix = f"headway bindings create {short}/all"
            yield Finding(_ERROR, "tenant_unbound", tenant.name, "no GPU group is bound to it: all is refused", fix)
        if len(facts.tenants) > 1 and not _limited(tenant):
            fix = f"headway tenants update {short} quotas.max_inflight=64, if it shares GPUs with others"
            yield Finding(_INFO, "tenant_unlimited", tenant.name, "a quota of 0 is none: it has no limit", fix)
        if tenant.HasField("routed_percent") and tenant.routed_percent < 100:
            what = f"{tenant.routed_percent} % of its requests are routed, the others are watched"
            fix = f"headway observe report; then headway tenants update {short} routed_percent=100"
            yield Finding(_INFO, "routed_partly", tenant.name, what, fix)
    for name in facts.status.bypassed:
        option = "" if name == "*" else f" --tenant {_short(name)}"
        where = "everybody" if name == "*" else name
        yield Finding(_WARNING, "bypassed", where, "Headway keeps out of its requests", f"headway bypass off{option}")


def _limited(tenant: admin_pb2.Tenant) -> bool:
    quotas = tenant.quotas
    return bool(quotas.requests_per_minute or quotas.tokens_per_minute or quotas.max_inflight)


def _models(facts: Facts) -> Iterator[Finding]:
    served = {model for endpoint in facts.endpoints if endpoint.healthy for model in endpoint.models}
    for model in facts.models:
        short = _short(model.name)
        if short not in served:
            fix = f"headway fleet endpoints --model {short}; start an engine for it, or headway models delete {short}"
            yield Finding(_WARNING, "model_unserved", model.name, "no healthy endpoint serves it: 503", fix)
        if model.splits and not any(split.weight for split in model.splits.values()):
            fix = f"headway models update {short} splits.{min(model.splits)}.weight=1"
            yield Finding(_ERROR, "splits_of_zero", model.name, "each of its splits has the weight 0", fix)


def _strategies(facts: Facts) -> Iterator[Finding]:
    known = {strategy.name: strategy for strategy in facts.status.strategies}
    for binding in facts.strategy_bindings:
        strategy, short = known.get(binding.strategy), _short(binding.strategy)
        if strategy is None:
            what = f"{binding.strategy} could not be built here: an algorithm that this scheduler lacks"
            fix = "install its package beside the scheduler, or headway strategies bind adaptive"
            yield Finding(_ERROR, "strategy_missing", binding.name, what, fix)
        elif not strategy.enabled:
            what = f"{binding.strategy} is bound and disabled: its fallback decides"
            yield Finding(_WARNING, "strategy_disabled", binding.name, what, f"headway strategies enable {short}")
        elif strategy.tripped:
            what = f"{binding.strategy} keeps failing, its fallback decides: {strategy.last_error}"
            fix = f"headway strategies revisions {short}; headway strategies rollback {short} REVISION"
            yield Finding(_ERROR, "strategy_tripped", binding.name, what, fix)


CHECKS: Final[Sequence[Check]] = (
    _scheduler, _clocks, _versions, _certificates, _agents, _engines, _metrics, _tenants, _models, _strategies,
)  # fmt: skip
"""All of them."""
