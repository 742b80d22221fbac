"""RecurrentModel: a recurrent state-space model with discrete latents (DreamerV2; Hafner, 2021).

The world model of DiWA (Chandra et al., 2025). A latent is [h, z], the state h of a GRU and
`groups` categorical variables z, one-hot, of `classes` each:

    h_t = GRU(f(z_{t-1}, a_{t-1}), h_{t-1}),   prior p(z_t | h_t),   posterior q(z_t | h_t, e(o_t))

It minimises, on sequences that begin at any observation with h = z = a = 0,

    sum_t |o_t - o(h_t, z_t)|^2 / 2 + (r_t - r)^2 / 2 + BCE(end) + w KL,
    KL = b KL(sg(q) || p) + (1 - b) KL(q || sg(p))

with z drawn from q by a straight-through sample; vectors are standardised, pixels are in [0, 1]. A
step of the model draws z from the prior; `filtered` takes the most likely z of the posterior.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core import tensors as tt
from embodied.core.bounds import (
    Bound,
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
    Units,
)
from embodied.core.build import ConfigError, nearest
from embodied.core.choices import Choices
from embodied.core.spec import NORMALIZED, Leaf, Spec, hidden
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.pictures import load
from embodied.models.dynamics import LATENT, Fit, LatentDynamics, OutputError, Prediction, Progress
from embodied.models.ensemble import errors_of, evenly, held_out, output_names
from embodied.nn.networks import mlp
from embodied.nn.optim import Adam
from embodied.policies.networks.encoders import Encoder, ImageConfig

BETTER = 0.01  # relative decrease of the held-out loss that counts as an improvement
CHECKED = 200  # updates between two looks at the held-out sequences
MOST_HELD_OUT = 256  # sequences, evenly spread
RARE = 1e-6  # least distance of a uniform number from 0 and 1


@dataclass(frozen=True)
class Config:
    """Settings of RecurrentModel."""

    width: Units = 256  # units of the GRU
    groups: Count = 16  # categorical variables of a latent
    classes: Annotated[int, Bound(2)] = 16  # of each variable
    hidden: tuple[Units, ...] = (256,)  # units of the hidden layers of every network
    images: ImageConfig = field(default_factory=ImageConfig)  # encoder; decoders mirror it
    obs: tuple[str, ...] | None = None  # observations that are read; null: all vectors and images
    length: Count = 16  # steps of a sequence
    batch_size: Count = 32  # sequences per update
    lr: PositiveFraction = 3e-4  # AdamW's learning rate
    weight_decay: NonNegative = 0.05  # AdamW's
    grad_clip: Positive = 100.0  # largest norm of the gradient
    kl_weight: NonNegative = 0.3  # w: weight of the KL divergence
    kl_balance: Fraction = 0.8  # b: share of the divergence that trains the prior
    held_out: Annotated[float, Bound(above=0.0, high=0.5)] = 0.1  # share of episodes held out
    patience: Count = 10  # looks at the held-out loss without improvement before the fit ends
    most_updates: Count = 20_000  # updates at most


@dataclass(frozen=True)
class Along:
    """What the model made of sequences: latents [T + 1, n, D], and the logits [T + 1, n, groups,
    classes] of the prior and the posterior."""

    latent: Tensor
    prior: Tensor
    posterior: Tensor


class RecurrentModel(LatentDynamics):
    """A `LatentDynamics` of vectors and images; symbols, texts, depth and points are refused."""

    can_end: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.config = config
        self.seen = spec
        leaves = read_leaves(spec, config.obs)
        self.size = config.groups * config.classes
        latent = Leaf((config.width + self.size,), unit=NORMALIZED)
        self.spec = replace(self.seen, obs={LATENT: latent})
        self.noise_size = self.size + 1  # the classes, the termination
        self.choices = Choices(self.seen)
        self.encoder = Encoder(leaves, config.images, asymmetric=True)
        self.names = tuple(self.encoder.names)
        both, layers = latent.size, config.hidden
        self.enter = nn.Sequential(
            nn.Linear(self.size + self.choices.width, config.width), nn.SiLU()
        )
        self.cell = nn.GRUCell(config.width, config.width)
        self.prior = mlp(config.width, layers, self.size, "silu")
        self.posterior = mlp(config.width + self.encoder.size, layers, self.size, "silu")
        numbers = self.encoder.norm.mean.numel()
        self.vector_head = mlp(both, layers, numbers, "silu") if numbers else nn.Identity()
        self.picture_heads = nn.ModuleList(
            PictureDecoder(self.seen.obs[name], config.images, both) for name in self.encoder.images
        )
        self.reward_head = mlp(both, layers, 1, "silu")
        self.end_head = mlp(both, layers, 1, "silu")
        self.register_buffer("shift", torch.zeros(()))  # of the reward
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("can_end", torch.tensor(False))

    @property
    def data_spec(self) -> Spec:
        return self.seen

    def step(self, obs: Tensors, action: Tensor, noise: Tensor) -> Prediction:
        """noise[:, :-1] chooses the classes (Gumbel-max), noise[:, -1] the termination."""
        h = self.following(obs[LATENT], self.choices.one_hot(action))
        uniform = torch.special.ndtr(noise).clamp(RARE, 1 - RARE)
        gumbel = -(-uniform[:, :-1].log()).log()
        logits = self.grouped(self.prior(h))
        latent = torch.cat([h, self.most_likely(logits + self.grouped(gumbel))], 1)
        reward = self.reward_head(latent)[:, 0] * self.scale + self.shift
        terminated = (self.end_head(latent)[:, 0].sigmoid() > uniform[:, -1]) & self.can_end
        return Prediction({LATENT: latent}, reward, terminated)

    def filtered(self, latent: Tensor, action: Tensor, obs: Tensors) -> Tensor:
        h = self.following(latent, action)
        logits = self.posterior(torch.cat([h, self.encoder(obs)], 1))
        return torch.cat([h, self.most_likely(self.grouped(logits))], 1)

    def decoded(self, latent: Tensor) -> Tensors:
        found: Tensors = {}
        norm = self.encoder.norm
        if self.encoder.vectors:
            flat = self.vector_head(latent) * norm.std + norm.mean
            leaves = [self.seen.obs[name] for name in self.encoder.vectors]
            parts = flat.split([leaf.size for leaf in leaves], 1)
            for name, leaf, part in zip(self.encoder.vectors, leaves, parts, strict=True):
                found[name] = part.reshape(-1, *leaf.shape)
        for name, head in zip(self.encoder.images, self.picture_heads, strict=True):
            found[name] = (255 * head(latent)).round().clamp(0, 255).to(torch.uint8)
        return found

    def following(self, latent: Tensor, action: Tensor) -> Tensor:
        """The GRU's state [n, width] after `action` [n, width of actions] at `latent` [n, D]."""
        h, z = latent.split([self.config.width, self.size], 1)
        return self.cell(self.enter(torch.cat([z, action], 1)), h)

    def grouped(self, values: Tensor) -> Tensor:
        """Values [n, groups * classes] as [n, groups, classes]."""
        return values.unflatten(-1, (self.config.groups, self.config.classes))

    def most_likely(self, logits: Tensor) -> Tensor:
        """The most likely class of each group [n, groups, classes], one-hot, flat."""
        classes = functional.one_hot(logits.argmax(2), self.config.classes)
        return classes.to(logits.dtype).flatten(1)

    def along(self, obs: Tensors, action: Tensor, sample: bool) -> Along:
        """Filter sequences of observations [T + 1, n, ...] and the actions [T, n, width] between
        them. z is a straight-through `sample`, else the most likely one."""
        length, count = tt.length(obs), action.shape[1]
        seen = self.encoder(tt.each(obs, lambda leaf: leaf.flatten(0, 1)))
        seen = seen.unflatten(0, (length, count))
        latent = seen.new_zeros(count, self.config.width + self.size)
        before = torch.cat([torch.zeros_like(action[:1]), action])
        latents: list[Tensor] = []
        priors: list[Tensor] = []
        posteriors: list[Tensor] = []
        for t in range(length):
            h = self.following(latent, before[t])
            logits = self.grouped(self.posterior(torch.cat([h, seen[t]], 1)))
            z = straight_through(logits) if sample else self.most_likely(logits)
            latent = torch.cat([h, z.flatten(1)], 1)
            latents.append(latent)
            priors.append(self.grouped(self.prior(h)))
            posteriors.append(logits)
        return Along(torch.stack(latents), torch.stack(priors), torch.stack(posteriors))

    def loss(self, batch: Sequences, sample: bool = True) -> Tensor:
        """The loss of sequences: the mean over their observations."""
        made = self.along(batch.obs, batch.action, sample)
        valid = batch.valid.float()
        everything = torch.cat([torch.ones_like(valid[:1]), valid])
        flat, obs = made.latent.flatten(0, 1), tt.each(batch.obs, lambda leaf: leaf.flatten(0, 1))
        error = self.reconstruction_error(flat, obs).view_as(everything)
        config = self.config
        divergence = balanced_kl(made.posterior, made.prior, config.kl_balance)
        total = ((error + config.kl_weight * divergence) * everything).sum()
        later = made.latent[1:]
        reward = (batch.reward - self.shift) / self.scale
        wrong = 0.5 * (self.reward_head(later)[..., 0] - reward).square()
        wrong = wrong + functional.binary_cross_entropy_with_logits(
            self.end_head(later)[..., 0], batch.ended, reduction="none"
        )
        return (total + (wrong * valid).sum()) / everything.sum()

    def reconstruction_error(self, latent: Tensor, obs: Tensors) -> Tensor:
        """Half the squared error [n] of decoded observations, summed over their elements."""
        error = latent.new_zeros(len(latent))
        if self.encoder.vectors:
            target = self.encoder.norm(self.encoder.flat(obs))
            error = error + 0.5 * (self.vector_head(latent) - target).square().sum(1)
        for name, head in zip(self.encoder.images, self.picture_heads, strict=True):
            wrong = head(latent) - obs[name].float() / 255
            error = error + 0.5 * wrong.square().flatten(1).sum(1)
        return error

    def fit(self, transitions: Tensors, progress: Progress = lambda *_: None) -> Fit:
        if "episode" not in transitions:
            raise ConfigError("this model is fitted to whole episodes, not to single transitions")
        device = self.shift.device
        count = tt.length(transitions)
        held = held_out(transitions["episode"], count, self.config.held_out).to(device)
        train, test = (~held).nonzero().flatten(), held.nonzero().flatten()
        test = test[evenly(len(test), MOST_HELD_OUT, device)]
        self._standardize(transitions, train)
        data = Data(self, transitions)
        history = [*self._optimize(data, train, test, progress)]
        facts = {
            "transitions": len(train),
            "held_out_sequences": len(test),
            "ends": int((transitions["discount"] == 0).sum()),
            "updates": history[-1][0],
        }
        return Fit(self._errors(data.at(test)), history, facts)

    def _standardize(self, transitions: Tensors, train: Tensor) -> None:
        """Set the scales of vectors and rewards from the transitions `train` [n]."""
        vectors = {
            f"obs/{name}": transitions[f"obs/{name}"][train] for name in self.encoder.vectors
        }
        self.encoder.fit(vectors)
        reward = transitions["reward"][train].float()
        std = reward.std(correction=0)
        self.shift.copy_(reward.mean())
        self.scale.copy_(torch.where(std < RARE, torch.ones_like(std), std))
        self.can_end.fill_(bool((transitions["discount"] == 0).any()))

    def _optimize(
        self, data: Data, train: Tensor, test: Tensor, progress: Progress
    ) -> Iterator[tuple[int, float]]:
        """Train until the held-out loss has not decreased for a while, and keep the best
        parameters. Yields the updates and the held-out loss at each look."""
        config = self.config
        adam = Adam(self.parameters(), config.lr, weight_decay=config.weight_decay, decoupled=True)
        best, kept = torch.inf, {k: v.detach().clone() for k, v in self.named_parameters()}
        waited = updates = 0
        while waited < config.patience and updates < config.most_updates:
            for _ in range(min(CHECKED, config.most_updates - updates)):
                drawn = torch.randint(len(train), (config.batch_size,), device=train.device)
                self.loss(data.at(train[drawn])).backward()
                nn.utils.clip_grad_norm_(self.parameters(), config.grad_clip)
                adam.step()
                updates += 1
            with torch.no_grad():
                now = float(self.loss(data.at(test), sample=False))
            waited = 0 if now < best - BETTER * abs(best) or best == torch.inf else waited + 1
            if now < best:
                best = now
                kept = {k: v.detach().clone() for k, v in self.named_parameters()}
            progress(updates, config.most_updates, now)
            yield updates, now
        self.load_state_dict(kept, strict=False)

    @torch.no_grad()
    def _errors(self, batch: Sequences) -> list[OutputError]:
        """Errors of one step of the prior from filtered latents, in the steps that are valid."""
        made, valid = self.along(batch.obs, batch.action, False), batch.valid.flatten()
        h = made.latent[1:, :, : self.config.width].flatten(0, 1)[valid]
        z = self.most_likely(made.prior[1:].flatten(0, 1)[valid])
        latent = torch.cat([h, z], 1)
        errors: list[OutputError] = []
        for name, found in self.decoded(latent).items():
            last, now = (
                batch.obs[name][at].flatten(0, 1)[valid].float().flatten(1)
                for at in (slice(None, -1), slice(1, None))
            )
            error, change = found.float().flatten(1) - now, now - last
            leaf = self.seen.obs[name]
            if leaf.is_image:  # one output of all pixels
                error, change = error.reshape(-1, 1), change.reshape(-1, 1)
            labels = output_names(replace(self.seen, obs={name: leaf}))
            errors += errors_of([(name, "")] if leaf.is_image else [*labels], error, change)
        p = self.end_head(latent).sigmoid() * self.can_end
        reward = self.reward_head(latent) * self.scale + self.shift
        for name, found, true in (
            ("reward", reward, batch.reward.flatten()[valid]),
            ("terminated", p, batch.ended.flatten()[valid]),
        ):
            errors += errors_of([(name, "")], found - true[:, None], true[:, None])
        return errors


