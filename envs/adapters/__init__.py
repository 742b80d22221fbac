"""Our environments as Gymnasium and Stable-Baselines3 environments."""
