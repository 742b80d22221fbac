"""Ways to improve a policy: each spends a budget and leaves a run. `configs/way/` has the recipes.

A recipe's settings were chosen on other tasks and are the same everywhere: no way is tuned more
than another.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from embodied.core import checkpoint
from embodied.core.bounds import Count, PositiveFraction
from embodied.core.build import ConfigError
from embodied.evaluation.evaluate import Evaluation
from embodied.improvement.diagnosis import with_steps
from embodied.improvement.race import Leg, best
from embodied.policies.remote.address import is_address
from embodied.training.logger import read_metrics

MANY = 1000  # updates or steps of a training in the time of one step that is played, at most


@dataclass(frozen=True)
class Commands:
    """What `embodied` does, by the words of its command line; the environment is known to them."""

    train: Callable[[Sequence[str]], Path]
    collect: Callable[[Sequence[str]], Path]
    check: Callable[[Sequence[str]], None]
    """ConfigError for a training that cannot begin."""
    play: Callable[[str, Sequence[str], int, int], Evaluation]
    """(policy, words, episodes, seed): episodes of a policy with other settings."""
    film: Callable[[str, Sequence[str], int, int, int], Tensor]
    """The frames [T, H, W, 3] of one of as many parallel envs as episodes: (..., row)."""


@dataclass(frozen=True)
class Setup:
    """What all ways have in common: the policy that is to be improved, as it acts best; the words
    of every training; the unit of budgets, and environment steps in a minute of playing."""

    commands: Commands
    base: Leg
    common: tuple[str, ...]
    demos: tuple[str, ...]
    unit: Literal["minutes", "steps"]
    pace: float
    seed: int

    def steps(self, budget: float) -> int:
        """Environment steps that fit into a budget."""
        return max(1, round(budget if self.unit == "steps" else budget * self.pace))

    def train(self, out: Path, words: Sequence[str], total: float) -> Path:
        """Train in `out` until `total` of the budget is spent, from where it is."""
        saved = sorted(out.glob("checkpoints/[0-9]*/about.json"))
        done = int(saved[-1].parent.name) if saved else 0
        if self.unit == "steps":
            left, limit = total - done, [f"steps={round(total)}"]
        else:  # and more steps than any training makes in this time
            left = total - (read_metrics(out)[-1]["seconds"] / 60 if saved else 0.0)
            limit = [f"minutes={left:.4f}", f"steps={done + MANY * self.steps(left)}"]
        if left <= 0:  # it was interrupted after this
            return out
        if saved:
            return self.commands.train([f"resume={out}", *limit])
        return self.commands.train([*self.common, *words, *limit, f"out={out}"])


class Way(ABC):
    """A way to improve a policy."""

    searches_sampler = False
    """Whether its policy is a new one, whose best sampler has to be looked for."""

    @abstractmethod
    def require(self, setup: Setup) -> None:
        """ConfigError that says why it does not apply to this policy."""

    @abstractmethod
    def advance(self, folder: Path, legs: Sequence[Leg], budget: float, setup: Setup) -> Path:
        """Spend `budget` more in `folder`, after `legs`; returns the run. An interrupted leg goes
        on where it was."""


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of a training."""

    words: str  # of `embodied train`; init, env, out, seed and the budget are added
    demos: Literal["needed", "used", "ignored"] = "ignored"  # what it does with demonstrations
    init: bool = True  # begin with the policy that is to be improved


class Training(Way):
    """One training, which goes on from rung to rung."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.searches_sampler = not config.init

    def words(self, setup: Setup) -> list[str]:
        words = shlex.split(self.config.words)
        if self.config.init:
            words.append(f"init={setup.base.policy}")
        if setup.demos and self.config.demos != "ignored":
            words.append(f"demos=[{','.join(setup.demos)}]")
        return words

    def require(self, setup: Setup) -> None:
        if self.config.demos == "needed" and not setup.demos:
            raise ConfigError("needs demonstrations: demos=DIR")
        setup.commands.check([*setup.common, *self.words(setup)])

    def advance(self, folder: Path, legs: Sequence[Leg], budget: float, setup: Setup) -> Path:
        total = budget + sum(leg.budget for leg in legs)
        return setup.train(folder / "run", self.words(setup), total)


@dataclass(frozen=True)
class OwnSuccessesConfig:
    """Settings of rounds of cloning."""

    words: str  # of `embodied train`, that imitate a dataset
    collecting: PositiveFraction = 0.3  # share of a budget in minutes that is played
    updates: Count = 4000  # of each round, with a budget of steps


class OwnSuccesses(Way):
    """Rounds: the best policy so far plays, and a new one imitates all episodes that succeeded."""

    searches_sampler = True

    def __init__(self, config: OwnSuccessesConfig) -> None:
        self.config = config

    def require(self, setup: Setup) -> None:
        score = setup.base.score
        if is_address(setup.base.policy):
            raise ConfigError("episodes of a policy server cannot be recorded: use a run")
        if score is None or not score.is_rate:
            raise ConfigError("the environment does not say which episodes succeeded")

    def advance(self, folder: Path, legs: Sequence[Leg], budget: float, setup: Setup) -> Path:
        rung, player = len(legs), best([setup.base, *legs])
        assert player is not None
        in_steps = setup.unit == "steps"
        played = budget if in_steps else self.config.collecting * budget
        acting = save_as_it_acts(player, folder / f"player-{rung}")
        words = [f"policy={acting}", f"seed={setup.seed + 1000 * (rung + 1)}", "episodes=1000000"]
        words += [f"steps={setup.steps(played)}", f"out={folder}/episodes-{rung}"]
        words += [] if executed(player) is None else [f"execute={executed(player)}"]
        setup.commands.collect(words)
        every = ",".join(f"{folder}/episodes-{k}" for k in range(rung + 1))
        new = [*shlex.split(self.config.words), f"demos=[{every}]"]
        return setup.train(
            folder / f"run-{rung}", new, self.config.updates if in_steps else budget - played
        )


def save_as_it_acts(leg: Leg, folder: Path) -> Path:
    """Save the policy of `leg` with the sampler's steps with which it acts best."""
    policy = checkpoint.load_policy(leg.policy)
    step = int(checkpoint.read_about(leg.policy)["step"])
    for word in leg.sampler:
        if word.partition("=")[0].endswith("steps"):
            policy = with_steps(policy, int(word.partition("=")[2]))
    return checkpoint.save(folder, policy, step)


def executed(leg: Leg) -> int | None:
    """The steps of each chunk that are executed where it acts best; None: as it was trained."""
    found = [word.partition("=")[2] for word in leg.sampler if word.startswith("execute=")]
    return int(found[0]) if found else None
