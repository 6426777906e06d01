"""Samples on the wire: what is read of them without objects is what protobuf reads."""

from math import inf, nan, nextafter

import pytest
from google.protobuf.message import DecodeError
from headway.telemetry.v1 import telemetry_pb2 as pb
from headway_scheduler.domain.measurement import UNKNOWN, Measurement
from headway_scheduler.domain.plausible import RANGES
from headway_scheduler.rpc.convert.scanning import SampleScanner
from headway_scheduler.rpc.convert.telemetry import sample_from_proto
from hypothesis import given
from hypothesis import strategies as st

SCANNER = SampleScanner()
NUMBERS = (("devices", ("memory_used_bytes", "utilization", "temperature_c", "power_w")),)
NUMBERS += (("engines", ("running", "waiting", "kv_use", "prefix_queries", "prefix_hits")),)

plausible = st.floats(0, 1)
"""Whatever it is of."""


def measurements(name):
    return st.one_of(
        st.floats(*RANGES[name]).map(lambda value: pb.Measurement(value=value)),
        st.integers(0, 4).map(lambda reason: pb.Measurement(missing=reason)),
        st.just(pb.Measurement()),
        st.none(),
    )


def messages(kind, numbers, **others):
    fields = {name: measurements(name) for name in numbers} | others
    return st.builds(lambda **found: kind(**{k: v for k, v in found.items() if v is not None}), **fields)


samples = st.builds(
    pb.Sample,
    sequence=st.integers(0, 2**63 - 1),
    devices=st.lists(
        messages(
            pb.DeviceSample,
            NUMBERS[0][1],
            uuid=st.text(max_size=3),
            throttle_reasons=st.lists(st.sampled_from(["hw_thermal", "sw_power_cap"]), max_size=2),
            ecc_errors=measurements("ecc_errors"),
        ),
        max_size=3,
    ),
    engines=st.lists(
        messages(
            pb.EngineSample,
            NUMBERS[1][1],
            address=st.text(max_size=3),
            dp_rank=st.integers(0, 2**32 - 1),
            ready=st.booleans(),
        ),
        max_size=3,
    ),
)


def wire(sample):
    return pb.ConnectRequest(sample=sample).SerializeToString()


def numbers_of(sample):
    rows = [(each, names) for kind, names in NUMBERS for each in getattr(sample, kind)]
    measured = [getattr(each, name) for each, names in rows for name in names]
    return [each.value for each in measured if each.WhichOneof("kind") == "value"]


def put_numbers(sample, values):
    """The same sample with other numbers."""
    found, values = pb.Sample.FromString(sample.SerializeToString()), iter(values)
    for kind, names in NUMBERS:
        for each in getattr(found, kind):
            for name in names:
                if getattr(each, name).WhichOneof("kind") == "value":
                    getattr(each, name).value = next(values)
    return found


@given(samples)
def test_numbers_are_those_of_protobuf(sample):
    found = SCANNER.scan(wire(sample))
    assert found.sequence == sample.sequence
    assert found.numbers.tolist() == numbers_of(sample)
    reasons = {number: tuple(each.throttle_reasons) for number, each in enumerate(sample.devices)}
    assert found.throttles == {number: each for number, each in reasons.items() if each}


@given(samples, st.data())
def test_words_are_all_else(sample, data):
    words = SCANNER.scan(wire(sample)).words
    count = len(numbers_of(sample))
    other = put_numbers(sample, data.draw(st.lists(plausible, min_size=count, max_size=count)))
    other.sequence += other.sequence < 2**63 - 1
    other.taken.seconds = data.draw(st.integers(0, 2**31))
    for each in other.devices:
        each.throttle_reasons[:] = data.draw(st.lists(st.text(max_size=20), max_size=2))
    assert SCANNER.scan(wire(other)).words == words


@given(samples, samples)
def test_other_words_are_other_samples(one, other):
    said = [SCANNER.scan(wire(each)) for each in (one, other)]
    zeros = [put_numbers(each, [0.0] * len(numbers_of(each))) for each in (one, other)]
    for each in zeros:
        each.sequence = 0
        for device in each.devices:
            del device.throttle_reasons[:]
    assert (said[0].words == said[1].words) == (zeros[0] == zeros[1])


@given(samples, st.data())
def test_broken_bytes_are_left_to_protobuf_or_read_as_it_does(sample, data):
    raw = bytearray(wire(sample))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    found = SCANNER.scan(raw)
    try:
        message = pb.ConnectRequest.FromString(raw)
    except DecodeError:
        return  # its words are those of no sample that was ever understood
    if found is not None:
        assert message.WhichOneof("message") == "sample"
        assert found.sequence == message.sample.sequence
        assert set(found.numbers.tolist()) <= set(numbers_of(message.sample))


