"""System identification: fit simulated joints to recorded motion."""
