"""Requests from other machines, with CURVE keys."""
