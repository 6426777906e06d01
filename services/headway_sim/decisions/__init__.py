"""What Headway promises of its decisions, run again: `headway sim decisions` (docs/benchmarks.md)."""
