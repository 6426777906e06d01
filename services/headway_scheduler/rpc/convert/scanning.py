"""A sample on the wire, parted into its numbers and its words (ADR 50).

protobuf makes a Python object of every measurement; a node of 8 devices and 8 engines has some 80. Where a sample has
the same words as the one before it, only its numbers are to be read.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headway_scheduler.compiling import compiled
from headway_scheduler.domain.plausible import RANGES
from headway_scheduler.fleet.columns import FloatColumn, IntColumn
from headway_scheduler.fleet.readings import DEVICE_NUMBERS, ENGINE_NUMBERS, Throttles

__all__ = ["SampleScanner", "Scanned"]

Bytes = npt.NDArray[np.uint8]

_MOST_BYTES: Final = 1 << 16
_HEAD_BYTES: Final = 3
"""Before the words of each device and engine: which of them it is, and how many bytes they are."""
_MOST_REASONS: Final = 1 << 10
"""So many bytes of throttle reasons in a sample, and so many different ones that are kept."""
_UNTHROTTLED: Final[Throttles] = {}
_BAD: Final = (-1, -1)
_RAW: Final = "Bytes(uint8, 1, 'C')"

# Protobuf's encoding: a tag is the field's number << 3 | the kind of what follows.
_VARINT: Final = 0
_BYTES: Final = 2
_IN_REQUEST: Final = 2 << 3 | 2
"""ConnectRequest.sample."""
_SEQUENCE: Final = 1 << 3 | 0
_TAKEN: Final = 2 << 3 | 2
_DEVICE: Final = 3 << 3 | 2
_ENGINE: Final = 4 << 3 | 2
"""Of Sample."""
_NUMBERS_OF_DEVICES: Final = (2, 5)
_NUMBERS_OF_ENGINES: Final = (3, 7)
"""The first and last field of those."""
_REASONS: Final = 6
"""DeviceSample.throttle_reasons."""
_LARGEST_BYTE: Final = 255
_VALUE: Final = 1 << 3 | 1
"""Measurement.value, a double."""
_VALUE_BYTES: Final = 9
"""Of a Measurement that is one."""

_OF_ENGINES: Final = 8
"""Added to the number of an engine's field, to tell it from a device's."""


def _bounds(end: int) -> FloatColumn:
    """Of each number, by its field: what it is at least (0), or at most (1)."""
    found = np.zeros(2 * _OF_ENGINES)
    for names, first in (
        (DEVICE_NUMBERS, _NUMBERS_OF_DEVICES[0]),
        (ENGINE_NUMBERS, _OF_ENGINES + _NUMBERS_OF_ENGINES[0]),
    ):
        found[first : first + len(names)] = [RANGES[name][end] for name in names]
    return found


_LEAST: Final = _bounds(0)
_MOST: Final = _bounds(1)


class Scanned(NamedTuple):
    """Samples of equal words differ in sequence, time, numbers and throttle reasons only.

    `numbers`: the measurements of devices, without their ECC errors, and of engines in the order of fields; good until
    the next scan. `throttles`: the reasons of each device that has any, by its number in the sample.
    """

    sequence: int
    numbers: FloatColumn
    words: bytes
    throttles: Throttles


class SampleScanner:
    """Parts samples. What it does not expect it leaves to protobuf: other fields or order, values that cannot be."""

    def __init__(self) -> None:
        self._numbers = np.empty(_MOST_BYTES // 8)
        self._bits = self._numbers.view(np.uint8)
        self._fields = np.empty(_MOST_BYTES // 8, np.uint8)
        """Which each number is of."""
        self._words = np.empty(_HEAD_BYTES * _MOST_BYTES, np.uint8)
        self._reasons = np.empty(_MOST_BYTES, np.uint8)
        self._found = np.zeros(4, np.int64)
        self._throttles: dict[bytes, Throttles] = {}
        """As they were read before: there are not many."""

    def scan(self, raw: bytes) -> Scanned | None:
        """The sample in a ConnectRequest; None: protobuf has to say what this is."""
        if len(raw) > _MOST_BYTES or not _scan(raw, self._bits, self._fields, self._words, self._reasons, self._found):
            return None
        sequence, numbers, words, reasons = self._found.tolist()
        if not _plausible(self._numbers[:numbers], self._fields, _LEAST, _MOST):
            return None
        throttles = self._throttled(self._reasons[:reasons].tobytes()) if reasons else _UNTHROTTLED
        if throttles is None:
            return None
        return Scanned(sequence, self._numbers[:numbers], self._words[:words].tobytes(), throttles)

    def _throttled(self, reasons: bytes) -> Throttles | None:
        """None: they are too long, or no text."""
        found = self._throttles.get(reasons)
        if found is None and len(reasons) <= _MOST_REASONS:
            if len(self._throttles) >= _MOST_REASONS:
                self._throttles.clear()
            try:
                found = self._throttles[reasons] = _read(reasons)
            except UnicodeDecodeError:
                return None
        return found


def _read(reasons: bytes) -> Throttles:
    """Each as a device's number, its own length and text."""
    found: dict[int, tuple[str, ...]] = {}
    at = 0
    while at < len(reasons):
        device, end = reasons[at], at + 2 + reasons[at + 1]
        found[device] = (*found.get(device, ()), reasons[at + 2 : end].decode())
        at = end
    return found


