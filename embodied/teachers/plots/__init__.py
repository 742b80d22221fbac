"""Pictures of what a teacher sampled."""
