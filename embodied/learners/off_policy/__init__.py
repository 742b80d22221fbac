"""Learners from a replay buffer: SAC and its relatives, TD3."""
