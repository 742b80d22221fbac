"""Goal GAN: a generative adversarial network proposes goals of intermediate difficulty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.bounds import Count, CountOrZero, Fraction, NonNegative, PositiveFraction, Units
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.nn.optim import gradient_step
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats, named_task
from embodied.teachers.torch_teacher import TorchTeacher, mlp, points, tensor

BAD, GOOD, FOOLED = -1.0, 1.0, 0.0  # a, b, c
OPEN = 2_000  # maximum number of goals without a label; the oldest are dropped


@dataclass(frozen=True, kw_only=True)
class GoalGanConfig(teacher.Config):
    """Settings of Goal GAN. A share `old` of the goals comes from the good ones so far, a share
    `random` is uniform (0 in the paper; it finds a first good goal if the generator proposes none),
    the others come from the generator. `pretrain` imitates the box of half-width `spread` around
    `easy`."""

    rollouts: Count = 2  # episodes per goal
    low: Fraction = 0.25  # least mean score of a good goal
    high: Fraction = 0.75  # largest mean score of a good goal
    every: Count = 100  # labelled goals between trainings
    iterations: Count = 250  # gradient steps of a training
    batch: Count = 64  # goals per gradient step
    lr: PositiveFraction = 1e-3  # RMSprop's learning rate
    old: Fraction = 0.2  # share of goals from the good ones so far
    random: Fraction = 0.1  # share of uniform goals
    noise: NonNegative = 0.01  # standard deviation of noise on the other goals
    apart: NonNegative = 0.01  # least distance of stored good goals, of the cube's diagonal
    pretrain: CountOrZero = 500  # gradient steps before the first episode
    easy: Mapping[str, Fraction] = field(default_factory=dict)  # easy task; empty: the whole cube
    spread: NonNegative = 0.1  # half-width of the box around `easy`
    generator_width: Units = 256  # units of a hidden layer
    discriminator_width: Units = 128  # units of a hidden layer


class GoalGan(TorchTeacher):
    """Goal GAN: a generative adversarial network proposes goals of intermediate difficulty.

    Florensa, Held, Geng and Abbeel, "Automatic goal generation for reinforcement learning agents",
    2018. A goal has label y = 1 if low <= mean score <= high. With (a, b, c) = (-1, 1, 0):
    D minimises y (D(g) - b)^2 + (1 - y) (D(g) - a)^2 + (D(G(z)) - a)^2, G minimises
    (D(G(z)) - c)^2. The memo of an episode is the number of its goal.
    """

    remembered = ("open", "labelled", "labels", "passed", "goals", "trained", "good")

    def __init__(self, config: GoalGanConfig, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        if config.low >= config.high:
            raise ConfigError(
                f"teacher: needs low < high; got low={config.low:g} high={config.high:g}"
            )
        d = len(self.space)
        wide, narrow = config.generator_width, config.discriminator_width
        self.maker = mlp((d, wide, wide, d), self.random, nn.LeakyReLU)
        self.critic = mlp((d, narrow, narrow, 1), self.random, nn.LeakyReLU)
        self.modules = {"maker": self.maker, "critic": self.critic}
        self.optimizers = {
            f"{name}_optimizer": torch.optim.RMSprop(net.parameters(), config.lr, foreach=True)
            for name, net in self.modules.items()
        }
        self.open: dict[int, dict[str, Any]] = {}  # by number: point, episodes left to play, scores
        self.labelled: list[list[float]] = []
        self.labels: list[float] = []
        self.passed = np.zeros((0, d))
        self.goals = 0
        self.trained = 0
        self.good = 0.0
        if config.pretrain:
            self.pretrain()

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        waiting = [number for number, goal in self.open.items() if goal["left"]]
        proposed: list[tuple[Floats, Any]] = []
        while len(proposed) < n:
            number = waiting.pop(0) if waiting else self.new_goal()
            goal = self.open[number]
            take = min(goal["left"], n - len(proposed))
            goal["left"] -= take
            proposed += [(goal["point"], number)] * take
        return proposed

    def new_goal(self) -> int:
        number = self.goals
        self.goals = self.goals + 1
        self.open[number] = {"point": self.goal(), "left": self.config.rollouts, "scores": []}
        if len(self.open) > OPEN:
            del self.open[next(iter(self.open))]
        return number

    def goal(self) -> Floats:
        kind = self.random.random()
        settings = self.config
        d = len(self.space)
        if kind < settings.random:
            return self.random.random(d)
        if kind < settings.random + settings.old and len(self.passed):
            point = self.passed[self.random.integers(len(self.passed))]
        else:
            with torch.no_grad():
                point = points(self.made(1))[0]
        return (point + settings.noise * self.random.standard_normal(d)).clip(0, 1)

    def made(self, n: int) -> Tensor:
        """`n` goals [n, d] of the generator, with gradient."""
        return 0.5 + 0.5 * torch.tanh(self.maker(self.normal(n, len(self.space))))

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        for score, number in zip(scores.tolist(), memos, strict=True):
            goal = self.open.get(number)
            if goal is None:
                continue
            goal["scores"].append(score)
            if len(goal["scores"]) == self.config.rollouts:
                self.label(self.open.pop(number))
        if len(self.labels) >= self.config.every:
            self.train()

    def label(self, goal: dict[str, Any]) -> None:
        mean = sum(goal["scores"]) / len(goal["scores"])
        self.labelled.append(goal["point"].tolist())
        self.labels.append(float(self.config.low <= mean <= self.config.high))
        if mean > self.config.high:
            self.keep(goal["point"])

    def keep(self, point: Floats) -> None:
        """Store a good goal if it is far enough from all stored ones."""
        apart = self.config.apart * np.sqrt(len(point))
        if not len(self.passed) or np.linalg.norm(self.passed - point, axis=1).min() >= apart:
            self.passed = np.vstack([self.passed, point])

    def train(self) -> None:
        goals, labels = tensor(self.labelled), tensor(self.labels)
        self.labelled = []
        self.labels = []
        self.good = float(labels.mean())
        if labels.any():  # without a good goal the generator has no target
            self.adversarial(goals, labels, self.config.iterations)
            self.trained += 1

    def pretrain(self) -> None:
        """Train the generator to imitate the box around the easy task."""
        n = 1000
        d = len(self.space)
        settings = self.config
        goals = self.random.random((n, d))
        if settings.easy:
            easy = named_task(self.space, settings.easy, 0.5, "easy")
            goals = (easy + settings.spread * (2 * goals - 1)).clip(0, 1)
        self.adversarial(tensor(goals), torch.ones(n), settings.pretrain)

    def adversarial(self, goals: Tensor, labels: Tensor, iterations: int) -> None:
        for _ in range(iterations):
            at = torch.from_numpy(self.random.integers(len(goals), size=self.config.batch))
            with torch.no_grad():
                made = self.made(len(at))
            known, fake = self.critic(goals[at])[:, 0], self.critic(made)[:, 0]
            gradient_step(self.optimizers["critic_optimizer"], critic_loss(known, labels[at], fake))
            fake = self.critic(self.made(len(at)))[:, 0]
            gradient_step(self.optimizers["maker_optimizer"], ((fake - FOOLED) ** 2).mean())

    def metrics(self) -> dict[str, float]:
        return {
            "goals": float(self.goals),
            "trained": float(self.trained),
            "good": self.good,
            "passed": float(len(self.passed)),
        }


def critic_loss(known: Tensor, label: Tensor, made: Tensor) -> Tensor:
    """Discriminator loss from its outputs [n] for goals with `label` [n] and generated goals."""
    real = label * (known - GOOD) ** 2 + (1 - label) * (known - BAD) ** 2
    return real.mean() + ((made - BAD) ** 2).mean()
