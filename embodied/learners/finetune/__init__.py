"""Learners for fine-tuning a base policy: DPPO, ReinFlow, EXPO, DSRL-NA, searched noise."""
