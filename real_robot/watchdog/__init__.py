"""The hardware watchdog: firmware for a board on the robot's safeguard input, and its client."""
