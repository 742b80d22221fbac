"""Scripted demonstrators, and checkpoints as demonstrators."""
