"""`python -m headway_sim.emulator`."""

from headway_sim.emulator.main import main

main()
