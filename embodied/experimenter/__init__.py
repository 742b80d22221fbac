"""Experimenter: a language model chooses which skills are trained next, and when one is learned."""
