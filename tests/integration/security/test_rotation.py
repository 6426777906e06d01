"""A token is rotated under a real agent and a real data plane: they show the new one, and lose nothing."""

import asyncio

import pytest
from fakes.credentials import bearer, credential
from fakes.scheduler import serving
from fakes.waiting import eventually
from headway.admin.v1 import admin_pb2 as apb
from headway.routing.v1 import routing_pb2 as rpb
from headway_agent.app import Agent
from headway_agent.config import AgentConfig
from headway_client import HeadwayClient, RouteRefused
from headway_gateway.config import GatewaySettings
from headway_scheduler.domain.desired import Role

ENGINE = {"address": "127.0.0.1:1", "engine": "openai", "models": ["m"]}


async def test_who_reads_its_token_from_a_file_never_notices(database_url, tmp_path):
    async with serving(database_url, require_credentials=True) as served:
        admin = await credential(served, "admin", Role.ADMIN)
        files = {role: tmp_path / role for role in ("agent", "router")}
        files["agent"].write_text(await credential(served, "agent", Role.AGENT))
        files["router"].write_text(await credential(served, "router", Role.ROUTER))
        target = f"127.0.0.1:{served.server.port}"
        agent = Agent(
            AgentConfig(
                node="n",
                schedulers=[target],
                token_file=files["agent"],
                devices=[{"kind": "simulated"}],
                engines=[ENGINE],
                interval_s=0.1,
            )
        )
        running = asyncio.create_task(agent.run())
        async with HeadwayClient([target], token=lambda: files["router"].read_text()) as client:
            await client.wait_connected()
            await eventually(lambda: served.scheduler.fleet.nodes.get("n"))
            before = client.stats.connects, served.scheduler.fleet.nodes["n"].connection
            for name, file in files.items():
                request = apb.RotateCredentialRequest(name=f"credentials/{name}", overlap={"seconds": 1})
                rotated = await served.admin.RotateCredential(request, metadata=bearer(admin))
                file.write_text(rotated.token)
            node = served.scheduler.fleet.nodes["n"]
            await eventually(lambda: client.stats.connects > before[0] and client.connected)
            await eventually(lambda: node.connected and node.connection != before[1])
            # Nobody waited out a refusal, and nothing that was asked meanwhile was refused for the old token.
            now = bearer(files["router"].read_text())
            assert not (await served.router.Report(rpb.ReportRequest(), metadata=now)).results
            assert client._refusal is None
        agent.stop()
        await asyncio.wait_for(running, 10)


async def test_a_token_that_cannot_be_read_for_a_while_stops_nobody_for_good(database_url):
    async with serving(database_url, require_credentials=True) as served:
        token, tries = await credential(served, "router", Role.ROUTER), []

        def read():
            tries.append(None)
            if len(tries) < 3:
                raise OSError("no such file")
            return token

        async with HeadwayClient([f"127.0.0.1:{served.server.port}"], token=read) as client:
            with pytest.raises(RouteRefused) as refused:
                await client.identify_keys([b"x" * 32])
            assert refused.value.reason == "NO_SCHEDULER"
            async with asyncio.timeout(15):
                await client.wait_connected()
            assert (await client.identify_keys([b"x" * 32])).tenants == ("",)
        assert len(tries) == 3


def test_a_gateways_token_is_read_from_its_file_each_time(tmp_path):
    file = tmp_path / "token"
    file.write_text("hw_one\n")
    settings = GatewaySettings(token_file=file)
    file.write_text("hw_two\n")
    assert settings.current_token() == "hw_two"
    file.write_text("ü")
    with pytest.raises(OSError, match="ASCII"):
        settings.current_token()
