"""Teachers that propose tasks with neural networks: Goal GAN, Setter-Solver, MPTS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.bounds import (
    Bound,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Number,
    PositiveFraction,
)
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.nn.fit import gradient_step
from embodied.nn.optim import Adam
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats, named_task
from embodied.teachers.torch_teacher import TorchTeacher, linear, mlp, points, tensor

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
    generator_width: Count = 256  # units of a hidden layer
    discriminator_width: Count = 128  # units of a hidden layer


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


EDGE = 1e-4  # goals are clamped to [EDGE, 1 - EDGE] before the logit
UNIT = math.log(math.e - 1)  # softplus of it is 1

PLAN = 64  # goals that are generated at a time


class Highway(nn.Module):
    """Highway layer: h -> g relu(A h) + (1 - g) h, g = sigmoid(B h)."""

    def __init__(self, width: int, random: np.random.Generator) -> None:
        super().__init__()
        self.change = linear(width, width, random)
        self.gate = linear(width, width, random)

    def forward(self, h: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(h))
        return gate * F.relu(self.change(h)) + (1 - gate) * h


class Coupling(nn.Module):
    """Affine coupling layer; elements with `kept` [d] (bool) true are unchanged. Initially close to
    the identity."""

    kept: Tensor

    def __init__(self, kept: Tensor, width: int, layers: int, random: np.random.Generator) -> None:
        super().__init__()
        self.register_buffer("kept", kept.float(), persistent=False)
        highways = [Highway(width, random) for _ in range(layers)]
        last = linear(width, 2 * len(kept), random, scale=0.1)
        self.net = nn.Sequential(linear(len(kept) + 1, width, random), nn.ReLU(), *highways, last)

    def parts(self, kept: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and shift [n, d]; 1 and 0 for kept elements."""
        raw, shift = self.net(torch.cat([kept, condition], 1)).chunk(2, 1)
        moved = 1 - self.kept
        scale = 0.01 + F.softplus(raw + UNIT)
        return scale * moved + self.kept, shift * moved

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.parts(x * self.kept, condition)
        return x * scale + shift, scale.log().sum(1)

    def inverse(self, y: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Input x [n, d] for output y [n, d], and the log-determinant [n] of `forward` at x."""
        scale, shift = self.parts(y * self.kept, condition)
        return (y - shift) / scale, scale.log().sum(1)


class Flow(nn.Module):
    """RealNVP: maps normal noise z and a feasibility f to goals in the unit cube.

    Dinh, Sohl-Dickstein and Bengio, "Density estimation using Real NVP", 2017. Each affine coupling
    keeps part of the elements and maps the others by x -> x s + t, s = 0.01 + softplus(a); a
    network computes (a, t) from the kept part and f. The last layer is a sigmoid.

        log p(g | f) = log N(z) - log |dg / dz|

    Each of `blocks` has three couplings, which keep the first half of the elements, the second
    half, and every other element.
    """

    def __init__(
        self, d: int, blocks: int, width: int, layers: int, random: np.random.Generator
    ) -> None:
        super().__init__()
        place = torch.arange(d)
        left, odd = place < d // 2, place % 2 == 1
        masks = [left, ~left, odd] if d > 1 else [left] * 3
        couplings = [Coupling(mask, width, layers, random) for mask in masks * blocks]
        self.couplings = couplings
        self.parts = nn.ModuleList(couplings)

    def forward(self, z: Tensor, feasibility: Tensor) -> tuple[Tensor, Tensor]:
        """Goals [n, d] in (0, 1) and log p(goal | feasibility) [n]; z [n, d], feasibility [n]."""
        condition = feasibility[:, None] * 2 - 1
        x, log = z, normal(z)
        for coupling in self.couplings:
            x, volume = coupling(x, condition)
            log = log - volume
        return torch.sigmoid(x), log - squeezed(x)

    def inverse(self, goals: Tensor, feasibility: Tensor) -> tuple[Tensor, Tensor]:
        """Noise z [n, d] that is mapped to `goals` [n, d], and log p(goals | feasibility) [n]."""
        condition = feasibility[:, None] * 2 - 1
        x = torch.logit(goals.clamp(EDGE, 1 - EDGE))
        log = -squeezed(x)
        for coupling in reversed(self.couplings):
            x, volume = coupling.inverse(x, condition)
            log = log - volume
        return x, log + normal(x)


def normal(z: Tensor) -> Tensor:
    """Log-density [n] of the standard normal distribution at z [n, d]."""
    return -0.5 * (z**2 + math.log(2 * math.pi)).sum(1)


def squeezed(x: Tensor) -> Tensor:
    """Log-determinant [n] of the sigmoid's Jacobian at x [n, d]."""
    return (F.logsigmoid(x) + F.logsigmoid(-x)).sum(1)


@dataclass(frozen=True, kw_only=True)
class SetterSolverConfig(teacher.Config):
    """Settings of Setter-Solver. All goals are uniform before the first update."""

    solved: PositiveFraction = 0.5  # score from which an episode is a success
    every: Count = 100  # episodes between updates
    steps: Count = 50  # gradient steps of both networks per update
    batch: Count = 64  # episodes per gradient step
    memory: Count = 2_000  # newest episodes that are trained on
    lr: PositiveFraction = 3e-4  # Adam's learning rate
    random: Fraction = 0.1  # share of goals that are uniform over the box
    rarest: Annotated[float, Bound(above=0.0, below=0.5)] = 0.05  # feasibilities: this to 1 - this
    noise: NonNegative = 0.01  # e, noise on goals of successful episodes
    validity: NonNegative = 1.0  # weight of the validity loss
    feasibility: NonNegative = 1.0  # weight of the feasibility loss
    coverage: NonNegative = 1.0  # weight of the coverage loss
    judge: tuple[Count, ...] = (64, 64, 64)  # units of each hidden layer of the judge
    width: Count = 128  # units of the setter's hidden layers
    layers: CountOrZero = 3  # highway layers of a coupling
    blocks: Count = 3  # coupling layers of the setter


class SetterSolver(TorchTeacher):
    """Setter-Solver: a normalizing flow proposes goals of a given feasibility.

    Racaniere, Lampinen et al., "Automated curricula through setter-solver interactions", 2020. The
    judge J predicts success from the goal (cross-entropy). The setter S(z, f), f uniform, minimises
    the sum of its validity, feasibility and coverage losses (g: goals of successful episodes):

        E[-log p_S(g + U(0, e) | f)] + E[(J(S(z, f)) - logit f)^2] + E[log p_S(S(z, f) | f)]

    The memo of an episode is the requested feasibility of its goal (-1: a uniform goal).
    """

    remembered = ("plan", "rows", "fresh", "trained", "losses")

    def __init__(self, config: SetterSolverConfig, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        d = len(self.space)
        self.judge = mlp((d, *config.judge, 1), self.random)
        self.setter = Flow(d, config.blocks, config.width, config.layers, self.random)
        self.modules = {"judge": self.judge, "setter": self.setter}
        self.optimizers = {
            f"{name}_optimizer": Adam(net.parameters(), config.lr, local=True)
            for name, net in self.modules.items()
        }
        self.plan: list[list[float]] = []
        self.rows: list[list[float]] = []  # points, requested feasibility, 1 for a success
        self.fresh = 0
        self.trained = 0
        self.losses: dict[str, float] = {}

    def one(self) -> tuple[Floats, Any]:
        if not self.trained or self.random.random() < self.config.random:
            return self.random.random(len(self.space)), -1.0
        if not self.plan:
            self.plan = self.planned()
        goal = self.plan.pop()
        return np.array(goal[:-1]), goal[-1]

    @torch.no_grad()
    def planned(self) -> list[list[float]]:
        """Goals of the next episodes, with their requested feasibility; batched for speed."""
        wanted = self.wanted(PLAN)
        goals = self.setter(self.normal(PLAN, len(self.space)), wanted)[0]
        return torch.cat([goals, wanted[:, None]], 1).double().tolist()

    def wanted(self, n: int) -> Tensor:
        rarest = self.config.rarest
        return rarest + (1 - 2 * rarest) * self.uniform(n)

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        self.rows += np.column_stack([points, memos, scores >= self.config.solved]).tolist()
        del self.rows[: -self.config.memory]
        self.fresh += len(scores)
        if self.fresh >= self.config.every:
            self.fresh %= self.config.every
            self.train()

    def train(self) -> None:
        rows = tensor(self.rows)
        won = rows[rows[:, -1] > 0]
        for _ in range(self.config.steps):
            some = self.some(rows, self.config.batch)
            self.train_judge(some)
            self.train_setter(self.some(won, self.config.batch) if len(won) else None, some)
        self.trained += 1
        self.plan = []  # they are from the former setter

    def train_judge(self, rows: Tensor) -> None:
        logit = self.judge(rows[:, :-2])[:, 0]
        loss = F.binary_cross_entropy_with_logits(logit, rows[:, -1])
        gradient_step(self.optimizers["judge_optimizer"], loss)
        self.losses["judge"] = loss.item()

    def train_setter(self, won: Tensor | None, seen: Tensor) -> None:
        parts, settings = self.asked(seen), self.config
        if won is not None:
            parts["validity"] = self.valid(won)
        weights = {name: getattr(settings, name) for name in parts}
        loss = torch.stack([weights[name] * value for name, value in parts.items()]).sum()
        gradient_step(self.optimizers["setter_optimizer"], loss)
        self.losses |= {name: value.item() for name, value in parts.items()}

    def asked(self, seen: Tensor) -> dict[str, Tensor]:
        """Feasibility and coverage losses."""
        n, d = len(seen), len(self.space)
        wanted, latent = self.wanted(n), self.normal(n, d)
        goals, log = self.setter(latent, wanted)
        gap = self.judge(goals)[:, 0] - torch.logit(wanted)
        return {"feasibility": (gap**2).mean(), "coverage": log.mean()}

    def valid(self, won: Tensor) -> Tensor:
        """Validity loss: the negative log-likelihood of goals of successful episodes."""
        blurred = won[:, :-2] + self.config.noise * self.uniform(len(won), len(self.space))
        return -self.setter.inverse(blurred, self.wanted(len(won)))[1].mean()

    def metrics(self) -> dict[str, float]:
        return {"trained": float(self.trained), **self.losses}


Posterior = tuple[Tensor, Tensor]
"""Means and standard deviations of z, [width] each."""


@dataclass(frozen=True, kw_only=True)
class MptsConfig(teacher.Config):
    """Settings of MPTS. Risk is the negative score, standardised over the batch."""

    batch: Annotated[int, Bound(2)] = 16  # B, tasks that are selected at a time
    candidates: Annotated[float, Bound(1.0)] = 2.5  # m, uniform candidates as a multiple of B
    hardest: Fraction = 0.5  # share selected by predicted risk, the others at random
    weights: tuple[Number, Number] = (1.0, 5.0)  # gamma0, gamma1: of mean and standard deviation
    draws: Count = 50  # predictions of which these are computed
    steps: Count = 10  # gradient steps on each batch of finished episodes
    lr: PositiveFraction = 5e-3  # Adam's learning rate
    beta: NonNegative = 1e-4  # weight of the KL term
    warmup: CountOrZero = 160  # first episodes, with uniform tasks
    width: Count = 10  # units of the hidden layers, and size of z


class Mpts(TorchTeacher):
    """MPTS (model predictive task sampling): samples the tasks with the highest predicted risk.

    Wang et al., "Model predictive task sampling for efficient and robust adaptation", 2025. A
    neural process predicts the risk of a task x: z ~ q(z | batch), risk = f(x, z). Its loss on the
    last batch of (task, risk) pairs is MSE + beta KL(q(z | batch) || q(z | previous batch)). Of m B
    candidates, the tasks with the highest gamma0 mean + gamma1 std of the risk over z are selected.
    The memo of an episode is its predicted risk (NaN: not predicted).
    """

    remembered = ("plan", "rows", "posterior", "drawn", "learned", "correlation")

    def __init__(self, config: MptsConfig, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        d = len(self.space)
        h = config.width
        self.encoder = mlp((d + 1, h, h, h), self.random)
        self.heads = mlp((h, 2 * h), self.random)
        self.decoder = mlp((d + h, h, h, h, 1), self.random)
        self.modules = {"encoder": self.encoder, "heads": self.heads, "decoder": self.decoder}
        learned = nn.ModuleDict(self.modules).parameters()
        self.optimizers = {"adam": Adam(learned, config.lr, local=True)}
        self.plan: list[list[float]] = []  # points and predicted risks of the next episodes
        self.rows: list[list[float]] = []  # points, predicted risks, scores of finished ones
        self.posterior: Posterior = (torch.zeros(h), torch.ones(h))
        self.drawn = 0
        self.learned = 0
        self.correlation = 0.0

    def one(self) -> tuple[Floats, Any]:
        if not self.plan:
            self.plan = self.planned()
        row = self.plan.pop()
        return np.array(row[:-1]), row[-1]

    def planned(self) -> list[list[float]]:
        """Select the next `batch` tasks; in random order, each with its predicted risk."""
        settings, d = self.config, len(self.space)
        before = self.drawn
        self.drawn = self.drawn + settings.batch
        if before < settings.warmup or not self.learned:
            points = self.random.random((settings.batch, d))
            return [[*point, np.nan] for point in points.tolist()]
        points = self.random.random((round(settings.candidates * settings.batch), d))
        mean, std = self.predicted(points)
        order = np.argsort(-(settings.weights[0] * mean + settings.weights[1] * std))
        first = round(settings.hardest * settings.batch)
        others = self.random.permutation(order[first:])[: settings.batch - first]
        chosen = self.random.permutation(np.concatenate([order[:first], others]))
        return np.column_stack([points, mean])[chosen].tolist()

    @torch.no_grad()
    def predicted(self, points: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation [n] of the risk at `points` [n, d] over samples of z."""
        center, spread = self.posterior
        z = center + spread * self.normal(self.config.draws, len(center))
        risks = self.risk(tensor(points), z).double().numpy()
        return risks.mean(0), risks.std(0)

    def risk(self, points: Tensor, z: Tensor) -> Tensor:
        """Predicted risk [m, n] of tasks [n, d] for each z [m, width]."""
        shape = (len(z), len(points), -1)
        pairs = torch.cat([points[None].expand(shape), z[:, None].expand(shape)], 2)
        return self.decoder(pairs)[..., 0]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        self.rows += np.column_stack([points, memos, scores]).tolist()
        batch = self.config.batch
        while len(self.rows) >= batch:
            self.train(np.array(self.rows[:batch]))
            self.rows = self.rows[batch:]

    def train(self, rows: Floats) -> None:
        """Fit the model to one batch; its posterior becomes the prior of the next batch."""
        self.correlation = correlated(rows[:, -2], -rows[:, -1], self.correlation)
        points, risk = tensor(rows[:, :-2]), tensor(standard(-rows[:, -1]))
        for _ in range(self.config.steps):
            now = self.encoded(points, risk)
            z = now[0] + now[1] * self.normal(1, len(now[0]))
            error = ((self.risk(points, z)[0] - risk) ** 2).mean()
            loss = error + self.config.beta * divergence(now, self.posterior)
            gradient_step(self.optimizers["adam"], loss)
        with torch.no_grad():
            self.posterior = self.encoded(points, risk)
        self.learned += 1

    def encoded(self, points: Tensor, risk: Tensor) -> Posterior:
        """Posterior q(z | batch)."""
        pooled = self.encoder(torch.cat([points, risk[:, None]], 1)).mean(0)
        mean, raw = self.heads(pooled).chunk(2)
        return mean, 0.1 + 0.9 * torch.sigmoid(raw)

    def metrics(self) -> dict[str, float]:
        return {"learned": float(self.learned), "correlation": self.correlation}


def standard(values: Floats) -> Floats:
    """Standardise to mean 0 and standard deviation 1; zeros if all values are equal."""
    spread = values.std()
    return (values - values.mean()) / spread if spread > 1e-8 else np.zeros_like(values)


def divergence(p: Posterior, q: Posterior) -> Tensor:
    """KL(p || q) of diagonal normal distributions."""
    ratio = p[1] / q[1]
    return 0.5 * (ratio**2 + ((p[0] - q[0]) / q[1]) ** 2 - 1).sum() - ratio.log().sum()


def correlated(predicted: Floats, actual: Floats, otherwise: float) -> float:
    """Pearson correlation over the episodes with a prediction; `otherwise` if it is undefined."""
    known = np.isfinite(predicted)
    if known.sum() < 2:
        return otherwise
    a, b = standard(predicted[known]), standard(actual[known])
    return float((a * b).mean()) if a.any() and b.any() else otherwise
