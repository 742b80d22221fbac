"""An actor on both sides: EnvActor in its own process, RemoteActor in the learner's.

`ActorPool` knows actors by the classes here only. There are two kinds of `Transport`: processes of
this machine (`pool`) and actors of a Ray cluster (`ray_cluster`). A vector step is sent as bytes
(safetensors).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import safetensors.numpy
import safetensors.torch
import torch
from torch import Tensor, nn

from embodied.core import tensors as tt
from embodied.core.build import Node, allow, build
from embodied.core.device import pick_device, rng_state, seed_everything, set_rng_state
from embodied.core.env import Step, VecEnv
from embodied.core.env_contract import require_start
from embodied.core.policy import Policy
from embodied.core.reward import AugmentsEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.nn.kernels import PRECISION
from embodied.training.collector import Collector
from embodied.training.config import read_config
from embodied.training.reward_pipeline import make_reward
from embodied.training.run_evaluation import RunEvaluation

FLAGS = ("reward", "terminated", "truncated")


@dataclass(frozen=True)
class Collected:
    """The transitions `rows` that `step` completed in parallel envs `finished` (None: all), and the
    `version` of the weights that acted."""

    rows: Tensors
    step: Step
    finished: Tensor | None
    version: int


def encode(collected: Collected) -> bytes:
    """The message for `collected`; all tensors are copied."""
    step = collected.step
    leaves = {f"step/{name}": cast(Tensor, getattr(step, name)) for name in FLAGS}
    leaves |= tt.nest(step.obs, "step/obs") | tt.nest(step.log, "step/log")
    if step.next_obs is not step.obs:
        leaves |= tt.nest(step.next_obs, "step/next_obs")
    if collected.finished is not None:
        leaves["finished"] = collected.finished
    leaves |= tt.nest(collected.rows, "rows") | {"version": torch.tensor(collected.version)}
    return safetensors.numpy.save(tt.each(leaves, lambda leaf: leaf.contiguous().cpu().numpy()))  # type: ignore[arg-type]


def decode(message: bytes) -> Collected:
    """What `encode` was given."""
    leaves = safetensors.torch.load(message)
    obs = tt.under(leaves, "step/obs")
    reward, terminated, truncated = (leaves[f"step/{name}"] for name in FLAGS)
    following = tt.under(leaves, "step/next_obs") or obs
    step = Step(obs, following, reward, terminated, truncated, tt.under(leaves, "step/log"))
    return Collected(tt.under(leaves, "rows"), step, leaves.get("finished"), int(leaves["version"]))


def joined(parts: list[Collected], starts: list[int], counts: list[int]) -> Collected:
    """One vector step of several actors; the parallel envs of part i begin at `starts[i]`, and are
    `counts[i]`."""
    if len(parts) == 1:
        return parts[0]
    rows = [part.rows for part in parts if part.rows]
    who: list[Tensor] = []
    for part, start, count in zip(parts, starts, counts, strict=True):
        every = torch.arange(count if part.rows else 0)
        who.append(start + (every if part.finished is None else part.finished))
    steps = [part.step for part in parts]
    obs, following, log = (
        tt.cat([getattr(step, name) for step in steps]) for name in ("obs", "next_obs", "log")
    )
    reward, terminated, truncated = (
        torch.cat([getattr(step, name) for step in steps]) for name in FLAGS
    )
    together = Step(obs, following, reward, terminated, truncated, log)
    oldest = min(part.version for part in parts)
    return Collected(tt.cat(rows) if rows else {}, together, torch.cat(who), oldest)


LOOK = 0.1  # s between two looks at whether the other side lives
END = 20.0  # s for an actor to bring its environment to rest


class ActorDied(RuntimeError):
    """The actor ended without a word, as after a kill."""


@dataclass(frozen=True)
class ActorSettings:
    """`num_envs` parallel envs, seeded by `seed`, of the run with settings `node`.

    `allowed`: the packages that the run may build objects from. `lag`: vector steps that the actor
    may be ahead of the learner; None: it never waits once it was allowed to step. `product`: the
    learner's float32 product (`embodied.nn.kernels`).
    """

    node: Node
    allowed: tuple[str, ...]
    num_envs: int
    seed: int
    lag: int | None
    product: str


def learned(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes: parameters that need gradients, and all buffers."""
    named = {name: p.data for name, p in module.named_parameters() if p.requires_grad}
    return named | dict(module.named_buffers())


