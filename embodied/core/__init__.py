"""Core contracts: environment, policy, reward, spec, checkpoint; depends on torch only."""
