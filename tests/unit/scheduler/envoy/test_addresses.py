"""Engines' addresses as planes are told them."""

import asyncio
import socket

import pytest
from headway_scheduler.addresses import EngineAddresses


@pytest.mark.parametrize(
    ("address", "shown"),
    [("10.0.0.1:8000", "10.0.0.1:8000"), ("[::1]:8000", "[::1]:8000"), ("[0:0::1]:80", "[::1]:80")],
)
def test_a_literal_address_needs_no_look_up(address, shown):
    addresses = EngineAddresses()
    assert addresses.of(address) == addresses.shown(address) == shown
    assert addresses.new([address]) == []


async def test_a_name_is_looked_up_once_and_found_again_by_its_ip(monkeypatch):
    asked = []

    async def getaddrinfo(host, port, **_):
        asked.append(host)
        if host == "nowhere":
            raise socket.gaierror("no such host")
        return [(0, 0, 0, "", (ip, port)) for ip in answers]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    answers = ["10.0.0.9", "10.0.0.7"]
    addresses = EngineAddresses()
    engines = ["gpu-1:8000", "nowhere:8000", "10.0.0.1:8000"]
    assert addresses.new(engines) == ["gpu-1:8000", "nowhere:8000"]
    assert (addresses.of("gpu-1:8000"), addresses.shown("gpu-1:8000")) == (None, "gpu-1:8000")
    await addresses.resolve(engines)
    assert (addresses.of("gpu-1:8000"), addresses.version) == ("10.0.0.7:8000", 1)
    assert addresses.named("10.0.0.7:8000") == "gpu-1:8000"
    assert addresses.named("10.0.0.1:8000") == "10.0.0.1:8000"
    assert addresses.of("nowhere:8000") is None
    assert addresses.new(engines) == [], "what failed waits for the next round"
    assert sorted(asked) == ["gpu-1", "nowhere"]

    answers = ["10.0.0.8", "10.0.0.7"]
    await addresses.resolve(engines)
    assert (addresses.of("gpu-1:8000"), addresses.version) == ("10.0.0.7:8000", 1), "it still leads there"
    answers = ["10.0.0.8"]
    await addresses.resolve(engines)
    assert (addresses.of("gpu-1:8000"), addresses.version) == ("10.0.0.8:8000", 2)
