"""Before anything imports mujoco: `envs` chooses the off-screen renderer."""

import envs  # noqa: F401
