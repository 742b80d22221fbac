"""On-policy training: collect a batch with the newest policy, update from it, discard it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from embodied.buffers.rollout import RolloutBuffer
from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, build
from embodied.core.device import compared, free_bytes
from embodied.core.env import Step, VecEnv
from embodied.core.policy import Policy
from embodied.core.remembered import pack, unpack
from embodied.core.reward import Stateful
from embodied.core.tensors import Tensors
from embodied.learners.learner import HasStateValues, Learner, TakesDemonstrations
from embodied.teachers.teacher import Curriculum, StudentEstimates, TwoAgentTeacher
from embodied.training.collector import Collector, behaviour_of
from embodied.training.config import RunConfig
from embodied.training.demonstrations import imitated, rows_for
from embodied.training.reward_pipeline import RewardPipeline, build_reward
from embodied.training.task_sampling import SecondAgent, build_task_sampling
from embodied.training.trainer import RunParts, Trainer

SEED_OFFSET = 1_000_003  # from the seed of the first agent's environment to that of the second's


class OnPolicyLoop:
    """The run's steps count environment steps of all parallel envs (and processes) together.

    One update follows every `learner.horizon` decisions' worth of steps: horizon x execute in each
    parallel env. A decision that is still running then was made by older parameters, and is left
    out of the next batch, unless the learner `keeps_stale`. `estimates`: for a teacher that needs
    the learner's advantages and values. `second_agent`: another agent, which is stepped after each
    step of the first.
    """

    held_out = None
    memory = ""

    def __init__(
        self,
        collector: Collector,
        learner: Learner,
        rewards: RewardPipeline | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        estimates: StudentEstimates | None = None,
        second_agent: SecondAgent | None = None,
    ) -> None:
        self.collector, self.learner = collector, learner
        self.rewards = rewards or RewardPipeline(collector.env)
        self.stateful = dict(stateful or {})  # other parts that a checkpoint stores
        self.estimates, self.second_agent = estimates, second_agent
        self.data_metrics: Mapping[str, float] = {}
        device, count = collector.actor.device, collector.env.num_envs
        self.env_ids = torch.arange(count, device=device)
        self.steps = learner.horizon * collector.actor.execute
        self.adapt_every = learner.adapt_every * collector.actor.execute  # in steps
        self.buffer = RolloutBuffer(count, learner.horizon, device, learner.keep_batches)
        self.stale = torch.zeros(count, dtype=torch.bool, device=device)
        self.age = 0
        self._start_batch()

    @property
    def teacher(self) -> Curriculum | None:
        return cast("Curriculum | None", self.stateful.get("teacher"))

    def run(self, trainer: Trainer) -> None:
        stride, second = self.collector.env.num_envs * distributed.world(), self.second_agent
        while trainer.running:
            metrics, step = self.advance(trainer.step + stride)
            if second is None:
                trainer.advance(stride, metrics, step)
                continue
            metrics = metrics | second.metrics if metrics else metrics
            trainer.advance(stride + second.drain(), metrics, step)

    def advance(self, step: int = 0) -> tuple[dict[str, Tensor], Step]:
        """One step of all parallel envs, and an update if one is due. `step`: the run's step count
        after it. Returns the update's metrics (possibly empty) and the environment's step."""
        made = self.collector.act()
        if self.second_agent is not None:
            made = self.second_agent.after_step(made)
        rows, made = self.collector.complete(made)
        finished = self.collector.finished
        self.rewards.observe_step(rows, self.env_ids if finished is None else finished, made)
        if rows:
            self._store(rows, made)
        self.age += 1
        metrics = self._update(step) if self.age == self.steps else {}
        if self.adapt_every and self.age % self.adapt_every == 0:
            self.learner.adapt_behaviour(self.buffer.batch(self.carry))
        return metrics, made

    def restart(self, seed: int) -> None:
        self.collector.restart(seed)
        self._start_batch()

    def mean_reward(self) -> dict[str, Tensor]:
        return self.rewards.mean_of_batch()

    def _start_batch(self) -> None:
        """Clear the batch; keep the recurrent state from which its first decisions start."""
        actor = self.collector.actor
        carry = {k: v for k, v in actor.carry.items() if not k.startswith("row/")}
        self.carry = tt.each(carry, torch.clone)
        running = ~self.collector.first.to(actor.device) & (actor.cursor < actor.execute)
        drop = actor.execute > 1 and not self.learner.keeps_stale
        self.stale = running if drop else torch.zeros_like(running)
        self.buffer.clear()
        self.age = 0

    def _store(self, rows: Tensors, step: Step) -> None:
        finished = self.collector.finished
        flags = {"ended": step.ended, "first": self.collector.is_first}
        if self.estimates is not None:
            flags |= {key: step.log[key] for key in ("ticket", "learn")}
        if finished is None:
            self.buffer.add({**rows, **flags}, None)
            return
        rows = {**rows, **tt.take(flags, finished)}
        fresh = (~self.stale[finished]).nonzero().flatten()
        self.stale[finished] = False
        self.buffer.add(tt.take(rows, fresh), finished[fresh])

    def _update(self, step: int) -> dict[str, Tensor]:
        self.collector.finite.read()
        batch = self.buffer.batch(self.carry)
        metrics = self.rewards.on_policy_batch(batch, step)
        metrics = self.learner.update(batch) | metrics
        self.collector.actor.carry = self.learner.refreshed(self.collector.actor.carry)
        self._update_teacher(batch)
        self._start_batch()
        return metrics

    def _update_teacher(self, batch: Tensors) -> None:
        """Pass the learner's estimates of the newest batch to the teacher."""
        learner = self.learner
        if self.estimates is None or not isinstance(learner, HasStateValues):
            return
        if learner.estimates is None:
            return
        newest = slice(None), slice(len(self.env_ids))
        parts = {"ticket": batch["ticket"], **learner.estimates}
        valid = batch["valid"][newest]
        self.estimates.add_steps(**{key: part[newest][valid] for key, part in parts.items()})

    def get_state(self) -> dict[str, Any]:
        """All state but the learner's. If the environment cannot save its state, a resumed run
        starts a new batch."""
        self.collector.finite.read()  # a checkpoint holds only finite decisions
        state: dict[str, Any] = {
            "collector": None,
            "reward": self.rewards.get_state(),
            "parts": {name: pack(part.get_state()) for name, part in self.stateful.items()},
        }
        if not self.collector.savable:
            return state
        return state | {
            "collector": self.collector.get_state(),
            "rollout_buffer": self.buffer.get_state(),
            "carry": self.carry,
            "stale_decision": self.stale,
            "steps_in_batch": self.age,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.rewards.set_state(state["reward"])
        for name, part in self.stateful.items():
            part.set_state(unpack(state["parts"][name]))
        if state["collector"] is None:
            if self.stateful:
                self.collector.restart()
            return
        self.collector.set_state(state["collector"])
        self.buffer.set_state(state["rollout_buffer"])
        here = self.collector.actor.device
        self.carry, self.stale = tt.to(state["carry"], here), state["stale_decision"].to(here)
        self.age = state["steps_in_batch"]


def build_on_policy(parts: RunParts) -> OnPolicyLoop:
    """The loop; `episodes` are the demonstrations of a learner that uses them (ppo_demos)."""
    config, policy, learner, device = parts.config, parts.policy, parts.learner, parts.device
    episodes = parts.episodes
    assert parts.env is not None
    if isinstance(learner, TakesDemonstrations):
        if episodes is None:
            raise ConfigError("this learner needs demonstrations: demos=DIR")
        if learner.rows == "pairs":
            raise ConfigError("pairs are labelled in offline training only: data=offline")
    elif episodes is not None:
        raise ConfigError(
            "demos have no effect in on-policy training, except with a learner that imitates "
            "demonstrations (embodied list learners)"
        )
    tasks = build_task_sampling(config, parts.env, learner, device, build_second_agent)
    rewards = build_reward(config, tasks.env, learner, device)
    if isinstance(learner, TakesDemonstrations) and episodes is not None:
        rows = rows_for(episodes, policy, learner, config.execute)
        if learner.rows == "decisions":  # with the rewards of the run
            if rewards.learned:
                raise ConfigError("demonstrations would keep their recorded rewards: reward=null")
            rows = rewards.demonstrations(rows, learner, device)
        own = imitated(rows)
        learner.set_demonstrations(rows if own.all() else tt.take(rows, own.nonzero().flatten()))
    seed = distributed.own_seed(config.seed)
    acting = behaviour_of(learner, policy)
    memory = require_memory(config, rewards.env, acting, learner, device)
    collector = Collector(
        rewards.env, acting, learner.gamma, 1, config.execute, seed, device=device
    )
    stateful, estimates, second = tasks.stateful, tasks.estimates, tasks.second_agent
    loop = OnPolicyLoop(collector, learner, rewards, stateful, estimates, second)
    loop.memory = memory
    return loop


def require_memory(
    config: RunConfig, env: VecEnv, policy: Policy, learner: Learner, device: torch.device
) -> str:
    """The line about the memory of a batch; ConfigError if it cannot fit."""
    size = env.spec.transition_bytes(config.execute or policy.chunk)
    count = learner.horizon * env.num_envs * learner.keep_batches
    return compared(
        f"a batch ({count:,} decisions of {size:,} bytes)",
        count * size,
        free_bytes(device),
        "memory" if device.type == "cpu" else "GPU memory",
        "a smaller learner.horizon or env.num_envs",
    )


def build_second_agent(
    config: RunConfig, teacher: TwoAgentTeacher, env: VecEnv, device: torch.device
) -> SecondAgent:
    """A second agent with the run's policy and learner settings, in the teacher's environment."""
    if distributed.world() > 1:
        raise ConfigError("a two-agent teacher trains in one process: start it without torchrun")
    env = teacher.antagonist_env(env, lambda: build(config.environment, VecEnv))
    assert config.policy is not None, "two-agent teachers have no finetune"
    policy = build(config.policy, Policy, spec=env.spec)
    plan = config.plan(policy.chunk)
    learner = build(config.learner, Learner, policy=policy, spec=policy.spec, run=plan).to(device)
    seed = config.seed + SEED_OFFSET
    acting = behaviour_of(learner, policy)
    collector = Collector(env, acting, learner.gamma, 1, config.execute, seed, device=device)
    return SecondAgent(teacher, learner, OnPolicyLoop(collector, learner))
