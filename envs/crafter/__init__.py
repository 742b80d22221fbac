"""Crafter: a batched open-world survival game with 22 achievements."""
