"""RunComponents: the environment, policy, learner and training loop of one run, built and wired."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from embodied.core import checkpoint, distributed
from embodied.core.build import ConfigError, build
from embodied.core.device import pick_device, rng_state, set_rng_state
from embodied.core.env import HasModel, HasNativeCode, VecEnv
from embodied.core.env_contract import innermost, require_start
from embodied.core.files import MALFORMED, reading
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.reward import HasComponents
from embodied.core.wrapper import find_protocol
from embodied.learners.acceleration import accelerate, native_obstacle
from embodied.learners.learner import Learner
from embodied.nn.kernels import Kernels, choose
from embodied.training.config import OffPolicy, RunConfig, as_node
from embodied.training.run_evaluation import RunEvaluation, write_terms
from embodied.training.trainer import Loop, RunParts

if TYPE_CHECKING:
    from embodied.datasets.lerobot.reader import Episodes
    from embodied.training.actors.pool import ActorPool
    from embodied.training.off_policy import OffPolicyLoop

BUILDERS = {  # the function that builds the loop of a regime; a run imports its own only
    "offline": "embodied.training.offline.build_offline",
    "off_policy": "embodied.training.off_policy.build_off_policy",
    "on_policy": "embodied.training.on_policy.build_on_policy",
}
AFTER_EVALUATION = 7_000_003  # added to the seeds of the episodes after a shared evaluation


class BestPolicy:
    """Keeps the policy with the lowest held-out loss of a run, which is what it saves. `policy`:
    the best one that was offered (None: none yet); `score`, `step`: its own."""

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.score, self.step = float("inf"), 0

    def offer(self, policy: Policy, score: float, step: int) -> None:
        """Keep a copy of `policy` if its `score` is the lowest so far."""
        if self.policy is None or score < self.score:
            self.policy = copy.deepcopy(policy).eval()
            self.score, self.step = score, step

    def metrics(self) -> dict[str, float]:
        return {"best_loss": self.score, "best_step": float(self.step)}

    def get_state(self) -> dict[str, Any]:
        return {"score": self.score, "step": self.step}

    def set_state(self, state: Mapping[str, Any], policy: Policy) -> None:
        self.policy, self.score, self.step = policy.eval(), state["score"], state["step"]


class RunComponents:
    """The environment, policy, learner and training loop of a run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = pick_device(config.device)
        saved = None
        if config.resume is not None:
            saved = checkpoint.read_about(config.resume).get("kernels") or Kernels().saved()
        self.kernels = choose(self.device, config.deterministic, saved)
        self.env = None if config.env is None else make_env(config, self.kernels)
        try:
            self._build()
        except BaseException:
            if self.env is not None:
                self.env.close()
            raise

    def _build(self) -> None:
        config = self.config
        self.episodes: Episodes | None = None
        if config.demos is not None:
            from embodied.training.demonstrations import read_demonstrations

            self.episodes = read_demonstrations(config, self.env)
        self.policy, trained = make_policy(config, self.env, self.episodes)
        plan = config.plan(self.policy.chunk)
        learner = build(config.learner, Learner, policy=trained, spec=trained.spec, run=plan)
        if isinstance(config.data, OffPolicy) and isinstance(config.data.utd_ratio, dict):
            from embodied.learners.critics import watch_active_units

            watch_active_units(learner)  # native code cannot: before it takes over
        self.learner = accelerate(learner.to(self.device), self.kernels.native)
        if config.finetune is None:
            self.policy = self.learner.policy
        else:
            assert isinstance(self.policy, PolicyWrapper)
            self.policy = self.policy.with_trained(self.learner.policy)
        self.policy.to(self.device)
        module, _, name = BUILDERS[config.data.regime].rpartition(".")
        build_loop: Callable[..., Loop] = getattr(import_module(module), name)
        parts = RunParts(config, self.env, self.policy, self.learner, self.device, self.episodes)
        self.loop = build_loop(parts)
        second = getattr(self.loop, "second_agent", None)  # of a two-agent teacher
        if second is not None:
            accelerate(second.learner, self.kernels.native)
        self.best = BestPolicy()
        reward = None if self.loop.rewards is None else self.loop.rewards.reward
        self.evaluation = None if self.env is None else RunEvaluation(config, self.env, reward)

    def describe_kernels(self) -> str:
        """One line: the matrix product, and whether the update and the environment are native code
        or why not."""
        obstacles = {"update": native_obstacle(self.learner) if self.kernels.native else ""}
        env = None if self.env is None else find_protocol(self.env, HasNativeCode)
        if env is not None:
            obstacles["environment"] = env.native_obstacle()
        parts = [self.kernels.note]
        for name, obstacle in obstacles.items():
            if obstacle != "":
                how = "native code" if obstacle is None else f"PyTorch ({obstacle})"
                parts.append(f"{name}: {how}")
        return "; ".join(parts)

    def close(self) -> None:
        second = getattr(self.loop, "second_agent", None)
        estimator = getattr(self.loop.teacher, "student", None)
        theirs = None if second is None else second.loop.collector.env
        if theirs is not None and self.env is not None and innermost(theirs) is innermost(self.env):
            theirs = None
        for part in (theirs, estimator, self.evaluation, self.env):
            if part is not None:
                part.close()

    def evaluate(self, step: int) -> dict[str, float]:
        """Success rate and return on held-out initial states, or held-out tasks; without an
        environment the losses and errors on held-out episodes."""
        if self.evaluation is None:
            # Metrics on held-out episodes (none where all are trained on); keeps the best policy.
            held_out = self.loop.held_out
            if held_out is None:
                return {}
            self.policy.eval()
            result = held_out.evaluate(self.policy, self.config.eval.seed, self.device)
            self.best.offer(self.policy, result["loss"], step)
            self.policy.train()
            return {**result, **self.best.metrics()}
        if isinstance(self.config.data, OffPolicy) and self.config.data.actors:
            loop = cast("OffPolicyLoop", self.loop)
            return cast("ActorPool", loop.collector).evaluate(step)
        result = self.evaluation(self.policy, step)
        if self.config.eval.shared:
            self.loop.restart(AFTER_EVALUATION + self.config.seed + step)
        return result

    def record_videos(self, folder: Path) -> None:
        """Write one successful and one failed evaluation episode as MP4, if the env renders."""
        if self.evaluation is None:
            return
        from embodied.evaluation.evaluate import evaluate, film
        from embodied.evaluation.video import write_mp4

        settings, execute = self.config.eval, self.config.execute
        with self.evaluation.another(min(8, settings.episodes)) as env:
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
                    frames = film(self.policy, env, env.num_envs, settings.seed, row, execute)
                    write_mp4(folder / f"{name}.mp4", frames, fps=1 / env.spec.dt)

    def write_reward_components(self, folder: Path) -> None:
        """Write the reward's components over one evaluation episode, if it has components."""
        reward = None if self.loop.rewards is None else self.loop.rewards.reward
        if self.evaluation is None or not isinstance(reward, HasComponents):
            return
        settings = self.config.eval
        self.policy.eval()
        gamma, execute = self.learner.gamma, self.config.execute
        with self.evaluation.another(min(8, settings.episodes)) as env:
            write_terms(folder, reward, self.policy, env, gamma, settings.seed, execute)

    def save(self, folder: Path, step: int, metrics: dict[str, float]) -> None:
        """Save a checkpoint. This one and the one before have the loop state, which only resuming
        needs; older ones lose it. The policy in it is the one with the best evaluation so far where
        there is no environment."""
        loop = {"step": step, "rng": rng_state(), "loop": self.loop.get_state()}
        loop["best"] = self.best.get_state()
        state = self.learner.get_state()
        left_out = tuple(self._left_out())  # a base that the checkpoint only refers to
        state["module"] = {k: v for k, v in state["module"].items() if not k.startswith(left_out)}
        for old in sorted((folder / "checkpoints").glob("[0-9]*/loop.pt"))[:-1]:
            old.unlink()  # first, so that the disk never holds three
        checkpoint.save(
            folder / "checkpoints" / f"{step:08d}",
            self.deployed((self.best.policy or self.policy).inference_policy()),
            step,
            state,
            loop,
            {
                "metrics": metrics,
                "parent": self._parent(),
                "demos": self.config.demos,
                "kernels": self.kernels.saved(),
            },
            self.config.copy_base_mb,
        )

    def deployed(self, policy: Policy) -> Policy:
        """`policy`, of a model's environment as one of the real environment."""
        imagined = None if self.env is None else find_protocol(self.env, HasModel)
        return policy if imagined is None else imagined.deployed(policy)

    def _left_out(self) -> list[str]:
        """Prefixes of the learner's parameters that are in the file of a base policy."""
        named = checkpoint.referable(self.policy, self.config.copy_base_mb)
        parts = [self.policy.get_submodule(name) for name in named]
        names = [n for n, part in self.learner.named_modules() if any(part is p for p in parts)]
        return [f"{name}." for name in names]

    def _parent(self) -> str | None:
        if self.config.init is None:
            return None
        from embodied.policies.remote.address import is_address

        if is_address(self.config.init):
            return None
        return checkpoint.file_hash(checkpoint.find(self.config.init) / "policy.safetensors")

    def resume(self, path: str) -> int:
        """Continue from the last checkpoint of `path`; returns its step."""
        loop = checkpoint.load_state(path, "loop")
        state = checkpoint.load_state(path, "learner", self.device)
        for name, file in checkpoint.references(path).items():
            if not file.holds(self.policy.get_submodule(name).state_dict()):
                raise checkpoint.CheckpointError(
                    f"{path} was trained on the {name} policy {file.path}, and "
                    f"init={self.config.init} holds another one: give init=RUN with that one"
                )
        known = self.learner.state_dict()
        base = {k: v for k, v in known.items() if k.startswith(tuple(self._left_out()))}
        with reading(f"the state in {path}", *MALFORMED):
            state["module"] = {**base, **state["module"]}
            self.learner.set_state(state)
            if distributed.rank() > 0:
                loop["loop"]["collector"] = None  # the first process's environments
            self.loop.set_state(loop["loop"])
            if self.env is None and self.loop.held_out is not None and loop["best"]["step"]:
                self.best.set_state(loop["best"], checkpoint.load_policy(path, device=self.device))
            set_rng_state(loop["rng"])
            return int(loop["step"])


