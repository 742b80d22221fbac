"""Several rewards look at one world, each at what it needs."""

from __future__ import annotations

from embodied.core.build import ConfigError
from embodied.core.env import VecEnv
from embodied.core.reward import AugmentsEnv, Reward


def watched_by(env: VecEnv, reward: Reward, name: str) -> VecEnv:
    """`env` as `reward` wants to see it; the same pictures are taken once.

    ConfigError where it would give another meaning to what a reward before it looks at; `name` says
    which reward it is.
    """
    if not isinstance(reward, AugmentsEnv):
        return env
    after, old = reward.augment_env(env), env.spec.obs
    watched = getattr(after, "name", "")
    if after is env or watched not in old:
        return after
    if old[watched] == after.spec.obs[watched] and old[watched].is_image:
        return env
    raise ConfigError(
        f"{name} looks at the world in another way than a reward before it does; give both the "
        "same settings (picture size), or a picture among the observations"
    )
