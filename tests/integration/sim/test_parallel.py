"""Runs in processes of their own give what they give here."""

import numpy as np
from headway_sim.simulation import Policy
from headway_sim.simulation.parallel import ProcessRunner
from headway_sim.simulation.scenario import Scenario, Task, run_task


def test_processes_give_the_same_results_in_order():
    scenario = Scenario(workload="article", fleet="2xa100-40g-8b", limit=10)
    tasks = [Task(scenario, Policy(name, name), seed) for name in ("random", "least_request") for seed in (0, 1)]
    with ProcessRunner(2, quiet=True) as runner:
        found = runner.run(tasks)
    for task, each in zip(tasks, found, strict=True):
        assert np.array_equal(each.ttft_ms, run_task(task).ttft_ms)
