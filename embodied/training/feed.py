"""Feed: which rows a learner gets, from where, in which loop; names no method."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from embodied.buffers.augment import Shift
from embodied.buffers.mixture import Mix, Relabel
from embodied.buffers.replay import Replay
from embodied.buffers.source import Source
from embodied.buffers.success import Successes
from embodied.buffers.trajectory_columns import Hindsight, of_episodes
from embodied.buffers.weighted import Weighted, Weights
from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, build
from embodied.core.env import HasLevels, VecEnv
from embodied.core.policy import Policy
from embodied.core.reward import (
    AugmentsEnv,
    ObservesSteps,
    Reward,
    Stateful,
    accept_old_methods,
    extra_columns,
)
from embodied.core.spec import require_same
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.datasets.transitions import Dataset, chunks, joined, transitions
from embodied.learners.learner import Learner, TakesDemonstrations
from embodied.teachers.episode_log import FILE, Diary
from embodied.teachers.levels.two_agent import Duel
from embodied.teachers.resets.reset_distribution import ResetDistribution
from embodied.teachers.student_estimates import Estimates
from embodied.teachers.task_wrapper import Taught
from embodied.teachers.teacher import Teacher
from embodied.training.collector import Rollout
from embodied.training.config import RunConfig
from embodied.training.off_policy import ReplayLoop, Schedule
from embodied.training.offline import Offline
from embodied.training.on_policy import RolloutLoop
from embodied.training.second_agent import Rival
from embodied.training.trainer import Loop
from embodied.training.value_query import asked

PIECE = 4096  # demonstrations' rows that are rewarded at once


class Feed:
    """The sources of one run, wired into a loop by `loop`; `notes` is what to log of them."""

    def __init__(
        self,
        config: RunConfig,
        env: VecEnv,
        policy: Policy,
        learner: Learner,
        device: torch.device,
    ) -> None:
        self.config, self.env, self.device = config, env, device
        self.policy, self.learner = policy, learner
        self.episodes = read_demos(config, env)
        self.kept: dict[str, Stateful] = {}
        self.estimates: Estimates | None = None
        self.rival: Rival | None = None
        self.notes: dict[str, float] = {}
        if config.weighting is not None and self.episodes is None:
            raise ConfigError("a weighting is of demonstrations: demos=DIR")

    def loop(self) -> Loop:
        """As the learner wants it, or as the run says."""
        loops = {"offline": self._offline, "replay": self._replay, "rollout": self._rollout}
        kind = self.config.data or self.learner.data
        if self.config.teacher is not None:
            self._teach(kind)
        return loops[kind]()

    def _teach(self, kind: str) -> None:
        """From here on the environment's episodes are those that the teacher chooses."""
        config = self.config
        if kind == "offline":
            raise ConfigError("a teacher chooses what is played; this learner plays nothing")
        assert config.teacher is not None
        seed, folder = distributed.own_seed(config.seed), Path(config.output)
        levelled = find_protocol(self.env, HasLevels)
        levels = None if levelled is None else levelled.levels
        teacher: Teacher = build(
            config.teacher,
            spec=self.env.spec,
            env=self.env,
            seed=seed,
            folder=folder,
            levels=levels,
            student=asked(config.env, self.learner, self.device),
        )
        diary = Diary(folder / FILE) if distributed.rank() == 0 else None
        if "estimates" in teacher.needs:
            if kind != "rollout" or self.learner.estimates is None:
                raise ConfigError(
                    "this teacher needs to hear what the student expected: learner=ppo "
                    "learner.scale_rewards=false"
                )
            self.estimates = Estimates(teacher)
        if "rival" in teacher.needs:
            self.rival = self._against(kind, teacher)
            self.env = cast(Duel, teacher).beside(self.env, self.rival.play, diary)
        elif "states" in teacher.needs:
            self.env = cast(ResetDistribution, teacher).around(self.env, diary)
        else:
            self.env = Taught(self.env, teacher, diary, self.estimates)
        kept = {"teacher": teacher, "diary": diary, "estimates": self.estimates}
        kept["rival"] = self.rival
        self.kept = {name: part for name, part in kept.items() if part is not None}

    def _against(self, kind: str, teacher: Teacher) -> Rival:
        """A second student like the first one, in the world that the teacher has for it."""
        config = self.config
        if kind != "rollout" or config.finetune or config.init or config.reward:
            raise ConfigError(
                "this teacher brings up a second student, from nothing and by the world's own "
                "rewards: learner=ppo without init, finetune or reward"
            )
        world = cast(Duel, teacher).against(self.env, lambda: build(config.env))
        return Rival(config, world, self.device, teacher.metrics)

    def _offline(self) -> Offline:
        if self.episodes is None:
            raise ConfigError(
                "this learner needs demonstrations: embodied demos collect env=... out=DIR, "
                "then demos=DIR"
            )
        if self.config.reward is not None:
            raise ConfigError(
                "an offline learner takes the recorded reward: embodied reward label DATASET "
                "reward=... out=DIR, then demos=DIR"
            )
        if self.config.pretrain:
            raise ConfigError(
                "pretrain comes before environment steps: data=replay, or offline set steps instead"
            )
        rows = self._rows(self.episodes)
        self.learner.fit(rows)
        return Offline(self.learner, self._shifted(self._demos(rows)))

    def _demos(self, rows: Tensors) -> Source:
        """The demonstrations' rows to draw from."""
        if self.config.weighting is None:
            return Dataset(rows, self.device)
        assert self.episodes is not None, "the rows come from episodes"
        weights: Weights = build(self.config.weighting)
        each = weights(self.episodes).repeat_interleave(self.episodes.length)
        source = Weighted(rows, each, self.device)
        self.notes = {"data/rows": len(source), "data/effective_rows": source.effective}
        return source

    def _shifted(self, source: Source) -> Source:
        pad = self.config.shift
        return Shift(source, self.env.spec, pad) if pad else source

    def _replay(self) -> ReplayLoop:
        config, learner = self.config, self.learner
        if learner.rows == "chunks":
            raise ConfigError("this learner imitates; it cannot be fed from a replay")
        rows = None if self.episodes is None else self._rows(self.episodes)
        if config.pretrain and rows is None:
            raise ConfigError("pretrain learns from demonstrations: demos=DIR")
        if rows is not None and (config.normalize or config.pretrain):
            learner.fit(rows)
        reward, unseen = self._reward()
        if rows is not None:  # a demonstration is a person's from beginning to end
            rows |= {
                mark: torch.ones(tt.length(rows), dtype=torch.bool)
                for mark in extra_columns(reward)
            }
        if rows is not None and reward is not None and reward.frozen:
            rows = self._paid(rows, reward)
        replay, source, demos = self._sources(rows)
        share = config.success_fraction
        successes = Successes(config.replay_size, replay, self.device) if share else None
        if successes is not None:
            self._refuse_successes(replay)
            source = Mix([source, successes], (1 - share, share))
        if reward is not None and not reward.frozen:
            source, demos = Relabel(source, reward), Relabel(demos, reward)
        # Rewards see pictures as they are.
        source, demos = self._shifted(source), self._shifted(demos)
        ready = config.start == 0 or config.pretrain > 0
        first = self.policy if ready else self.policy.warmup_policy()
        rollout = Rollout(
            self.env,
            first,
            learner.gamma,
            learner.n_step,
            config.execute,
            distributed.own_seed(config.seed),
        )
        if learner.columns and (learner.n_step > 1 or (reward is not None and not reward.frozen)):
            raise ConfigError(
                f"this learner's rows need {' and '.join(learner.columns)}: they are known neither "
                "with n_step above 1 nor where the reward is still learning"
            )
        hindsight = Hindsight(learner.columns) if learner.columns else None
        warm_fit = config.normalize and self.episodes is None
        schedule = Schedule(config.start, config.ratio, warm_fit, config.pretrain)
        loop = ReplayLoop(rollout, self.policy, learner, replay, source, reward, schedule, demos)
        loop.hindsight, loop.successes = hindsight, successes
        loop.kept = self.kept
        loop.unseen = unseen if reward is not None and reward.frozen else frozenset()
        return loop

    def _reward(self) -> tuple[Reward | None, frozenset[str]]:
        """The reward that stands in for the world's own, and what rows hold for its eyes only;
        the environment becomes the one that it watches."""
        config, env = self.config, self.env
        if config.reward is None:
            return None, frozenset()
        reward: Reward = accept_old_methods(
            build(
                config.reward,
                spec=env.spec,
                gamma=self.learner.gamma,
                num_envs=env.num_envs,
                device=self.device,
                seed=distributed.own_seed(config.seed),
                folder=Path(config.output) / "reward",
            )
        )
        if isinstance(reward, ObservesSteps) and self.learner.n_step > 1:
            raise ConfigError("this reward needs to know of every step: learner.n_step=1")
        if isinstance(reward, AugmentsEnv):
            self.env = reward.augment_env(env)
        more = set(self.env.spec.obs) - set(env.spec.obs)
        return reward, frozenset(f"{end}/{name}" for name in more for end in ("obs", "next_obs"))

    def _paid(self, rows: Tensors, reward: Reward) -> Tensors:
        """Demonstrations' rows as `reward` pays them, like those that are still to come."""
        if missing := set(self.env.spec.obs) - set(tt.under(rows, "obs")):
            raise ConfigError(
                f"the demonstrations do not show what this reward looks at ({min(missing)}): leave "
                "them out, or take a reward of what they show"
            )
        if self.learner.columns:
            raise ConfigError(
                "this learner's rows hold what followed on the recorded reward: reward=null"
            )
        parts = []
        for at in range(0, tt.length(rows), PIECE):
            piece = tt.each(rows, lambda leaf: leaf[at : at + PIECE].to(self.device))  # noqa: B023
            parts.append(reward(piece).to(rows["reward"]))
        return {**rows, "reward": torch.cat(parts)}

    def _refuse_successes(self, replay: Replay) -> None:
        if self.learner.columns or self.learner.n_step > 1 or replay.columns:
            raise ConfigError(
                "success_fraction needs rows that are complete when they are stored, and "
                "replay=uniform: with this learner, or n_step above 1, they are not"
            )

    def _new_replay(self, more: int = 0) -> Replay:
        """An empty one, for `more` rows than was asked for."""
        config = self.config
        rank = f"-{distributed.rank()}" if distributed.world() > 1 else ""
        node = config.replay or {"_target_": "embodied.buffers.replay.Replay"}
        return build(
            node,
            capacity=config.replay_size + more,
            device=self.device,
            folder=Path(config.output) / f"replay{rank}",
        )

    def _sources(self, rows: Tensors | None) -> tuple[Replay, Source, Source]:
        """The replay, what to learn from once it fills, and what to learn from before."""
        share = self.config.demo_fraction
        if rows is None:
            replay = self._new_replay()
            return replay, replay, replay
        if share is None:
            if self.config.weighting is not None:
                raise ConfigError("a weighting needs demonstrations kept apart: demo_fraction=0.5")
            replay = self._new_replay(tt.length(rows))
            replay.add(rows)
            return replay, replay, replay
        replay, demos = self._new_replay(), self._demos(rows)
        if replay.columns:
            raise ConfigError("this replay cannot be mixed with demonstrations: demo_fraction=null")
        return replay, Mix([replay, demos], (1 - share, share)), demos

    def _rollout(self) -> RolloutLoop:
        config, learner = self.config, self.learner
        if config.pretrain or config.normalize or config.shift:
            raise ConfigError(
                "a learner from its own newest steps takes no pretrain, normalize or shift (it has "
                "a running normaliser of its own: learner.normalize)"
            )
        if not isinstance(learner, TakesDemonstrations) and config.demos is not None:
            raise ConfigError("this learner takes no demos; learner=ppo_demos does")
        if isinstance(learner, TakesDemonstrations):
            if self.episodes is None:
                raise ConfigError("this learner needs to be shown something: demos=DIR")
            learner.set_demonstrations(self._rows(self.episodes))
        reward, _ = self._reward()
        seed = distributed.own_seed(config.seed)
        rollout = Rollout(self.env, self.policy, learner.gamma, 1, config.execute, seed)
        loop = RolloutLoop(rollout, learner, reward)
        loop.kept, loop.estimates, loop.rival = self.kept, self.estimates, self.rival
        return loop

    def _rows(self, episodes: Episodes) -> Tensors:
        learner, chunk = self.learner, self.policy.chunk
        if learner.rows == "chunks":
            return chunks(episodes, chunk)
        if learner.policy is not self.policy:
            raise ConfigError(
                "demonstrations cannot be mixed into this finetune (what it learns to choose are "
                "not the robot's actions); leave demos out"
            )
        steps = self.config.execute or chunk
        rows = transitions(episodes, learner.gamma, steps, learner.n_step)
        del rows["episode"]  # rows from the environment do not know theirs
        width = max(steps, learner.n_step)
        return rows | of_episodes(episodes, rows, learner.columns, learner.gamma, width)


def read_demos(config: RunConfig, env: VecEnv) -> Episodes | None:
    """The demonstrations, if there are any, refused where they are of another world."""
    if config.demos is None:
        return None
    parts: list[Episodes] = []
    for path in [config.demos] if isinstance(config.demos, str) else config.demos:
        parts.append(read_episodes(Path(path), limit=config.demo_episodes))
        require_same(env.spec, parts[-1].spec, "environment", f"dataset {path}")
    return joined(parts)
