"""Other routers' policies, as baselines for the simulator: one file each, in the shape of a scheduler's strategy."""

from headway_sim.policies.catalog import PEERS

__all__ = ["PEERS"]
