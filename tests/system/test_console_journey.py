"""As a new user would: start everything, ask something, and see in the browser why it went where it went."""

import asyncio
import json
import re
import signal
import sys
import urllib.request

from playwright.async_api import async_playwright, expect


async def up(directory):
    """`headway up` on free ports, once it has said where it is; what it said."""
    arguments = ("up", "--data-dir", str(directory / "hw"), "--scheduler-port", "0", "--gateway-port", "0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headway_cli.main", *arguments), stderr=asyncio.subprocess.PIPE
    )
    said = ""
    async with asyncio.timeout(120):
        while "Ctrl-C" not in said:
            line = (await process.stderr.readline()).decode()
            assert line, f"it ended: {said}"
            said += line
    return process, said


def ask(gateway, request_id):
    body = {
        "model": "demo-8b",
        "messages": [{"role": "user", "content": "Why is the sky blue? " * 80}],
        "max_tokens": 8,
    }
    headers = {"content-type": "application/json", "x-request-id": request_id}
    request = urllib.request.Request(
        f"{gateway}/chat/completions", json.dumps(body | {"stream": True}).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
        return answer.headers["x-headway-endpoint"]


async def test_from_headway_up_to_ones_own_decision_explained(postgres_dir):
    process, said = await up(postgres_dir)
    try:
        assert "/console   the fleet and its traffic, in a browser\n" in said, "each in one line, whatever the terminal"
        gateway, console = (re.search(rf"^{name}\s+(\S+)", said, re.MULTILINE)[1] for name in ("gateway", "console"))
        await asyncio.to_thread(ask, gateway, "first")
        endpoint = await asyncio.to_thread(ask, gateway, "mine")
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            page = await browser.new_page()
            await page.goto(console)
            await expect(page.get_by_role("heading", name="All is well")).to_be_visible()
            await page.get_by_role("link", name="Traffic").click()
            await page.get_by_role("link", name=re.compile("^mine")).click()
            await expect(page.locator(".lead")).to_contain_text(f"adaptive chose {endpoint}@0 of 8 candidates")
            await expect(page.locator("tbody tr")).to_have_count(8)
            chosen = page.get_by_role("row", name="chosen")
            await expect(chosen).to_contain_text(endpoint)
            await expect(page.locator(".facts")).to_contain_text(re.compile(r"Outcome\s*success"))
            await expect(page.locator(".facts")).to_contain_text(re.compile(r"TTFT actual\s*\d"))
            await browser.close()
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 0
