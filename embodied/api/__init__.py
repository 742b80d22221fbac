"""The Python API, `import embodied as em`: thin functions over what the command line does.

A mistake raises ConfigError (or another error of one line that says what to do).
"""

from embodied.api.agent import Agent, load
from embodied.api.environments import make_env
from embodied.api.parts import list_names as list
from embodied.api.parts import make_learner, make_policy, save
from embodied.api.training import collect, evaluate, rollout, train

__all__ = [
    "Agent",
    "collect",
    "evaluate",
    "list",
    "load",
    "make_env",
    "make_learner",
    "make_policy",
    "rollout",
    "save",
    "train",
]
