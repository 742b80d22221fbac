"""Grasping scenes without physics: shapes on a table, point clouds by ray casting, grasp labels."""
