"""Shared memory between the processes: who writes which mailbox, messages, the flight recorder."""
