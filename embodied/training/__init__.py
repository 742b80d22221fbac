"""Training runs: trainer, training loops (offline, off-policy, on-policy), rewards and logging."""
