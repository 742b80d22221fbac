"""Offline RL learners (fixed dataset, then online): IQL, ReBRAC, PRDC, Cal-QL, FQL, Q-chunking."""
