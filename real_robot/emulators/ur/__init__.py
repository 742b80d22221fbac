"""A simulated UR: RTDE, the program port, the dashboard."""
