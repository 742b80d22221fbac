"""Untrusted reward programs: the allow-list, the locked worker process and its limits."""
