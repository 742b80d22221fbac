"""Training without manual resets (autonomous RL)."""
