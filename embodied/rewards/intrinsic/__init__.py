"""Exploration bonuses: RND and ICM, and what they share."""
