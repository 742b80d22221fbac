"""ActorPool: a Collector whose parallel envs run in actors: other processes, or on Ray.

With lag 0 the actor makes a step when the learner asks for it, with the learner's weights and
random numbers: one actor is then equal to a Collector bit for bit. With a lag, actors step while
the learner updates.

Actors in processes of this machine: weights go through shared memory, steps through a pipe.

Commands and their answers go through a pipe of their own. `credits` counts the steps that the actor
may still make. An actor process steps where steps are allowed, and answers commands in between.
"""

from __future__ import annotations

import copy
import pickle
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from embodied.core import tensors as tt
from embodied.core.build import ConfigError, Node, asked_packages
from embodied.core.children import safe_path
from embodied.core.env import Step, VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.training.actors.actor import (
    END,
    LOOK,
    ActorDied,
    ActorSettings,
    ActorWeights,
    Collected,
    EnvActor,
    RemoteActor,
    Transport,
    Weights,
    as_bytes,
    decode,
    joined,
    learned,
    load_flat,
    sendable,
)
from embodied.training.actors.ray_cluster import RayCluster
from embodied.training.config import OffPolicy

if TYPE_CHECKING:
    from multiprocessing.synchronize import Semaphore


@dataclass
class Links:
    """`steps`: the end of the pipe that takes messages; `rng` [n] (uint8), in shared memory: the
    state of torch's generator in lockstep."""

    steps: Connection
    credits: Semaphore
    rng: Tensor


def run(settings: ActorSettings, links: Links, pipe: Connection) -> None:
    """The process: serves until the learner closes `pipe` or is gone; errors are sent to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the learner's, which ends this process
    actor: EnvActor | None = None
    try:
        actor = EnvActor(settings)
        serve(actor, settings.lag, links, pipe)
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        pipe.send(("error", sendable(error), 0))
    finally:
        if actor is not None:
            actor.close()


def serve(actor: EnvActor, lag: int | None, links: Links, pipe: Connection) -> None:
    """Every answer has the number of messages that were sent before it."""
    sent, begun = 0, False
    while True:
        while pipe.poll(0 if actor.collector else None):
            command, arguments = pipe.recv()
            pipe.send(("answer", getattr(actor, command)(*arguments), sent))
        if actor.collector is None:
            continue
        if lag is not None or not begun:  # else it never waits
            begun = links.credits.acquire(timeout=LOOK / 10)
        if begun:
            if lag == 0:
                torch.set_rng_state(links.rng.clone())
            message = actor.step()
            if lag == 0:
                links.rng.copy_(torch.get_rng_state())
            links.steps.send_bytes(message)
            sent += 1


class Inbox:
    """Receives an actor's messages as they come, so that the actor never waits for room in `pipe`.
    `queue`: those that were not used yet; `received`: all since the start; `arrived` guards
    both."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.queue, self.received = pipe, deque[bytes](), 0
        self.arrived = threading.Condition()
        self.thread = threading.Thread(target=self._receive, daemon=True)
        self.thread.start()

    def _receive(self) -> None:
        """Until the actor has gone; a message that it did not finish is none."""
        with self.pipe, suppress(EOFError, OSError):
            while True:
                message = self.pipe.recv_bytes()
                with self.arrived:
                    self.queue.append(message)
                    self.received += 1
                    self.arrived.notify()


