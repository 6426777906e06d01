"""Engines that publish KV events: the emulator's publisher, fed by a test or by the emulator itself."""

import contextlib
import socket

from headway_sim.emulator.kv_events import KvPublisher
from xxhash import xxh3_64_intdigest


@contextlib.asynccontextmanager
async def publishing(port=0, replay_port=0, **changes):
    """A publisher until the block ends."""
    publisher = KvPublisher("127.0.0.1", port, replay_port, lambda: 1.0, **changes)
    await publisher.start()
    try:
        yield publisher
    finally:
        await publisher.close()


def store(publisher, ids, salt=""):
    """The engine stored a prompt of these ids, one batch; returns its blocks."""
    data = b"".join(each.to_bytes(4, "little") for each in ids)
    keys, key = [], xxh3_64_intdigest(salt.encode())
    for start in range(0, len(data) // 64 * 64, 64):
        key = xxh3_64_intdigest(data[start : start + 64], key)
        keys.append(key)
    publisher.describe(keys, data, salt)
    for each in keys:
        publisher.stored(each)
    publisher.publish()
    return keys


def free_ports():
    """A free port whose next one is free too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                other.bind(("127.0.0.1", port + 1))
                return port, port + 1
