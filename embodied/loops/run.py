"""Run: from a configuration to a trained policy in a folder; names no method."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from embodied.core import checkpoint, parallel
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, Node, build, parse, plain, resolve
from embodied.core.env import VecEnv
from embodied.core.episodes import Episodes, read_episodes
from embodied.core.policy import Policy
from embodied.core.rng import rng_state, seed_everything, set_rng_state
from embodied.core.spec import require_same
from embodied.core.tensors import Tensors
from embodied.data.augment import Shift
from embodied.data.dataset import Dataset, chunks, joined, transitions
from embodied.data.hindsight import Hindsight, of_episodes
from embodied.data.mix import Mix, Relabel
from embodied.data.replay import Replay
from embodied.data.rollout import Rollout
from embodied.data.source import Source
from embodied.data.successes import Successes
from embodied.data.weighted import Weighted, Weights
from embodied.learners.learner import Learner
from embodied.loops.evaluate import evaluate, film
from embodied.loops.keeper import Every, Keeper, Loop
from embodied.loops.log import Log
from embodied.loops.offline import Offline
from embodied.loops.replay import ReplayLoop, Schedule
from embodied.loops.rollout import RolloutLoop


@dataclass(frozen=True)
class EvalConfig:
    """Held-out starts: `episodes` from `seed`, in `num_envs` rows."""

    episodes: int = 200
    num_envs: int = 50
    seed: int = 10_000


@dataclass(frozen=True)
class RunConfig:
    """One run. `steps` are environment steps, or updates where the learner is offline.

    `init`: a run or checkpoint to start from; with `finetune`, the frozen base; with a policy made
    of others, the one that it is made of. `demos`: a dataset
    folder or several, `demo_episodes` of each (None: all); a learner with replay takes
    `demo_fraction` of every batch from them (None: they are the first rows of the one replay).
    `replay`: the kind of memory of `replay_size` rows (None: all alike); `success_fraction` of
    every batch come from episodes that succeeded, once there are any.
    `weighting`: how often each of their trajectories is drawn (None: in proportion to its length).
    `data`: feed the learner so instead of its own way. `pretrain`: updates from the demonstrations
    before the first environment step; a run's clock counts them, then its `steps`.

    `start`: warm-up steps; `ratio`: updates per stored row; `execute`: steps of a chunk to play
    before deciding again (None: all); `shift`: pictures of a batch are shifted by up to so many
    pixels at random. Intervals of 0 mean: at the end only.
    """

    env: Node
    policy: Node
    learner: Node
    name: str
    output: str
    steps: int
    finetune: Node | None = None
    reward: Node | None = None
    init: str | None = None
    demos: str | tuple[str, ...] | None = None
    demo_episodes: int | None = None
    demo_fraction: float | None = 0.5
    weighting: Node | None = None
    data: Literal["offline", "replay"] | None = None
    pretrain: int = 0
    seed: int = 0
    device: str = "auto"
    threads: int = 1
    start: int = 0
    ratio: float = 1.0
    normalize: bool = False
    shift: int = 0
    execute: int | None = None
    replay_size: int = 1_000_000
    replay: Node | None = None
    success_fraction: float = 0.0
    log_every: int = 1_000
    save_every: int = 0
    eval_every: int = 0
    eval: EvalConfig = field(default_factory=EvalConfig)
    wandb: bool = False
    video: bool = True
    resume: str | None = None


def train(node: dict[str, Any], log: Log) -> Path:
    """Train as `node` says (the fields of RunConfig); returns the run folder.

    Writes `run.yaml`, checkpoints, metrics and a video; a run interrupted by Ctrl-C saves, raises
    KeyboardInterrupt and can be resumed bit for bit (on the CPU). Of processes that torchrun
    started, each has worlds and a replay of its own, and the first one writes (a resumed run gives
    its replay to all, and the others new starts).
    """
    config: RunConfig = parse(RunConfig, node, "run")
    first = parallel.start() == 0
    seed_everything(config.seed)
    torch.set_num_threads(config.threads)
    parts = Parts(config)
    folder = Path(config.output)
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(yaml.safe_dump(plain(node), sort_keys=False))
    step = parts.resume(config.resume) if config.resume else 0
    parallel.share(parts.learner)
    if parallel.world() > 1:
        seed_everything(parallel.own_seed(config.seed) + step)
    every = Every(config.log_every, config.eval_every, config.save_every)

    def assess(step: int) -> None:
        if first:
            log.write(step, {f"eval/{k}": v for k, v in parts.evaluate().items()})

    def save(step: int) -> None:
        if first:
            parts.save(folder, step, log.last)

    if not step:
        log.write(step, parts.notes)
    total = config.pretrain + config.steps
    with Keeper(log, total, every, assess, save, step) as keeper:
        parts.loop.run(keeper)
        if keeper.interrupted:
            keeper.keep()
            raise KeyboardInterrupt
        if not (config.eval_every and keeper.step % config.eval_every == 0 and keeper.step > step):
            assess(keeper.step)
        keeper.keep()
        if config.video and first:
            parts.film(folder / "videos")
    parts.env.close()
    parallel.stop()
    return folder


class Parts:
    """What a run is made of, wired."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = pick_device(config.device)
        self.env: VecEnv = build(config.env)
        self.policy, trained = make_policy(config, self.env)
        self.learner: Learner = build(
            config.learner,
            policy=trained,
            spec=trained.spec,
            total_steps=config.pretrain + config.steps,
            execute=config.execute,
            total_decisions=config.steps // (config.execute or self.policy.chunk),
        ).to(self.device)
        if config.finetune is None:
            self.policy = self.learner.policy
        else:
            whole: Any = self.policy
            self.policy = whole.learned(self.learner.policy)
        self.policy.to(self.device)
        self.notes: dict[str, float] = {}  # what the first line of the metrics says
        self.episodes = read_demos(config, self.env)
        if config.weighting is not None and self.episodes is None:
            raise ConfigError("a weighting is of demonstrations: demos=DIR")
        loops = {"offline": self._offline, "replay": self._replay, "rollout": self._rollout}
        self.loop: Loop = loops[config.data or self.learner.data]()
        self._eval_env: VecEnv | None = None

    def _offline(self) -> Offline:
        if self.episodes is None:
            raise ConfigError(
                "this learner needs demonstrations: embodied demos collect env=... out=DIR, "
                "then demos=DIR"
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
        replay, source, demos = self._sources(rows)
        share = config.success_fraction
        successes = Successes(config.replay_size, replay, self.device) if share else None
        if successes is not None:
            self._refuse_successes(replay)
            source = Mix([source, successes], (1 - share, share))
        reward = None if config.reward is None else build(config.reward, spec=self.env.spec)
        if reward is not None and not reward.frozen:
            source, demos = Relabel(source, reward), Relabel(demos, reward)
        # Rewards see pictures as they are.
        source, demos = self._shifted(source), self._shifted(demos)
        ready = config.start == 0 or config.pretrain > 0
        first = self.policy if ready else self.policy.first()
        rollout = Rollout(
            self.env,
            first,
            learner.gamma,
            learner.n_step,
            config.execute,
            parallel.own_seed(config.seed),
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
        return loop

    def _refuse_successes(self, replay: Replay) -> None:
        if self.learner.columns or self.learner.n_step > 1 or replay.columns:
            raise ConfigError(
                "success_fraction needs rows that are complete when they are stored, and "
                "replay=uniform: with this learner, or n_step above 1, they are not"
            )

    def _new_replay(self, more: int = 0) -> Replay:
        """An empty one, for `more` rows than was asked for."""
        config = self.config
        rank = f"-{parallel.rank()}" if parallel.world() > 1 else ""
        node = config.replay or {"_target_": "embodied.data.replay.Replay"}
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
        if config.demos is not None or config.pretrain or config.normalize or config.shift:
            raise ConfigError(
                "a learner from its own newest steps takes no demos, normalize or shift (it has a "
                "running normaliser of its own: learner.normalize)"
            )
        reward = None if config.reward is None else build(config.reward, spec=self.env.spec)
        seed = parallel.own_seed(config.seed)
        rollout = Rollout(self.env, self.policy, learner.gamma, 1, config.execute, seed)
        return RolloutLoop(rollout, learner, reward)

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

    @property
    def eval_env(self) -> VecEnv:
        env = self._eval_env
        if env is None:
            count = min(self.config.eval.num_envs, self.config.eval.episodes)
            env = self._eval_env = build(self.config.env | {"num_envs": count})
        return env

    def evaluate(self) -> dict[str, float]:
        """Success and return on the held-out starts."""
        self.policy.eval()
        settings = self.config.eval
        result = evaluate(
            self.policy, self.eval_env, settings.episodes, settings.seed, self.config.execute
        )
        self.policy.train()
        return result.metrics()

    def film(self, folder: Path) -> None:
        """One success and one failure of the evaluation as MP4, where there is a camera."""
        from embodied.loops.video import write_mp4

        settings, execute = self.config.eval, self.config.execute
        env: VecEnv = build(self.config.env | {"num_envs": min(8, settings.episodes)})
        try:
            env.reset(settings.seed)
            env.render(0)
        except NotImplementedError:
            return
        self.policy.eval()
        result = evaluate(self.policy, env, env.num_envs, settings.seed, execute)
        won = torch.zeros(env.num_envs) if result.success is None else result.success
        names = ("episode", "episode") if result.success is None else ("failure", "success")
        for wanted, name in enumerate(names):
            for row in (won == wanted).nonzero().flatten().tolist()[:1]:
                frames = film(self.policy, env, settings.seed, row, execute)
                write_mp4(folder / f"{name}.mp4", frames, fps=1 / env.spec.dt)
        env.close()

    def save(self, folder: Path, step: int, metrics: dict[str, float]) -> None:
        """A checkpoint to act from and to go on from; older ones keep what acting needs."""
        loop = {"step": step, "rng": rng_state(), "loop": self.loop.get_state()}
        here = checkpoint.save(
            folder / "checkpoints" / f"{step:08d}",
            self.policy.deployed(),
            step,
            self.learner.get_state(),
            loop,
            {"metrics": metrics, "parent": self._parent(), "demos": self.config.demos},
        )
        for old in here.parent.glob("[0-9]*/loop.pt"):
            if old.parent != here:
                old.unlink()

    def _parent(self) -> str | None:
        if self.config.init is None:
            return None
        return checkpoint.file_hash(checkpoint.find(self.config.init) / "policy.safetensors")

    def resume(self, path: str) -> int:
        """Go on from the last checkpoint of `path`; returns its step."""
        loop = checkpoint.load_state(path, "loop")
        self.learner.set_state(checkpoint.load_state(path, "learner"))
        if parallel.rank() > 0:
            loop["loop"]["rollout"] = None  # the first process's worlds
        self.loop.set_state(loop["loop"])
        set_rng_state(loop["rng"])
        return int(loop["step"])


def make_policy(config: RunConfig, env: VecEnv) -> tuple[Policy, Policy]:
    """The policy that acts, and the part of it that learns (the same one without `finetune`)."""
    if config.finetune is not None:
        if config.init is None:
            raise ConfigError("a finetune needs the policy to start from: init=RUN")
        base = checkpoint.load_policy(config.init, env.spec)
        policy = resolve(config.finetune["_target_"]).on(base, config.finetune, config.policy)
        return policy, policy.learns()
    if config.init is not None:
        policy = checkpoint.load_policy(config.init, env.spec)
        wanted = resolve(config.policy["_target_"])
        if hasattr(wanted, "on") and type(policy) is not wanted:
            policy = wanted.on(policy, config.policy)  # a policy made of others, this its base
        return policy.train(), policy
    policy = build(config.policy, spec=env.spec)
    return policy, policy


def read_demos(config: RunConfig, env: VecEnv) -> Episodes | None:
    """The demonstrations, if there are any, refused where they are of another world."""
    if config.demos is None:
        return None
    parts: list[Episodes] = []
    for path in [config.demos] if isinstance(config.demos, str) else config.demos:
        parts.append(read_episodes(Path(path), limit=config.demo_episodes))
        require_same(env.spec, parts[-1].spec, "environment", f"dataset {path}")
    return joined(parts)


def pick_device(name: str) -> torch.device:
    """ "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
