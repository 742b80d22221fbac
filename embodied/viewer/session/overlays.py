"""Values and rewards over the displayed episode: the run's critic and the terms of its reward.

Both come from the run's newest checkpoint and are evaluated for whichever policy acts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, Node, build
from embodied.core.checkpoint import CheckpointError
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.reward import HasComponents, Reward
from embodied.core.saved_node import read_run_settings, require_inside
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner, RunPlan
from embodied.reports.load_reward import make_reward, of_run
from embodied.viewer.session.episode import TERM, Moment
from embodied.viewer.session.reward_image import SCORE, RewardCamera, ScoresImages, reward_camera
from embodied.viewer.session.snapshot import CompressedImage

VALUE, MODEL = "value", "reward of the run"
ValueFunction = Callable[[Actor], Tensor]


class StepOverlay:
    """Evaluates the critic `value` and the `reward` on each step; either may be None.

    `camera` captures the images that the reward is computed from. If the critic or the reward fails
    on this environment's data, it is dropped, and `trouble` says why.
    """

    def __init__(
        self,
        value: ValueFunction | None,
        reward: Reward | None,
        gamma: float,
        camera: RewardCamera | None = None,
    ) -> None:
        self.value, self.reward, self.gamma = value, reward, gamma
        self.camera = RewardCamera(None, "", False) if camera is None else camera
        self.trouble = ""
        self._last: float | None = None

    def reset(self) -> None:
        """Start a new episode."""
        self._last = None

    def reward_image(self) -> CompressedImage | None:
        """The image for the reward in the current state; None if the reward needs none."""
        return None if self.reward is None else self.camera.capture()

    @torch.no_grad()
    def numbers(self, before: Moment, after: Moment, acts: object) -> dict[str, float]:
        """The value and the reward (components) of the step from `before` to `after`, by name."""
        found: dict[str, float] = {}
        if self.value is not None and isinstance(acts, Actor):
            found |= self._guarded(lambda: self._critic_value(after, acts), "value")
        if self.reward is not None:
            found |= self._guarded(lambda: self._reward_numbers(before, after), "reward")
        return found

    def _guarded(self, compute: Callable[[], dict[str, float]], what: str) -> dict[str, float]:
        try:
            return compute()
        except (RuntimeError, KeyError, ConfigError, NotImplementedError) as error:
            setattr(self, what, None)
            self.trouble = f"{'critic' if what == 'value' else 'reward'} not shown: {error}"[:200]
            return {}

    def _critic_value(self, after: Moment, acts: Actor) -> dict[str, float]:
        if after.is_decision and self.value is not None:
            self._last = float(self.value(acts)[0])
        return {} if self._last is None else {VALUE: self._last}

    def _reward_numbers(self, before: Moment, after: Moment) -> dict[str, float]:
        assert self.reward is not None
        camera = self.camera
        image = camera.observation(after.reward_image)
        if image and isinstance(self.reward, ScoresImages):
            return {SCORE: float(self.reward.score(*image.values())[0])}
        assert after.action is not None
        ended = after.end == "ended" and not camera.hides_terminations
        transition: Tensors = {
            **tt.nest(before.obs, "obs"),
            **tt.nest(after.next_obs, "next_obs"),
            "action": torch.tensor([after.action]),
            "reward": torch.tensor([after.reward]),
            "discount": torch.tensor([0.0 if ended else self.gamma]),
            **tt.nest(camera.observation(before.reward_image), "obs"),
            **tt.nest(image, "next_obs"),
        }
        if isinstance(self.reward, HasComponents):
            parts = self.reward.components(transition)
            return {f"{TERM}{name}": float(value[0]) for name, value in parts.items()}
        return {MODEL: float(self.reward(transition)[0])}


def make_step_overlay(
    folder: Path, policy: Callable[[], Policy], env: VecEnv
) -> StepOverlay | None:
    """The overlay for the newest checkpoint of run `folder`; None if it has neither critic nor
    reward.

    `policy` loads the policy of that checkpoint, `env` is the displayed environment.
    """
    try:
        saved = checkpoint.find(folder)
    except CheckpointError:
        return None
    file = folder / "run.yaml"
    trained = read_run_settings(file) if file.exists() else {}
    gamma = float((trained.get("learner") or {}).get("gamma", 0.99))
    reward, camera = _reward(folder, policy, gamma, env) if trained.get("reward") else (None, None)
    value = _value_function(saved, trained, policy) if trained.get("learner") else None
    return None if reward is None and value is None else StepOverlay(value, reward, gamma, camera)


def _reward(
    folder: Path, policy: Callable[[], Policy], gamma: float, env: VecEnv
) -> tuple[Reward | None, RewardCamera | None]:
    """The run's trained reward and the camera for it; (None, None) if the displayed environment
    lacks observations that the reward needs."""
    try:
        node, state = of_run(folder)
        reward = make_reward(node, state, policy().spec, gamma)
        return reward, reward_camera(reward, env)
    except (ConfigError, CheckpointError, KeyError, RuntimeError):
        return None, None


def _value_function(
    saved: Path, trained: Node, policy: Callable[[], Policy]
) -> ValueFunction | None:
    """The critic saved in learner.pt: Q of the chosen action, or V of the observation."""
    if not (saved / "learner.pt").exists():
        return None
    try:
        part: Any = policy()
        if trained.get("finetune"):
            part = part.trainable()  # the part that its learner trained
        require_inside(trained["learner"], saved)
        plan = RunPlan(updates=1, execute=trained.get("execute"))
        learner = build(trained["learner"], Learner, policy=part, spec=part.spec, run=plan)
        learner.set_state(checkpoint.load_state(saved, "learner"))
    except (ConfigError, CheckpointError, KeyError, RuntimeError, AttributeError):
        return None
    # The minimum over the learner's critics, or its value network; None if it has neither.
    critic: Any = getattr(learner, "critic", None)
    if critic is not None and hasattr(critic, "each") and getattr(critic, "out", 0) == 1:
        return lambda acts: critic(acts.decision_obs, acts.stored_action).amin(0)
    value: Any = getattr(learner, "value", None)
    if isinstance(value, nn.Module) and not hasattr(value, "memory"):
        return lambda acts: value(acts.decision_obs)
    return None
