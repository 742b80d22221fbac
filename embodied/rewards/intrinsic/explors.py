"""ExploRS: a learned reward beside a bonus for rarely visited states (Devidze et al., 2022).

    r' = env_weight r + bonus / sqrt((bonus / most_bonus)^2 + N(s')) + intrinsic R_phi(s, a)

N counts visits of an abstraction of the state, so that the bonus starts at `most_bonus` and fades.
R_phi makes lasting what the bonus has found: after the first success it ascends, over the newest
and the best episodes,

    mean_t pi(a_t|s_t) (G_t - V(s_t)) (R_phi(s_t, a_t) - sum_b pi(b|s_t) R_phi(s_t, b))

which is how a step of the policy on R_phi changes the return: G are returns of the environment's
rewards and V is fitted to them.

"Exploration-guided reward shaping for reinforcement learning under sparse rewards" (2022).
Differences from the paper: pi is fitted to the learner's newest actions, so that any learner will
do; R_phi is bounded by a tanh.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.buffers.pending import TrajectoryColumns
from embodied.core.bounds import Count, NonNegative, Number, Positive, PositiveFraction, Units
from embodied.core.build import ConfigError
from embodied.core.choices import Choices
from embodied.core.device import forked
from embodied.core.env import Step
from embodied.core.remembered import Remembered
from embodied.core.reward import SummedReward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, cat, state_to
from embodied.nn.networks import mlp
from embodied.nn.optim import Adam, gradient_step, minibatches
from embodied.rewards.intrinsic.features import ObservationFeatures

CELLS = 2**16  # of the table of visits, found by a hash


@dataclass(frozen=True)
class ExploRsConfig:
    """Settings of ExploRS, for a single choice of actions."""

    env_weight: Number = 1.0  # weight of the environment's reward
    intrinsic: NonNegative = 0.1  # weight of R_phi; 0: visits alone
    bonus: NonNegative = 1.0  # lambda: how slowly the bonus fades
    most_bonus: Positive = 1.0  # the bonus of a state that was never visited
    leaves: tuple[str, ...] | None = None  # observations that it sees and counts; null: all
    grid: Positive = 10.0  # cells of visits per standard deviation of a vector's elements
    hidden: tuple[Units, ...] = (64,)  # units of the hidden layers
    lr: PositiveFraction = 1e-3  # Adam's learning rate of R_phi
    critic_lr: PositiveFraction = 5e-3  # Adam's learning rate of V and of the policy's estimate
    batch_size: Count = 256  # transitions per gradient step of the policy's estimate
    every: Count = 20  # episodes between two updates of R_phi
    steps: Count = 10  # gradient steps of an update
    recent: Count = 5  # newest episodes that it learns from
    best: Count = 5  # best episodes, likewise


class ExploRs(Remembered, SummedReward):
    """ExploRS. Learned: transitions are rewarded with the visits and R_phi of now."""

    frozen = False
    remembered = (
        *("nets", "optimizers", "generator", "features", "visits", "salt"),
        *("running", "newest", "finest", "finished", "armed"),
    )

    def __init__(
        self, config: ExploRsConfig, spec: Spec, num_envs: int, device: torch.device, seed: int
    ) -> None:
        self.config = config
        self.num_envs = num_envs
        self.choices = Choices(spec).to(device)
        if self.choices.numbers or len(self.choices.counts) != 1:
            raise ConfigError("this reward needs actions that are one choice of several")
        self.features = ObservationFeatures(spec.obs, config.leaves, device)
        actions = self.choices.counts[0]
        outputs = {"reward": actions, "policy": actions, "value": 1}
        rates = {"reward": config.lr, "policy": config.critic_lr, "value": config.critic_lr}
        with forked(seed):
            self.nets = nn.ModuleDict(
                {key: mlp(self.features.size, config.hidden, n) for key, n in outputs.items()}
            ).to(device)
            self.salt = (torch.randint(2**62, (self.features.size,)) * 2 + 1).to(device)
        self.optimizers = {
            key: Adam(net.parameters(), lr=rates[key], local=True) for key, net in self.nets.items()
        }
        self.generator = torch.Generator(device).manual_seed(seed)
        self.visits = torch.zeros(CELLS, device=device)
        self.running = TrajectoryColumns(("returns",))
        self.newest: deque[Tensors] = deque(maxlen=config.recent)
        self.finest: list[Tensors] = []
        self.finished = 0  # episodes since the last update of R_phi
        self.armed = False  # whether an episode succeeded

    @torch.no_grad()
    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        if len(transitions["reward"]) != self.num_envs:
            raise ConfigError("this reward is that of single steps: policy.chunk=1")
        self.features.update(transitions, "next_obs")
        cells = self.cells(transitions)
        self.visits.index_add_(0, cells, torch.ones_like(cells, dtype=torch.float32))
        won = step.log.get("success", transitions["reward"] > 0)
        self.armed = self.armed or bool(won.any())
        kept = {key: v for key, v in transitions.items() if not key.startswith("next_obs/")}
        done = self.running.push({**kept, "env": env_ids}, env_ids, step.ended)
        if done:
            lengths = torch.unique_consecutive(done["env"], return_counts=True)[1].tolist()
            parts = {key: leaf.split(lengths) for key, leaf in done.items()}
            for place in range(len(lengths)):
                self._keep({key: leaf[place] for key, leaf in parts.items()})

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state_to(state, self.visits.device))

    def _keep(self, episode: Tensors) -> None:
        """Keep an episode among the newest, and if it is one of the best among those."""
        self.newest.append(episode)
        self.finest.append(episode)
        self.finest.sort(key=lambda each: -float(each["returns"][0]))
        del self.finest[self.config.best :]
        self.finished += 1

    def cells(self, transitions: Tensors) -> Tensor:
        """The places [N] in the table of visits of the states that transitions lead to."""
        seen = (self.features(transitions, "next_obs") * self.config.grid).round().long()
        # Integer overflow wraps around, which makes this a hash; its highest bits are the place.
        return ((seen * self.salt).sum(1) >> 48) % CELLS

    @torch.no_grad()
    def components(self, transitions: Tensors) -> Tensors:
        config = self.config
        least = (config.bonus / config.most_bonus) ** 2
        visits = self.visits[self.cells(transitions)]
        found = {
            "env": config.env_weight * transitions["reward"],
            "visits": config.bonus * (least + visits).clamp(min=1e-8).rsqrt(),
        }
        if self.armed and config.intrinsic:
            given = self.rewards(self.features(transitions, "obs"))
            chosen = given.gather(1, self._chosen(transitions)).squeeze(1)
            found["learned"] = config.intrinsic * chosen
        return found

    def rewards(self, x: Tensor) -> Tensor:
        """R_phi [N, A] of features [N, F]."""
        return torch.tanh(self.nets["reward"](x))

    def _chosen(self, transitions: Tensors) -> Tensor:
        """The classes [N, 1] of actions."""
        return self.choices.split(transitions["action"])[0]

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        kept = {k: v for k, v in transitions.items() if k == "action" or k.startswith("obs/")}
        metrics = minibatches(self._imitate, kept, self.config.batch_size, self.generator)
        if self.armed and self.config.intrinsic and self.finished >= self.config.every:
            self.finished = 0
            episodes = cat([*self.newest, *self.finest])
            for _ in range(self.config.steps):
                self._ascend(episodes)
        return metrics

    def _imitate(self, transitions: Tensors) -> dict[str, Tensor]:
        """A step of the estimate of the learner's policy."""
        logits = self.nets["policy"](self.features(transitions, "obs"))
        loss = functional.cross_entropy(logits, self._chosen(transitions)[:, 0])
        gradient_step(self.optimizers["policy"], loss)
        return {"policy_loss": loss.detach()}

    def _ascend(self, episodes: Tensors) -> None:
        """A step of V and one of R_phi."""
        x = self.features(episodes, "obs")
        value = self.nets["value"](x).squeeze(1)
        gradient_step(self.optimizers["value"], functional.mse_loss(value, episodes["returns"]))
        with torch.no_grad():
            policy = self.nets["policy"](x).softmax(1)
        advantage = episodes["returns"] - value.detach()
        worth = informative(self.rewards(x), policy, self._chosen(episodes), advantage)
        gradient_step(self.optimizers["reward"], -worth)


def informative(reward: Tensor, policy: Tensor, chosen: Tensor, advantage: Tensor) -> Tensor:
    """mean pi(a|s) A (R(s, a) - sum_b pi(b|s) R(s, b)); `reward` and `policy` [N, A], `chosen`
    [N, 1], `advantage` [N]."""
    mine = reward.gather(1, chosen).squeeze(1) - (policy * reward).sum(1)
    return (policy.gather(1, chosen).squeeze(1) * advantage * mine).mean()