@pytest.mark.parametrize(
    "message",
    [
        pb.ConnectRequest(),
        pb.ConnectRequest(hello=pb.Hello(node="n")),
        pb.ConnectRequest(sample=pb.Sample(devices=[pb.DeviceSample(power_w=pb.Measurement(value=nan))])),
        pb.ConnectRequest(sample=pb.Sample(engines=[pb.EngineSample(running=pb.Measurement(value=inf))])),
        pb.ConnectRequest(sample=pb.Sample(engines=[pb.EngineSample(running=pb.Measurement(value=-inf))])),
        pb.ConnectRequest(sample=pb.Sample(sequence=2**63)),
        pb.ConnectRequest(sample=pb.Sample(devices=[pb.DeviceSample(throttle_reasons=["a" * 256])])),
        pb.ConnectRequest(sample=pb.Sample(devices=[pb.DeviceSample(throttle_reasons=["a" * 250] * 5)])),
        pb.ConnectRequest(
            sample=pb.Sample(devices=[pb.DeviceSample()] * 256 + [pb.DeviceSample(throttle_reasons="a")])
        ),
        pb.ConnectRequest(sample=pb.Sample(engines=[pb.EngineSample(address="a" * 100) for _ in range(1000)])),
    ],
)
def test_what_is_no_plain_sample_is_left_to_protobuf(message):
    assert SCANNER.scan(message.SerializeToString()) is None


def of_one(name, value):
    """A sample that says this, and where."""
    kind, part = ("devices", pb.DeviceSample) if name in NUMBERS[0][1] else ("engines", pb.EngineSample)
    return kind, pb.Sample(**{kind: [part(**{name: pb.Measurement(value=value)})]})


@pytest.mark.parametrize("name", sorted({name for _, names in NUMBERS for name in names}))
def test_a_number_that_cannot_be_is_unknown_and_read_by_objects(name):
    least, most = RANGES[name]
    for value in (least, most, (least + most) / 2):
        kind, sample = of_one(name, value)
        assert SCANNER.scan(wire(sample)).numbers.tolist() == [value]
        assert getattr(getattr(sample_from_proto(sample), kind)[0], name) == Measurement(value)
    for value in (nextafter(least, -inf), nextafter(most, inf), -1e9, 1e300, nan, inf, -inf):
        kind, sample = of_one(name, value)
        assert SCANNER.scan(wire(sample)) is None
        assert getattr(getattr(sample_from_proto(sample), kind)[0], name) == UNKNOWN


def sample_of(*parts):
    """A ConnectRequest of a sample whose fields are these bytes."""
    inner = b"".join(parts)
    return b"\x12" + bytes([len(inner)]) + inner


def field(number, *parts):
    inner = b"".join(parts)
    return bytes([number << 3 | 2, len(inner)]) + inner


VALUE = b"\x09" + bytes(8)


@pytest.mark.parametrize(
    "raw",
    [
        sample_of(field(4), field(3)),  # engines before devices
        sample_of(field(3, field(3, VALUE), field(2, VALUE))),  # another order
        sample_of(field(3, field(2, VALUE), field(2, VALUE))),  # one measurement twice
        sample_of(field(9)),  # what this scheduler does not know
        sample_of() + field(1),  # a Hello after it: the last of a oneof counts
    ],
)
def test_what_protobuf_allows_and_nobody_sends_is_left_to_it(raw):
    pb.ConnectRequest.FromString(raw)
    assert SCANNER.scan(raw) is None


def test_reasons_that_are_no_text_are_left_to_protobuf():
    raw = sample_of(field(3, field(6, b"\xff")))
    with pytest.raises(DecodeError):
        pb.ConnectRequest.FromString(raw)
    assert SCANNER.scan(raw) is None


def test_what_is_kept_of_reasons_is_bounded():
    scanner = SampleScanner()
    for number in range(3000):
        device = pb.DeviceSample(throttle_reasons=[f"reason-{number}"])
        assert scanner.scan(wire(pb.Sample(devices=[device]))).throttles == {0: (f"reason-{number}",)}
    assert len(scanner._throttles) <= 1024


def test_a_measurement_in_other_forms_is_words():
    twice, both = VALUE + VALUE, VALUE + b"\x10\x02"
    raw = sample_of(field(3, field(2, twice), field(3, both), field(4, VALUE)))
    assert SCANNER.scan(raw).numbers.tolist() == [0.0]
