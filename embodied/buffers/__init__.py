"""What learners sample from: replay buffers, rollout buffers, mixtures and relabelling."""