def make_env(config: RunConfig, kernels: Kernels) -> VecEnv:
    """The training environment, in this process or in those of actors."""
    data, node = config.data, config.environment
    if not isinstance(data, OffPolicy) or not data.actors:
        env = build(node, VecEnv)
        require_start(env, config.seed, teaches=config.teacher is not None)
        return env
    if distributed.world() > 1:
        raise ConfigError("actor processes collect for one learner; with torchrun: data.actors=0")
    if config.teacher is not None:
        raise ConfigError("a teacher chooses tasks in the learner's process: data.actors=0")
    num_envs, seed = int(node.get("num_envs", 1)), config.seed
    from embodied.training.actors.pool import make_actor_env

    return make_actor_env(as_node(config), num_envs, data, seed, config.threads, kernels.product)


def make_policy(
    config: RunConfig, env: VecEnv | None, episodes: Episodes | None
) -> tuple[Policy, Policy]:
    """The policy that acts, and the trainable part of it (the same without `finetune`)."""
    if env is None:
        from embodied.training.initial_policy import make_dataset_policy

        policy = make_dataset_policy(config, episodes)
        return policy, policy
    if config.finetune is not None:
        from embodied.training.initial_policy import finetuned_policy

        return finetuned_policy(config, env)
    if config.policy is None:
        raise ConfigError("policy is not given: policy=NAME")
    if config.init is not None:
        from embodied.training.initial_policy import continued_policy

        policy = continued_policy(config, env)
    else:
        policy = build(config.policy, Policy, spec=env.spec)
        if policy.requires_base:
            raise ConfigError("this policy wraps a trained base policy: init=RUN")
    return policy, policy
