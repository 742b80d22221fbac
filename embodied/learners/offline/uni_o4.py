"""Uni-O4: PPO's objective on recordings, then online PPO unchanged (Lei et al., 2024).

    1  Q and V by IQL, and n Gaussian policies by cloning, held apart where the data have modes:
       L_i = -log pi_i(a|s) - alpha (log pi_i(a|s) - max_j log pi_j(a|s))
    2  for each policy PPO's clipped loss on the data's states with actions of its frozen copy
       pi_k and the standardised advantages Q - V; clip and learning rate fall to 0
    3  every `gate_every` updates the gate compares the policy with the best so far of its line in a
       model of the dynamics: if it is better, it becomes pi_k

The policy is the best of the n. `learner=ppo init=RUN` goes on with it online. Differences from the
published code: the term that holds the policies apart has gradients through the maximum (theirs
only scales the cloning); the gate has fixed starts and asks for more than the standard error.

ModelGate: judges a policy by a model's roll-outs and a critic, without the environment (AM-Q).

The score of a start state is the mean of Q(s, pi(s)) along a roll-out of the policy's most typical
actions in the model. Starts are fixed, so that two policies are compared in pairs: a better one is
ahead by more than the standard error of the differences. Otherwise the maximum over many policies
would be their noise (as in the published code of Uni-O4, which draws new starts each time).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.bounds import (
    Count,
    CountOrZero,
    Few,
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
)
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, length, take, to, under
from embodied.datasets.lerobot.pictures import load
from embodied.learners.learner import Learner, RunPlan
from embodied.learners.offline import iql
from embodied.learners.offline.iql import Iql
from embodied.learners.on_policy.ppo_cloning import fit_step
from embodied.learners.on_policy.ppo_parts import clip_loss
from embodied.models import dynamics
from embodied.models.dynamics import Dynamics
from embodied.nn.optim import Adam
from embodied.policies import deterministic
from embodied.policies.deterministic import Deterministic
from embodied.policies.diagonal_gaussian import DiagonalGaussian


@dataclass(eq=False)
class ModelGate:
    """Compares policies from the observations `starts` [n, ...], over `horizon` steps of `model`
    (None: at the starts alone). `q` returns the values [n] of observations and actions [n, A]."""

    starts: Tensors
    q: Callable[[Tensors, Tensor], Tensor]
    model: Dynamics | None = None
    horizon: int = 0

    @torch.no_grad()
    def scores(self, policy: Policy) -> Tensor:
        """The score [n] of each start; a roll-out counts until the model terminates it."""
        obs = self.starts
        n = length(obs)
        total = torch.zeros(n, device=next(iter(obs.values())).device)
        count = torch.zeros_like(total)
        running = torch.ones_like(total, dtype=torch.bool)
        for step in range(self.horizon + 1):
            plan, _ = policy.act(obs, policy.initial(n), policy.sample_noise(n))
            action = plan[:, 0]
            total = total + torch.where(running, self.q(obs, action), 0.0)
            count = count + running
            if self.model is None or step == self.horizon:
                break
            noise = torch.zeros(n, self.model.noise_size, device=running.device)
            made = self.model.step(obs, action, noise)
            obs = made.next_obs
            running = running & ~made.terminated
        return total / count

    def better(self, scores: Tensor, than: Tensor) -> bool:
        """Whether the mean of the paired differences of scores is above their standard error."""
        gain = scores - than
        return bool(gain.mean() > gain.std() / len(gain) ** 0.5)


LOG_STD = (-5.0, 0.0)  # bounds of the policies' log std


@dataclass(frozen=True)
class Config:
    batch_size: Count = 256  # transitions per update
    values: iql.Config = field(default_factory=iql.Config)  # Q and V; what IQL extracts is unused
    members: Few = 4  # policies
    apart: NonNegative = 0.1  # alpha: how much the policies are held apart
    clone: Fraction = 0.8  # share of the updates that fit values and clone; then PPO
    lr: PositiveFraction = 1e-4  # Adam's learning rate of the policies
    clip: Positive = 0.25  # PPO's eps at the start of its part
    grad_clip: NonNegative = 0.5  # largest norm of a policy's gradient; 0: no limit
    model: str | None = None  # folder of a model of the dynamics; null: compare at the starts alone
    gate_every: Count = 100  # updates between two comparisons
    gate_starts: Count = 512  # states at which its roll-outs begin
    gate_horizon: CountOrZero = 20  # steps of a roll-out; shorter if its values exceed the data's


class UniO4(Learner):
    """`update`: a step of the values and of cloning, later one of PPO for each policy."""

    data = "offline"
    usual_policy = "diagonal_gaussian"
    counters = ("done", "best", "accepted")

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy)
        if config.values.batch_size not in (iql.Config.batch_size, config.batch_size):
            raise ConfigError("values.batch_size has no effect: learner.batch_size is for both")
        if not isinstance(policy, DiagonalGaussian) or policy.chunk > 1:
            raise ConfigError("learner=uni_o4 needs single actions: policy=diagonal_gaussian")
        if policy.encoder.norm.limit.isfinite():
            raise ConfigError("learner=uni_o4 clones its own policies anew: leave init out")
        self.total = run.updates
        self.cloned = round(config.clone * run.updates)
        plan = replace(run, updates=max(self.cloned, 1))
        unused = Deterministic(deterministic.Config(hidden=(32,)), policy.spec)  # IQL's own policy
        self.values = Iql(config.values, unused, spec, plan)
        self.gamma = config.values.gamma
        self.n_step = config.values.n_step
        made = [
            build(policy.node, DiagonalGaussian, spec=policy.spec) for _ in range(config.members)
        ]
        self.members = nn.ModuleList(made)
        self.kept = copy.deepcopy(self.members).requires_grad_(False)  # pi_k
        self.adams = [Adam(member.parameters(), config.lr) for member in made]
        self.optims = {f"member_{number}": adam for number, adam in enumerate(self.adams)}
        self.optims |= {f"values_{name}": adam for name, adam in self.values.optims.items()}
        self.model = () if config.model is None else (model_of(config.model, spec),)
        self.gate: ModelGate | None = None
        self.done = self.accepted = 0
        self.best = torch.empty(0)  # scores of `kept`, [members, starts]

    def lines(self) -> list[tuple[Adam, Any, Any]]:
        """The optimiser, the policy and the frozen one of each line."""
        return list(zip(self.adams, self.members, self.kept, strict=True))

    def fit(self, transitions: Tensors) -> None:
        self.values.fit(transitions)
        self.policy.fit(transitions)
        for _, member, kept in self.lines():
            member.fit(transitions)
            kept.fit(transitions)
        order = torch.randperm(length(transitions), generator=torch.Generator().manual_seed(0))
        starts = load(take(under(transitions, "obs"), order[: self.config.gate_starts]))
        device = self.adams[0].param_groups[0]["params"][0].device
        model = self.model[0].to(device) if self.model else None
        self.gate = ModelGate(to(starts, device), self.q, model, self.config.gate_horizon)

    def q(self, obs: Tensors, action: Tensor) -> Tensor:
        """min_i Q'_i(s, a), [N], of actions as they are executed."""
        return self.values.target(obs, action.clamp(-1, 1)).amin(0)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        if self.done < self.cloned:
            self.values.done = self.done
            metrics = self.values.update(batch) | {"clone_loss": self._clone(batch)}
            self.policy.load_state_dict(self.members[0].state_dict())
        else:
            if self.done == self.cloned:
                self._begin()
            metrics = self._improve(batch)
        self.done += 1
        return metrics

    def _clone(self, batch: Tensors) -> Tensor:
        """A step of cloning of all policies; the loss."""
        obs = under(batch, "obs")
        log_prob = torch.stack(
            [member.log_prob(obs, batch["action"]) for _, member, _ in self.lines()]
        )
        apart = log_prob - log_prob.amax(0)
        loss = -(log_prob + self.config.apart * apart).mean(1).sum()
        loss.backward()
        for adam, member, _ in self.lines():
            adam.step()
            member.log_std.data.clamp_(*LOG_STD)
        return loss.detach()

    def _begin(self) -> None:
        """Freeze the cloned policies as the first pi_k, and score them."""
        if self.gate is None:
            raise ConfigError("learner=uni_o4 improves on a dataset: data=offline demos=DIR")
        self.kept.load_state_dict(self.members.state_dict())
        self.best = torch.stack([self.gate.scores(member) for _, member, _ in self.lines()])
        self._deploy()

    def _improve(self, batch: Tensors) -> Tensors:
        """A step of PPO of each policy and, if it is due, the gate."""
        left = 1 - (self.done - self.cloned) / max(self.total - self.cloned, 1)
        obs = under(batch, "obs")
        losses: list[Tensor] = []
        for adam, member, kept in self.lines():
            with torch.no_grad():
                noise = kept.sample_noise(len(batch["action"]), True)
                action = kept(obs) + kept.log_std.exp() * noise
                old = kept.log_prob(obs, action)
                gap = self.q(obs, action) - self.values.value(obs)
                advantage = (gap - gap.mean()) / gap.std(correction=0).clamp(min=1e-6)
            log_prob = member.log_prob(obs, action)
            loss = clip_loss(log_prob, old, advantage, self.config.clip * left)[0].mean()
            adam.param_groups[0]["lr"] = self.config.lr * left
            fit_step(adam, loss, self.config.grad_clip)
            member.log_std.data.clamp_(*LOG_STD)
            losses.append(loss.detach())
        if (self.done - self.cloned + 1) % self.config.gate_every == 0:
            self._ask_gate()
        return {
            "policy_loss": torch.stack(losses).mean(),
            "score": self.best.mean(1).amax(),
            "accepted": torch.tensor(float(self.accepted)),
        }

    def _ask_gate(self) -> None:
        """Each policy that is better than the best of its line becomes its pi_k."""
        assert self.gate is not None
        for line, (_, member, kept) in enumerate(self.lines()):
            scores = self.gate.scores(member)
            if self.gate.better(scores, self.best[line]):
                kept.load_state_dict(member.state_dict())
                self.best[line] = scores
                self.accepted += 1
        self._deploy()

    def _deploy(self) -> None:
        """Act as the best policy of all lines."""
        best = self.kept[int(self.best.mean(1).argmax())]
        self.policy.load_state_dict(best.state_dict())


def model_of(folder: str, spec: Spec) -> dynamics.Dynamics:
    """The model of `folder`; ConfigError if it leaves out an observation of `spec`."""
    model = dynamics.load(folder).requires_grad_(False)
    if missing := [name for name in spec.obs if name not in model.spec.obs]:
        raise ConfigError(
            f"the model {folder} does not predict {', '.join(missing)}: fit one to all observations"
        )
    return model
