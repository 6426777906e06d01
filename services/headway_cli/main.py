"""`headway`: the command line."""

import structlog

from headway_cli.app import build

__all__ = ["main"]


def main() -> None:
    """Run one command; exits with 0, 1 (refused or failed), 2 (usage) or 3 (nobody answers)."""
    # What the embedded Postgres and the migrations log is for processes, not for people at a prompt.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    build()()


if __name__ == "__main__":
    main()