class ActorProcess(RemoteActor):
    def __init__(self, settings: ActorSettings) -> None:
        # Actors start within a second: torch is imported once, in a process that they fork from.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["embodied.training.actors.pool"])
        rng = torch.get_rng_state().share_memory_()
        received, steps = context.Pipe(duplex=False)
        self.pipe, theirs = context.Pipe()
        self.lockstep, self.links = settings.lag == 0, Links(steps, context.Semaphore(0), rng)
        self.process: Any = context.Process(target=run, args=(settings, self.links, theirs))
        with safe_path():
            self.process.start()
        theirs.close()
        steps.close()  # the actor's is the only one, so that its death ends the inbox
        self.inbox, self.count = Inbox(received), 0
        # Before this process waits for its children at its end, also after an error.
        self.finalize = Finalize(self, end, (self.pipe, self.process), exitpriority=10)

    def send(self, command: str, *arguments: Any) -> None:
        try:
            self.pipe.send((command, arguments))
        except OSError as error:
            raise self._death() from error

    def answer(self) -> Any:
        while not self.pipe.poll(LOOK):
            if not self.process.is_alive() and not self.pipe.poll(0):
                raise self._death()
        try:
            kind, value, self.count = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if kind == "error":
            raise value
        inbox = self.inbox
        with inbox.arrived:
            while inbox.received < self.count and inbox.thread.is_alive():
                inbox.arrived.wait(LOOK)
        return value

    def allow(self, steps: int) -> None:
        if self.lockstep:
            self.links.rng.copy_(torch.get_rng_state())
        for _ in range(steps):
            self.links.credits.release()

    def take(self) -> Collected:
        inbox = self.inbox
        with inbox.arrived:
            while not inbox.arrived.wait_for(lambda: inbox.queue, LOOK):
                if self.pipe.poll(0):
                    self.answer()  # nothing was asked: it is an error
                elif not self.process.is_alive():
                    raise self._death()
            message = inbox.queue.popleft()
        if self.lockstep:
            torch.set_rng_state(self.links.rng.clone())
        return decode(message)

    @property
    def waiting(self) -> int:
        return len(self.inbox.queue)

    def messages(self) -> list[bytes]:
        inbox = self.inbox
        with inbox.arrived:
            late = inbox.received - self.count
            return list(inbox.queue)[: len(inbox.queue) - late]

    def remaining(self) -> list[bytes]:
        self.inbox.thread.join(END)
        return list(self.inbox.queue)

    def put_back(self, messages: list[bytes]) -> None:
        self.inbox.queue = deque(messages)

    def close(self) -> None:
        self.finalize()

    def _death(self) -> ActorDied:
        deadline = time.monotonic() + 1.0
        while self.process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return ActorDied(f"an actor process ended (exit code {self.process.exitcode})")


def end(pipe: Connection, process: BaseProcess) -> None:
    """Close the pipe, which ends the actor's process; kill it where that takes too long."""
    pipe.close()
    process.join(END)
    if process.is_alive():
        process.kill()
        process.join()


VERSION, SUMS = 0, 1  # the newest version, then one checksum for each slot


class SharedWeights(Weights, ActorWeights):
    """The learned tensors of `policy` in shared memory; pass it to a process as an argument. Two
    slots are written in turn and a reader never waits: it checks its copy's checksum, which depends
    on the version, and copies again where the writer was faster."""

    def __init__(self, policy: nn.Module) -> None:
        self.version = 0  # of the writer
        self.sizes = [each.nbytes for each in learned(policy).values()]
        self.counters = torch.zeros(3, dtype=torch.int64).share_memory_()
        self.slots = torch.zeros(2, sum(self.sizes), dtype=torch.uint8).share_memory_()

    def publish(self, policy: nn.Module) -> int:
        version = self.version = self.version + 1
        slot = self.slots[version % 2]
        for part, tensor in zip(slot.split(self.sizes), learned(policy).values(), strict=True):
            part.copy_(as_bytes(tensor))
        self.counters[SUMS + version % 2] = crc32(slot.numpy().data, version)
        self.counters[VERSION] = version
        return version

    def for_actor(self) -> SharedWeights:
        return self

    def load_into(self, policy: nn.Module, held: int) -> int:
        while (version := int(self.counters[VERSION])) != held:
            copy = self.slots[version % 2].clone()
            if crc32(copy.numpy().data, version) != int(self.counters[SUMS + version % 2]):
                continue
            load_flat(policy, copy)
            return version
        return held


class Processes(Transport):
    def start(self, settings: ActorSettings) -> ActorProcess:
        return ActorProcess(settings)

    def weights(self, policy: nn.Module) -> SharedWeights:
        return SharedWeights(policy)

    def close(self) -> None:
        """Nothing is left."""


SEEDS = 1_000_003  # between the seeds of two actors
T = TypeVar("T")
DEATHS = 20  # actors that may die in one run


