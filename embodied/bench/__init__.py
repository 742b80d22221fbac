"""Side-by-side measurements against other projects; each module with `run` is a suite."""
