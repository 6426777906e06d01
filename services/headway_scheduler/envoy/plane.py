"""What a data plane says of itself in the metadata of its calls, for all its requests or by route.

Whoever holds a router's credential writes it (in Envoy `grpc_service.initial_metadata`, by route
`grpc_initial_metadata`); a plane's clients cannot. docs/envoy.md explains each.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from headway_scheduler.errors import InvalidField

__all__ = ["Control", "Plane", "UserKeys", "plane_of"]

_PREFIX: Final = "x-headway-"
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
_ALL: Final = "all"
_SWITCH: Final = {"true": True, "false": False}


class Control(StrEnum):
    """What a client's control headers may do, where the plane trusts them."""

    OBJECTIVE = "objective"
    FAIRNESS_ID = "fairness-id"
    MODEL_NAME_REWRITE = "model-name-rewrite"
    SLO = "slo"


class UserKeys(StrEnum):
    """Whether end users show keys of their own in `authorization`, which say whose tenant they are."""

    NO = "no"
    OPTIONAL = "optional"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane's, or one route's, settings.

    `tenant`: whom its requests act for; empty: the credential's own. `model`: asked for where no body tells.
    `trusts`: control headers that count. `message_timeout_s` and `max_message_timeout_s` are Envoy's own settings of
    these names; None: not told. `include_usage`: have streams end with their usage. `user_keys`: users' keys name the
    tenant, before anything else does. `observe`: another router picks, we only watch.
    """

    tenant: str = ""
    model: str = ""
    trusts: frozenset[Control] = frozenset()
    message_timeout_s: float | None = None
    max_message_timeout_s: float | None = None
    include_usage: bool = True
    user_keys: UserKeys = UserKeys.NO
    observe: bool = False


def plane_of(metadata: Iterable[tuple[str, str | bytes]]) -> Plane:
    """Read a call's metadata. Raises InvalidField naming the key."""
    told = tuple((key, value) for key, value in metadata if key in _READERS and isinstance(value, str))
    return _plane(told) if told else _PLAIN


_PLAIN: Final = Plane()


@lru_cache(maxsize=1024)
def _plane(told: tuple[tuple[str, str], ...]) -> Plane:
    values: dict[str, object] = {}
    for key, value in told:
        name, read = _READERS[key]
        try:
            values[name] = read(value.strip())
        except ValueError as error:
            raise InvalidField(key, str(error)) from None
    return Plane(**values)  # type: ignore[arg-type]  # the readers' types are the fields'


def _trusts(value: str) -> frozenset[Control]:
    words = {word.strip() for word in value.split(",")} - {""}
    if _ALL in words:
        return frozenset(Control)
    unknown = sorted(words - set(Control))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(Control)}, {_ALL}")
    return frozenset(Control(word) for word in words)


def _duration(value: str) -> float:
    match = _DURATION.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is no duration like 10s or 500ms")
    return float(match[1]) / (1e3 if match[2] == "ms" else 1.0)


def _switch(value: str) -> bool:
    if value not in _SWITCH:
        raise ValueError(f"{value!r} is neither true nor false")
    return _SWITCH[value]


def _user_keys(value: str) -> UserKeys:
    if value not in set(UserKeys):
        raise ValueError(f"{value!r} is none of {', '.join(UserKeys)}")
    return UserKeys(value)


_READERS: Final[Mapping[str, tuple[str, Callable[[str], object]]]] = {
    f"{_PREFIX}tenant": ("tenant", str),
    f"{_PREFIX}model": ("model", str),
    f"{_PREFIX}trust": ("trusts", _trusts),
    f"{_PREFIX}message-timeout": ("message_timeout_s", _duration),
    f"{_PREFIX}max-message-timeout": ("max_message_timeout_s", _duration),
    f"{_PREFIX}include-usage": ("include_usage", _switch),
    f"{_PREFIX}observe": ("observe", _switch),
    f"{_PREFIX}user-keys": ("user_keys", _user_keys),
}
