"""Training runs: trainer, training loops (offline, off-policy, on-policy), rewards and logging.

More than fifteen modules, because a run is read from top to bottom here: configuration, components,
one loop for each regime, and what the loops share. No module names a method.
"""
