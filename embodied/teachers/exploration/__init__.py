"""Exploration with two policies that act in alternating turns: Adversarial Surprise."""
