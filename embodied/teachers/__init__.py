"""Teachers: which tasks a policy meets while it learns, and nothing else of a run."""
