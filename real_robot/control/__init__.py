"""The control process: it owns the robot and keeps its rate and its limits."""
