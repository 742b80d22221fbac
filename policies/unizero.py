"""UniZero: a transformer model of the environment and a policy that searches in it (Pu, 2024).

Latents of observations and actions are the tokens z_0 a_0 z_1 a_1 ... of a causal transformer. From
the output at z_t follow policy and value, from that at a_t the reward, whether the episode goes on,
and the next latent. A decision is a tree search from z_t, whose visits are the policy that is
learned (`learner=unizero`) and from which actions are drawn.

With `experts` the transformer's feed-forward layers are mixtures; with `stages` its linear layers
have adapters (ScaleZero, 2025; `embodied.policies.networks.mixture`).

Differences from the published code: choices only; whether an episode goes on is predicted, where
the code learns values of 0 behind its end; several tasks share encoder and heads, and observe which
one it is; rewards are regressed; the noise on the root's policy is uniform on the simplex.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, CountOrZero, Few, Fraction, Number, Positive, Units
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import MASK, Spec
from embodied.core.tensors import Tensors, each
from embodied.nn.networks import mlp
from embodied.policies.networks.encoders import Encoder
from embodied.policies.networks.mixture import Mixture, stage_layers
from embodied.policies.transformer import KNOWN, CausalTransformer
from embodied.policies.tree_search import NONE, gumbel_like, search

OUTPUT = "output"  # of the transformer, at the latent of a state in the tree


@dataclass(frozen=True)
class Config:
    """Settings of the model and of the search."""

    width: Units = 64  # elements of a latent, units of a token
    heads: Few = 4  # attention heads of a layer
    layers: Few = 2  # layers
    window: Count = 8  # steps that a token sees, its own included
    hidden: tuple[Units, ...] = (64,)  # units of the encoder and of each head
    values: tuple[Number, Number] = (-1.0, 1.0)  # smallest and largest value
    atoms: Count = 51  # of the distribution of values
    experts: CountOrZero = 0  # of each feed-forward layer, of which a token uses one; 0: an MLP
    stages: Count = 1  # of training; each but the first has adapters of its own
    rank: Count = 8  # of an adapter
    alpha: Positive = 8.0  # an adapter's gain is alpha / rank
    simulations: Count = 16  # of a search
    branches: Count = 20  # actions of a node that are searched, at most
    span: Positive = 0.1  # least difference of returns that a tree tells apart fully
    gamma: Fraction = 0.97  # discount per step in the tree
    explore: Fraction = 0.25  # weight of the noise on the root's policy


class UniZero(Policy):
    """The policy and its model. Noise [n, C + C + (S + 1) C]: what is added to the root's policy,
    Gumbel numbers that draw the action, and others that draw the actions of the tree's nodes."""

    atoms: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        if spec.act.shape or spec.act.is_continuous or MASK in spec.obs:
            raise ConfigError("policy=unizero needs one choice of actions, of which none is masked")
        if config.values[0] >= config.values[1]:
            raise ConfigError("policy.values: [low, high] with low < high")
        self.config = config
        self.spec = spec
        self.count = spec.act.choices[0]
        width, hidden = config.width, config.hidden
        self.encoder = Encoder(spec.obs)
        self.enter = nn.Sequential(
            mlp(self.encoder.size, hidden, width, "silu"), nn.LayerNorm(width)
        )
        self.acted = nn.Embedding(self.count, width)
        self.past = CausalTransformer(width, config.heads, config.layers, 2 * config.window)
        if config.experts:
            for layer in self.past.layers:
                layer.each = Mixture(width, config.experts)  # pyright: ignore[reportAttributeAccessIssue]
        if config.stages > 1:
            stage_layers(self.past, config.stages, config.rank, config.alpha)
        self.policy_head = mlp(width, hidden, self.count, "silu")
        self.value_head = mlp(width, hidden, config.atoms, "silu")
        self.reward_head = mlp(width, hidden, 1, "silu")
        self.goes_on_head = mlp(width, hidden, 1, "silu")
        self.next_head = nn.Sequential(mlp(width, hidden, width, "silu"), nn.LayerNorm(width))
        low, high = config.values
        self.register_buffer("atoms", torch.linspace(low, high, config.atoms), persistent=False)

    def latent(self, obs: Tensors) -> Tensor:
        """Latents [n, width] of observations [n, ...]."""
        return self.enter(self.encoder(obs))

    def initial(self, n: int) -> Tensors:
        visits = torch.zeros(n, self.count, device=self.atoms.device)
        return {**self.past.empty(n), "row/visits": visits}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        device, simulations = self.atoms.device, self.config.simulations
        draws = torch.rand(n, (simulations + 1) * self.count, device=device)
        plain = torch.zeros(n, 2 * self.count, device=device)
        if explore:
            lots = -torch.log(torch.rand(n, self.count, device=device).clamp(min=1e-9))
            lots = lots / lots.sum(1, keepdim=True)
            action = gumbel_like(torch.rand(n, self.count, device=device))
            plain = torch.cat([self.config.explore * lots, action], 1)
        else:
            draws = torch.full_like(draws, NONE)
        return torch.cat([plain, gumbel_like(draws)], 1)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        size = self.count
        added, drawn, gumbel = noise.split([size, size, noise.shape[1] - 2 * size], 1)
        cache = {name: value for name, value in carry.items() if not name.startswith("row/")}
        root = self._known(self.latent(obs), cache)
        p = self.policy_head(root[OUTPUT]).softmax(1)
        p = (1 - added.sum(1, keepdim=True)) * p + added
        visits, _ = search(
            root,
            p.clamp(min=1e-9).log(),
            self.predict,
            self.expand,
            self.config.simulations,
            self.config.branches,
            self.config.span,
            gumbel.unflatten(1, (-1, size)),
        )
        share = visits / visits.sum(1, keepdim=True)
        action = (share.log() + drawn).argmax(1)
        own = {name: root[name] for name in cache}
        _, after = self.past.step(self.acted(action), own)
        return action[:, None], {**after, "row/visits": share}

    def _known(self, latent: Tensor, cache: Tensors) -> Tensors:
        """The state of `latent` [n, width] after `cache`."""
        output, cache = self.past.step(latent, cache)
        return {OUTPUT: output, **cache}

    def predict(self, state: Tensors) -> tuple[Tensor, Tensor]:
        """Logits [n, C] of the policy and values [n] of states."""
        output = state[OUTPUT]
        return self.policy_head(output), self.mean(self.value_head(output))

    def expand(self, state: Tensors, action: Tensor) -> tuple[Tensors, Tensor, Tensor]:
        """The states after `action` [n], the rewards [n] and the discounts [n]."""
        cache = {name: value for name, value in state.items() if name != OUTPUT}
        output, cache = self.past.step(self.acted(action), cache)
        goes_on = self.goes_on_head(output)[:, 0].sigmoid()
        following = self._known(self.next_head(output), cache)
        return following, self.reward_head(output)[:, 0], self.config.gamma * goes_on

    def mean(self, logits: Tensor) -> Tensor:
        """Values [...] of distributions with `logits` [..., atoms]."""
        return functional.softmax(logits, -1) @ self.atoms

    def along(self, latent: Tensor, action: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [T, B, width] at latents [T, B, width] and at the actions [T, B] after them;
        `first` [T, B] (bool): an episode begins."""
        tokens = torch.stack([latent, self.acted(action)], 1).flatten(0, 1).transpose(0, 1)
        begins = torch.stack([first, torch.zeros_like(first)], 1).flatten(0, 1).mT
        found, _ = self.past(tokens, self.past.empty(len(tokens)), begins)
        return found[:, 0::2].transpose(0, 1), found[:, 1::2].transpose(0, 1)

    def forgotten(self, carry: Tensors) -> Tensors:
        """`carry` without the past, whose keys are of older parameters."""
        return each(carry, torch.clone) | {KNOWN: torch.zeros_like(carry[KNOWN])}

    def fit(self, rows: Tensors) -> None:
        self.encoder.fit(rows)
