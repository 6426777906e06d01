"""`python -m headway_sim.cli run …`: the simulator without the rest of Headway."""

from headway_sim.commands import sim_app

if __name__ == "__main__":
    sim_app()
