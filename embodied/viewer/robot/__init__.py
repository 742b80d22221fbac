"""Monitoring a deployed robot: its mailboxes, model, history and page; strictly read-only."""
