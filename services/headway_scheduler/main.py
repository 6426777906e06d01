"""`headway-scheduler`: parse, build, serve, drain."""

import argparse
import sys

import uvloop

from headway_scheduler.config import ConfigError, load
from headway_scheduler.serve import configure_logging, serve

__all__ = ["main"]


def main() -> int:
    """Run a scheduler configured by the environment; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="headway-scheduler",
        description="Decides which GPU serves which LLM request.",
        epilog="Configured by HEADWAY_SCHEDULER_… variables; docs/scheduler.md lists them.",
    )
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
    uvloop.run(serve(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
