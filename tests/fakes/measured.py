"""A run's figures, made up."""

import numpy as np
from headway_sim.simulation.metrics import Measured


def measured(ttft_ms=(100.0,), refused=0, duration_s=10.0):
    ttft = np.array(ttft_ms, np.float64)
    return Measured(
        ttft_ms=ttft,
        tpot_ms=ttft / 10,
        e2e_ms=ttft * 10,
        hold_ms=ttft * 0,
        requests=len(ttft) + refused,
        refusals={"SATURATED": refused} if refused else {},
        prompt_tokens=100 * len(ttft),
        cached_tokens=25 * len(ttft),
        duration_s=duration_s,
        kv_use_mean=0.5,
        load_times_s=np.array([0.0, 1.0]),
        load=np.array([[1.0, 3.0], [1.0, 3.0]]),
        arrival_s=np.arange(float(len(ttft))),
    )
