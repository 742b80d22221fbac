"""Implementations to compare with: Stable-Baselines3 and plain PyTorch."""
