"""The discrete-event simulator: the engine model and the scheduler's own objects in virtual time."""

from headway_sim.simulation.fleet import FleetError, parse_fleet
from headway_sim.simulation.jobs import MODEL, Job, SessionSource, Source, TraceSource
from headway_sim.simulation.records import Record, Run, Timeline
from headway_sim.simulation.router import Policy
from headway_sim.simulation.simulator import Setup, simulate

__all__ = [
    "MODEL",
    "FleetError",
    "Job",
    "Policy",
    "Record",
    "Run",
    "SessionSource",
    "Setup",
    "Source",
    "Timeline",
    "TraceSource",
    "parse_fleet",
    "simulate",
]
