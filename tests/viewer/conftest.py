"""MuJoCo draws without a screen only if `envs` is imported before it."""

import envs as envs
