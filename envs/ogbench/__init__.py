"""OGBench's single-task environments, and play data by the oracles of its package."""
