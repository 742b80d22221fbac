"""Rewards from language models that read captions: annotation and subgoals."""
