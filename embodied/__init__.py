"""Train robot policies, improve them by reinforcement learning, and put them on robots.

import embodied as em

agent = em.train(env="Pendulum-v1", learner="sac", steps=10_000)
print(em.evaluate(agent))
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodied.api import (
        Agent,
        collect,
        diagnose,
        evaluate,
        improve,
        list,
        load,
        make_env,
        make_learner,
        make_policy,
        rollout,
        save,
        train,
    )

__all__ = [
    "Agent",
    "collect",
    "diagnose",
    "evaluate",
    "improve",
    "list",
    "load",
    "make_env",
    "make_learner",
    "make_policy",
    "rollout",
    "save",
    "train",
]


def __getattr__(name: str) -> Any:
    # Imported at the first use: `import embodied.cli` must not import PyTorch.
    if name in __all__:
        from embodied import api

        return getattr(api, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("embodied-rl")
    if name.isupper() and (Path(__file__).parent / f"configs/learner/{name.lower()}.yaml").exists():
        # An ImportError, which `from embodied import SAC` shows as it is.
        raise ImportError(f"there is no class {name}: em.train(env=ENV, learner={name.lower()!r})")
    from embodied.mistakes import answer

    more = "" if name.startswith("_") else answer("names", name)
    raise AttributeError(f"module 'embodied' has no attribute {name!r}{more}")


def __dir__() -> Sequence[str]:
    return [*__all__, "__version__"]
