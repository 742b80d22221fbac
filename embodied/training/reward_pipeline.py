"""RewardPipeline: the one place where a run's reward is applied.

    off-policy, frozen reward     computed when transitions and demonstrations are stored
    off-policy, learned reward    computed when transitions are sampled
    on-policy                     computed for every complete batch

A learned reward is updated after each update of the learner, from the same batch with the
environment's rewards.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.buffers.source import ENV_REWARD, Relabel, Source
from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, build
from embodied.core.env import FiniteCheck, Step, VecEnv
from embodied.core.reward import (
    AugmentsEnv,
    AugmentsEpisodes,
    FollowsPolicy,
    HasComponents,
    LearnsFromRollouts,
    ObservesSteps,
    RestartsCritic,
    Reward,
    Scheduled,
    Stateful,
    extra_columns,
)
from embodied.core.tensors import Tensors
from embodied.learners.learner import HasCritic, Learner
from embodied.nn.networks import redraw
from embodied.training import warning_signs
from embodied.training.config import RunConfig

if TYPE_CHECKING:
    from embodied.datasets.lerobot.reader import Episodes

RECENT = 16  # steps of transitions for the mean components of a frozen reward
PIECE = 4096  # transitions of demonstrations in one call of the reward


class RewardPipeline:
    """Applies `reward` (None: the environment's) in `env`, which has the observations it needs.
    `reward_only_keys`: those observations' columns; a frozen reward's are not stored."""

    def __init__(
        self,
        env: VecEnv,
        reward: Reward | None = None,
        reward_only_keys: frozenset[str] = frozenset(),
    ) -> None:
        self.env, self.reward, self.reward_only_keys = env, reward, reward_only_keys
        self.finite = FiniteCheck(f"the reward {type(reward).__name__}", "transitions")
        self.recent: deque[Tensors] = deque(maxlen=RECENT)
        self.new_rows = 0  # stored since `mean_of_stored` was called
        self.last_batch: tuple[Tensors, Tensor] | None = None  # transitions and their rewards

    @property
    def frozen(self) -> bool:
        """Whether there is a reward, and it does not learn."""
        return self.reward is not None and self.reward.frozen

    @property
    def learned(self) -> bool:
        return self.reward is not None and not self.reward.frozen

    def set_step(self, step: int) -> None:
        if isinstance(self.reward, Scheduled):
            self.reward.set_step(step)

    def observe_step(self, rows: Tensors, env_ids: Tensor, step: Step) -> None:
        """Transitions `rows` [n] of parallel envs `env_ids` [n] were completed by `step`."""
        if rows and isinstance(self.reward, ObservesSteps):
            self.reward.observe_step(rows, env_ids, step)

    def take_restart(self) -> int | None:
        """Updates to make at once with a new critic; None: the critic stays."""
        return self.reward.take_restart() if isinstance(self.reward, RestartsCritic) else None

    def rewarded(self, rows: Tensors) -> Tensor:
        """The rewards of transitions; NotFinite names a reward that is not a number."""
        assert self.reward is not None
        rewards = self.reward(rows)
        self.finite.add(rewards, {})
        return rewards

    def before_storing(self, rows: Tensors) -> Tensors:
        if not rows or not self.frozen:
            return rows
        if isinstance(self.reward, HasComponents):
            self.recent.append(tt.each(rows, torch.clone))
        kept = {key: value for key, value in rows.items() if key not in self.reward_only_keys}
        return {**kept, "reward": self.rewarded(rows)}

    def augment_demonstrations(self, episodes: Episodes) -> Episodes:
        """The demonstrations with the observations that the reward adds to recorded ones."""
        if not isinstance(self.reward, AugmentsEpisodes):
            return episodes
        from embodied.datasets.transitions import with_observations

        return with_observations(episodes, self.reward.augment_episode)

    def demonstrations(self, rows: Tensors, learner: Learner, device: torch.device) -> Tensors:
        """Transitions of demonstrations, rewarded if the reward is frozen."""
        if not self.frozen:
            return rows
        if missing := set(self.env.spec.obs) - set(tt.under(rows, "obs")):
            raise ConfigError(
                f"the demonstrations have no {min(missing)}, which this reward observes: leave out "
                "demos, or choose another reward"
            )
        if learner.columns:
            raise ConfigError(
                "this learner uses returns of the rewards in the demonstrations: reward=null"
            )
        parts: list[Tensor] = []
        for at in range(0, tt.length(rows), PIECE):
            piece = {key: leaf[at : at + PIECE].to(device) for key, leaf in rows.items()}
            parts.append(self.rewarded(piece).to(rows["reward"]))
        kept = {key: value for key, value in rows.items() if key not in self.reward_only_keys}
        return {**kept, "reward": torch.cat(parts)}

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Columns (bool) that the reward needs of every transition, also of demonstrations."""
        return extra_columns(self.reward)

    def sampled(self, source: Source) -> Source:
        """The transitions of `source`, rewarded as they are sampled where the reward learns."""
        return Relabel(source, self.rewarded) if self.learned else source

    def update(self, batch: Tensors, env_reward: Tensor | None) -> dict[str, Tensor]:
        """Update a learned reward from a sampled batch; returns its metrics."""
        if self.reward is None or self.reward.frozen:
            return {}
        rows = batch if env_reward is None else {**batch, "reward": env_reward}
        return _named(self.reward.update(rows))

    def on_policy_batch(self, batch: Tensors, step: int) -> dict[str, Tensor]:
        """Replace `batch["reward"]` [T, B] by the reward's, and the discounts if it has its own;
        returns the update's metrics."""
        reward = self.reward
        if reward is None:
            return {}
        self.set_step(step)
        at = batch["valid"].flatten().nonzero().flatten()
        grid = {k: v for k, v in batch.items() if not k.startswith("carry/")}
        rows = tt.each(grid, lambda value: value.flatten(0, 1)[at])
        rewards = torch.zeros_like(batch["reward"]).flatten()
        rewards[at] = self.rewarded(rows).to(rewards.dtype)
        self.finite.read()
        self.last_batch = rows, rewards[at]
        if isinstance(reward, LearnsFromRollouts):
            discounts = reward.discounts(grid)
            metrics = _named(reward.update_rollout(grid))
            batch |= {"reward": rewards.view_as(batch["reward"]), "discount": discounts}
            return metrics
        batch["reward"] = rewards.view_as(batch["reward"])
        return {} if reward.frozen else _named(reward.update(rows))

    def mean_of_batch(self) -> dict[str, Tensor]:
        """Mean rewards, and of each component, of the last on-policy batch."""
        if self.reward is None or self.last_batch is None:
            return {}
        return warning_signs.describe(self.reward, *self.last_batch)

    @torch.no_grad()
    def mean_of_stored(self, replay: ReplayBuffer) -> dict[str, Tensor]:
        """Mean rewards, and of each component, of the transitions stored since the last call."""
        count, self.new_rows = min(self.new_rows, warning_signs.NEWEST, len(replay)), 0
        if self.reward is None or not count:
            return {}
        back = torch.arange(count, device=replay.device) + 1
        rows = replay.take((replay.cursor - back) % replay.capacity)
        if not self.reward.frozen:
            return warning_signs.describe(self.reward, rows, self.reward(rows))
        recent = tt.cat(self.recent) if self.recent else None
        parts = {} if recent is None else warning_signs.describe(self.reward, recent)
        return {**parts, warning_signs.PROXY: rows["reward"].mean()}

    def get_state(self) -> dict[str, Any] | None:
        self.finite.read()  # a checkpoint holds only finite rewards
        return self.reward.get_state() if isinstance(self.reward, Stateful) else None

    def set_state(self, state: dict[str, Any] | None) -> None:
        if isinstance(self.reward, Stateful) and state is not None:
            self.reward.set_state(state)


def _named(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"reward_{key}": value for key, value in metrics.items()}


def pop_env_reward(batch: Tensors) -> Tensor | None:
    """The environment's own rewards, taken out of a batch that was relabelled."""
    return batch.pop(ENV_REWARD, None)


def make_reward(config: RunConfig, env: VecEnv, gamma: float, device: torch.device) -> Reward:
    """The reward of `config.reward` for transitions of `env`."""
    assert config.reward is not None
    return build(
        config.reward,
        Reward,
        spec=env.spec,
        gamma=gamma,
        num_envs=env.num_envs,
        device=device,
        seed=distributed.own_seed(config.seed),
        folder=Path(config.out) / "reward",
    )


def build_reward(
    config: RunConfig, env: VecEnv, learner: Learner, device: torch.device
) -> RewardPipeline:
    """The pipeline of `config.reward`; its environment has the observations that it needs."""
    if config.reward is None:
        return RewardPipeline(env)
    reward = make_reward(config, env, learner.gamma, device)
    if learner.n_step > 1 and not reward.sums_steps:
        raise ConfigError("this reward is that of a single decision: learner.n_step=1")
    if isinstance(reward, LearnsFromRollouts) and config.data.regime != "on_policy":
        raise ConfigError("this reward learns from whole rollouts: take an on-policy learner")
    restarts = isinstance(reward, RestartsCritic) and reward.restarts_critic
    if restarts and (config.data.regime != "off_policy" or not isinstance(learner, HasCritic)):
        raise ConfigError("reward.restart needs an off-policy actor-critic: set it to null")
    if restarts:
        redraw(
            copy.deepcopy(cast(HasCritic, learner).critic)
        )  # a ConfigError is raised before training
    if isinstance(reward, FollowsPolicy):
        reward.follow(learner.policy)
    augmented = augment(env, reward, learner.gamma)
    added = set(augmented.spec.obs) - set(env.spec.obs)
    keys = frozenset(f"{when}/{name}" for name in added for when in ("obs", "next_obs"))
    return RewardPipeline(augmented, reward, keys)


def augment(env: VecEnv, reward: Reward, gamma: float) -> VecEnv:
    """`env` with the observations that `reward` needs, added where the environment runs."""
    if not isinstance(reward, AugmentsEnv):
        return env
    elsewhere = getattr(env, "augmented", None)  # parallel envs that other processes step
    if elsewhere is None:
        return reward.augment_env(env)
    if reward.needs_local_env:
        raise ConfigError(
            "this reward keeps what the environment shows in the training process: data.actors=0"
        )
    return elsewhere(gamma)