@compiled(f"UniTuple(int64, 2)({_RAW}, int64, int64)")
def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """The number that begins at `at` and where it ends; negative: there is none that fits in 63 bits."""
    value, shift = 0, 0
    while at < end and shift < 63:
        byte = int(raw[at])
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    return _BAD


@compiled(f"int64({_RAW}, int64, int64, uint8[::1], int64)")
def _copy(raw: bytes, at: int, end: int, into: Bytes, to: int) -> int:
    """Copy what lies from `at` to `end`; where it ends in `into`."""
    for place in range(at, end):
        into[to + place - at] = raw[place]
    return to + end - at


@compiled(f"int64({_RAW}, int64, int64, int64, uint8[::1], uint8[::1], uint8[::1], uint8[::1], int64[::1])")
def _part(
    raw: bytes,
    at: int,
    end: int,
    device: int,
    bits: Bytes,
    fields: Bytes,
    words: Bytes,
    reasons: Bytes,
    found: IntColumn,
) -> int:
    """One device, by its number, or engine: -1. Where it ends; negative: unexpected."""
    first, last = _NUMBERS_OF_DEVICES if device >= 0 else _NUMBERS_OF_ENGINES
    before = 0
    while at < end:
        begin = at
        tag, at = _varint(raw, at, end)
        field, kind = tag >> 3, tag & 7
        measured = first <= field <= last
        if at < 0 or field < before or (measured and field == before):
            return -1
        before = field
        size, at = _varint(raw, at, end)
        if at < 0 or kind not in (_VARINT, _BYTES) or (kind == _BYTES and size > end - at):
            return -1
        stop = at + size if kind == _BYTES else at
        if device >= 0 and field == _REASONS and kind == _BYTES:
            if device > _LARGEST_BYTE or size > _LARGEST_BYTE:
                return -1
            reasons[found[3]], reasons[found[3] + 1] = device, size
            found[3] = _copy(raw, at, stop, reasons, found[3] + 2)
            at = stop
            continue
        told = stop
        if measured and kind == _BYTES and size == _VALUE_BYTES and raw[at] == _VALUE:
            told = at + 1
            fields[found[1]] = field if device >= 0 else field + _OF_ENGINES
            found[1] = _copy(raw, told, stop, bits, found[1] * 8) // 8
        found[2] = _copy(raw, begin, told, words, found[2])
        at = stop
    return at


@compiled("boolean(float64[::1], uint8[::1], float64[::1], float64[::1])")
def _plausible(numbers: FloatColumn, fields: Bytes, least: FloatColumn, most: FloatColumn) -> bool:
    """Is each of them what such a number may be? NaN is not."""
    for number in range(len(numbers)):
        field = fields[number]
        if not least[field] <= numbers[number] <= most[field]:
            return False
    return True


@compiled(f"boolean({_RAW}, uint8[::1], uint8[::1], uint8[::1], uint8[::1], int64[::1])")
def _scan(raw: bytes, bits: Bytes, fields: Bytes, words: Bytes, reasons: Bytes, found: IntColumn) -> bool:
    """`found`: the sequence, and how many numbers, bytes of words and of reasons there are."""
    found[:] = 0
    end = len(raw)
    if end == 0 or raw[0] != _IN_REQUEST:
        return False
    size, at = _varint(raw, 1, end)
    if at < 0 or size != end - at:
        return False
    before, devices = 0, 0
    while at < end:
        tag, at = _varint(raw, at, end)
        if at < 0 or tag < before:
            return False
        before = tag
        size, at = _varint(raw, at, end)
        if at < 0 or (tag != _SEQUENCE and size > end - at):
            return False
        if tag == _SEQUENCE:
            found[0] = size
        elif tag == _TAKEN:
            at += size
        elif tag in (_DEVICE, _ENGINE):
            head = found[2]
            found[2] = head + _HEAD_BYTES
            at = _part(raw, at, at + size, devices if tag == _DEVICE else -1, bits, fields, words, reasons, found)
            if at < 0:
                return False
            devices += tag == _DEVICE
            length = found[2] - head - _HEAD_BYTES
            words[head], words[head + 1], words[head + 2] = tag, length & 0xFF, length >> 8
        else:
            return False
    return True
