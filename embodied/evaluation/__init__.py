"""Evaluation of policies: episodes, success rates, intervals, task grids, videos."""
