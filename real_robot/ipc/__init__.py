"""Shared memory between the processes: mailboxes, messages, the flight recorder."""
