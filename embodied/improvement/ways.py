"""Ways to improve a policy: another sampler, or a training that spends a budget and leaves a run.

`configs/way/` has the recipes of trainings. A recipe's settings were chosen on other tasks and are
the same everywhere: no way is tuned more than another.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import yaml
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.bounds import Count, CountOrZero, Positive, PositiveFraction
from embodied.core.build import ConfigError, Node, shell_words
from embodied.core.config_fields import complete, settings_of
from embodied.core.device import device_of
from embodied.core.policy import Policy
from embodied.core.saved_node import read_saved
from embodied.evaluation.evaluate import Evaluation
from embodied.improvement.advice import Score
from embodied.improvement.race import Leg, best
from embodied.policies.remote.address import is_address
from embodied.policies.wrappers.real_time_chunking import GuidedSampler
from embodied.training.logger import read_metrics

STEPS = (1, 4, 16)  # of a sampler, that are tried beside its own
CORRECTION = 1.5  # times the usual change of an action: the largest correction of it
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
    film: Callable[[str, Sequence[str], int, int, int], tuple[Tensor, float]]
    """The frames [T, H, W, 3] of the first episode of one parallel env, and the seconds between
    two: (..., row)."""


@dataclass(frozen=True)
class Setup:
    """What all ways have in common: the policy that is to be improved, as it acts best; the words
    of every training; the unit of budgets, environment steps in a minute of playing, and in the
    whole budget (infinite where the ways were named)."""

    commands: Commands
    base: Leg
    common: tuple[str, ...]
    demos: tuple[str, ...]
    unit: Literal["minutes", "steps"]
    pace: float
    whole: float
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
    """Settings of a training. `scales` are settings in units of the action range, by their largest
    values: where the base's actions change little from step to step (joint positions), they are
    `CORRECTION` times that."""

    words: str  # of `embodied train`; init, env, out, seed and the budget are added
    demos: Literal["needed", "used", "ignored"] = "ignored"  # what it does with demonstrations
    init: bool = True  # begin with the policy that is to be improved
    execute: str = ""  # setting of the executed steps (empty: it begins as it was trained)
    scales: Mapping[str, Positive] = field(default_factory=dict)  # of corrections, at most
    updates: Count | None = None  # of each rung, with a budget of steps (null: those are its steps)
    least_steps: CountOrZero = 0  # of the whole budget, below which it races only if it is named


class Training(Way):
    """One training, which goes on from rung to rung."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.searches_sampler = not config.init

    def words(self, setup: Setup) -> list[str]:
        words = shell_words(self.config.words, "words")
        if setup.demos and self.config.demos != "ignored":
            words.append(f"demos=[{','.join(setup.demos)}]")
        usual = CORRECTION * (setup.base.change or math.inf)
        words += [f"{key}={min(most, usual):.3g}" for key, most in self.config.scales.items()]
        return words

    def begin(self, folder: Path, base: Leg) -> list[str]:
        """The words for the policy that it begins with; where the recipe says which setting takes
        the executed steps, that is the policy as it acts best, which is kept in `folder`."""
        if not self.config.init:
            return []
        if not self.config.execute or not base.sampler:
            return [f"init={base.policy}"]
        start, steps = folder / "start", executed(base)
        if not start.exists():
            step = int(checkpoint.read_about(base.policy)["step"])
            checkpoint.save(start, acting_best(base), step)
        return [f"init={start}", *([] if steps is None else [f"{self.config.execute}={steps}"])]

    def require(self, setup: Setup) -> None:
        if self.config.demos == "needed" and not setup.demos:
            raise ConfigError("needs demonstrations: demos=DIR")
        if setup.whole < (least := self.config.least_steps):
            raise ConfigError(
                f"needs {least:,} steps or more, here about {setup.whole:,.0f} fit in"
            )
        init = [f"init={setup.base.policy}"] if self.config.init else []
        setup.commands.check([*setup.common, *self.words(setup), *init])

    def advance(self, folder: Path, legs: Sequence[Leg], budget: float, setup: Setup) -> Path:
        total = budget + sum(leg.budget for leg in legs)
        if self.config.updates is not None and setup.unit == "steps":
            total = self.config.updates * (len(legs) + 1)
        words = [*self.words(setup), *self.begin(folder, setup.base)]
        return setup.train(folder / "run", words, total)


