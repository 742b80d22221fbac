"""Exploration by two policies in turns: Adversarial Surprise."""
