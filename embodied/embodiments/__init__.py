"""Robot models (kinematics, limits, home pose) and the action spaces that control them.

It has more modules than other packages because each robot and each action space is one file.
"""
