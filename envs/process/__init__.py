"""Environments that need other package versions, in a process of another Python."""
