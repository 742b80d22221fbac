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
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.reward import HasComponents, Reward
from embodied.core.tensors import Tensors
from embodied.reports.load_reward import make_reward, of_run
from embodied.viewer.session.episode import TERM, Moment
from embodied.viewer.session.reward_image import SCORE, Lookout, Scores, lookout_of
from embodied.viewer.session.snapshot import Packed

VALUE, MODEL = "value", "reward of the run"
Worth = Callable[[Actor], Tensor]


class Judge:
    """`worth` says what a decision is worth, `reward` pays for steps; either may be None. `lookout`
    takes the pictures that the reward looks at, if it does.

    One that cannot judge what it is given is left out from there on, and `trouble` says why.
    """

    def __init__(
        self,
        worth: Worth | None,
        reward: Reward | None,
        gamma: float,
        lookout: Lookout | None = None,
    ) -> None:
        self.worth, self.reward, self.gamma = worth, reward, gamma
        self.lookout = Lookout(None, False) if lookout is None else lookout
        self.trouble = ""
        self._last: float | None = None

    def begin(self) -> None:
        """A new episode."""
        self._last = None

    def photo(self) -> Packed | None:
        """What the reward sees of the world as it is."""
        return None if self.reward is None else self.lookout.take()

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
        look = self.lookout
        after_leaf = look.leaf(after.photo)
        if after_leaf and isinstance(self.reward, Scores):
            return {SCORE: float(self.reward.score(*after_leaf.values())[0])}
        rows = rows_of(before, after, self.gamma)
        rows |= tt.nest(look.leaf(before.photo), "obs") | tt.nest(after_leaf, "next_obs")
        if look.endless:
            rows["discount"] = torch.tensor([self.gamma])
        if isinstance(self.reward, HasComponents):
            parts = self.reward.components(rows)
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


def judge_of(folder: Path, policy: Callable[[], Policy], env: VecEnv) -> Judge | None:
    """Of the newest checkpoint in a run folder; None where it has neither critic nor reward.

    `policy` gives the policy of that checkpoint, `env` is the world that is looked at.
    """
    try:
        saved = checkpoint.find(folder)
    except CheckpointError:
        return None
    file = folder / "run.yaml"
    trained: Node = yaml.safe_load(file.read_text()) if file.exists() else {}
    gamma = float((trained.get("learner") or {}).get("gamma", 0.99))
    reward, look = _reward(folder, policy, gamma, env) if trained.get("reward") else (None, None)
    worth = _worth(saved, trained, policy) if trained.get("learner") else None
    return None if reward is None and worth is None else Judge(worth, reward, gamma, look)


def _reward(
    folder: Path, policy: Callable[[], Policy], gamma: float, env: VecEnv
) -> tuple[Reward | None, Lookout | None]:
    """The run's own reward, as it has been taught, and what takes the pictures that it looks at;
    those that look at anything else are left to `embodied reward`, as the world here has it not."""
    try:
        node, state = of_run(folder)
        reward = make_reward(node, state, policy().spec, gamma)
        return reward, lookout_of(reward, env)
    except (ConfigError, CheckpointError, KeyError, RuntimeError):
        return None, None


def _worth(saved: Path, trained: Node, policy: Callable[[], Policy]) -> Worth | None:
    """By the critic in learner.pt: of the decision (Q), or of what was seen (V)."""
    if not (saved / "learner.pt").exists():
        return None
    try:
        part: Any = policy()
        if trained.get("finetune"):
            part = part.trainable()  # the part that its learner trained
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
        return lambda acts: critic(acts.decision_obs, acts.stored_action).amin(0)
    value: Any = getattr(learner, "value", None)
    if isinstance(value, nn.Module) and not hasattr(value, "memory"):
        return lambda acts: value(acts.decision_obs)
    return None
