"""Sindy: sparse equations of motion that a person can read (SINDy-RL; Zolman et al., 2024).

The change of every observation is a sum of few terms of a library, monomials of the observations x
that are at most linear in the action a; reward and end are sums of monomials of both:

    x' = x + Theta(x, a) Xi,   Xi = STLSQ(Theta, x' - x)

STLSQ, sequentially thresholded least squares (Brunton et al., 2016): a ridge regression; terms of
less than `threshold` are dropped; again with the others, until none is dropped. Columns of Theta
and outputs have a root mean square of 1 there, so the threshold is a share of the output. An
ensemble (Fasel et al., 2022): each member is fitted to a bootstrap sample, without `drop` of the
terms; members that go astray in rollouts of held-out actions are left out, and the median of the
others' coefficients is used.

Differences from the paper: the libraries' degree is the total one; the end is predicted too, where
the equation of +1 (an end) and -1, fitted to as many ends as others, is above 0; what lies further
outside the data than `margin` is put back to the border (`outside=end`: it ends the episode, which
a policy seeks where rewards are negative).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, groupby
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Bound, Count, CountOrZero, Few, NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.models.dynamics import Fit, Prediction, Progress
from embodied.models.ensemble import Rows, VectorDynamics, evenly, held_out, output_names

ROUNDS = 20  # of STLSQ at most
STARTS = 64  # rollouts that judge the members
ASTRAY = 3.0  # times the median error of the members


@dataclass(frozen=True)
class Config:
    """Settings of Sindy. Places are those in the predicted observations, one after the other."""

    degree: Annotated[int, Bound(1, 6)] = 2  # highest total degree of a term of the changes
    outcome_degree: Annotated[int, Bound(1, 6)] = 2  # the same of the reward and the end
    angles: tuple[CountOrZero, ...] = ()  # places (rad) whose sine and cosine are variables too
    circles: tuple[tuple[CountOrZero, CountOrZero], ...] = ()  # cosine and sine: norm 1 is kept
    obs: tuple[str, ...] | None = None  # observations that are predicted; null: all
    threshold: NonNegative = 0.005  # least term, as a share of the output's root mean square
    ridge: Positive = 1e-6  # weight of the squared coefficients
    members: Few = 20  # of the ensemble
    drop: CountOrZero = 1  # terms that each member does without
    use: Literal["median", "mean", "member"] = "median"  # of coefficients; a member drawn per step
    rollout: Count = 20  # steps of the rollouts that judge the members
    margin: NonNegative = 0.1  # how far states may leave the data, as a share of its range
    outside: Literal["border", "end"] = "border"  # what becomes of states that leave it
    held_out: Annotated[float, Bound(above=0.0, high=0.5)] = 0.1  # share of episodes held out


class Library(nn.Module):
    """Monomials of up to `degree` of `count` variables, [n, count] to [n, terms]. Variables from
    the number `last` on are together at most of degree `most` in a term, those of `once` (sines:
    sin^2 = 1 - cos^2) each of degree 1."""

    index: Tensor

    def __init__(
        self, count: int, degree: int, last: int, most: int, once: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.terms = [
            term
            for size in range(degree + 1)
            for term in combinations_with_replacement(range(count), size)
            if sum(variable >= last for variable in term) <= most
            and all(term.count(variable) < 2 for variable in once)
        ]
        padded = [(*term, *[count] * (degree - len(term))) for term in self.terms]
        self.register_buffer("index", torch.tensor(padded), persistent=False)

    def forward(self, variables: Tensor) -> Tensor:
        one = torch.ones_like(variables[:, :1])
        return torch.cat([variables, one], 1)[:, self.index].prod(2)


class Sindy(VectorDynamics):
    """Noise [n, 1] draws a member with `use=member`; otherwise steps are deterministic."""

    noise_size = 1
    changes: Tensor  # [members, terms, size]: coefficients of the changes
    outcomes: Tensor  # [members, terms, 2]: of the reward and of the end
    used: Tensor  # [members] (bool)
    least: Tensor  # [size]: lowest values of states
    most: Tensor  # [size]: highest values

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(spec, config.obs)
        self.config = config
        for place in (*config.angles, *(each for pair in config.circles for each in pair)):
            if place >= self.size:
                raise ConfigError(
                    f"model: place {place} should be below {self.size}, the number of predicted "
                    "values"
                )
        if config.drop and config.members < 3:
            raise ConfigError("model.drop needs model.members of at least 3: drop=0")
        last = self.size + 2 * len(config.angles)
        count = last + self.choices.width
        sines = [self.size + k for k in range(len(config.angles))]
        sines += [sine for _, sine in config.circles]
        self.dynamics = Library(count, config.degree, last, 1, sines)
        self.ends = Library(count, config.outcome_degree, last, config.outcome_degree, sines)
        members, size = config.members, self.size
        self.register_buffer("changes", torch.zeros(members, len(self.dynamics.terms), size))
        self.register_buffer("outcomes", torch.zeros(members, len(self.ends.terms), 2))
        self.register_buffer("used", torch.ones(members, dtype=torch.bool))
        self.register_buffer("least", torch.full((size,), -torch.inf))
        self.register_buffer("most", torch.full((size,), torch.inf))

    def variables(self, x: Tensor) -> Tensor:
        """The library's variables [n, count] of inputs [n, size + actions]."""
        angle = x[:, list(self.config.angles)]
        return torch.cat([x[:, : self.size], angle.sin(), angle.cos(), x[:, self.size :]], 1)

    def agreed(self, coefficients: Tensor) -> Tensor:
        """The ensemble's coefficients [terms, outputs] of its members' [members, ...]."""
        kept = coefficients[self.used]
        return kept.mean(0) if self.config.use == "mean" else kept.quantile(0.5, dim=0)

    def step(self, obs: Tensors, action: Tensor, noise: Tensor) -> Prediction:
        x = self.inputs(obs, action)
        variables = self.variables(x)
        terms, wide = self.dynamics(variables), self.ends(variables)
        if self.config.use == "member":
            members = self.used.nonzero().flatten()
            place = (torch.special.ndtr(noise[:, 0]) * len(members)).long()
            own = members[place.clamp(max=len(members) - 1)]
            change = torch.einsum("nt,nto->no", terms, self.changes[own])
            outcome = torch.einsum("nt,nto->no", wide, self.outcomes[own])
        else:
            change = terms @ self.agreed(self.changes)
            outcome = wide @ self.agreed(self.outcomes)
        following, outside = self.kept(x[:, : self.size] + change)
        terminated = (outcome[:, 1] > 0) | (outside & (self.config.outside == "end"))
        return Prediction(self.unflat(following), outcome[:, 0], terminated)

    def kept(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """States [n, size] on their circles and within the borders, and which had left these."""
        x = x.clone()
        for pair in map(list, self.config.circles):
            x[:, pair] = functional.normalize(x[:, pair], dim=1, eps=1e-6)
        outside = ((x < self.least) | (x > self.most)).any(1)
        return x.clamp(self.least, self.most), outside

    @torch.no_grad()
    def fit(self, transitions: Tensors, progress: Progress = lambda *_: None) -> Fit:
        config, rows = self.config, self.rows(transitions)
        episode = transitions.get("episode")
        held = held_out(episode, len(rows), config.held_out).to(rows.x.device)
        train, test = rows.take(~held), rows.take(held)
        self._fit_borders(train)
        variables = self.variables(train.x.double())
        even = torch.ones(len(train), device=train.x.device)
        self.changes.copy_(sparse(self.dynamics(variables), train.y[:, :-1], even, config))
        wide = self.ends(variables)
        self.outcomes[:, :, :1] = sparse(wide, train.y[:, -1:], even, config).float()
        self.outcomes[:, 0, 1] = -1.0  # the constant: no end
        if 0 < train.ended.mean() < 1:
            share = train.ended.mean()
            balanced = torch.where(train.ended > 0, 1 / share, 1 / (1 - share))
            signs = 2 * train.ended[:, None] - 1
            self.outcomes[:, :, 1:] = sparse(wide, signs, balanced, config).float()
        astray = self._judge(rows, held, episode)
        errors = self.output_errors(self._found(test), test)
        unexplained = [1 - each.explained for each in errors if each.spread > 0]
        error = sum(unexplained) / max(len(unexplained), 1)
        progress(1, 1, error)
        facts = {
            "transitions": len(train),
            "held_out_transitions": len(test),
            "ends": int(rows.ended.sum()),
            "terms": f"{int((self.agreed(self.changes) != 0).sum())} of {self.changes[0].numel()}",
            "members": int(self.used.sum()),
            f"error_after_{config.rollout}_steps": astray,
        }
        return Fit(errors, [(1, error)], facts)

    def _fit_borders(self, train: Rows) -> None:
        now = train.x[:, : self.size]
        seen = torch.cat([now, now + train.y[:, :-1]])
        low, high = seen.amin(0), seen.amax(0)
        room = self.config.margin * (high - low)
        self.least.copy_(torch.maximum(self.low, low - room))
        self.most.copy_(torch.minimum(self.high, high + room))

    def _found(self, rows: Rows) -> Tensor:
        """The predicted changes, reward and end [n, size + 2], on the data's scale."""
        variables = self.variables(rows.x)
        outcome = self.ends(variables) @ self.agreed(self.outcomes)
        change = self.dynamics(variables) @ self.agreed(self.changes)
        return torch.cat([change, outcome[:, :1], (outcome[:, 1:] > 0).float()], 1)

    def _judge(self, rows: Rows, held: Tensor, episode: Tensor | None) -> float | None:
        """Leave out members that go astray where the ensemble does not, in rollouts of held-out
        episodes; returns the ensemble's error, as a share of the states' spread (None: no
        held-out episode is long enough, or rows are of no episodes, as those of a replay)."""
        steps, count = self.config.rollout, len(rows)
        self.used.fill_(True)
        if episode is None:
            return None
        number = episode.to(held.device)
        inside = held[: count - steps + 1] & held[steps - 1 :]
        start = (inside & (number[: count - steps + 1] == number[steps - 1 :])).nonzero().flatten()
        if count < steps or not len(start):
            return None
        start = start[evenly(len(start), STARTS, start.device)]
        each = torch.cat([self.changes, self.agreed(self.changes)[None]])
        x = rows.x[start, : self.size].expand(len(each), -1, -1)
        for k in range(steps):
            action = rows.x[start + k, self.size :].expand(len(each), -1, -1)
            terms = self.dynamics(self.variables(torch.cat([x, action], 2).flatten(0, 1)))
            moved = x + terms.unflatten(0, x.shape[:2]) @ each
            x = self.kept(moved.flatten(0, 1))[0].view_as(x)
        last = start + steps - 1
        true = rows.x[last, : self.size] + rows.y[last, :-1]
        spread = true.std(0, correction=0).clamp(min=1e-6)
        error = ((x - true) / spread).square().mean((1, 2)).sqrt()
        self.used.copy_(error[:-1] <= ASTRAY * error[:-1].nanmedian())
        return float(f"{error[-1]:.3g}")

    def texts(self) -> dict[str, str]:
        """The equations for a person, and as a C function."""
        return {"equations.txt": self.equations(), "model.h": self.header()}

    def names(self) -> list[str]:
        """The names of the library's variables."""
        obs, act, width = [n for n, _ in output_names(self.spec)], self.spec.act, self.choices.width
        known = act.names if len(act.names) == width else [str(k) for k in range(width)]
        angles = [obs[place] for place in self.config.angles]
        trigonometric = [f"{how}({name})" for how in ("sin", "cos") for name in angles]
        return [*obs, *trigonometric, *(f"action[{name}]" for name in known)]

    def equations(self) -> str:
        """The model as text; `'` marks the next value."""
        names, changes = self.names(), self.agreed(self.changes)
        outcomes = self.agreed(self.outcomes)
        words = [readable(term, names) for term in self.dynamics.terms]
        wide = [readable(term, names) for term in self.ends.terms]
        lines = [
            f"{names[k]}' = {names[k]} {summed(changes[:, k], words)}" for k in range(self.size)
        ]
        lines.append(f"reward = {summed(outcomes[:, 0], wide)}")
        if bool((outcomes[1:, 1] != 0).any()):
            lines.append(f"end where 0 < {summed(outcomes[:, 1], wide)}")
        return "\n".join(lines) + "\n"

    def header(self) -> str:
        """The model as a C99 header without allocation: `model_step`."""
        size, width = self.size, self.choices.width
        angles = [f"(x[{place}])" for place in self.config.angles]
        symbols = [f"x[{k}]" for k in range(size)]
        symbols += [f"{how}{a}" for how in ("sinf", "cosf") for a in angles]
        symbols += [f"u[{k}]" for k in range(width)]
        words = [" * ".join(symbols[v] for v in term) for term in self.dynamics.terms]
        wide = [" * ".join(symbols[v] for v in term) for term in self.ends.terms]
        changes, outcomes = self.agreed(self.changes), self.agreed(self.outcomes)
        body = [f"next[{k}] = x[{k}] {coded(changes[:, k], words)};" for k in range(size)]
        for a, b in self.config.circles:
            norm = f"fmaxf(hypotf(next[{a}], next[{b}]), 1e-6f)"
            body += [f"const float norm{a} = {norm};"]
            body += [f"next[{a}] /= norm{a};", f"next[{b}] /= norm{a};"]
        body += ["int outside = 0;"]
        for k in range(size):
            low, high = number(float(self.least[k])), number(float(self.most[k]))
            body += [f"outside |= next[{k}] < {low} || next[{k}] > {high};"]
            body += [f"next[{k}] = fminf(fmaxf(next[{k}], {low}), {high});"]
        body += [f"*reward = {coded(outcomes[:, 0], wide)};"]
        end = f"{coded(outcomes[:, 1], wide)} > 0.0f"
        body += [f"return {end} || (outside && {int(self.config.outside == 'end')});"]
        names = [re.sub(r"[^\w .\[\]()=-]", " ", name) for name in self.names()]
        about = [f"x[{k}] {names[k]}" for k in range(size)]
        about += [f"u[{k}] {name}" for k, name in enumerate(names[len(names) - width :])]
        lines = [line for text in body for line in textwrap.wrap(text, 96)]
        return (
            "/* A model of an environment, by sparse regression. model_step predicts the next x and"
            f" the reward\n * after {self.spec.dt:g} s, and returns whether the episode ends.\n * "
            + "\n * ".join(about)
            + "\n */\n#ifndef MODEL_H\n#define MODEL_H\n#include <math.h>\n\n"
            f"#define MODEL_OBS {size}\n#define MODEL_ACTIONS {width}\n\n"
            "static inline int model_step(const float *x, const float *u, float *next, "
            "float *reward)\n{\n    (void)u;\n"
            + "\n".join(f"    {line}" for line in lines)
            + "\n}\n#endif\n"
        )


def sparse(theta: Tensor, y: Tensor, weights: Tensor, config: Config) -> Tensor:
    """Coefficients [members, terms, outputs] of outputs `y` [N, outputs] in terms `theta` [N,
    terms]. Bootstrap samples draw rows in proportion to `weights` [N]; a single member is fitted to
    all rows, weighted."""
    y = y.double()
    scale, size = rms(theta), rms(y)
    theta, y, count = theta / scale, y / size, len(y)
    found: list[Tensor] = []
    for _ in range(config.members):
        share = weights.double() / weights.sum()
        if config.members > 1:
            drawn = torch.multinomial(weights, count, replacement=True)
            share = drawn.bincount(minlength=count).double() / count
        weighted = (theta * share[:, None]).T
        gram, cross = weighted @ theta, weighted @ y
        there = torch.ones(theta.shape[1], dtype=torch.bool, device=theta.device)
        there[torch.randperm(theta.shape[1])[: config.drop]] = False
        own = [stlsq(gram, column, there, config) for column in cross.T]
        found.append(torch.stack(own, 1))
    return torch.stack(found) * size / scale[:, None]


def stlsq(gram: Tensor, cross: Tensor, there: Tensor, config: Config) -> Tensor:
    """Coefficients [terms] by sequentially thresholded ridge regression, of the normal equations
    `gram` [terms, terms] and `cross` [terms]; terms not `there` [terms] (bool) stay out."""
    found = torch.zeros_like(cross)
    kept = there
    for _ in range(ROUNDS):
        place = kept.nonzero().flatten()
        system = gram[place][:, place] + config.ridge * torch.eye(len(place)).to(gram)
        found = torch.zeros_like(cross)
        found[place] = torch.linalg.solve(system, cross[place])
        smaller = kept & (found.abs() < config.threshold)
        if not smaller.any():
            break
        kept = kept & ~smaller
        found[smaller] = 0.0
    return found


def rms(values: Tensor) -> Tensor:
    """Root mean squares of columns; 1 for one that is 0."""
    size = values.square().mean(0).sqrt()
    return torch.where(size < 1e-12, torch.ones_like(size), size)


def readable(term: tuple[int, ...], names: Sequence[str]) -> str:
    """A term such as "x^2 v"; "" is the constant."""
    powers = [(names[variable], len([*same])) for variable, same in groupby(term)]
    return " ".join(f"{name}^{power}" if power > 1 else name for name, power in powers)


def summed(coefficients: Tensor, words: Sequence[str]) -> str:
    """The terms that are not 0, as text."""
    pairs = zip(coefficients.tolist(), words, strict=True)
    parts = [f"{'-' if c < 0 else '+'} {abs(c):.4g} {word}".rstrip() for c, word in pairs if c]
    return " ".join(parts) or "+ 0"


def coded(coefficients: Tensor, words: Sequence[str]) -> str:
    """The same in C, with a sign in front."""
    pairs = zip(coefficients.tolist(), words, strict=True)
    parts = [f"+ {number(c)}{' * ' if word else ''}{word}" for c, word in pairs if c]
    return " ".join(parts) or "+ 0.0f"


def number(value: float) -> str:
    """A C float."""
    if abs(value) == torch.inf:
        return "INFINITY" if value > 0 else "-INFINITY"
    return f"{value:.9e}f"
