"""Universal Robots arms over RTDE."""
