"""A token is rotated under a real agent and a real data plane: they show the new one, and lose nothing."""

import asyncio

from fakes.credentials import bearer, credential
from fakes.scheduler import serving
from fakes.waiting import eventually
from headway.admin.v1 import admin_pb2 as apb
from headway.routing.v1 import routing_pb2 as rpb
from headway_agent.app import Agent
from headway_agent.config import AgentConfig
from headway_client import HeadwayClient
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
