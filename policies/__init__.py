"""Policies with log-probabilities and simple ones; the others are in sub-packages by kind."""
