"""Recording episodes as a dataset."""
