"""Policies that change how another one acts: best of N, edits, real-time chunking, reflex."""
