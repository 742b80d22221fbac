"""Speed and learning measured side by side with other projects; each module with `run` is a
suite."""
