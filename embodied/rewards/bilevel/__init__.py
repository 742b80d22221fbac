"""Rewards learned on two levels: by what the policy that maximises them is worth otherwise."""
