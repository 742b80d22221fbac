"""Run: from a configuration to a trained policy in a folder; names no method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from embodied.core import checkpoint, distributed
from embodied.core.build import ConfigError, build, parse, plain, resolve
from embodied.core.env import VecEnv
from embodied.core.errors import RobotError
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.reward import HasComponents
from embodied.core.seeding import rng_state, seed_everything, set_rng_state
from embodied.evaluation.evaluate import evaluate, film
from embodied.evaluation.task_grid import TaskGridEval, grid, held_out
from embodied.learners.learner import Learner
from embodied.training import reward_hacking
from embodied.training.config import RunConfig
from embodied.training.feed import Feed
from embodied.training.logger import Log
from embodied.training.reward_components import write_terms
from embodied.training.trainer import Every, Keeper, Loop


def train(node: dict[str, Any], log: Log) -> Path:
    """Train as `node` says (the fields of RunConfig); returns the run folder.

    Writes `run.yaml`, checkpoints, metrics and a video; a run interrupted by Ctrl-C saves, raises
    KeyboardInterrupt and can be resumed bit for bit (on the CPU). Of processes that torchrun
    started, each has worlds and a replay of its own, and the first one writes (a resumed run gives
    its replay to all, and the others new starts).
    """
    config: RunConfig = parse(RunConfig, node, "run")
    first = distributed.start() == 0
    seed_everything(config.seed)
    torch.set_num_threads(config.threads)
    parts = Parts(config)
    folder = Path(config.output)
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(yaml.safe_dump(plain(node), sort_keys=False))
    step = parts.resume(config.resume) if config.resume else 0
    distributed.broadcast(parts.learner)
    if distributed.world() > 1:
        seed_everything(distributed.own_seed(config.seed) + step)
    every = Every(config.log_every, config.eval_every, config.save_every)

    def assess(step: int) -> None:
        if first:
            result = {f"eval/{k}": v for k, v in parts.evaluate(step).items()}
            reward_hacking.watch(parts.loop, log, step, result)

    def save(step: int) -> None:
        if first:
            parts.save(folder, step, log.last)

    if not step:
        log.write(step, parts.feed.notes)
    total = config.pretrain + config.steps
    with Keeper(log, total, every, assess, save, step) as keeper:
        try:
            parts.loop.run(keeper)
        except RobotError:  # what was learned is kept; people go on when it is mended
            keeper.keep()
            raise
        if keeper.interrupted:
            keeper.keep()
            raise KeyboardInterrupt
        if not (config.eval_every and keeper.step % config.eval_every == 0 and keeper.step > step):
            assess(keeper.step)
        keeper.keep()
        if config.video and first:
            parts.film(folder / "videos")
            parts.take_apart(folder)
    parts.env.close()
    distributed.stop()
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
            assert isinstance(self.policy, PolicyWrapper)
            self.policy = self.policy.with_trained(self.learner.policy)
        self.policy.to(self.device)
        self.feed = Feed(config, self.env, self.policy, self.learner, self.device)
        self.loop: Loop = self.feed.loop()
        self._eval_env: VecEnv | None = None

    @property
    def eval_env(self) -> VecEnv:
        env = self._eval_env
        if env is None:
            settings = self.config.eval
            tasks = grid(self.env.spec, settings.grid) if settings.grid else held_out(self.env)
            tasks = tasks if tasks is None or settings.grid else tasks[: settings.episodes]
            episodes = settings.episodes if tasks is None else len(tasks)
            env = build(self.config.env | {"num_envs": min(settings.num_envs, episodes)})
            env = self._eval_env = env if tasks is None else TaskGridEval(env, tasks)
        return env

    def evaluate(self, step: int) -> dict[str, float]:
        """Success and return on the held-out starts, or tasks."""
        self.policy.eval()
        settings, env = self.config.eval, self.eval_env
        episodes = len(env.tasks) if isinstance(env, TaskGridEval) else settings.episodes
        result = evaluate(self.policy, env, episodes, settings.seed, self.config.execute)
        self.policy.train()
        if isinstance(env, TaskGridEval):
            env.write(Path(self.config.output), step, result)
        return result.metrics()

    def film(self, folder: Path) -> None:
        """One success and one failure of the evaluation as MP4, where there is a camera."""
        from embodied.evaluation.video import write_mp4

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

    def take_apart(self, folder: Path) -> None:
        """What the reward was made of in one episode of the evaluation, where it has parts."""
        reward = getattr(self.loop, "reward", None)
        if not isinstance(reward, HasComponents):
            return
        settings = self.config.eval
        env: VecEnv = build(self.config.env | {"num_envs": min(8, settings.episodes)})
        self.policy.eval()
        gamma, execute = self.learner.gamma, self.config.execute
        write_terms(folder, reward, self.policy, env, gamma, settings.seed, execute)
        env.close()

    def save(self, folder: Path, step: int, metrics: dict[str, float]) -> None:
        """A checkpoint to act from and to go on from; older ones keep what acting needs."""
        loop = {"step": step, "rng": rng_state(), "loop": self.loop.get_state()}
        here = checkpoint.save(
            folder / "checkpoints" / f"{step:08d}",
            self.policy.inference_policy(),
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
        if distributed.rank() > 0:
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
        wrapper: type[PolicyWrapper] = resolve(config.finetune["_target_"])
        whole = wrapper.wrap(base, config.finetune, config.policy)
        return whole, whole.trainable()
    if config.policy is None:
        raise ConfigError("policy is not given: policy=NAME")
    if config.init is not None:
        policy = checkpoint.load_policy(config.init, env.spec)
        wanted = resolve(config.policy["_target_"])
        if issubclass(wanted, PolicyWrapper) and type(policy) is not wanted:
            policy = wanted.wrap(policy, config.policy)
        return policy.train(), policy
    policy = build(config.policy, spec=env.spec)
    if policy.requires_base:
        raise ConfigError("this policy wraps a trained base policy: init=RUN")
    return policy, policy


def pick_device(name: str) -> torch.device:
    """ "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
