"""MlpEnsemble: a probabilistic ensemble of MLPs (PETS, Chua et al. 2018; MBPO, Janner et al. 2019).

Every network predicts mean and log-variance of the standardised change of the observations and of
the reward, and the probability p of a termination. It minimises

    (y - mean)^2 exp(-log_var) + log_var + BCE(p, terminated),

with log_var between two learned bounds, on a bootstrap sample of its own. The `elites` with the
least error on held-out transitions are used; each step draws one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core import tensors as tt
from embodied.core.bounds import Bound, Count, Few, NonNegative, PositiveFraction, Units
from embodied.core.build import ConfigError, nearest
from embodied.core.choices import Choices
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.models.dynamics import Dynamics, Fit, OutputError, Prediction, Progress
from embodied.nn.networks import Ensemble
from embodied.nn.normalizers import MeanStdNormalizer
from embodied.nn.optim import Adam

CHECKED = (100, 1000)  # least and most updates between two looks at the held-out transitions
MOST_HELD_OUT = 5000  # transitions, evenly spread
BETTER = 0.01  # relative decrease of the error that counts as an improvement
CONSTANT = 1e-6  # outputs with a smaller standard deviation are not scaled


@dataclass(frozen=True)
class Config:
    """Settings of MlpEnsemble."""

    networks: Few = 7  # networks of the ensemble
    elites: Count = 5  # networks that are used: those with the least held-out error
    hidden: tuple[Units, ...] = (200, 200, 200, 200)  # units of the hidden layers
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "silu"  # of the hidden layers
    obs: tuple[str, ...] | None = None  # observations that are predicted; null: all
    lr: PositiveFraction = 1e-3  # Adam's learning rate
    weight_decay: NonNegative = 1e-5  # L2 penalty, as part of the gradient
    batch_size: Count = 256  # transitions per update and network
    held_out: Annotated[float, Bound(above=0.0, high=0.5)] = 0.1  # share of episodes held out
    patience: Count = 5  # looks at the held-out error without improvement before the fit ends
    most_updates: Count = 20_000  # updates at most
    bound_weight: NonNegative = 0.01  # weight of the distance between the bounds of log_var


class VectorDynamics(Dynamics):
    """A `Dynamics` of vector observations. Images, symbols, texts and point clouds are refused."""

    low: Tensor
    high: Tensor

    def __init__(self, spec: Spec, obs: tuple[str, ...] | None) -> None:
        """`obs`: the observations that are predicted (None: all)."""
        super().__init__()
        self.spec = replace(spec, obs=predicted(spec, obs))
        self.size = sum(leaf.size for leaf in self.spec.obs.values())
        self.choices = Choices(self.spec)
        low, high = zip(*(ends_of(leaf) for leaf in self.spec.obs.values()), strict=True)
        self.register_buffer("low", torch.cat(low), persistent=False)
        self.register_buffer("high", torch.cat(high), persistent=False)

    def flat(self, obs: Tensors) -> Tensor:
        """The predicted observations, concatenated, [n, size]."""
        return torch.cat([obs[name].flatten(1) for name in self.spec.obs], 1)

    def unflat(self, values: Tensor) -> Tensors:
        """The inverse of `flat`."""
        leaves = self.spec.obs
        parts = values.split([leaf.size for leaf in leaves.values()], 1)
        return {
            name: part.reshape(-1, *leaf.shape)
            for (name, leaf), part in zip(leaves.items(), parts, strict=True)
        }

    def inputs(self, obs: Tensors, action: Tensor) -> Tensor:
        """Observations and actions (choices one-hot), [n, size]."""
        return torch.cat([self.flat(obs), self.choices.one_hot(action)], 1)

    def rows(self, transitions: Tensors) -> Rows:
        """The inputs and outputs of transitions [N]."""
        obs, following = tt.under(transitions, "obs"), tt.under(transitions, "next_obs")
        x = self.inputs(obs, transitions["action"])
        y = torch.cat([self.flat(following) - self.flat(obs), transitions["reward"][:, None]], 1)
        return Rows(x, y, (transitions["discount"] == 0).float())

    def output_errors(self, found: Tensor, rows: Rows) -> list[OutputError]:
        """Errors of predictions [n, size + 2]: changes of observations, reward and termination."""
        true = torch.cat([rows.y, rows.ended[:, None]], 1)
        labels = [*output_names(self.spec), ("reward", ""), ("terminated", "")]
        return errors_of(labels, found - true, true)


class MlpEnsemble(VectorDynamics):
    """An ensemble of MLPs."""

    shift: Tensor
    scale: Tensor
    elites: Tensor
    can_end: Tensor
    further_loss: Callable[[Rows], Tensor] | None = None
    """A further term [E] of the loss of each network, of standardised transitions [E, n]."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(spec, config.obs)
        if config.elites > config.networks:
            raise ConfigError(
                f"model.elites={config.elites} should be at most networks={config.networks}"
            )
        self.config = config
        self.outputs = self.size + 1  # the changes of the observations, and the reward
        self.noise_size = 1 + self.outputs + 1  # the network, the outputs, the termination
        inputs = self.size + self.choices.width
        self.normalizer = MeanStdNormalizer(inputs)
        sizes = config.networks, inputs, config.hidden
        self.net = Ensemble(*sizes, 2 * self.outputs, activation=config.activation)
        # Networks of their own: the likelihood of nearly exact outputs has gradients that are
        # thousands of times as large, and a shared network would learn no terminations.
        self.end_net = Ensemble(*sizes, 1, activation=config.activation)
        ends = torch.ones(config.networks, 1, self.outputs)
        self.min_log_var, self.max_log_var = nn.Parameter(-10 * ends), nn.Parameter(0.5 * ends)
        self.register_buffer("shift", torch.zeros(self.outputs))
        self.register_buffer("scale", torch.ones(self.outputs))
        self.register_buffer("elites", torch.arange(config.elites))
        self.register_buffer("can_end", torch.tensor(False))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means and log-variances [E, n, outputs] of the standardised outputs, and the logits of a
        termination [E, n], of inputs [n, size] or [E, n, size]."""
        normalized = self.normalizer(x)
        mean, log_var = self.net(normalized).split(self.outputs, 2)
        logit = self.end_net(normalized).squeeze(2)
        return mean, bounded(log_var, self.min_log_var, self.max_log_var), logit

    def step(self, obs: Tensors, action: Tensor, noise: Tensor) -> Prediction:
        """noise[:, 0] chooses the network, noise[:, -1] the termination, the others the outputs."""
        mean, log_var, logit = self(self.inputs(obs, action))
        uniform = torch.special.ndtr(noise[:, [0, -1]])
        place = (uniform[:, 0] * len(self.elites)).long().clamp(max=len(self.elites) - 1)
        index = self.elites[place], torch.arange(len(place), device=place.device)
        drawn = mean[index] + (0.5 * log_var[index]).exp() * noise[:, 1:-1]
        out = drawn * self.scale + self.shift
        following = (self.flat(obs) + out[:, :-1]).clamp(self.low, self.high)
        terminated = (logit[index].sigmoid() > uniform[:, 1]) & self.can_end
        return Prediction(self.unflat(following), out[:, -1], terminated)

    def fit(self, transitions: Tensors, progress: Progress = lambda *_: None) -> Fit:
        rows = self.rows(transitions)
        share = self.config.held_out
        held = held_out(transitions.get("episode"), len(rows), share).to(rows.x.device)
        train = rows.take(~held)
        test = rows.take(held).thinned(MOST_HELD_OUT)
        # Set the scales of inputs and outputs, and begin with the data's rate of terminations.
        self.normalizer.fit(train.x)
        std = train.y.std(0, correction=0)
        self.shift.copy_(train.y.mean(0))
        self.scale.copy_(torch.where(std < CONSTANT, torch.ones_like(std), std))
        self.can_end.fill_(bool(train.ended.any()))
        rate = train.ended.mean().clamp(1e-4, 1 - 1e-4)
        with torch.no_grad():
            self.end_net.biases[-1][:] = torch.logit(rate)
        history = [*self._optimize(train.standardized(self), test.standardized(self), progress)]
        facts = {
            "transitions": len(train),
            "held_out_transitions": len(test),
            "ends": int(rows.ended.sum()),
            "updates": history[-1][0],
            "elites": self.elites.tolist(),
        }
        return Fit(self._errors(test), history, facts)

    def _optimize(self, train: Rows, test: Rows, progress: Progress) -> Iterator[tuple[int, float]]:
        """Train until the held-out error of no network has decreased for a while, and keep the best
        parameters of each. Yields the updates and the elites' mean error at each look."""
        config, count = self.config, len(train)
        adam = Adam(self.parameters(), config.lr, weight_decay=config.weight_decay)
        own = torch.randint(count, (config.networks, count), device=train.x.device)
        every = min(max(CHECKED[0], -(-count // config.batch_size)), CHECKED[1])
        best = self.held_out_error(test)
        kept = {name: value.detach().clone() for name, value in self.named_parameters()}
        waited = updates = 0
        further = self.further_loss
        while waited < config.patience and updates < config.most_updates:
            for _ in range(min(every, config.most_updates - updates)):
                place = torch.randint(
                    count, (config.networks, config.batch_size), device=own.device
                )
                batch = train.take(own.gather(1, place))
                loss = self.loss(batch)
                if further is not None:
                    loss = loss + further(batch)
                loss.sum().backward()
                adam.step()
                updates += 1
            error = self.held_out_error(test)
            better = error < best
            waited = 0 if (error < (1 - BETTER) * best).any() else waited + 1
            best = torch.where(better, error, best)
            for name, value in self.named_parameters():
                kept[name][better] = value.detach()[better]
            self.elites.copy_(best.argsort()[: config.elites])
            now = float(best[self.elites].mean())
            progress(updates, config.most_updates, now)
            yield updates, now
        self.load_state_dict(kept, strict=False)

    def loss(self, batch: Rows) -> Tensor:
        """The loss [E] of each network on standardised transitions [E, n]."""
        mean, log_var, logit = self(batch.x)
        fit = gaussian_loss(mean, log_var, batch.y)
        end = functional.binary_cross_entropy_with_logits(logit, batch.ended, reduction="none")
        width = (self.max_log_var - self.min_log_var).sum((1, 2))
        return fit + end.mean(1) + self.config.bound_weight * width

    @torch.no_grad()
    def held_out_error(self, rows: Rows) -> Tensor:
        """The mean squared error [E] over the outputs, standardised, and the termination."""
        mean, _, logit = self(rows.x)
        wrong = (logit.sigmoid() - rows.ended).square()[:, :, None]
        return torch.cat([(mean - rows.y).square(), wrong], 2).mean((1, 2))

    @torch.no_grad()
    def _errors(self, rows: Rows) -> list[OutputError]:
        """Errors of the elites' mean prediction."""
        mean, _, logit = self(rows.x)
        y = mean[self.elites].mean(0) * self.scale + self.shift
        p = logit[self.elites].sigmoid().mean(0) * self.can_end
        return self.output_errors(torch.cat([y, p[:, None]], 1), rows)


@dataclass(frozen=True)
class Rows:
    """Inputs `x` [..., size], outputs `y` [..., outputs] and `ended` [...] of transitions."""

    x: Tensor
    y: Tensor
    ended: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def take(self, index: Tensor) -> Rows:
        return Rows(self.x[index], self.y[index], self.ended[index])

    def thinned(self, most: int) -> Rows:
        """At most `most` of them, evenly spread."""
        return self.take(evenly(len(self), most, self.x.device))

    def standardized(self, model: MlpEnsemble) -> Rows:
        return replace(self, y=(self.y - model.shift) / model.scale)


def evenly(count: int, most: int, device: torch.device) -> Tensor:
    """At most `most` of the numbers below `count`, evenly spread."""
    return torch.linspace(0, count - 1, min(most, count), device=device).round().long()


def errors_of(
    labels: Sequence[tuple[str, str]], error: Tensor, output: Tensor
) -> list[OutputError]:
    """The errors [n, k] of the `output` [n, k], by the names and units of its columns."""
    sizes = error.square().mean(0).sqrt().tolist()
    spreads = output.std(0, correction=0).tolist()
    columns = zip(labels, sizes, spreads, strict=True)
    return [OutputError(name, unit, size, spread) for (name, unit), size, spread in columns]


def gaussian_loss(mean: Tensor, log_var: Tensor, target: Tensor) -> Tensor:
    """Twice the Gaussian negative log-likelihood without its constant, the mean [E]."""
    return ((target - mean).square() * (-log_var).exp() + log_var).mean((1, 2))


def bounded(log_var: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`log_var`, kept between `low` and `high` by softplus on either side."""
    log_var = high - functional.softplus(high - log_var)
    return low + functional.softplus(log_var - low)


def held_out(episode: Tensor | None, count: int, share: float) -> Tensor:
    """Which of `count` transitions are held out, [count] (bool): `share` of the episodes, at least
    one; of a single episode, `share` of its transitions. ConfigError for fewer than two."""
    if count < 2:
        raise ConfigError(f"the dataset has {count} transitions; a model needs at least two")
    one = torch.arange(count)
    group = one if episode is None or len(episode.unique()) < 2 else episode.cpu()
    kinds, member = group.unique(return_inverse=True)
    some = min(len(kinds) - 1, max(1, round(share * len(kinds))))
    chosen = torch.zeros(len(kinds), dtype=torch.bool)
    chosen[torch.randperm(len(kinds))[:some]] = True
    return chosen[member]


def predicted(spec: Spec, names: tuple[str, ...] | None) -> dict[str, Leaf]:
    """The observations of `spec` that a model predicts. ConfigError for one that is no vector."""
    for name in names or ():
        if name not in spec.obs:
            raise ConfigError(
                f'model.obs: there is no observation "{name}"{nearest(name, spec.obs)}'
            )
    chosen = {name: leaf for name, leaf in spec.obs.items() if names is None or name in names}
    able = [
        name
        for name, leaf in spec.obs.items()
        if leaf.dtype == "float32" and not (leaf.is_points or leaf.is_depth)
    ]
    for name in chosen:
        if name not in able:
            leaf = chosen[name]
            raise ConfigError(
                f"this model predicts float32 vectors, and {name} is {leaf.dtype}"
                f"{list(leaf.shape)} {leaf.unit}: choose others with model.obs=[{','.join(able)}]"
            )
    if not chosen:
        raise ConfigError("model.obs is empty: a model needs an observation")
    return chosen


def ends_of(leaf: Leaf) -> tuple[Tensor, Tensor]:
    """The lowest and the highest values [size] of a leaf; infinite where it has no bound."""
    low, high = (
        torch.tensor(sign * torch.inf if end is None else end)
        for end, sign in ((leaf.low, -1), (leaf.high, 1))
    )
    return low.expand(leaf.size).clone(), high.expand(leaf.size).clone()


def output_names(spec: Spec) -> Iterator[tuple[str, str]]:
    """Name and unit of every element of the observations."""
    for name, leaf in spec.obs.items():
        known = len(leaf.names) == leaf.size
        for place in range(leaf.size):
            element = f"/{leaf.names[place]}" if known else f"[{place}]"
            yield f"{name}{element if leaf.size > 1 or known else ''}", leaf.unit
