"""Environment wrappers: time limit, delays, noise, frame stacking, partial observation."""
