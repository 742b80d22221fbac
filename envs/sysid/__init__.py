"""System identification: fits joint parameters of the simulation to recorded motion."""
