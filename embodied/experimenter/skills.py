"""Skills: the tasks that an experiment can train, each a sentence and the words that choose it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from embodied.core.bounds import CountOrZero
from embodied.core.build import ConfigError

NONE = "none"  # no skill of the library; no task has this name


@dataclass(frozen=True)
class Config:
    """What can be trained. `tasks`: for each sentence the words of the environment that have it."""

    about: str  # the robot and its environment, for the language model
    env: tuple[str, ...]  # words that choose the environment (env=NAME env.KEY=VALUE)
    learn: tuple[str, ...]  # words of `embodied train` that all trainings share
    tasks: Mapping[str, tuple[str, ...]]  # sentence: words of its environment (env.KEY=VALUE)
    demos: CountOrZero = 0  # scripted episodes that are recorded for each task (0: none)

    def __post_init__(self) -> None:
        if not self.tasks or NONE in self.tasks:
            raise ConfigError(f'skills.tasks needs at least one task, and none called "{NONE}"')
        for word in self.learn:  # on a resume they come from a file
            if word.startswith(("-", "allow")):
                raise ConfigError(f"skills.learn: {word} is no setting of a training (KEY=VALUE)")
        for word in (*self.env, *(word for words in self.tasks.values() for word in words)):
            if not word.startswith(("env=", "env.")):
                raise ConfigError(f"skills: {word} should choose an environment (env.KEY=VALUE)")


class Skills:
    """A set of tasks, as its settings name them."""

    def __init__(self, config: Config) -> None:
        self.config = config
