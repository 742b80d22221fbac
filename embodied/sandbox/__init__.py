"""Untrusted reward programs: what they need, the locked process in which they run, its limits."""
