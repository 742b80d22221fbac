"""Evaluation of policies: episodes, success rates with intervals, task grids, videos."""
