"""Trainer: counts steps; logs, evaluates and saves at intervals; handles Ctrl-C."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.children import outlive_parent
from embodied.core.env import Step, VecEnv
from embodied.core.policy import Policy
from embodied.evaluation.evaluate import EpisodeMeans
from embodied.training.logger import Log

if TYPE_CHECKING:
    from embodied.datasets.lerobot.reader import Episodes
    from embodied.evaluation.held_out import HeldOut
    from embodied.learners.learner import Learner
    from embodied.teachers.teacher import Curriculum
    from embodied.training.config import RunConfig
    from embodied.training.reward_pipeline import RewardPipeline

# Called after each step, with the number of steps; where it returns False, the training ends.
Callback: TypeAlias = "Callable[[int, Log, Policy], object]"


@dataclass(frozen=True)
class RunParts:
    """What a training loop is built of; `episodes`: the demonstrations (None: none)."""

    config: RunConfig
    env: VecEnv | None
    policy: Policy
    learner: Learner
    device: torch.device
    episodes: Episodes | None


class Loop(Protocol):
    """A training loop: runs until `trainer.running` is false; its state allows an exact resume.
    `data_metrics`: metrics of the dataset, logged before training. `rewards`: the run's reward
    pipeline (None: the rewards of the dataset). `held_out`: episodes of the dataset to evaluate on
    (None: none). `teacher`: chooses the tasks (None: the environment does). `memory`: a line about
    the memory that the run needs, if it is much."""

    memory: str

    @property
    def data_metrics(self) -> Mapping[str, float]: ...
    @property
    def rewards(self) -> RewardPipeline | None: ...
    @property
    def held_out(self) -> HeldOut | None: ...
    @property
    def teacher(self) -> Curriculum | None: ...
    def run(self, trainer: Trainer, /) -> None: ...
    def restart(self, seed: int, /) -> None:
        """Begin new episodes from `seed`: the environment was used for something else."""

    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Every:
    """Intervals in steps; 0: only at the end."""

    log: int
    evaluate: int
    save: int


def intervals(log: int | None, evaluate: int | None, save: int | None, stride: int) -> Every:
    """The intervals given; for None the usual one, or more where a vector step is `stride` steps of
    many environments: a line every 10, an evaluation and a checkpoint every 100 vector steps."""
    rare = max(10_000, 100 * stride)
    return Every(
        max(1_000, 10 * stride) if log is None else log,
        rare if evaluate is None else evaluate,
        rare if save is None else save,
    )


class Throughput:
    """Steps and updates a second since the last `drain`, without evaluations and checkpoints."""

    def __init__(self, step: int) -> None:
        self.step, self.updates, self.began = step, 0, time.monotonic()
        self.counted = False  # whether the loop counts its updates

    def count(self, updates: int | None) -> None:
        """`updates` more (None: they are not counted)."""
        self.counted |= updates is not None
        self.updates += updates or 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.began += time.monotonic() - began

    def drain(self, step: int) -> dict[str, float]:
        seconds = max(time.monotonic() - self.began, 1e-9)
        rates = {"train/steps_per_second": (step - self.step) / seconds}
        if self.counted:
            rates["train/updates_per_second"] = self.updates / seconds
        self.step, self.updates, self.began = step, 0, time.monotonic()
        return rates


ECHO = 0.5  # s in which the same signal may have been sent again already


class Trainer:
    """Counts steps and calls `evaluate(step)` and `save(step)` when they are due. `minutes`: wall
    time from the first step on, after which it is enough (None: no limit), as where `call(step)`,
    if it is set, returns False after a step. The first Ctrl-C finishes the current iteration, saves
    and raises KeyboardInterrupt; a second one, more than `ECHO` s later, stops at once."""

    def __init__(
        self,
        log: Log,
        steps: int,
        every: Every,
        evaluate: Callable[[int], None],
        save: Callable[[int], None],
        step: int = 0,
        teacher: Curriculum | None = None,
        minutes: float | None = None,
    ) -> None:
        self.call: Callable[[int], object] | None = None
        self.stopped = False
        self.log, self.steps, self.every = log, steps, every
        self.evaluate, self.save, self.teacher = evaluate, save, teacher
        self.step = self.first_step = self.saved = step
        self.interrupted, self.heard = False, 0.0
        self.episodes = EpisodeMeans()
        self.updates: list[Mapping[str, Tensor]] = []
        self.throughput = Throughput(step)
        self.minutes, self.until = minutes, math.inf

    @property
    def running(self) -> bool:
        self.interrupted = distributed.any_rank(self.interrupted)
        if self.minutes is not None:
            if math.isinf(self.until):  # from the first step on, which is always made
                self.until = time.monotonic() + 60 * self.minutes
            elif distributed.any_rank(time.monotonic() >= self.until):
                return False
        if self.call is not None:
            self.stopped = distributed.any_rank(self.stopped)
        return self.step < self.steps and not self.interrupted and not self.stopped

    def advance(
        self,
        steps: int,
        metrics: Mapping[str, Tensor],
        step: Step | None = None,
        updates: int | None = None,
    ) -> None:
        """Count `steps` more; `metrics` are those of the last update (may be empty), of `updates`
        that were made (None: not counted)."""
        before, self.step = self.step, self.step + steps
        if step is not None:
            self.episodes.add(step)
        if metrics:
            self.updates.append(metrics)
        self.throughput.count(updates)
        if self._due(self.every.log, before):
            rates = self.throughput.drain(self.step)
            taught = {} if self.teacher is None else self.teacher.metrics()
            new, self.updates = self.updates, []
            keys = dict.fromkeys(key for update in new for key in update)
            stacks = {key: torch.stack([u[key] for u in new if key in u]) for key in keys}
            # Means over the updates since the last line; the only device sync.
            row = {f"train/{key}": stack.mean().item() for key, stack in stacks.items()}
            row |= {f"train/teacher_{key}": value for key, value in taught.items()}
            row |= self.episodes.drain("train/") | rates
            self.log.write(self.step, row)
        self.log.advance(self.step)
        if self._due(self.every.evaluate, before):
            with self.throughput.paused():
                self.evaluate(self.step)
        if self._due(self.every.save, before):
            with self.throughput.paused():
                self.save_now()
        if self.call is not None:
            with self.throughput.paused():
                self.stopped = self.call(self.step) is False

    def save_now(self) -> None:
        if self.saved != self.step:
            self.save(self.step)
            self.saved = self.step

    def _due(self, every: int, before: int) -> bool:
        return every > 0 and self.step // every > before // every

    def __enter__(self) -> Trainer:
        # Python lets only the main thread handle signals.
        mine = threading.current_thread() is threading.main_thread()
        kinds = (signal.SIGINT, signal.SIGTERM) if mine else ()
        self._handlers = {kind: signal.signal(kind, self._stop) for kind in kinds}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.interrupted:
            self.interrupted, self.heard = True, time.monotonic()
            outlive_parent()
        elif distributed.world() == 1 and time.monotonic() - self.heard > ECHO:
            raise KeyboardInterrupt  # with torchrun not: it forwards the signal to all
