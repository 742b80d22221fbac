"""Rewards from frozen image-text encoders: a sentence (CLIP) or a goal image."""
