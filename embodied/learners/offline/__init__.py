"""Learners that also work on a fixed dataset: IQL, ReBRAC, Cal-QL, FQL, Q-chunking."""
