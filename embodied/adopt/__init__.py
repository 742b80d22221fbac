"""`embodied adopt`: a LeRobot checkpoint becomes a run: its settings, statistics and weights."""
