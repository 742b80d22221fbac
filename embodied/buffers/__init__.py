"""Replay buffers, rollout buffers, mixtures and relabelling: the sources of learners' batches."""
