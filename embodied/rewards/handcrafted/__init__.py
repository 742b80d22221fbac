"""Hand-written rewards: weighted sums, shaping, programs, composites."""
