"""Core contracts: environment, policy, reward, spec, checkpoint; depends on torch only.

It has sixteen modules because all other packages build on it, and it on none of them.
"""
