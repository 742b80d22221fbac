"""The Python API, `import embodied as em`: thin functions over what the command line does.

A mistake raises ConfigError (or another error of one line that says what to do).
"""

from embodied.api.agent import Agent as Agent
from embodied.api.agent import evaluate as evaluate
from embodied.api.agent import load as load
from embodied.api.agent import make_learner as make_learner
from embodied.api.agent import make_policy as make_policy
from embodied.api.agent import save as save
from embodied.api.agent import train as train
from embodied.api.environment import make_env as make_env
from embodied.api.training import collect as collect
from embodied.api.training import diagnose as diagnose
from embodied.api.training import improve as improve
from embodied.api.training import list_names as list  # noqa: F401
from embodied.api.training import rollout as rollout
