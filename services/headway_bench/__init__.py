"""Benchmarks of whole processes: what a request costs, by the processes' own accounting."""
