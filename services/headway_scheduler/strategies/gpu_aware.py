"""GPU-aware: memory pressure, compute utilisation, temperature and power (ARTICLE.md, algorithm 3).

Over 80 % memory pressure an endpoint is avoided; when all are over it, requests are held and then refused with 429.
Unknown values count as the known ones' mean: neither preferred nor starved.
"""

from typing import ClassVar

import numpy as np
from pydantic import Field

from headway_scheduler.domain.request import Request
from headway_scheduler.fleet.columns import FloatColumn
from headway_scheduler.strategies.base import SLOWED_DOWN, Costs, Parameters, SoftGuard
from headway_scheduler.strategies.view import View

__all__ = ["GpuAware"]


class GpuAwareParameters(Parameters):
    """What can be tuned: the weight of each part of the water level."""

    memory_weight: float = Field(4.0, ge=0.0, le=1000.0, description="Of memory pressure")
    utilization_weight: float = Field(2.0, ge=0.0, le=1000.0, description="Of compute utilisation")
    heat_weight: float = Field(1.0, ge=0.0, le=1000.0, description="Of temperature over the slowdown temperature")
    power_weight: float = Field(1.0, ge=0.0, le=1000.0, description="Of power over its limit")
    inflight_weight: float = Field(1.0, ge=0.0, le=1000.0, description="Of in-flight over the pool's largest")


class GpuAware:
    """Cost: the weighted water level of the endpoint."""

    name: ClassVar[str] = "gpu_aware"
    parameters_type: ClassVar[type[Parameters]] = GpuAwareParameters
    classic: ClassVar[bool] = False
    guards: ClassVar[frozenset[SoftGuard]] = SLOWED_DOWN | {SoftGuard.MEMORY_PRESSURE}

    def __init__(self, parameters: GpuAwareParameters) -> None:
        self.parameters = parameters

    def cost(self, request: Request, view: View, now: float) -> Costs:
        """Price each candidate."""
        p, load = self.parameters, view.inflight
        return Costs(
            p.memory_weight * _known(view.memory_pressure)
            + p.utilization_weight * _known(view.utilization)
            + p.heat_weight * _known(view.heat)
            + p.power_weight * _known(view.power)
            # Telemetry is up to a second old; what we sent since then is not.
            + p.inflight_weight * load / max(1.0, float(load.max()))
        )


def _known(values: FloatColumn) -> FloatColumn:
    unknown = np.isnan(values)
    if not unknown.any():
        return values
    mean = 0.0 if unknown.all() else float(values[~unknown].mean())
    return np.where(unknown, mean, values)
