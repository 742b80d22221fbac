"""RunComponents: the environment, policy, learner and training loop of one run, built and wired."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import get_type_hints

import torch

from embodied.core import checkpoint, distributed
from embodied.core.build import ConfigError, Node, build, parse, resolve
from embodied.core.env import VecEnv
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.reward import HasComponents
from embodied.core.seeding import rng_state, set_rng_state
from embodied.evaluation.evaluate import evaluate, film
from embodied.evaluation.task_grid import TaskGridEval, grid, held_out
from embodied.learners.learner import Learner
from embodied.training.config import RunConfig
from embodied.training.demonstrations import read_demonstrations
from embodied.training.off_policy import build_off_policy
from embodied.training.offline import build_offline
from embodied.training.on_policy import build_on_policy
from embodied.training.reward_components import write_terms
from embodied.training.trainer import Loop

BUILDERS: dict[str, Callable[..., Loop]] = {
    "offline": build_offline,
    "off_policy": build_off_policy,
    "on_policy": build_on_policy,
}


class RunComponents:
    """The environment, policy, learner and training loop of a run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = pick_device(config.device)
        self.env: VecEnv = build(config.env)
        self.policy, trained = make_policy(config, self.env)
        self.learner: Learner = build(
            config.learner,
            policy=trained,
            spec=trained.spec,
            total_steps=config.total_steps,
            execute=config.execute,
            total_decisions=config.steps // (config.execute or self.policy.chunk),
        ).to(self.device)
        if config.finetune is None:
            self.policy = self.learner.policy
        else:
            assert isinstance(self.policy, PolicyWrapper)
            self.policy = self.policy.with_trained(self.learner.policy)
        self.policy.to(self.device)
        self.episodes = read_demonstrations(config, self.env)
        build_loop = BUILDERS[config.data.regime]
        parts = (self.env, self.policy, self.learner, self.device, self.episodes)
        self.loop: Loop = build_loop(config, *parts)
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
        """Success rate and return on held-out initial states, or held-out tasks."""
        self.policy.eval()
        settings, env = self.config.eval, self.eval_env
        episodes = len(env.tasks) if isinstance(env, TaskGridEval) else settings.episodes
        result = evaluate(self.policy, env, episodes, settings.seed, self.config.execute)
        self.policy.train()
        if isinstance(env, TaskGridEval):
            env.write(Path(self.config.output), step, result)
        return result.metrics()

    def record_videos(self, folder: Path) -> None:
        """Write one successful and one failed evaluation episode as MP4, if the env renders."""
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

    def write_reward_components(self, folder: Path) -> None:
        """Write the reward's components over one evaluation episode, if it has components."""
        reward = None if self.loop.rewards is None else self.loop.rewards.reward
        if not isinstance(reward, HasComponents):
            return
        settings = self.config.eval
        env: VecEnv = build(self.config.env | {"num_envs": min(8, settings.episodes)})
        self.policy.eval()
        gamma, execute = self.learner.gamma, self.config.execute
        write_terms(folder, reward, self.policy, env, gamma, settings.seed, execute)
        env.close()

    def save(self, folder: Path, step: int, metrics: dict[str, float]) -> None:
        """Save a checkpoint; older ones lose the loop state, which only resuming needs."""
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
        """Continue from the last checkpoint of `path`; returns its step."""
        loop = checkpoint.load_state(path, "loop")
        self.learner.set_state(checkpoint.load_state(path, "learner"))
        if distributed.rank() > 0:
            loop["loop"]["rollout"] = None  # the first process's environments
        self.loop.set_state(loop["loop"])
        set_rng_state(loop["rng"])
        return int(loop["step"])


def make_policy(config: RunConfig, env: VecEnv) -> tuple[Policy, Policy]:
    """The policy that acts, and the trainable part of it (the same without `finetune`)."""
    if config.finetune is not None:
        if config.init is None:
            raise ConfigError("finetune needs a trained base policy: init=RUN")
        base = checkpoint.load_policy(config.init, env.spec)
        wrapper: type[PolicyWrapper] = resolve(config.finetune["_target_"])
        whole = wrapper.wrap(base, config.finetune, config.policy)
        return whole, whole.trainable()
    if config.policy is None:
        raise ConfigError("policy is not given: policy=NAME")
    if config.init is not None:
        policy = checkpoint.load_policy(config.init, env.spec)
        wanted = resolve(config.policy["_target_"])
        if issubclass(wanted, PolicyWrapper):
            if type(policy) is not wanted:
                policy = wanted.wrap(policy, config.policy)
        elif config.resume is None:  # a run of before may have ignored them
            require_settings(policy, config.policy)
        return policy.train(), policy
    policy = build(config.policy, spec=env.spec)
    if policy.requires_base:
        raise ConfigError("this policy wraps a trained base policy: init=RUN")
    return policy, policy


def require_settings(policy: Policy, node: Node) -> None:
    """ConfigError if `node` has another class or other settings than the policy of `init`."""
    wanted, held = resolve(node["_target_"]), type(policy)
    if wanted is not held:
        raise ConfigError(f"init holds a {held.__name__}, not a {wanted.__name__}: policy=NAME")
    if "config" not in signature(wanted).parameters:
        return
    kind = get_type_hints(wanted.__init__)["config"]
    asked, saved = (
        parse(kind, {k: v for k, v in each.items() if k != "_target_"}, "policy")
        for each in (node, policy.node)
    )
    for each in fields(kind):
        given, has = getattr(asked, each.name), getattr(saved, each.name)
        if given != has:
            raise ConfigError(
                f"policy.{each.name}={given} has no effect: the policy that init holds has {has}; "
                "set it to that, or train without init"
            )


def pick_device(name: str) -> torch.device:
    """The torch device of a name; "auto": the GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
