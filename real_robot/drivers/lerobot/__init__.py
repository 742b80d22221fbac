"""Driver of any LeRobot robot; LeRobot runs in a process and an interpreter of its own."""
