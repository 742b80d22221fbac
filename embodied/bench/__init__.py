"""Benchmarks of speed and learning against other projects; each module with `run` is a suite."""
