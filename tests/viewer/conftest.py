"""MuJoCo draws without a screen only if `envs` is imported before it."""

from embodied import envs as envs