@dataclass(frozen=True)
class Sequences:
    """Sequences of T steps: observations [T + 1, n, ...]; `action` [T, n, width], `reward` and
    `ended` [T, n]; `valid` [T, n] (bool): the step is of the episode that the sequence began in."""

    obs: Tensors
    action: Tensor
    reward: Tensor
    ended: Tensor
    valid: Tensor


class Data:
    """Transitions in the order of time, from which sequences are read."""

    def __init__(self, model: RecurrentModel, transitions: Tensors) -> None:
        names = [f"{kind}/{name}" for kind in ("obs", "next_obs") for name in model.names]
        self.rows = {name: transitions[name] for name in names}
        self.action = model.choices.one_hot(transitions["action"])
        self.reward = transitions["reward"].float()
        self.ended = (transitions["discount"] == 0).float()
        self.episode = transitions["episode"].to(self.reward.device)
        self.length = model.config.length

    def at(self, start: Tensor) -> Sequences:
        """The sequences that begin at the transitions `start` [n]."""
        rows = start + torch.arange(self.length, device=start.device)[:, None]
        valid = rows < len(self.reward)
        rows = rows.clamp(max=len(self.reward) - 1)
        valid = valid & (self.episode[rows] == self.episode[start])
        first = load(tt.take(tt.under(self.rows, "obs"), start))
        later = load(tt.take(tt.under(self.rows, "next_obs"), rows.flatten()))
        obs = {
            name: torch.cat([value[None], later[name].unflatten(0, tuple(rows.shape))])
            for name, value in first.items()
        }
        return Sequences(obs, self.action[rows], self.reward[rows], self.ended[rows], valid)


