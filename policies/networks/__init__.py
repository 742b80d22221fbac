"""Observation encoders and network blocks of policies."""
