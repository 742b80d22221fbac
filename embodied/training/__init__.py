"""Training runs: trainer, training loops (offline, off-policy, on-policy), rewards and logging.

A run is read from top to bottom here: configuration, components, one loop for each regime, and what
the loops share. No module names a method.
"""
