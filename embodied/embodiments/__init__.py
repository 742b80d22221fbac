"""Robot models (kinematics, limits, home pose) and the action spaces that control them."""
