"""The emulator as a process of its own."""

import asyncio
import signal
import sys

import aiohttp

DEADLINE_S = 20.0


async def test_engines_listen_on_their_own_ports_and_stop_when_told(tmp_path):
    port_file = tmp_path / "ports"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headway_sim.emulator", "--engines", "3", "--speedup", "100"),
        *("--model", "a", "--model", "b", "--port-file", str(port_file)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not port_file.exists():
                assert process.returncode is None
                await asyncio.sleep(0.01)
        ports = port_file.read_text().split()
        assert len(set(ports)) == 3
        async with aiohttp.ClientSession() as http:
            body = {"model": "b", "prompt": "p" * 200, "max_tokens": 3}
            for port in ports:  # each engine has a cache of its own
                async with http.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
                    usage = (await response.json())["usage"]
                    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    finally:
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), DEADLINE_S)
    assert code == 0
