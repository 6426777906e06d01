"""An Envoy configuration, read as Envoy reads it: what in it does not go with how long a scheduler holds a request."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from headway_cli.doctor.findings import Finding, Severity

__all__ = ["examine_envoy"]

Json = Mapping[str, Any]  # a mapping of a YAML file

_WARNING, _ERROR = Severity.WARNING, Severity.ERROR
_DUPLEX: Final = "FULL_DUPLEX_STREAMED"
_DESTINATION: Final = "x-gateway-destination-endpoint"
_TOLD_TIMEOUT: Final = "x-headway-message-timeout"
_DEFAULT_MESSAGE_S: Final = 0.2
_DEFAULT_ROUTE_S: Final = 15.0
_DEFAULT_IDLE_S: Final = 300.0
_DEFAULT_MAX_REQUESTS: Final = 1024
_MARGIN_S: Final = 5.0


def examine_envoy(config: Any, file: str, hold_s: float) -> list[Finding]:  # whatever a YAML file holds
    """Everything found in a configuration that sends its requests by us; `hold_s`: the longest hold."""
    found: list[Finding] = []
    pickers = 0
    for path, manager in _typed(config, "HttpConnectionManager", file):
        for where, picker in _typed(manager, "ExternalProcessor", path):
            pickers += 1
            found += _ext_proc(where, picker, hold_s)
            found += _picker_cluster(config, where, picker)
        for where, picker in _typed(manager, "ExtAuthz", path):
            pickers += 1
            found += _ext_authz(where, picker, hold_s)
            found += _picker_cluster(config, where, picker)
        found += _manager(path, manager, hold_s)
        found += _routes(config, path, manager, hold_s)
    if not pickers:
        found = [each for each in found if each.check not in ("envoy_override_host", "envoy_trusts_clients")]
        what, fix = (
            "it has no ext_proc and no ext_authz filter: nobody asks Headway",
            "start from deploy/envoy/fail-open.yaml; where headway-gateway is behind this Envoy, it asks",
        )
        found.append(Finding(_ERROR, "envoy_no_picker", file, what, fix))
    return sorted(found, key=lambda finding: -finding.severity)


def _ext_proc(where: str, picker: Json, hold_s: float) -> Iterator[Finding]:
    metadata = _metadata(picker)
    if picker.get("observability_mode"):
        if metadata.get("x-headway-observe") != "true":
            fix = "initial_metadata: [{key: x-headway-observe, value: 'true'}]"
            what = (
                "Envoy reads no answers (observability_mode), and Headway does not know: it would reserve for nothing"
            )
            yield Finding(_ERROR, "envoy_observe", where, what, fix)
        return
    duplex = picker.get("processing_mode", {}).get("request_body_mode") == _DUPLEX
    message_s = _seconds(picker.get("message_timeout"), _DEFAULT_MESSAGE_S)
    longest_s = max(message_s, _seconds(picker.get("max_message_timeout"), 0.0))
    if not duplex and longest_s < hold_s:
        what = f"message_timeout is {message_s:g} s, but a request may be held for {hold_s:g} s: Envoy gives up first"
        fix = f"message_timeout: {hold_s + _MARGIN_S:g}s, and tell {_TOLD_TIMEOUT} the same; or a lower max_wait_s"
        yield Finding(_ERROR, "envoy_message_timeout", where, what, fix)
    told = metadata.get(_TOLD_TIMEOUT)
    if not duplex and told is not None and _seconds(told, 0.0) > message_s:
        what = f"{_TOLD_TIMEOUT} says {told}, message_timeout is {message_s:g} s: holds outlive Envoy's patience"
        yield Finding(_ERROR, "envoy_told_timeout", where, what, f"{_TOLD_TIMEOUT}: {message_s:g}s")
    if duplex and picker.get("failure_mode_allow"):
        what = (
            "failure_mode_allow has no effect on bodies that are streamed both ways: a lost scheduler refuses requests"
        )
        yield Finding(
            _WARNING, "envoy_failure_mode", where, what, "request_body_mode: BUFFERED (deploy/envoy/fail-open.yaml)"
        )
    if not duplex and not picker.get("failure_mode_allow"):
        what = "failure_mode_allow is false: while no scheduler answers, requests are refused"
        yield Finding(_WARNING, "envoy_failure_mode", where, what, "failure_mode_allow: true, unless that is meant")
    if "upstream.address" not in picker.get("response_attributes", ()):
        what = "who served a request is not told: after Envoy's own failover the wrong endpoint is counted"
        yield Finding(
            _WARNING, "envoy_attributes", where, what, "response_attributes: [upstream.address, response.code_details]"
        )


def _ext_authz(where: str, picker: Json, hold_s: float) -> Iterator[Finding]:
    http = picker.get("http_service", {}).get("server_uri")
    setting, service = ("grpc_service", picker.get("grpc_service", {})) if http is None else ("server_uri", http)
    timeout_s = _seconds(service.get("timeout"), _DEFAULT_MESSAGE_S)
    if timeout_s < hold_s:
        what = f"{setting}.timeout is {timeout_s:g} s, but a request may be held for {hold_s:g} s"
        yield Finding(_ERROR, "envoy_message_timeout", where, what, f"{setting}.timeout: {hold_s + _MARGIN_S:g}s")
    if not picker.get("failure_mode_allow"):
        what = "failure_mode_allow is false: while no scheduler answers, requests are refused"
        yield Finding(_WARNING, "envoy_failure_mode", where, what, "failure_mode_allow: true, unless that is meant")


def _manager(where: str, manager: Json, hold_s: float) -> Iterator[Finding]:
    idle_s = _seconds(manager.get("stream_idle_timeout"), _DEFAULT_IDLE_S)
    if 0 < idle_s <= hold_s:
        what = f"stream_idle_timeout is {idle_s:g} s: a held request is cut off"
        yield Finding(_ERROR, "envoy_idle_timeout", where, what, f"stream_idle_timeout: {hold_s + 310:g}s")
    if _DESTINATION not in _removed(manager, where):
        what = f"a client's own {_DESTINATION} is obeyed wherever nobody picked"
        fix = "early_header_mutation_extensions that remove it, as in deploy/envoy/fail-open.yaml"
        yield Finding(_WARNING, "envoy_trusts_clients", where, what, fix)


def _removed(manager: Json, where: str) -> set[str]:
    """The headers that clients send for nothing: removed before any filter sees them."""
    # As an HTTP filter the same name holds a mapping, and comes too late.
    early = (each.get("mutations") for _, each in _typed(manager, "HeaderMutation", where))
    return {change.get("remove") for changes in early if isinstance(changes, list) for change in changes}


def _routes(config: Any, where: str, manager: Json, hold_s: float) -> Iterator[Finding]:
    watched = [picker.get("observability_mode") for _, picker in _typed(manager, "ExternalProcessor", where)]
    # Where every picker only watches, the clusters are somebody else's.
    clusters = {} if watched and all(watched) else _clusters(config)
    for host in manager.get("route_config", {}).get("virtual_hosts", ()):
        for route in host.get("routes", ()):
            action = route.get("route")
            if not action:
                continue
            place = f"{where}, virtual host {host.get('name', '?')}"
            timeout_s = _seconds(action.get("timeout"), _DEFAULT_ROUTE_S)
            if 0 < timeout_s <= hold_s:
                said = f"{timeout_s:g} s" if "timeout" in action else "15 s, since it is not set"
                what = f"the route's timeout is {said}: held requests and long answers are cut off"
                yield Finding(_ERROR, "envoy_route_timeout", place, what, "timeout: 0s")
            cluster = clusters.get(action.get("cluster", ""))
            if cluster is not None and "override_host" not in str(cluster.get("load_balancing_policy", "")):
                what = f"the cluster {cluster.get('name')} has no override_host policy: it ignores what Headway picks"
                fix = "load_balancing_policy with envoy.load_balancing_policies.override_host (docs/envoy.md)"
                yield Finding(_ERROR, "envoy_override_host", place, what, fix)


def _picker_cluster(config: Any, where: str, picker: Json) -> Iterator[Finding]:
    name = picker.get("grpc_service", {}).get("envoy_grpc", {}).get("cluster_name", "")
    cluster = _clusters(config).get(name)
    if cluster is None:
        return
    thresholds = cluster.get("circuit_breakers", {}).get("thresholds") or [{}]
    if min(each.get("max_requests", _DEFAULT_MAX_REQUESTS) for each in thresholds) <= _DEFAULT_MAX_REQUESTS:
        what = f"the cluster {name} takes {_DEFAULT_MAX_REQUESTS} requests at once, and each lasts as its answer"
        fix = "circuit_breakers.thresholds: max_requests, max_connections and max_pending_requests of 100000"
        yield Finding(_WARNING, "envoy_circuit_breaker", where, what, fix)


def _clusters(config: Any) -> dict[str, Json]:
    listed = config.get("static_resources", {}).get("clusters", ()) if isinstance(config, Mapping) else ()
    return {cluster.get("name", ""): cluster for cluster in listed}


def _metadata(picker: Json) -> dict[str, str]:
    told = picker.get("grpc_service", {}).get("initial_metadata", ())
    return {each.get("key", ""): str(each.get("value", "")) for each in told}


def _typed(config: Any, kind: str, path: str) -> Iterator[tuple[str, Json]]:
    """Every message of this type, at any depth, and where it stands: by the names on the way."""
    if isinstance(config, Mapping):
        name = config.get("name")
        here = f"{path}: {name}" if isinstance(name, str) and "." not in name else path
        if str(config.get("@type", "")).endswith(f".{kind}"):
            yield here, config
        for value in config.values():
            yield from _typed(value, kind, here)
    elif isinstance(config, list):
        for value in config:
            yield from _typed(value, kind, path)


def _seconds(value: Any, otherwise: float) -> float:
    text = str(value) if value is not None else ""
    try:
        return float(text.removesuffix("ms")) / 1e3 if text.endswith("ms") else float(text.removesuffix("s"))
    except ValueError:
        return otherwise