def flat_weights(module: nn.Module) -> Tensor:
    """The learned tensors as bytes [n] (uint8), one after the other."""
    return torch.cat([as_bytes(each) for each in learned(module).values()])


def load_flat(module: nn.Module, flat: Tensor) -> None:
    """Copy `flat_weights` of an equal module into `module`."""
    tensors = learned(module).values()
    for part, tensor in zip(flat.split([each.nbytes for each in tensors]), tensors, strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class Weights(ABC):
    """What the learner publishes; `version` is the newest one, 0 before the first."""

    version: int

    @abstractmethod
    def publish(self, policy: nn.Module) -> int:
        """Make the weights of `policy` the next version; returns it."""

    @abstractmethod
    def for_actor(self) -> ActorWeights:
        """What an actor reads them with."""


class ActorWeights(ABC):
    """The weights as an actor sees them."""

    @abstractmethod
    def load_into(self, policy: nn.Module, held: int) -> int:
        """Copy the newest version into `policy`, which has version `held`; returns what it has
        then."""


class RemoteActor(ABC):
    """One actor, seen from the learner's process. Its commands are the methods of `EnvActor`."""

    fresh = True  # it was not allowed to step yet
    weights: Weights | None = None  # of the policy that collects

    @abstractmethod
    def send(self, command: str, *arguments: Any) -> None:
        """Ask for a command; ActorDied if the actor ended."""

    @abstractmethod
    def answer(self) -> Any:
        """The answer to the oldest command that waits for one; raises what the actor raised,
        ActorDied if it ended."""

    @abstractmethod
    def allow(self, steps: int) -> None:
        """Let the actor make `steps` more steps; in lockstep with this process's generator."""

    @abstractmethod
    def take(self) -> Collected:
        """The next vector step; waits for it. In lockstep this process's generator follows."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Vector steps that were made and not taken."""

    @abstractmethod
    def messages(self) -> Iterable[bytes]:
        """The steps that were made before the last answer and not taken (`encode`)."""

    @abstractmethod
    def remaining(self) -> list[bytes]:
        """Of an actor that died: the steps that it had sent and that were not taken (`encode`)."""

    @abstractmethod
    def put_back(self, messages: list[bytes]) -> None:
        """`take` returns these first."""

    @abstractmethod
    def close(self) -> None:
        """End the actor; its environment is closed."""

    def ask(self, command: str, *arguments: Any) -> Any:
        self.send(command, *arguments)
        return self.answer()

    def collect(
        self, policy: Policy, weights: Weights, warmup: bool, settings: dict[str, Any]
    ) -> bool:
        """Begin to collect; whether the actor's environment can be saved."""
        savable = self.ask("collect", policy, weights.for_actor(), warmup, settings)
        self.weights = weights
        return savable

    def get_state(self) -> dict[str, Any]:
        """The actor's state, and the steps made before it that were not taken."""
        state = self.ask("get_state")
        return {**state, "unread_messages": [bytearray(each) for each in self.messages()]}

    def set_state(self, state: dict[str, Any]) -> None:
        self.fresh = True
        self.put_back([bytes(each) for each in state["unread_messages"]])
        own = {key: value for key, value in state.items() if key != "unread_messages"}
        self.ask("set_state", own)


class Transport(ABC):
    """Starts actors, and brings them weights."""

    @abstractmethod
    def start(self, settings: ActorSettings) -> RemoteActor:
        """A new actor."""

    @abstractmethod
    def weights(self, policy: nn.Module) -> Weights:
        """For the weights of `policy`."""

    @abstractmethod
    def close(self) -> None:
        """After the last actor was closed."""


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
