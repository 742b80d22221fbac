"""Scripted demonstrators, one module per environment, and checkpoints as demonstrators."""
