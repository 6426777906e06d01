"""Ways an engine can fail, switched on over HTTP by tests."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headway_sim.emulator.requests import BadRequestError


class FaultMode(StrEnum):
    """`http_500` and `die_mid_stream` concern inference; `hang` and `refuse` every route but the switch.

    `refuse` drops each connection without an answer; `die_mid_stream` drops it after some tokens.
    """

    NONE = "none"
    HTTP_500 = "http_500"
    HANG = "hang"
    REFUSE = "refuse"
    DIE_MID_STREAM = "die_mid_stream"


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong; `after_tokens` is how far an answer comes before it dies."""

    mode: FaultMode = FaultMode.NONE
    after_tokens: int = 1


def parse_fault(body: dict[str, Any]) -> Fault:
    """The fault a JSON body asks for."""
    try:
        mode = FaultMode(body.get("mode", ""))
    except ValueError:
        raise BadRequestError("mode", f"mode must be one of {', '.join(FaultMode)}") from None
    after_tokens = body.get("after_tokens", 1)
    if type(after_tokens) is not int or after_tokens < 0:
        raise BadRequestError("after_tokens", "after_tokens must be a non-negative integer")
    return Fault(mode, after_tokens)
