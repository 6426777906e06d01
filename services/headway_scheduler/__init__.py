"""The scheduler. Its decision path runs as machine code where that was made."""

from headway_scheduler.native import prefer as _prefer

_prefer()
