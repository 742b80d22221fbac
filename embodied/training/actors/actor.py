"""The actor's side: steps an environment with the newest weights, and answers commands."""

from __future__ import annotations

import multiprocessing as mp
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from embodied.core.build import Node, allow, build
from embodied.core.device import pick_device
from embodied.core.env import VecEnv
from embodied.core.env_contract import require_start
from embodied.core.policy import Policy
from embodied.core.reward import AugmentsEnv
from embodied.core.seeding import seed_everything
from embodied.core.spec import Spec
from embodied.nn.kernels import PRECISION
from embodied.training.actors.collected import Collected, encode
from embodied.training.actors.links import LOOK, Links
from embodied.training.actors.shared_weights import SharedWeights
from embodied.training.collector import Collector
from embodied.training.config import read_config
from embodied.training.reward_pipeline import make_reward
from embodied.training.run_evaluation import RunEvaluation


def run(
    node: Node,
    allowed: tuple[str, ...],
    num_envs: int,
    seed: int,
    lag: int | None,
    product: str,
    links: Links,
    pipe: Connection,
) -> None:
    """The process: serves until the learner closes `pipe` or is gone; errors are sent to it.

    `allowed`: the packages that the run may build objects from. `product`: the learner's float32
    product (`embodied.nn.kernels`).
    """
    torch.set_float32_matmul_precision(PRECISION[product])
    for package in allowed:
        allow(package)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the learner's, which ends this process
    actor: EnvActor | None = None
    try:
        actor = EnvActor(node, num_envs, seed, lag, links, pipe)
        actor.serve()
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        pipe.send(("error", sendable(error)))
    finally:
        if actor is not None:
            actor.env.close()


def sendable(error: Exception) -> Exception:
    """The error, where its class can be built from its text; else a RuntimeError that names it."""
    try:
        return type(error)(str(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


class EnvActor:
    """The environment of an actor process; its methods without `_` are the commands."""

    def __init__(
        self, node: Node, num_envs: int, seed: int, lag: int | None, links: Links, pipe: Connection
    ) -> None:
        self.config, self.seed, self.lockstep = read_config(node), seed, lag == 0
        self.never_waits, self.begun = lag is None, False
        self.links, self.pipe = links, pipe
        seed_everything(seed)
        torch.set_num_threads(self.config.threads)
        self.device = pick_device(self.config.device)
        self.env = build(self.config.environment | {"num_envs": num_envs}, VecEnv)
        require_start(self.env, seed)
        self.evaluation = RunEvaluation(self.config, self.env)
        self.collector: Collector | None = None
        self.version = 0

    def serve(self) -> None:
        """Answer commands, and step in between where steps are allowed."""
        while True:
            while self.pipe.poll(0 if self.collector else None):
                command, arguments = self.pipe.recv()
                self.pipe.send(("answer", getattr(self, command)(*arguments)))
            if self.collector is not None and self._allowed():
                self._step(self.collector)

    def spec(self) -> Spec:
        return self.env.spec

    def augment(self, gamma: float) -> Spec:
        """Add the observations that the run's reward needs."""
        reward = make_reward(self.config, self.env, gamma, self.device)
        assert isinstance(reward, AugmentsEnv)
        self.env = reward.augment_env(self.env)
        return self.env.spec

    def collect(
        self, policy: Policy, weights: SharedWeights, warmup: bool, settings: dict[str, Any]
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

    def get_state(self) -> tuple[dict[str, Any] | None, int]:
        """The collector's state (None: it cannot be saved), and how many messages came before."""
        state = self._running().get_state() if self._running().savable else None
        return state, self.links.ring.put_count

    def set_state(self, state: dict[str, Any]) -> None:
        self._running().set_state(state)

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the newest weights."""
        self.version = self.weights.load_into(self.policy, self.version)
        return self.evaluation(self.policy, step)

    def _running(self) -> Collector:
        assert self.collector is not None
        return self.collector

    def _allowed(self) -> bool:
        if self.never_waits and self.begun:
            return True
        self.begun = self.links.credits.acquire(timeout=LOOK / 10)
        return self.begun

    def _step(self, collector: Collector) -> None:
        self.version = self.weights.load_into(self.policy, self.version)
        if self.lockstep:
            torch.set_rng_state(self.links.rng.clone())
        rows, step = collector.step()
        if self.lockstep:
            self.links.rng.copy_(torch.get_rng_state())
        self._send(encode(Collected(rows, step, collector.finished, self.version)))

    def _send(self, message: bytes) -> None:
        """Wait while the ring is full."""
        while not self.links.ring.put(message):
            time.sleep(LOOK / 10)
            parent = mp.parent_process()
            if parent is None or not parent.is_alive():
                raise EOFError
        self.links.items.release()
