"""PromptDt: a decision transformer with a prompt, for tasks that are not told (Xu et al., 2022).

In lifetimes of episodes of one task (`Trials`) the policy sees, before an episode, a segment of an
earlier one, and then of each step the return that is still wanted, the state and the last action:

    a_t = tanh(W f(R*_1 s*_1 a*_1 ... R*_L s*_L a*_L, ... a_{t-1} R_t s_t)),
    R_t = R - sum_{i<t} r_i

R is a high return of the training tasks (`learner=prompt_dt` sets it). The prompt is a segment that
the policy drew at random in each of its own episodes of this lifetime so far, of the best of which
one is shown; in the first episode there is none.

Differences from the published code: prompts are the policy's own episodes, not demonstrations of
the test task, and R is not that task's; the past is the last `window` steps, the prompt included;
places are biases of attention, not embeddings of time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, Few, Units
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import FIRST, LAST_ACTION, LAST_REWARD, Spec
from embodied.core.tensors import Tensors, where
from embodied.policies.encoded import require_continuous
from embodied.policies.networks.encoders import Encoder
from embodied.policies.transformer import KNOWN, CausalTransformer

LIFETIME = (LAST_ACTION, LAST_REWARD, FIRST)
EARNED, SCORE, REWARD, STATE = range(4)  # columns of a remembered step, from STATE on the state


@dataclass(frozen=True)
class Config:
    """Settings of a decision transformer with a prompt."""

    width: Units = 64  # units of a token
    heads: Few = 1  # attention heads of a layer
    layers: Few = 2  # layers
    window: Count = 25  # steps of three tokens that a token sees, those of the prompt included
    prompt: Count = 5  # steps of a prompt
    best: Count = 3  # own episodes of this lifetime, the best ones, that the prompt is of


class PromptDt(Policy):
    """Decision transformer. Noise [n, 1], uniform, draws the segments."""

    target: Tensor
    scale: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        require_continuous(spec)
        super().__init__()
        if missing := [name for name in LIFETIME if name not in spec.obs]:
            raise ConfigError(
                f"this policy acts in lifetimes of episodes and needs the observations {missing}: "
                "the wrapper embodied.envs.wrappers.trials.Trials adds them"
            )
        self.config: Any = config
        self.spec = spec
        leaves = {name: leaf for name, leaf in spec.obs.items() if name not in LIFETIME}
        self.encoder = Encoder(leaves)
        self.encoder.only_vectors()
        self.size = self.encoder.size
        self.actions = spec.act.size
        self.remembered = config.prompt  # steps
        width = config.width
        seen = self.size + self.latent_size(config)
        self.enter = nn.ModuleList(nn.Linear(k, width) for k in (self.actions, 1, seen))
        self.show = nn.ModuleList(nn.Linear(k, width) for k in (1, self.size, self.actions))
        self.past = CausalTransformer(width, config.heads, config.layers, 3 * config.window)
        self.head = nn.Linear(width, self.actions)
        self.register_buffer("target", torch.zeros(()))  # R
        self.register_buffer("scale", torch.ones(()))  # of returns

    @staticmethod
    def latent_size(config: Any) -> int:
        """Elements that `described` adds to a state."""
        return 0

    def described(self, state: Tensor, recent: Tensor) -> Tensor:
        """What is shown of states [n, S] after the remembered steps `recent` [n, K, F]."""
        return state

    def surprise(self, recent: Tensor, step: Tensor, following: Tensor, lot: Tensor) -> Tensor:
        """The score [n] of a `step` [n, F] after `recent` that led to the state `following` [n, S];
        segments with the largest sum are shown. `lot` [n]: uniform numbers."""
        return lot

    def initial(self, n: int) -> Tensors:
        best, length = self.config.best, self.config.prompt
        like = self.scale
        low = like.new_full((n, best), -torch.inf)
        start = self._begun(n)
        return {
            **self.past.empty(n),
            **start,
            "state": like.new_zeros(n, self.size),
            "started": torch.zeros(n, dtype=torch.bool, device=like.device),
            "returns": low,
            "scores": low.clone(),
            "prompts": like.new_zeros(n, best, length, start["recent"].shape[2]),
        }

    def _begun(self, n: int) -> Tensors:
        """What is remembered of an episode at its start."""
        like, columns = self.scale, STATE + self.size + self.actions
        return {
            "recent": like.new_zeros(n, self.remembered, columns),
            "steps": torch.zeros(n, dtype=torch.int64, device=like.device),
            "earned": like.new_zeros(n),
            "segment": like.new_zeros(n, self.config.prompt, columns),
            "score": like.new_full((n,), -torch.inf),
        }

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.rand(n, 1, device=self.scale.device)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        state = self.encoder(obs)
        carry = self.noted(obs, state, carry, noise[:, 0])
        first = obs[FIRST][:, 0] > 0.5
        at_start = torch.zeros(len(state), 1, dtype=torch.bool, device=state.device)
        cache = self._after_prompt(carry)
        cache = where(first, cache, {name: carry[name] for name in cache})
        tokens = self.tokens(
            (obs[LAST_ACTION] * (1 - obs[FIRST]))[:, None],
            (self.target - carry["earned"])[:, None],
            self.described(state, carry["recent"])[:, None],
        )
        found, cache = self.past(tokens, cache, at_start.expand(-1, 3))
        action = torch.tanh(self.head(found[:, 2]))
        return action[:, None], {**carry, **cache, "state": state, "started": ~at_start[:, 0]}

    def _after_prompt(self, carry: Tensors) -> Tensors:
        """The cache [n, ...] of an episode that begins: that of the prompt, if there is one."""
        n = len(carry["score"])
        chosen = carry["scores"].argmax(1)
        segment = carry["prompts"][torch.arange(n, device=chosen.device), chosen]
        tokens = self.shown(torch.cat([segment[..., :1], segment[..., STATE:]], 2))
        none = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        _, cache = self.past(tokens, self.past.empty(n), none)
        there = carry["returns"].amax(1) > -torch.inf
        return {**cache, KNOWN: cache[KNOWN] & there[:, None]}

    def noted(self, obs: Tensors, state: Tensor, carry: Tensors, lot: Tensor) -> Tensors:
        """The carry with the step that led to `state` [n, S], and its episode if it is over.

        The state after the last step of an episode is not seen: that step counts in the return, and
        is in no segment.
        """
        reward = obs[LAST_REWARD][:, 0]
        numbers = torch.stack([carry["earned"], torch.zeros_like(reward), reward], 1)
        step = torch.cat([numbers, carry["state"], obs[LAST_ACTION]], 1)
        step[:, SCORE] = self.surprise(carry["recent"], step, state, lot)
        recent = torch.cat([carry["recent"][:, 1:], step[:, None]], 1)
        steps = carry["steps"] + 1
        segment = recent[:, -self.config.prompt :]
        score = segment[..., SCORE].sum(1)
        better = (steps >= self.config.prompt) & (score > carry["score"])
        earned = carry["earned"] + reward
        within = {
            **{"recent": recent, "steps": steps, "earned": earned},
            "segment": torch.where(better[:, None, None], segment, carry["segment"]),
            "score": torch.where(better, score, carry["score"]),
        }
        first = obs[FIRST][:, 0] > 0.5
        store = self.stored(carry, earned, first & carry["started"])
        return {**carry, **store, **where(first, self._begun(len(state)), within)}

    def stored(self, carry: Tensors, earned: Tensor, over: Tensor) -> Tensors:
        """The best episodes, with those that are `over` [n] (bool) and returned `earned` [n]."""
        segment = carry["segment"].clone()
        segment[..., EARNED] = earned[:, None] - segment[..., EARNED]  # now the return to come
        lowest, place = carry["returns"].min(1)
        enters = over & (carry["score"] > -torch.inf) & (earned > lowest)
        at = functional.one_hot(place, self.config.best).bool() & enters[:, None]
        return {
            "returns": torch.where(at, earned[:, None], carry["returns"]),
            "scores": torch.where(at, carry["score"][:, None], carry["scores"]),
            "prompts": torch.where(at[:, :, None, None], segment[:, None], carry["prompts"]),
        }

    def tokens(self, before: Tensor, wanted: Tensor, seen: Tensor) -> Tensor:
        """Tokens [B, 3 T, width] of last actions [B, T, A], wanted returns [B, T] and described
        states [B, T, S + Z]."""
        parts = (before, (wanted / self.scale)[..., None], seen)
        entered = [enter(part) for enter, part in zip(self.enter, parts, strict=True)]
        return torch.stack(entered, 2).flatten(1, 2)

    def shown(self, prompt: Tensor) -> Tensor:
        """Tokens [B, 3 L, width] of prompts [B, L, 1 + S + A]: return to come, state, action."""
        wanted, state, action = prompt.split([1, self.size, self.actions], 2)
        parts = (wanted / self.scale, state, action)
        entered = [show(part) for show, part in zip(self.show, parts, strict=True)]
        return torch.stack(entered, 2).flatten(1, 2)

    def along(self, prompt: Tensor, there: Tensor, tokens: Tensor) -> Tensor:
        """Actions [B, T, A] of sequences of T steps `tokens` [B, 3 T, width] after `prompt`
        [B, L, 1 + S + A], where it is `there` [B] (bool)."""
        shown = self.shown(prompt)
        x = torch.cat([shown, tokens], 1)
        first = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        first[:, shown.shape[1]] = ~there
        found, _ = self.past(x, self.past.empty(len(x)), first)
        return torch.tanh(self.head(found[:, shown.shape[1] + 2 :: 3]))

    def fit(self, rows: Tensors) -> None:
        self.encoder.fit(rows)
