"""Comparing rewards: distances (EPIC, DARD, STARC) and agreement with success."""
