"""The other side of comparisons: Stable-Baselines3 and plain PyTorch."""
