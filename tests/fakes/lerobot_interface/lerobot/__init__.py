"""Stand-in for LeRobot's interface of robots and teleoperators, for tests without LeRobot.

`tests/interop` runs the same driver with LeRobot itself.
"""
