"""Finds the 3D scene of an environment and the engine that holds it (MuJoCo or SAPIEN)."""

from __future__ import annotations

from typing import Any

from embodied.core.env import HasSapienScene, HasScene, VecEnv
from embodied.core.wrapper import find_protocol
from embodied.viewer.scene.types import NoScene, SceneModel


def detect_scene(env: VecEnv) -> SceneModel | None:
    """The scene of parallel env 0, or None if the environment has no scene to draw in 3D.

    MuJoCo environments have `scene(row)`, SAPIEN environments `sub_scene(row)`; a Gymnasium
    environment has its MuJoCo model on the unwrapped environment. Engines are imported only for
    their own environments. Raises NoScene if the environment refuses to show its scene (the
    parallel environments run in other processes).
    """
    target: Any = env
    if find_protocol(env, HasSapienScene) is not None:
        from embodied.viewer.scene.sapien import SapienScene

        try:
            target.sub_scene(0)
        except ValueError as error:
            raise NoScene(str(error)) from error
        return SapienScene(lambda: target.sub_scene(0))
    inner: Any = getattr(next(iter(getattr(target, "envs", ())), None), "unwrapped", None)
    has_model = type(getattr(inner, "model", None)).__module__.startswith("mujoco.")
    if not has_model and find_protocol(env, HasScene) is None:
        return None
    from embodied.viewer.scene.mujoco import MujocoScene

    return MujocoScene(lambda: (inner.model, inner.data) if has_model else target.scene(0))
