"""`headway-agent`: parse, build, serve, drain."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from headway_agent import app
from headway_agent.config import ConfigError, load


def main(argv: Sequence[str] | None = None) -> None:
    """Run the node agent."""
    parser = argparse.ArgumentParser(prog="headway-agent", description="Tell schedulers what this host's GPUs do.")
    parser.add_argument("--config", type=Path, help="a .toml or .json file; HEADWAY_AGENT_… variables go over it")
    parser.add_argument("--validate", action="store_true", help="check the configuration and exit")
    parser.add_argument("--dump", action="store_true", help="print one sample as JSON and exit")
    arguments = parser.parse_args(argv)
    try:
        config = load(arguments.config)
    except ConfigError as error:
        sys.exit("\n".join(error.problems))
    if arguments.validate:
        print("the configuration is valid")
        return
    app.configure_logs(config.log_format)
    if arguments.dump:
        print(asyncio.run(app.dump(config)))
    else:
        asyncio.run(app.serve(config))


if __name__ == "__main__":
    main()
