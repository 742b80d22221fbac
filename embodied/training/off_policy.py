"""Off-policy training: environment steps fill a replay buffer, updates sample from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from embodied.buffers.pending import KeepsSingle
from embodied.buffers.replay import PICTURES, ReplayBuffer
from embodied.buffers.source import Source
from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, Node, build, kind_of
from embodied.core.device import compared
from embodied.core.env import REAL, Step, VecEnv
from embodied.core.policy import Policy
from embodied.core.remembered import pack, unpack
from embodied.core.reward import OFFLINE_COLUMNS, ObservesSteps, Stateful, extra_columns
from embodied.core.tensors import Tensors
from embodied.learners.learner import HasCritic, Learner, ReportsErrors
from embodied.nn.networks import Ensemble
from embodied.training.collector import Collector, behaviour_of
from embodied.training.config import OffPolicy, RunConfig
from embodied.training.reward_pipeline import RewardPipeline, build_reward, pop_env_reward
from embodied.training.trainer import RunParts, Trainer

if TYPE_CHECKING:
    from embodied.buffers.pending import SuccessBuffer, TrajectoryColumns
    from embodied.datasets.lerobot.reader import Episodes
    from embodied.models.dyna import Dyna
    from embodied.teachers.teacher import Curriculum
    from embodied.training.actors.pool import ActorPool
    from embodied.training.update_ratio import UpdateRatio

UNIFORM: Node = {"_target_": "embodied.buffers.replay.ReplayBuffer"}
# Episodes as the reward augments them, and their transitions, with the columns of the buffer.
Demonstrations = tuple["Episodes", Tensors]
NORMALIZER_ROWS = 10_000  # warm-up transitions to which the normalizers are fitted


@dataclass(frozen=True)
class Buffers:
    """`source`: sampled by updates; `demos`: sampled by updates before the first environment step.

    `columns` completes transitions whose columns need the rest of their episode. `success` gets the
    transitions of successful episodes. `metrics`: metrics of the dataset. `dyna`: the source where
    updates are imagined.
    """

    replay: ReplayBuffer
    source: Source
    demos: Source
    columns: TrajectoryColumns | None = None
    success: SuccessBuffer | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    dyna: Dyna | None = None

    def forget(self, env_ids: Tensor) -> None:
        """Drop what is held of the running episodes of parallel envs `env_ids` [n]."""
        for part in (self.columns, self.success):
            if part is not None:
                part.forget(env_ids)


def build_buffers(
    parts: RunParts, rewards: RewardPipeline, demonstrations: Demonstrations | None
) -> Buffers:
    """The buffers; `demonstrations` are mixed into every batch or put into the replay buffer."""
    config, learner, device = parts.config, parts.learner, parts.device
    assert isinstance(config.data, OffPolicy)
    data = config.data
    replay, source, demos = _replay_and_demos(parts, rewards, demonstrations)
    metrics: Mapping[str, float] = {}
    if demonstrations is not None:
        from embodied.training.demonstrations import metrics_of

        metrics = metrics_of(demos, demonstrations[0])
    success: SuccessBuffer | None = None
    if share := data.success_fraction:
        from embodied.buffers.pending import SuccessBuffer
        from embodied.buffers.source import Mixture

        if learner.columns or learner.n_step > 1 or replay.columns:
            raise ConfigError(
                "data.success_fraction needs replay=uniform, learner.n_step=1 and a learner whose "
                "transitions do not depend on the rest of the episode: data.success_fraction=0"
            )
        success = SuccessBuffer(data.replay_size, replay, device)
        source = Mixture([source, success], (1 - share, share))
    dyna: Dyna | None = None
    if data.imagined is not None:
        from embodied.models.dyna import Dyna

        require_imaginable(config, learner, replay)
        policy, gamma, critic = learner.policy, learner.gamma, getattr(learner, "critic", None)
        context = {"replay": replay, "policy": policy, "gamma": gamma, "device": device}
        source = dyna = build(data.imagined, Dyna, critic=critic, **context)
    source = rewards.sampled(source)
    demos = rewards.sampled(demos)
    if data.random_shift:  # after the rewards, which are computed from the images as they are
        from embodied.buffers.source import augmented

        source = augmented(source, rewards.env.spec, data.random_shift)
        demos = augmented(demos, rewards.env.spec, data.random_shift)
    columns: TrajectoryColumns | None = None
    if learner.columns:
        from embodied.buffers.pending import TrajectoryColumns

        columns = TrajectoryColumns(learner.columns)
    return Buffers(replay, source, demos, columns, success, metrics, dyna)


def require_imaginable(config: RunConfig, learner: Learner, replay: ReplayBuffer) -> None:
    """ConfigError if imagined transitions would not be those that the learner needs."""
    assert isinstance(config.data, OffPolicy)
    wrong = {
        "replay=uniform": bool(replay.columns),
        "learner.n_step=1": learner.n_step > 1 or bool(learner.columns),
        "demos=null": config.demos is not None,
        "data.success_fraction=0": config.data.success_fraction > 0,
        "finetune=null": config.finetune is not None,
    }
    require_none(wrong, "data.imagined replaces every batch by imagined steps")


def _replay_and_demos(
    parts: RunParts, rewards: RewardPipeline, demonstrations: Demonstrations | None
) -> tuple[ReplayBuffer, Source, Source]:
    """The replay buffer, and the sources of updates and of pretraining updates."""
    config, learner, device = parts.config, parts.learner, parts.device
    assert isinstance(config.data, OffPolicy)
    data = config.data
    rank = f"-{distributed.rank()}" if distributed.world() > 1 else ""
    new_replay = partial(
        build,
        config.replay or UNIFORM,
        ReplayBuffer,
        env=rewards.env,
        gamma=learner.gamma,
        device=device,
        folder=Path(config.out) / f"replay{rank}",
    )
    if demonstrations is None:
        replay = new_replay(capacity=data.replay_size)
        return replay, replay, replay
    (episodes, rows), share = demonstrations, data.demo_fraction
    if share is None:
        replay = new_replay(capacity=data.replay_size + tt.length(rows))
        replay.add(rows)
        return replay, replay, replay
    replay = new_replay(capacity=data.replay_size)
    from embodied.buffers.source import Mixture
    from embodied.training.demonstrations import source_of

    demos = source_of(rows, episodes, config, device, learner.gamma)
    if replay.columns:
        raise ConfigError(
            "this replay buffer cannot be mixed with demonstrations: data.demo_fraction=null"
        )
    return replay, Mixture([replay, demos], (1 - share, share)), demos


def require_memory(config: RunConfig, buffers: Buffers, env: VecEnv, policy: Policy) -> str:
    """The line about the memory of the buffers; ConfigError if what the run will store in them, at
    most all transitions in each, cannot fit."""
    steps = config.execute or policy.chunk
    size = env.spec.transition_bytes(steps, PICTURES) + buffers.replay.extra_bytes
    ahead = config.steps // steps // distributed.world()
    stores = {"the replay buffer": buffers.replay}
    if buffers.success is not None:
        stores["the buffer of successes"] = buffers.success.kept
    lines: list[str] = []
    places = {name: store.room()[1] for name, store in stores.items()}
    for where in dict.fromkeys(places.values()):
        names = [name for name in stores if places[name] == where]
        here = [stores[name] for name in names]
        count = sum(min(store.capacity - len(store), ahead) for store in here)
        there = here[0].room()[0]
        instead = f"data.replay_size={int(0.9 * there / size / len(here))}"
        if buffers.replay in here and "disk" not in where:
            instead += ", or replay=memmap (on disk)"
        if buffers.success is not None and buffers.success.kept in here:
            instead += ", or data.success_fraction=0"
        what = f"{' with '.join(names)} ({count:,} transitions of {size:,} bytes)"
        lines.append(compared(what, count * size, there, where, instead))
    return "; ".join(filter(None, lines))


def require_single_steps(config: RunConfig, learner: Learner, policy: Policy) -> None:
    """ConfigError if the replay buffer asks the environment about single steps, and what is stored
    is not that."""
    assert isinstance(config.data, OffPolicy)
    node, data = config.replay or UNIFORM, config.data
    if not kind_of(node, ReplayBuffer).needs_steps:
        return
    wrong = {
        "learner.n_step=1": learner.n_step > 1,
        "execute=1": (config.execute or policy.chunk) > 1,
        "reward=null": config.reward is not None,
        "data.actors=0": data.actors > 0,
        "data.demo_fraction=0.5": config.demos is not None and data.demo_fraction is None,
        "replay=uniform": policy.augments or bool(learner.columns),
    }
    line = "this replay buffer asks the environment of this process about single steps, as the"
    require_none(wrong, f"{line} policy observed them")


def require_none(wrong: Mapping[str, bool], line: str) -> None:
    """ConfigError with `line` and the first setting to choose instead of one that is wrong."""
    for instead in (instead for instead, is_wrong in wrong.items() if is_wrong):
        raise ConfigError(f"{line}: {instead}")


def require_usable(config: RunConfig, learner: Learner) -> None:
    """Raises ConfigError if a setting of `config.data` has no effect in this run."""
    assert isinstance(config.data, OffPolicy)
    data, demos = config.data, config.demos is not None
    if learner.rows == "chunks":
        raise ConfigError("this learner imitates action chunks; it cannot use a replay buffer")
    if learner.rows == "pairs" or set(OFFLINE_COLUMNS) & set(extra_columns(learner)):
        raise ConfigError(
            "this learner needs labelled pairs, or the dataset or episode of each step, which only "
            "offline training has: data=offline"
        )
    if data.pretrain_steps and not demos:
        raise ConfigError("data.pretrain_steps are updates from demonstrations: demos=DIR")
    if not demos and data.demo_fraction != OffPolicy.demo_fraction:
        raise ConfigError("data.demo_fraction is the share of demonstrations: demos=DIR")
    if config.weighting is not None and data.demo_fraction is None:
        raise ConfigError(
            "weighting needs demonstrations in their own buffer: data.demo_fraction=0.5"
        )
    if data.normalize and not demos and not data.warmup_steps:
        raise ConfigError(
            "data.normalize fits normalizers to demonstrations or to the warm-up: demos=DIR or "
            "data.warmup_steps=1000"
        )


class OffPolicyLoop:
    """The run's steps count `pretrain_steps` updates from demonstrations, then environment steps of
    all parallel envs (and processes) together. `policy` collects after the warm-up. `schedule` sets
    the ratio of updates (None: constant)."""

    held_out = None
    memory = ""

    def __init__(
        self,
        config: OffPolicy,
        collector: Collector | ActorPool,
        policy: Policy,
        learner: Learner,
        buffers: Buffers,
        rewards: RewardPipeline,
        stateful: Mapping[str, Stateful] | None = None,
        fit_after_warmup: bool = False,
        schedule: UpdateRatio | None = None,
    ) -> None:
        self.config, self.collector = config, collector
        self.policy, self.learner = policy, learner
        self.buffers, self.rewards = buffers, rewards
        self.stateful = dict(stateful or {})  # other parts that a checkpoint stores
        self.fit_after_warmup = fit_after_warmup
        self.data_metrics = buffers.metrics
        self.device = buffers.replay.device
        self.env_ids = torch.arange(collector.env.num_envs, device=self.device)
        self.stride = collector.env.num_envs * distributed.world()
        self.learning = config.warmup_steps == 0  # whether the warm-up is over
        self.update_credit = 0.0
        self.schedule = schedule
        parts = [part for part in learner.modules() if isinstance(part, Ensemble)]
        self.watched = [part for part in parts if part.active is not None]
        given = config.utd_ratio
        self.utd_ratio = 0.0 if isinstance(given, dict) else given  # updates per transition, now
        self._set_ratio({})

    @property
    def teacher(self) -> Curriculum | None:
        return cast("Curriculum | None", self.stateful.get("teacher"))

    def run(self, trainer: Trainer) -> None:
        before = self.config.pretrain_steps
        while trainer.running and trainer.step < before:
            trainer.advance(1, self._update(self.buffers.demos), updates=1)
        while trainer.running:
            if not self.learning and trainer.step >= before + self.config.warmup_steps:
                replay = self.buffers.replay
                if self.fit_after_warmup and len(replay):
                    self.learner.fit(replay.sample(min(len(replay), NORMALIZER_ROWS)))
                    distributed.broadcast(self.learner)
                self.collector.act_with(self.policy)
                if self.buffers.columns is not None:
                    self.buffers.columns.forget()
                self.learning = True
            transitions, step = self._step()
            self.rewards.set_step(trainer.step - before + self.stride)
            if transitions:
                self.buffers.replay.add(transitions)
                self.buffers.replay.follow(step)
                self.rewards.new_rows += len(transitions["reward"])
            if self.collector.restarted is not None:
                trainer.episodes.forget(self.collector.restarted)
            metrics: dict[str, Any] = {}
            count = self._due_updates(transitions) + self._restarted_critic()
            done = 0
            while done < count and not self.collector.behind:
                metrics = self._update(self.buffers.source)
                done += 1
            if done < count:  # an arm does not wait: the updates are left out
                self.update_credit = 0.0
            if metrics:
                self._set_ratio(metrics)
                metrics |= self.collector.metrics()
            trainer.advance(self.stride, metrics, step, done)

    def restart(self, seed: int) -> None:
        """Begin new episodes; what is held of the running ones is dropped."""
        assert isinstance(self.collector, Collector)  # actors share no environment
        self.collector.restart(seed)
        self._forget(self.env_ids)

    def _forget(self, env_ids: Tensor) -> None:
        """The running episodes of parallel envs `env_ids` [n] are lost."""
        self.buffers.forget(env_ids)
        self.buffers.replay.end_episodes(torch.isin(self.env_ids, env_ids))

    def mean_reward(self) -> dict[str, Tensor]:
        return self.rewards.mean_of_stored(self.buffers.replay)

    def _due_updates(self, transitions: Tensors) -> int:
        """Return the whole number of updates due: `utd_ratio` per new transition; the rest is kept.
        All processes of a distributed run make the same number of updates."""
        stored = distributed.mean(len(transitions["reward"]) if transitions else 0)
        if not (self.learning and stored and distributed.all_min(len(self.buffers.replay))):
            return 0
        self.update_credit += self.utd_ratio * stored
        due = int(self.update_credit)
        self.update_credit -= due
        return due

    def _restarted_critic(self) -> int:
        """Give the learner a new critic if the reward asks for it; returns the updates to make."""
        updates = self.rewards.take_restart()
        if updates is None or not self.learning:
            return 0
        assert isinstance(self.learner, HasCritic), "checked before training"
        self.learner.restart_critic()
        return updates

    def _set_ratio(self, metrics: Mapping[str, Tensor]) -> None:
        """Ask the schedule, if there is one, for the ratio from now on."""
        if self.schedule is not None:
            self.utd_ratio = distributed.mean(self.schedule.ratio(metrics))

    def _step(self) -> tuple[Tensors, Step]:
        """One step of all parallel envs; returns the transitions that it completed."""
        rows, step = self.collector.step()
        if rows and REAL in extra_columns(self.learner) and REAL not in rows:
            rows[REAL] = torch.zeros_like(rows["reward"], dtype=torch.bool)
        if rows and (missing := set(extra_columns(self.learner)) - set(rows)):
            known = sorted(key for key, flag in step.log.items() if flag.dtype == torch.bool)
            raise ConfigError(
                f"this learner needs {min(missing)} of each step, and this environment reports "
                f"{', '.join(known) or 'nothing'}; of a person's steps: choose a reward with "
                "interventions (docs/robot_learning.md, People)"
            )
        if self.collector.restarted is not None:
            self._forget(self.collector.restarted)
        finished, columns = self.collector.finished, self.buffers.columns
        env_ids = self.env_ids if finished is None else finished
        self.rewards.observe_step(rows, env_ids, step)
        if rows and isinstance(self.learner, ObservesSteps):
            self.learner.observe_step(rows, env_ids, step)
        rows = self.rewards.before_storing(rows)
        if self.buffers.success is not None:
            if "success" not in step.log:
                raise ConfigError(
                    "this environment does not report success: data.success_fraction=0"
                )
            self.buffers.success.push(rows, finished, step.log["success"], step.ended)
        if columns is not None:
            rows = columns.push(rows, finished, step.ended.to(self.device))
        return rows, step

    def _update(self, source: Source) -> dict[str, Any]:
        batch = source.sample(self.learner.batch_size)
        env_reward = pop_env_reward(batch)
        metrics = self.learner.update(batch)
        active = [part.active for part in self.watched if part.active is not None]
        if active:
            metrics = {"active_units": torch.stack(active).mean(), **metrics}
        if "index" in batch:
            learner = self.learner
            if not isinstance(learner, ReportsErrors) or learner.priority is None:
                raise ConfigError("this learner reports no TD error per transition: replay=uniform")
            self.buffers.replay.settle(batch["index"], learner.priority)
        return metrics | self.rewards.update(batch, env_reward)

    def get_state(self) -> dict[str, Any]:
        """All state but the learner's; `collector` is None if its environment cannot be saved."""
        self.collector.require_finite()
        success, columns = self.buffers.success, self.buffers.columns
        return {
            "collector": self.collector.get_state() if self.collector.savable else None,
            "replay": self.buffers.replay.get_state(),
            "success_replay": None if success is None else success.get_state(),
            "trajectory_columns": None if columns is None else columns.get_state(),
            "warmup_done": self.learning,
            "update_credit": self.update_credit,
            "utd_ratio": self.utd_ratio,
            "schedule": None if self.schedule is None else pack(self.schedule.get_state()),
            "reward": self.rewards.get_state(),
            "parts": {name: pack(part.get_state()) for name, part in self.stateful.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        if self.schedule is not None:
            self.utd_ratio = state["utd_ratio"]
            self.schedule.set_state(unpack(state["schedule"]))
        if state["warmup_done"]:
            self.collector.act_with(self.policy)
        for name, part in self.stateful.items():
            part.set_state(unpack(state["parts"][name]))
        if state["collector"] is None and self.stateful:
            self.collector.restart()
        if state["collector"] is not None:
            self.collector.set_state(state["collector"])
            if self.buffers.columns is not None:
                columns = tt.state_to(state["trajectory_columns"], self.device)
                self.buffers.columns.set_state(columns)
        self.buffers.replay.set_state(state["replay"])
        if self.buffers.success is not None:
            self.buffers.success.set_state(tt.state_to(state["success_replay"], self.device))
        if state["collector"] is None:  # its episodes do not go on
            self._forget(self.env_ids)
        self.learning, self.update_credit = state["warmup_done"], state["update_credit"]
        self.rewards.set_state(state["reward"])


def build_off_policy(parts: RunParts) -> OffPolicyLoop:
    """The loop; the demonstrations of `episodes` (None: none) are mixed in by `config`."""
    config, policy, learner, env = parts.config, parts.policy, parts.learner, parts.env
    assert isinstance(config.data, OffPolicy) and env is not None
    data = config.data
    require_usable(config, learner)
    acting = behaviour_of(learner, policy)
    require_single_steps(config, learner, acting)
    stateful: Mapping[str, Stateful] = {}
    if config.teacher is not None:
        from embodied.training.task_sampling import build_task_sampling

        tasks = build_task_sampling(config, env, learner, parts.device)
        env = tasks.env
        stateful = tasks.stateful
    rewards = build_reward(config, env, learner, parts.device)
    if learner.columns and (learner.n_step > 1 or rewards.learned):
        raise ConfigError(
            f"this learner's transitions need {' and '.join(learner.columns)}, which cannot be "
            "computed with n_step above 1 or with a learned reward"
        )
    demonstrations = _demonstrations(parts, rewards)
    buffers = build_buffers(parts, rewards, demonstrations)
    if buffers.dyna is not None:
        stateful = {**stateful, "dyna": buffers.dyna}
    if data.actors and acting is not policy:
        raise ConfigError("this learner collects with a policy of its own: data.actors=0")
    schedule: UpdateRatio | None = None
    if isinstance(data.utd_ratio, dict):
        from embodied.training.update_ratio import UpdateRatio

        schedule = build(data.utd_ratio, UpdateRatio)
    memory = require_memory(config, buffers, rewards.env, acting)
    loop = OffPolicyLoop(
        data,
        collector=_collector(parts, rewards, acting),
        policy=acting,
        learner=learner,
        buffers=buffers,
        rewards=rewards,
        stateful=stateful,
        fit_after_warmup=config.normalizes and parts.episodes is None,
        schedule=schedule,
    )
    loop.memory = memory
    return loop


def _demonstrations(parts: RunParts, rewards: RewardPipeline) -> Demonstrations | None:
    """The learner's normalizers are fitted to them."""
    if parts.episodes is None:
        return None
    from embodied.datasets.transitions import flags
    from embodied.training.demonstrations import rows_for

    config, policy, learner = parts.config, parts.policy, parts.learner
    episodes = rewards.augment_demonstrations(parts.episodes)
    transitions = rows_for(episodes, policy, learner, config.execute)
    if config.normalizes:
        learner.fit(transitions)
    transitions |= flags(episodes, rewards.extra_columns, config.execute or policy.chunk)
    return episodes, rewards.demonstrations(transitions, learner, parts.device)


def _collector(parts: RunParts, rewards: RewardPipeline, policy: Policy) -> Collector | ActorPool:
    """Steps the environment in this process, or asks the actors that do."""
    config, learner, device = parts.config, parts.learner, parts.device
    assert isinstance(config.data, OffPolicy)
    data = config.data
    warmup = data.warmup_steps > 0 and data.pretrain_steps == 0
    settings = {
        "gamma": learner.gamma,
        "n_step": learner.n_step,
        "execute": config.execute,
        "keep_single": isinstance(learner, KeepsSingle) and learner.keep_single,
        "executed_steps": learner.uses_executed_steps,
        "flags": extra_columns(learner),
    }
    if data.actors:
        from embodied.training.actors.pool import ActorEnv, ActorPool

        assert isinstance(parts.env, ActorEnv)
        return ActorPool(parts.env, policy, warmup, settings, device, data.max_lag or 0)
    acting = policy.warmup_policy() if warmup else policy
    seed = distributed.own_seed(config.seed)
    return Collector(rewards.env, acting, seed=seed, device=device, **settings)
