"""Episodes on disk: LeRobot v3 datasets, importers of other formats, collecting demonstrations."""
