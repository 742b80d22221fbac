"""Episodes on disk: LeRobot v3 datasets, collecting and editing demonstrations."""