class ActorEnv(VecEnv):
    """The parallel envs of `count` actors together; `num_envs` is divided among them. `settings`:
    of the first actor, with the number of all parallel envs."""

    def __init__(self, settings: ActorSettings, count: int, transport: Transport) -> None:
        self.num_envs, self.lag, self.transport = settings.num_envs, settings.lag, transport
        self.each, self.started = settings.num_envs // count, 0
        self.settings = replace(settings, num_envs=self.each)
        self.gamma: float | None = None
        self.actors = list[RemoteActor]()
        try:
            self.actors += [self._started() for _ in range(count)]
            self.spec: Spec = self._each("spec")[0]
        except Exception:
            self.close()
            raise

    def _each(self, command: str, *arguments: Any) -> list[Any]:
        """The answer of every actor; they work at the same time."""
        for actor in self.actors:
            actor.send(command, *arguments)
        return [actor.answer() for actor in self.actors]

    def _started(self) -> RemoteActor:
        seed, self.started = self.settings.seed + SEEDS * self.started, self.started + 1
        return self.transport.start(replace(self.settings, seed=seed))

    def restarted(self, index: int) -> RemoteActor:
        """A new actor in the place of one that died."""
        self.actors[index].close()
        actor = self.actors[index] = self._started()
        if self.gamma is not None:
            actor.ask("augment", self.gamma)
        return actor

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        raise RuntimeError("these parallel envs are stepped by actor processes")

    def step(self, action: Tensor) -> Step:
        raise RuntimeError("these parallel envs are stepped by actor processes")

    def augmented(self, gamma: float) -> VecEnv:
        seen = copy.copy(self)
        seen.spec, self.gamma = self._each("augment", gamma)[0], gamma
        return seen

    def close(self) -> None:
        for actor in self.actors:
            actor.close()
        self.transport.close()