@dataclass(frozen=True)
class OwnSuccessesConfig:
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
        if score is None or not score.is_rate:
            raise ConfigError("the environment does not say which episodes succeeded")

    def advance(self, folder: Path, legs: Sequence[Leg], budget: float, setup: Setup) -> Path:
        rung, player = len(legs), best([setup.base, *legs])
        assert player is not None
        in_steps = setup.unit == "steps"
        played = budget if in_steps else self.config.collecting * budget
        acting = player.policy
        if not is_address(acting):
            step = int(checkpoint.read_about(acting)["step"])
            acting = str(checkpoint.save(folder / f"player-{rung}", acting_best(player), step))
        words = [f"policy={acting}", f"seed={setup.seed + 1000 * (rung + 1)}", "episodes=1000000"]
        words += [f"steps={setup.steps(played)}", f"out={folder}/episodes-{rung}"]
        words += [] if executed(player) is None else [f"execute={executed(player)}"]
        setup.commands.collect(words)
        every = ",".join(f"{folder}/episodes-{k}" for k in range(rung + 1))
        new = [*shell_words(self.config.words, "words"), f"demos=[{every}]"]
        return setup.train(
            folder / f"run-{rung}", new, self.config.updates if in_steps else budget - played
        )


def acting_best(leg: Leg) -> Policy:
    """The policy of `leg` with the sampler's steps with which it acts best."""
    policy = checkpoint.load_policy(leg.policy)
    for word in leg.sampler:
        if word.partition("=")[0].endswith("steps"):
            policy = with_steps(policy, int(word.partition("=")[2]))
    return policy


def save_run(folder: Path, policy: Policy, saved: Path, env: Node, execute: int | None) -> Path:
    """Write the run `folder` of a policy that comes from the checkpoint `saved`, in `env`, with its
    settings; `execute`: steps of each chunk that are executed (None: as it was trained). Returns
    its checkpoint."""
    step = int(checkpoint.read_about(saved)["step"])
    place = checkpoint.save(folder / "checkpoints" / f"{step:08d}", policy, step)
    run = saved.parent.parent / "run.yaml"
    node = read_saved(run) if run.exists() else {}
    node |= {"env": env, "out": str(folder), "name": folder.parent.name}
    node |= {} if execute is None else {"execute": execute}
    (folder / "run.yaml").write_text(yaml.safe_dump(node, sort_keys=False))
    return place


def executed(leg: Leg) -> int | None:
    """The steps of each chunk that are executed where it acts best; None: as it was trained."""
    found = [word.partition("=")[2] for word in leg.sampler if word.startswith("execute=")]
    return int(found[0]) if found else None


@dataclass(frozen=True)
class Sampler:
    """How a policy acts: the steps of its sampler (None: its own), the steps of each chunk that are
    executed, and whether zeros take the place of its noise."""

    steps: int | None
    execute: int
    zero: bool = False

    def words(self, policy: Policy, own: Sampler) -> tuple[str, ...]:
        """The settings that are not those of `own`, as `embodied eval` takes them."""
        name = ".".join(["policy", *(sampler_in(policy) or ()), "steps"])
        steps = [] if self.steps is None else [f"{name}={self.steps}"]
        return (*steps, *([] if self.execute == own.execute else [f"execute={self.execute}"]))


def best_sampler(
    policy: Policy,
    own: Sampler,
    score: Score,
    measure: Callable[[Sampler], Score],
    zero: bool = False,
    until: float = math.inf,
) -> tuple[Sampler, Score]:
    """The sampler with the highest lower end of its interval, and its score; `own` has `score`.
    `zero`: try zeros in place of the noise too; `until`: the monotonic time (s) after which nothing
    more is measured. A number of steps for which `measure` raises ConfigError is left out."""
    best = own
    place = sampler_in(policy)
    steps = None if place is None else steps_of(policy, place)
    rounds: list[Callable[[], list[Sampler]]] = [
        lambda: [replace(best, steps=k) for k in STEPS if steps not in (None, k)],
        lambda: [
            replace(best, execute=k)
            for k in sorted({1, policy.chunk // 2, policy.chunk} - {0, best.execute})
        ],
        lambda: [replace(best, zero=True)] if zero else [],
    ]
    for others in rounds:
        for other in others():
            if time.monotonic() > until:
                return best, score
            try:
                found = measure(other)
            except ConfigError:  # a number of steps that this sampler cannot make
                continue
            if found.low > score.low:
                best, score = other, found
    return best, score


def sampler_in(policy: Policy) -> tuple[str, ...] | None:
    """Where in the settings of `policy` those of its sampler are; None without one."""
    place: tuple[str, ...] = ()
    part = policy
    while not isinstance(part, GuidedSampler):
        inner = getattr(part, "base", None)
        if not isinstance(inner, Policy):
            return None
        part = inner
        place = (*place, "base")
    known = settings_of(str(part.node["_target_"])) or ()
    return place if any(setting.name == "steps" for setting in known) else None


def steps_of(policy: Policy, place: Sequence[str]) -> int | None:
    """The steps of the sampler at `place`."""
    node = complete(policy.node)
    for name in place:
        node = node[name]
    return node["steps"]


def with_steps(policy: Policy, steps: int) -> Policy:
    """`policy` with another number of steps of its sampler; ConfigError for one that it refuses."""
    node = complete(policy.node)
    inner = node
    for name in sampler_in(policy) or ():
        inner = inner[name]
    inner["steps"] = steps
    device = device_of(policy)
    return checkpoint.with_settings(policy, node, "this policy").to(device)
