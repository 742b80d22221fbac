"""A robot at work, read-only: its state, its plan, its last minutes."""
