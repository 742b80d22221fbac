"""Learners from their own newest rollouts: PPO and what is built on it."""
