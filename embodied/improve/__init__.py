"""Find out what improves a policy, and improve it: `embodied diagnose` and `embodied improve`."""
