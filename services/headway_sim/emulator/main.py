"""Entry point of the engine emulator."""

import uvloop

from headway_sim.emulator.app import serve
from headway_sim.emulator.config import parse_arguments


def main() -> None:
    """Parse the command line and serve until told to stop."""
    uvloop.run(serve(parse_arguments()))
