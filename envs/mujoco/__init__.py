"""Batched MuJoCo: thread pool, cameras, MuJoCo Warp, and locomotion tasks."""
