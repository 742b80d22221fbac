"""Teachers of whole levels: domain randomization, PLR, ACCEL, SFL, PAIRED, CLUTR."""
