"""What an engine publishes of its KV cache (vLLM, SGLang), in both encodings.

A message is `[topic, 8-byte sequence, msgpack]`; a batch `[ts, events, dp_rank?]` or a map; an event a tagged array,
`["BlockStored", …]`, in older engines, and a map with `"type"` in newer ones (FIELD.md section 5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

__all__ = ["Batch", "Cleared", "Event", "Extras", "Hash", "Malformed", "Removed", "Stored", "Tier", "decode"]

Hash = int | bytes
"""An engine's own block hash: opaque."""
Extras = tuple[object, ...]
"""What an engine mixes into one block's hash beside its tokens."""


class Tier(StrEnum):
    """Where a block lies; the values are the wire's."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"
    REMOTE = "remote"


class Malformed(Exception):
    """A payload that is no batch of events."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of full blocks, each the parent of the next. Without `token_ids`: known blocks that reached a tier."""

    hashes: tuple[Hash, ...]
    parent: Hash | None
    token_ids: tuple[int, ...]
    block_size: int
    adapter: str = ""
    tier: Tier = Tier.GPU
    extras: tuple[Extras, ...] = ()
    group: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """These blocks left the tier."""

    hashes: tuple[Hash, ...]
    tier: Tier = Tier.GPU
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache is empty."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """One message's events."""

    events: tuple[Event, ...]
    dp_rank: int | None = None


_STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
_REMOVED: Final = ("block_hashes", "medium", "group_idx")
_BATCH: Final = ("ts", "events", "data_parallel_rank")
_DECODER: Final = msgspec.msgpack.Decoder()
_TIERS: Final = {
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "CPU_PINNED": Tier.CPU,
    "CPU_TIER1": Tier.CPU,
    "CPU_TIER2": Tier.CPU,
    "HOST": Tier.CPU,
    "HOST_PINNED": Tier.CPU,
    "DISK": Tier.DISK,
    "SSD": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "FS": Tier.DISK,
}


def decode(payload: bytes) -> Batch:
    """Read a batch. Events of a kind not known here are left out. Raises Malformed."""
    try:
        fields = _fields(_DECODER.decode(payload), _BATCH)
        events = tuple(event for raw in fields.get("events") or () if (event := _event(raw)) is not None)
        rank = fields.get("data_parallel_rank", fields.get("attn_dp_rank", fields.get("dp_rank")))
        return Batch(events, None if rank is None else int(rank))
    except (msgspec.DecodeError, TypeError, ValueError, LookupError, OverflowError, RecursionError) as error:
        raise Malformed(str(error)) from error


# What msgpack holds is checked where it is used, hence Any.


def _fields(raw: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """A map as it is; an array by position, whatever comes after what we know left out."""
    if isinstance(raw, Mapping):
        return raw
    if isinstance(raw, list):
        return dict(zip(names, raw, strict=False))
    raise TypeError(f"neither a map nor an array: {type(raw).__name__}")


def _event(raw: Any) -> Event | None:
    if isinstance(raw, Mapping):
        kind, body = raw.get("type"), raw
    else:
        kind, body = raw[0], raw[1:]
    if kind == "BlockStored":
        return _stored(_fields(body, _STORED))
    if kind == "BlockRemoved":
        found = _fields(body, _REMOVED)
        return Removed(_hashes(found["block_hashes"]), _tier(found.get("medium")), int(found.get("group_idx") or 0))
    return Cleared() if kind == "AllBlocksCleared" else None


def _stored(found: Mapping[str, Any]) -> Stored:
    lora_id, lora_name = found.get("lora_id"), found.get("lora_name")
    # An adapter that is only numbered is nobody's: no request names it so.
    adapter = str(lora_name) if lora_name else "" if lora_id is None else f"\0lora {lora_id}"
    parent = found.get("parent_block_hash")
    return Stored(
        hashes=_hashes(found["block_hashes"]),
        parent=None if parent is None else _hash(parent),
        token_ids=tuple(found.get("token_ids") or ()),
        block_size=int(found.get("block_size") or 0),
        adapter=adapter,
        tier=_tier(found.get("medium")),
        extras=tuple(_extras(each, lora_name) for each in found.get("extra_keys") or ()),
        group=int(found.get("group_idx") or 0),
    )


def _extras(keys: Any, lora_name: Any) -> Extras:
    """Without the adapter's name, which the engine repeats there."""
    if keys is None:
        return ()
    each = keys if isinstance(keys, list) else [keys]
    return tuple(key for key in each if key != lora_name)


def _hashes(raw: Any) -> tuple[Hash, ...]:
    return tuple(_hash(each) for each in raw)


def _hash(raw: Any) -> Hash:
    if isinstance(raw, bool) or not isinstance(raw, int | bytes):
        raise TypeError(f"a block hash is an integer or bytes, not {type(raw).__name__}")
    return raw


def _tier(medium: Any) -> Tier:
    """Nothing said: the GPU. A medium not known here is as far away as can be."""
    return Tier.GPU if medium is None else _TIERS.get(str(medium).upper(), Tier.REMOTE)