class ActorPool:
    """See the module; the arguments are a Collector's, `warmup` takes the policy's warm-up policy.
    `behind`: whether more steps wait than `lag` (always False where actors wait for the learner).
    `restarted`: the parallel envs [n] whose running episodes were lost in the last step, or
    None."""

    def __init__(
        self,
        env: ActorEnv,
        policy: Policy,
        warmup: bool,
        settings: dict[str, Any],
        device: torch.device,
        allowed_lag: int,
    ) -> None:
        self.env, self.policy, self.warmup = env, policy, warmup
        self.settings, self.device, self.allowed_lag = settings, device, allowed_lag
        self.weights: Weights = env.transport.weights(policy)
        self.weights.publish(policy)
        self.finished: Tensor | None = None
        self.restarted: Tensor | None = None
        self.inherited = dict[int, int]()  # steps of a dead actor that its successor has to hand on
        self.deaths, self.lag = 0, 0.0
        self.hours, self.since = 0.0, time.monotonic()  # of all actors, up to `since`
        self.savable = all([self._begin(actor) for actor in env.actors])

    def _begin(self, actor: RemoteActor) -> bool:
        """Start to collect; whether the actor's environment can be saved."""
        policy = copy.deepcopy(self.policy).cpu()
        try:
            return actor.collect(policy, self.weights, self.warmup, self.settings)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"this policy cannot be sent to actors ({error}): data.actors=0"
            ) from error

    def act_with(self, policy: Policy) -> None:
        """The warm-up is over: act with `policy`, which is the one given at first."""
        assert policy is self.policy
        self.warmup = False
        self.weights.publish(policy)
        for index in range(len(self.env.actors)):
            self._try(index, lambda actor: actor.ask("act_with_policy"))

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the policy, found by the first actor, which does not collect meanwhile. Where
        it dies, another one begins the evaluation anew."""
        self.weights.publish(self.policy)
        return self._try(0, lambda actor: actor.ask("evaluate", step))

    def step(self) -> tuple[Tensors, Step]:
        """The oldest vector step of each actor that was not taken yet."""
        self.restarted = None
        version = self.weights.publish(self.policy)
        for actor in self.env.actors:
            self._allow(actor)
        parts = [self._take(index) for index in range(len(self.env.actors))]
        starts = [index * self.env.each for index in range(len(parts))]
        made = joined(parts, starts, [self.env.each] * len(parts))
        self.lag = float(version - made.version)
        self.finished = None if made.finished is None else made.finished.to(self.device)
        return tt.to(made.rows, self.device), made.step.to(self.device)

    def _allow(self, actor: RemoteActor) -> None:
        if actor.fresh:
            actor.fresh = False
            actor.allow(max(0, (self.env.lag or 0) - actor.waiting))
        actor.allow(1)

    def _take(self, index: int) -> Collected:
        while True:
            if (left := self.inherited.pop(index, None)) == 0:
                # The running episodes of the actor's parallel envs ended with it.
                lost = torch.arange(self.env.each, device=self.device) + index * self.env.each
                before = [] if self.restarted is None else [self.restarted]
                self.restarted = torch.cat([*before, lost])
            elif left is not None:
                self.inherited[index] = left - 1
            try:
                return self.env.actors[index].take()
            except ActorDied as error:
                self._replace(index, error)
                self._allow(self.env.actors[index])

    def _try(self, index: int, command: Callable[[RemoteActor], T]) -> T:
        """The answer of an actor, or of its successor."""
        while True:
            try:
                return command(self.env.actors[index])
            except ActorDied as error:
                self._replace(index, error)

    def _replace(self, index: int, error: ActorDied) -> None:
        """A new actor goes on from the initial states of new episodes, after the steps that the
        dead one had sent."""
        self.deaths += 1
        if self.deaths > DEATHS:
            raise error
        warnings.warn(f"{error}; another one takes its place", stacklevel=2)
        messages = self.env.actors[index].remaining()
        actor = self.env.restarted(index)
        self._begin(actor)
        actor.put_back(messages)
        self.inherited[index] = len(messages)

    @property
    def behind(self) -> bool:
        if self.env.lag is not None:
            return False
        return any(actor.waiting > self.allowed_lag for actor in self.env.actors)

    def metrics(self) -> dict[str, Tensor]:
        """For the log: how old the weights were, steps that wait, actors that died, hours of all
        actors (wall time, with all resumes)."""
        waiting = float(sum(actor.waiting for actor in self.env.actors))
        ages = {"policy_lag": self.lag, "waiting_steps": waiting}
        named = {**ages, "actor_deaths": self.deaths, "actor_hours": self._actor_hours()}
        return {name: torch.tensor(float(value)) for name, value in named.items()}

    def _actor_hours(self) -> float:
        now = time.monotonic()
        self.hours += len(self.env.actors) * (now - self.since) / 3600
        self.since = now
        return self.hours

    def require_finite(self) -> None:
        """Actors check each step and end with NotFinite."""

    def restart(self) -> None:
        for actor in self.env.actors:
            actor.ask("restart")

    def get_state(self) -> dict[str, Any]:
        """The state of each actor and the steps that it sent and that were not taken."""
        indices = range(len(self.env.actors))
        states = [self._try(index, lambda actor: actor.get_state()) for index in indices]
        state = {"actors": states, "version": self.weights.version, "hours": self._actor_hours()}
        return {**state, "inherited": dict(self.inherited)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `get_state`: exactly in lockstep, else without a lost or doubled step."""
        self.weights.version = state["version"]
        self.hours, self.inherited = state["hours"], dict(state["inherited"])
        for actor, saved in zip(self.env.actors, state["actors"], strict=True):
            actor.set_state(saved)


def make_actor_env(
    node: Node, num_envs: int, data: OffPolicy, seed: int, threads: int, product: str
) -> ActorEnv:
    """The actors that `data` asks for; see `ActorSettings`."""
    if num_envs % data.actors:
        raise ConfigError(
            f"env.num_envs={num_envs} parallel envs are divided among data.actors={data.actors}: "
            f"env.num_envs={max(1, num_envs // data.actors) * data.actors}"
        )
    lag = None if data.when_behind == "skip" else data.max_lag
    settings = ActorSettings(node, asked_packages(), num_envs, seed, lag, product)
    transport = RayCluster(data.actors, threads) if data.actors_on == "ray" else Processes()
    return ActorEnv(settings, data.actors, transport)