class PictureDecoder(nn.Module):
    """Latents [n, D] to pictures [n, H, W, C] in [0, 1]: the sizes of the encoder, backwards."""

    def __init__(self, leaf: Leaf, config: ImageConfig, size: int) -> None:
        super().__init__()
        height, width, colours = leaf.shape
        self.sizes = [(height, width)]
        for _ in config.channels:
            height, width = -(-height // 2), -(-width // 2)
            self.sizes.insert(0, (height, width))
        channels = [*config.channels[::-1], colours]
        self.shape = (channels[0], *self.sizes[0])
        self.enter = nn.Linear(size, channels[0] * height * width)
        self.convolve = nn.ModuleList(
            nn.Conv2d(one, other, 3, padding=1) for one, other in pairwise(channels)
        )

    def forward(self, latent: Tensor) -> Tensor:
        x = self.enter(latent).unflatten(1, self.shape)
        for size, convolve in zip(self.sizes[1:], self.convolve, strict=True):
            x = convolve(functional.interpolate(functional.relu(x), size))
        return x.permute(0, 2, 3, 1) + 0.5


def straight_through(logits: Tensor) -> Tensor:
    """One-hot samples [n, groups, classes], with the gradient of their probabilities."""
    p = logits.softmax(2)
    drawn = torch.multinomial(p.flatten(0, 1), 1).view(p.shape[:2])
    return functional.one_hot(drawn, p.shape[2]).to(p.dtype) + p - p.detach()


def balanced_kl(posterior: Tensor, prior: Tensor, balance: float) -> Tensor:
    """b KL(sg(q) || p) + (1 - b) KL(q || sg(p)) of logits, summed over the groups."""

    def divergence(q: Tensor, p: Tensor) -> Tensor:
        log_q, log_p = q.log_softmax(-1), p.log_softmax(-1)
        return (log_q.exp() * (log_q - log_p)).sum((-2, -1))

    one, other = divergence(posterior.detach(), prior), divergence(posterior, prior.detach())
    return balance * one + (1 - balance) * other


def read_leaves(spec: Spec, names: tuple[str, ...] | None) -> dict[str, Leaf]:
    """The observations of `spec` that a latent is filtered from. ConfigError for one that does not
    exist or is neither a vector of numbers nor an image."""
    able = {
        name: leaf
        for name, leaf in spec.obs.items()
        if leaf.is_image or (leaf.dtype == "float32" and not (leaf.is_points or leaf.is_depth))
    }
    for name in names or ():
        if name not in spec.obs:
            raise ConfigError(
                f'model.obs: there is no observation "{name}"{nearest(name, spec.obs)}'
            )
        if name not in able:
            raise ConfigError(
                f"this model reads vectors and images, and {name} is neither: choose others with "
                f"model.obs=[{','.join(able)}]"
            )
    wanted = (name for name in able if not hidden(name)) if names is None else names
    if not (found := {name: able[name] for name in wanted}):
        raise ConfigError("this model reads vectors and images, and there is none to read")
    return found
