"""A simulated servo bus on a pseudo-terminal."""
