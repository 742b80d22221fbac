"""Editing datasets: merge, drop, split, transform, check; into a new folder, films not re-encoded."""
