"""What tenancy costs a request: credentials, quotas and fair shares, against none of it (`headway bench tenancy`)."""

import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import grpc
from google.protobuf.field_mask_pb2 import FieldMask
from headway.admin.v1 import admin_pb2, admin_pb2_grpc

from headway_bench.figures import Json
from headway_bench.processes import ADMIN_TOKEN, fleet_of, scheduler_process
from headway_bench.route import RouteSettings, addresses_of, load_of

__all__ = ["TenancySettings", "measure_tenancy"]

_ROUNDS: Final = 7
_PLENTY: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TenancySettings:
    """How it is measured. `seconds`: of all rounds of one scheduler together."""

    mode: str = "stream"
    endpoints: int = 100
    prompt_bytes: int = 2048
    concurrency: int = 64
    seconds: float = 14.0


async def measure_tenancy(settings: TenancySettings) -> Json:
    """Two schedulers in turns: one without credentials, quotas and neighbours, one with all of them."""
    plain = RouteSettings(settings.mode, settings.endpoints, settings.prompt_bytes, settings.concurrency, auth=False)
    guarded = RouteSettings(settings.mode, settings.endpoints, settings.prompt_bytes, settings.concurrency, auth=True)
    without, beside = [], []
    async with AsyncExitStack() as stack:
        servers = []
        for auth in (False, True):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-bench-")))
            server = await stack.enter_async_context(scheduler_process(directory, auth=auth))
            token = ADMIN_TOKEN if auth else ""
            await stack.enter_async_context(fleet_of(server[1], addresses_of(settings.endpoints), token))
            servers.append(server)
        await _share(servers[1][1])
        for turn in range(_ROUNDS + 1):
            seconds = settings.seconds / _ROUNDS
            first, second = await load_of(servers[0], plain, seconds), await load_of(servers[1], guarded, seconds)
            if turn:  # the first one warms up
                without.append(first["server_cpu_us"])
                beside.append(second["server_cpu_us"])
    return {
        "settings": asdict(settings),
        "without_us": round(statistics.median(without), 1),
        "with_us": round(statistics.median(beside), 1),
        "cost_us": round(statistics.median(second - first for first, second in zip(without, beside, strict=True)), 1),
    }


async def _share(port: int) -> None:
    """Quotas for the tenant that routes, too large to be used up, and a neighbour in its GPU group."""
    metadata = (("authorization", f"Bearer {ADMIN_TOKEN}"),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        quotas = admin_pb2.Quotas(requests_per_minute=_PLENTY, tokens_per_minute=1000 * _PLENTY, max_inflight=_PLENTY)
        update = admin_pb2.UpdateTenantRequest(
            tenant=admin_pb2.Tenant(name="tenants/default", quotas=quotas),
            update_mask=FieldMask(paths=["quotas"]),
            request_id="bench-quotas",
        )
        await stub.UpdateTenant(update, metadata=metadata)
        neighbour = admin_pb2.Tenant(name="tenants/neighbour", weight=3.0)
        create = admin_pb2.CreateTenantRequest(tenant=neighbour, request_id="bench-neighbour")
        await stub.CreateTenant(create, metadata=metadata)
        binding = admin_pb2.Binding(
            name="tenants/neighbour/bindings/all", gpu_group="gpuGroups/all", mode=admin_pb2.BINDING_MODE_SHARED
        )
        await stub.CreateBinding(
            admin_pb2.CreateBindingRequest(binding=binding, request_id="bench-binding"), metadata=metadata
        )
