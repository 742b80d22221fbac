"""Encoders and network blocks of policies."""
