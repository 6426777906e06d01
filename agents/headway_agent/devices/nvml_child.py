"""The child process that holds NVML: one request a line in, one answer a line out, in JSON.

`python -m headway_agent.devices.nvml_child MODULE`, where MODULE is `pynvml` or a module shaped like it.
Requests: `{"do": "open" | "scan" | "events"}` and `{"do": "read", "uuid": …}`. Answers: `{"devices": […]}`,
`{"events": […]}`, `{"reading": {…}}`, or `{"broken": why}` when NVML as a whole fails. It ends when its input
ends.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any, TextIO

from headway_agent.devices.base import (
    DeviceEvent,
    DeviceEventKind,
    DeviceInfo,
    DeviceKind,
    DeviceReading,
    Measurement,
    MissingReason,
)
from headway_agent.devices.nvml_reader import LibraryBrokenError, NvmlReader

Json = Mapping[str, Any]  # any value JSON has


def answer(reader: NvmlReader, request: Json) -> dict[str, object]:
    """Do what one request asks."""
    try:
        match request["do"]:
            case "open":
                return {"devices": [asdict(d) for d in reader.open()]}
            case "scan":
                return {"devices": [asdict(d) for d in reader.scan()]}
            case "read":
                return {"reading": asdict(reader.read(request["uuid"]))}
            case _:
                return {"events": [asdict(e) for e in reader.events()]}
    except LibraryBrokenError as error:
        return {"broken": str(error)}


def decode_device(raw: Json) -> DeviceInfo:
    """A device as `answer` encoded it."""
    return DeviceInfo(
        uuid=raw["uuid"],
        kind=DeviceKind(raw["kind"]),
        product=raw["product"],
        memory_total_bytes=_measurement(raw["memory_total_bytes"]),
        power_limit_w=_measurement(raw["power_limit_w"]),
        temperature_slowdown_c=_measurement(raw["temperature_slowdown_c"]),
        parent_uuid=raw["parent_uuid"],
        driver_version=raw["driver_version"],
        index=raw["index"],
    )


def decode_reading(raw: Json) -> DeviceReading:
    """A reading as `answer` encoded it."""
    return DeviceReading(
        uuid=raw["uuid"],
        memory_used_bytes=_measurement(raw["memory_used_bytes"]),
        utilization=_measurement(raw["utilization"]),
        temperature_c=_measurement(raw["temperature_c"]),
        power_w=_measurement(raw["power_w"]),
        ecc_errors=_measurement(raw["ecc_errors"]),
        throttle_reasons=tuple(raw["throttle_reasons"]),
    )


def decode_event(raw: Json) -> DeviceEvent:
    """An event as `answer` encoded it."""
    return DeviceEvent(raw["uuid"], DeviceEventKind(raw["kind"]), raw["at_s"], raw["xid"], raw["detail"])


def _measurement(raw: float | str) -> Measurement:
    return MissingReason(raw) if isinstance(raw, str) else raw


def _encode(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _own_output() -> TextIO:
    """Our output, taken away from the library: whatever else prints goes to stderr."""
    mine = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return mine


def main() -> None:
    """Serve requests until the input ends."""
    out = _own_output()
    reader = NvmlReader(importlib.import_module(sys.argv[1]), time.time)
    for line in sys.stdin:
        out.write(json.dumps(answer(reader, json.loads(line)), default=_encode) + "\n")
    reader.close()


if __name__ == "__main__":
    main()
