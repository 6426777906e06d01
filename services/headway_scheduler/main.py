"""`headway-scheduler`: parse, build, serve, drain."""

import argparse
import sys

import uvloop

from headway_scheduler.config import ConfigError, load
from headway_scheduler.serve import StartError, configure_logging, serve

__all__ = ["main"]


def main() -> int:
    """Run a scheduler configured by the environment; returns the exit status."""
    words = "Decides which GPU serves which LLM request. Configured by HEADWAY_SCHEDULER_… variables."
    parser = argparse.ArgumentParser(prog="headway-scheduler", description=words)
    parser.add_argument("--validate", action="store_true", help="check the configuration and stop")
    arguments = parser.parse_args()
    try:
        config = load()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.validate:
        return 0
    configure_logging(config.log_level)
    try:
        uvloop.run(serve(config))
    except StartError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
