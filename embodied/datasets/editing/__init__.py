"""Editing datasets: merge, drop, split, transform, check; into a new folder, films as they are."""
