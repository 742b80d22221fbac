"""The control process: it owns the robot and keeps its rate and its limits.

It has more modules than other packages because each duty of a tick (reading, checking a chunk,
stopping, yielding, writing the state) is one small file that can be read and tested alone.
"""
