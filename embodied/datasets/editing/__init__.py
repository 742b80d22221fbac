"""Editing datasets: merge, drop, split, check; always into a new folder, films not re-encoded."""
