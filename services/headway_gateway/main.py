"""`headway-gateway`: an OpenAI-compatible data plane on Headway."""

import argparse
import asyncio
import sys
from pathlib import Path

import structlog
import uvloop

from headway_gateway.app import serve
from headway_gateway.config import ConfigError, load_settings


def main() -> None:
    """Parse, build, serve, drain."""
    parser = argparse.ArgumentParser(prog="headway-gateway", description=__doc__)
    parser.add_argument("--config", type=Path, help="a TOML or JSON file; HEADWAY_GATEWAY_… overrides it")
    arguments = parser.parse_args()
    try:
        settings = load_settings(arguments.config)
    except ConfigError as error:
        sys.exit(f"headway-gateway: the configuration is wrong:\n{error}")
    stamp, level = structlog.processors.TimeStamper(fmt="iso"), structlog.processors.add_log_level
    trace, line = structlog.processors.format_exc_info, structlog.processors.JSONRenderer()
    bound = structlog.contextvars.merge_contextvars
    structlog.configure([bound, level, stamp, trace, line], logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve(settings))
        except OSError as error:
            sys.exit(f"headway-gateway: port {settings.port}: {error.strerror or error}")


if __name__ == "__main__":
    main()
