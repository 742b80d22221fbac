"""Judge: what the critic of a run expects of each decision, and what its reward is made of.

Only what a run has is shown: its newest checkpoint holds the critic and the reward as they are, and
they judge whoever acts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, Node, build
from embodied.core.checkpoint import CheckpointError
from embodied.core.policy import Policy
from embodied.core.reward import Reward, Termed, Watching
from embodied.core.tensors import Tensors
from embodied.loops.judged import make_reward, of_run
from embodied.viewer.episode import TERM, Moment

VALUE, MODEL = "value", "reward of the run"
Worth = Callable[[Actor], Tensor]


class Judge:
    """`worth` says what a decision is worth, `reward` pays for steps; either may be None.

    One that cannot judge what it is given is left out from there on, and `trouble` says why.
    """

    def __init__(self, worth: Worth | None, reward: Reward | None, gamma: float) -> None:
        self.worth, self.reward, self.gamma = worth, reward, gamma
        self.trouble = ""
        self._last: float | None = None

    def begin(self) -> None:
        """A new episode."""
        self._last = None

    @torch.no_grad()
    def numbers(self, before: Moment, after: Moment, acts: object) -> dict[str, float]:
        """What is known of the step from `before` to `after`, by name."""
        found: dict[str, float] = {}
        if self.worth is not None and isinstance(acts, Actor):
            found |= self._tried(lambda: self._value(after, acts), "worth")
        if self.reward is not None:
            found |= self._tried(lambda: self._paid(before, after), "reward")
        return found

    def _tried(self, ask: Callable[[], dict[str, float]], what: str) -> dict[str, float]:
        try:
            return ask()
        except (RuntimeError, KeyError, ConfigError, NotImplementedError) as error:
            setattr(self, what, None)
            self.trouble = f"{'critic' if what == 'worth' else 'reward'} not shown: {error}"[:200]
            return {}

    def _value(self, after: Moment, acts: Actor) -> dict[str, float]:
        if after.fresh and self.worth is not None:
            self._last = float(self.worth(acts)[0])
        return {} if self._last is None else {VALUE: self._last}

    def _paid(self, before: Moment, after: Moment) -> dict[str, float]:
        assert self.reward is not None
        rows = rows_of(before, after, self.gamma)
        if isinstance(self.reward, Termed):
            parts = self.reward.terms(rows)
            return {f"{TERM}{name}": float(value[0]) for name, value in parts.items()}
        return {MODEL: float(self.reward(rows)[0])}


def rows_of(before: Moment, after: Moment, gamma: float) -> Tensors:
    """One step as the row that a reward is asked about."""
    assert after.action is not None
    ended = after.end == "ended"
    return {
        **tt.nest(before.obs, "obs"),
        **tt.nest(after.shown, "next_obs"),
        "action": torch.tensor([after.action]),
        "reward": torch.tensor([after.reward]),
        "discount": torch.tensor([0.0 if ended else gamma]),
    }


def judge_of(folder: Path, policy: Callable[[], Policy]) -> Judge | None:
    """Of the newest checkpoint in a run folder; None where it has neither critic nor reward.

    `policy` gives the policy of that checkpoint.
    """
    try:
        saved = checkpoint.find(folder)
    except CheckpointError:
        return None
    file = folder / "run.yaml"
    trained: Node = yaml.safe_load(file.read_text()) if file.exists() else {}
    gamma = float((trained.get("learner") or {}).get("gamma", 0.99))
    reward = _reward(folder, policy, gamma) if trained.get("reward") else None
    worth = _worth(saved, trained, policy) if trained.get("learner") else None
    return None if reward is None and worth is None else Judge(worth, reward, gamma)


def _reward(folder: Path, policy: Callable[[], Policy], gamma: float) -> Reward | None:
    """The run's own reward, as it has been taught; those that look at pictures of their own are
    left to `embodied reward`, as the world here has none."""
    try:
        node, state = of_run(folder)
        reward = make_reward(node, state, policy().spec, gamma)
    except (ConfigError, CheckpointError, KeyError, RuntimeError):
        return None
    return None if isinstance(reward, Watching) else reward


def _worth(saved: Path, trained: Node, policy: Callable[[], Policy]) -> Worth | None:
    """By the critic in learner.pt: of the decision (Q), or of what was seen (V)."""
    if not (saved / "learner.pt").exists():
        return None
    try:
        part: Any = policy()
        if trained.get("finetune"):
            part = part.learns()  # what its learner was given
        context = {"spec": part.spec, "total_steps": 1, "execute": trained.get("execute")}
        learner = build(trained["learner"], policy=part, **context)
        learner.set_state(checkpoint.load_state(saved, "learner"))
    except (ConfigError, CheckpointError, KeyError, RuntimeError, AttributeError):
        return None
    return worth_by(learner)


def worth_by(learner: nn.Module) -> Worth | None:
    """How `learner` judges: the least of its critics, or its value; None where it has neither."""
    critic: Any = getattr(learner, "critic", None)
    if critic is not None and hasattr(critic, "each") and getattr(critic, "out", 0) == 1:
        return lambda acts: critic(acts.seen, acts.choice).amin(0)
    value: Any = getattr(learner, "value", None)
    if isinstance(value, nn.Module) and not hasattr(value, "memory"):
        return lambda acts: value(acts.seen)
    return None
