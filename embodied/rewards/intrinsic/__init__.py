"""Exploration bonuses: RND and ICM, and their shared features and minibatches."""
