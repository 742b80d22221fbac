"""Monitoring a deployed robot: its mailboxes, model, history and page, which only stops it."""
