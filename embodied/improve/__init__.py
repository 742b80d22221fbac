"""Find out what improves a policy: measurements and advice (`embodied diagnose`)."""
