"""Offline RL learners (fixed dataset, then online): IQL, ReBRAC, Cal-QL, FQL, Q-chunking."""
