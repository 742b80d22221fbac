"""Adapters that present a VecEnv as a Gymnasium or Stable-Baselines3 environment."""
