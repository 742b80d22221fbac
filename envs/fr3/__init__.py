"""Franka FR3 on a table: scene, tasks, domain randomization; on MuJoCo and MuJoCo Warp."""
