"""EnvActor: the environment of an actor, stepped with the newest weights; the same everywhere."""

from __future__ import annotations

from typing import Any

import torch

from embodied.core.build import allow, build
from embodied.core.device import pick_device, rng_state, seed_everything, set_rng_state
from embodied.core.env import VecEnv
from embodied.core.env_contract import require_start
from embodied.core.policy import Policy
from embodied.core.reward import AugmentsEnv
from embodied.core.spec import Spec
from embodied.nn.kernels import PRECISION
from embodied.training.actors.transport import ActorSettings, ActorWeights, Collected, encode
from embodied.training.collector import Collector
from embodied.training.config import read_config
from embodied.training.reward_pipeline import make_reward
from embodied.training.run_evaluation import RunEvaluation


def sendable(error: Exception) -> Exception:
    """The error, where its class can be built from its text; else a RuntimeError that names it."""
    try:
        return type(error)(str(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


class EnvActor:
    """Owns the process it runs in: sets the generators, threads and precision of torch."""

    def __init__(self, settings: ActorSettings) -> None:
        torch.set_float32_matmul_precision(PRECISION[settings.product])
        for package in settings.allowed:
            allow(package)
        self.config, self.seed = read_config(settings.node), settings.seed
        seed_everything(self.seed)
        torch.set_num_threads(self.config.threads)
        self.device = pick_device(self.config.device)
        self.env = build(self.config.environment | {"num_envs": settings.num_envs}, VecEnv)
        require_start(self.env, self.seed)
        self.evaluation = RunEvaluation(self.config, self.env)
        self.collector: Collector | None = None
        self.version = 0

    def spec(self) -> Spec:
        return self.env.spec

    def augment(self, gamma: float) -> Spec:
        """Add the observations that the run's reward needs."""
        reward = make_reward(self.config, self.env, gamma, self.device)
        assert isinstance(reward, AugmentsEnv)
        self.env = reward.augment_env(self.env)
        return self.env.spec

    def collect(
        self, policy: Policy, weights: ActorWeights, warmup: bool, settings: dict[str, Any]
    ) -> bool:
        """Begin to collect with `policy`, or its warm-up policy; whether the env can be saved."""
        self.policy, self.weights = policy.to(self.device), weights
        acting = self.policy.warmup_policy() if warmup else self.policy
        self.collector = Collector(self.env, acting, seed=self.seed, device=self.device, **settings)
        return self.collector.savable

    def act_with_policy(self) -> None:
        """The warm-up is over."""
        self._running().act_with(self.policy)

    def restart(self) -> None:
        self._running().restart()

    def step(self) -> bytes:
        """One vector step with the newest weights, as a message (`decode`)."""
        self._load()
        rows, step = self._running().step()
        return encode(Collected(rows, step, self._running().finished, self.version))

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the newest weights."""
        self._load()
        return self.evaluation(self.policy, step)

    def get_state(self) -> dict[str, Any]:
        """State of the collector (None: it cannot be saved) and of torch's generators."""
        running = self._running()
        return {"collector": running.get_state() if running.savable else None, "rng": rng_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `get_state`, with new episodes where the collector could not be saved."""
        if state["collector"] is None:
            self._running().restart()
        else:
            self._running().set_state(state["collector"])
        set_rng_state(state["rng"])

    def close(self) -> None:
        self.env.close()

    def _load(self) -> None:
        self.version = self.weights.load_into(self.policy, self.version)

    def _running(self) -> Collector:
        assert self.collector is not None
        return self.collector
