"""Confined spaces: a box crawls through planar tunnels along waypoints of a sampling planner."""
