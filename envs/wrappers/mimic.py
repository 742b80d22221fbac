"""SkillMimic-V2: motions are imitated from a few noisy clips, and off them.

Yu et al., "SkillMimic-V2: Learning robust and generalizable interaction skills from sparse and
noisy demonstrations" (2025). A demonstrator records clips: simulator states, and the observation
`leaf` of each, standardised by that of all frames (z). An episode follows a clip c from a frame f:

    r = exp(-precision mean (z - z*)^2),   sim(s, f) = exp(-likeness mean (z_s - z_f)^2)

with the reference z* of the frame, which has noise. Where an episode begins:

* adaptive sampling: P(c) ~ exp(-5 m_c), P(f | c) ~ exp(-10 m_f), mixed with uniform by `adaptive`;
  m_f <- (m_f + mean reward of an episode from there) / 2, and m_c their mean
* stitched graph: with probability `switch` the body is at the most similar frame of another clip
* state field: with probability `stray` it is where random actions lead to from the frame, and the
  reference is re-timed to the most similar frame of its clip
* buffer: where it begins unlike its reference (sim <= 1/2), min(10, -floor(log10 sim)) steps follow
  none, and have the mean reward so far of following that clip

Differences from the source: the mean reward of a buffer is the env's own, not of all envs; random
actions in place of noise on joint angles, which would lead into contact; one precision for all
elements; episodes end with their clip.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.bounds import Count, CountOrZero, Fraction, NonNegative, Positive
from embodied.core.build import ConfigError, Node, build, nearest
from embodied.core.device import forked
from embodied.core.env import NotSavable, StateRoles, Step, VecEnv, restored
from embodied.core.policy import Policy
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.envs.row_rng import RowRng

LONGEST = 10  # steps of a buffer


@dataclass(frozen=True)
class Config:
    """Settings of the clips, the reward, and where episodes begin."""

    env: Node  # node of the inner environment
    player: Node  # demonstrator that records the clips
    num_envs: Count = 16  # parallel environments
    clips: Count = 3  # episodes that are recorded
    clip_seed: CountOrZero = 1_000_000  # of their initial states
    frames: Count = 100  # steps of a clip at most
    every: Count = 1  # of so many frames one is kept; between them the reference is a line
    noise: NonNegative = 0.0  # on the kept references, standard deviations
    leaf: str = "state"  # the observation that is imitated
    elements: tuple[str, ...] = ()  # names of its elements that are; empty: all
    precision: Positive = 2.0  # of the reward
    likeness: Positive = 1.0  # of the similarity
    adaptive: Fraction = 0.0  # weight of adaptive sampling, by the mean of all envs; 0: uniform
    switch: Fraction = 0.1  # probability of beginning in another clip (stitched graph)
    stray: Fraction = 0.1  # probability of beginning off the clip (state field)
    away: Count = 3  # random actions that lead off the clip
    buffers: bool = True  # dissimilar beginnings follow no reference at first
    history: CountOrZero = 0  # past frames that are observed too


@dataclass(frozen=True)
class Clips:
    """F frames of all clips: `states` that can be loaded ([2 F, ...], those off the clips last),
    their `z` [2 F, D], the `clip` [F] and the `last` frame [F] of it."""

    states: Tensors
    z: Tensor
    clip: Tensor
    last: Tensor

    @property
    def inner(self) -> Tensor:
        """Which frames [F] (bool) are followed by another one."""
        return torch.arange(len(self.last), device=self.last.device) < self.last


class Mimic(Wrapper):
    """Adds `reference` [D], the next frame's minus the present, and with `history` the past frames
    (`history_frames` [history D], oldest first, relative to the present one)."""

    memory_roles = StateRoles(generators={"generator": None, "means": None, "followed": None})

    def __init__(self, config: Config) -> None:
        env = build(config.env | {"num_envs": config.num_envs}, VecEnv)
        if config.switch + config.stray > 1:
            raise ConfigError("Mimic: switch + stray has to be at most 1")
        if not env.spec.act.is_continuous:
            raise ConfigError("Mimic: actions that are choices lead to no nearby states")
        self.config = config
        self.columns = _columns(config, env).to(env.device)
        size = len(self.columns)
        added = {"reference": Leaf((size,))}
        if config.history:
            added["history_frames"] = Leaf((config.history * size,))
        super().__init__(env, replace(env.spec.with_obs(**added), task=None))
        self.mean = torch.zeros(size, device=env.device)
        self.std = torch.ones(size, device=env.device)
        self.clips = self._record(build(config.player, Policy, spec=env.spec).eval())
        self.reference = self._reference()
        self.match, self.match_sim = self._graph()
        self.retimed, self.retimed_sim = self._field()
        self.streams = RowRng(self.depth << 40, self.num_envs, self.device)
        count = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        zero = count.float()
        self.memory = {
            **{"generator": self.streams.state, "frame": count, "began": count.clone()},
            **{"wait": count.clone(), "age": count.clone(), "sum": zero},
            "means": zero[:, None].repeat(1, len(self.clips.clip)),
            "followed": zero[:, None, None].repeat(1, config.clips, 2),  # sums, steps
            "past": torch.zeros(self.num_envs, config.history + 1, size, device=self.device),
        }

    def frame_of(self, obs: Tensors) -> Tensor:
        """z [B, D] of observations."""
        flat = obs[self.config.leaf].flatten(1)[:, self.columns].float()
        return (flat - self.mean) / self.std

    @torch.no_grad()
    def _record(self, player: Policy) -> Clips:
        """Play in the first env alone, so that the clips do not depend on the number of envs."""
        states: list[Tensors] = []
        seen: list[Tensor] = []
        lengths: list[int] = []
        with forked(self.config.clip_seed):
            for number in range(self.config.clips):
                obs = self.env.reset(self.config.clip_seed + number)
                actor = Actor(player, 1)
                action = torch.zeros(self.num_envs, *self.spec.act.shape, device=self.device)
                first = torch.ones(1, dtype=torch.bool, device=self.device)
                for length in range(1, self.config.frames + 1):
                    states.append(tt.each(self._state(), lambda leaf: leaf[:1].clone()))
                    seen.append(self.frame_of(obs)[:1])
                    action[:1] = actor(tt.each(obs, lambda leaf: leaf[:1]), first)
                    step = self.env.step(action)
                    obs, first = step.obs, step.ended[:1]
                    if step.ended[0] or length == self.config.frames:
                        lengths.append(length)
                        break
        if min(lengths) < 4:
            raise ConfigError(f"Mimic: a clip has {min(lengths)} frames; it needs four")
        self.mean, self.std = torch.cat(seen).mean(0), torch.cat(seen).std(0).clamp(min=1e-3)
        count = torch.tensor(lengths, device=self.device)
        clip = torch.repeat_interleave(torch.arange(len(lengths), device=self.device), count)
        shown = tt.cat(states)
        off, z = self._stray(shown)
        every = (torch.cat(seen) - self.mean) / self.std
        both = tt.cat([shown, off])
        return Clips(both, torch.cat([every, z]), clip, count.cumsum(0)[clip] - 1)

    def _state(self) -> Tensors:
        try:
            state, _ = self.env.get_state(), self.env.state_roles
        except NotSavable as error:
            raise ConfigError(f"Mimic: this environment cannot begin in frames: {error}") from error
        return state

    def _stray(self, shown: Tensors) -> tuple[Tensors, Tensor]:
        """The states [F, ...] after `away` random actions from each frame, and their z [F, D]; the
        frame's own where the episode ends by them."""
        random = torch.Generator().manual_seed(self.config.clip_seed)
        count = tt.length(shown)
        act = self.spec.act
        actions = torch.rand(self.config.away, count, *act.shape, generator=random) * 2 - 1
        states, frames = list[Tensors](), list[Tensor]()
        for index in torch.arange(count).split(self.num_envs):
            rows = torch.arange(len(index), device=self.device)
            begun = restored(self._state(), rows, shown, index, self.env.state_roles)
            obs = self.env.set_state(begun)
            kept = tt.each(begun, lambda leaf, rows=rows: leaf[rows].clone())
            z, alive = self.frame_of(obs)[rows], torch.ones_like(rows, dtype=torch.bool)
            for action in actions[:, index].to(self.device):
                filled = torch.zeros(self.num_envs, *act.shape, device=self.device)
                filled[rows] = action
                step = self.env.step(filled)
                alive = alive & ~step.ended[rows]
                now = tt.each(self._state(), lambda leaf, rows=rows: leaf[rows])
                kept = tt.where(alive, now, kept)
                z = torch.where(alive[:, None], self.frame_of(step.next_obs)[rows], z)
            states.append(kept)
            frames.append(z)
        return tt.cat(states), torch.cat(frames)

    def _reference(self) -> Tensor:
        """z* [F, D]: of every `every`-th frame of a clip and its last one, with noise, and lines
        between them."""
        clips, how = self.clips, self.config
        random = torch.Generator().manual_seed(how.clip_seed)
        own = clips.z[: len(clips.clip)]
        noisy = own + how.noise * torch.randn(own.shape, generator=random).to(own)
        number = torch.arange(len(own), device=self.device)
        first = torch.searchsorted(clips.clip, clips.clip)
        before = first + (number - first) // how.every * how.every
        after = (before + how.every).minimum(clips.last)
        share = (number - before) / (after - before).clamp(min=1)
        return noisy[before] + share[:, None] * (noisy[after] - noisy[before])

    def _graph(self) -> tuple[Tensor, Tensor]:
        """For each frame [F] the most similar one of another clip (never one of its first two, nor
        its last one), and the similarity; the frame itself where there is no other clip."""
        clips = self.clips
        own = clips.z[: len(clips.clip)]
        alike = similarity(own, own, self.config.likeness)
        number = torch.arange(len(own), device=self.device)
        first = torch.searchsorted(clips.clip, clips.clip)
        inner = clips.inner & (number >= first + 2)
        allowed = inner[None] & (clips.clip[:, None] != clips.clip[None])
        sim, match = torch.where(allowed, alike, -1.0).max(1)
        alone = sim < 0
        return torch.where(alone, number, match), torch.where(alone, 1.0, sim)

    def _field(self) -> tuple[Tensor, Tensor]:
        """For each state off the clips [F] the most similar frame of its clip, and the
        similarity."""
        clips = self.clips
        own, off = clips.z.chunk(2)
        alike = similarity(off, own, self.config.likeness)
        allowed = clips.inner[None] & (clips.clip[:, None] == clips.clip[None])
        sim, frame = torch.where(allowed, alike, -1.0).max(1)
        return frame, sim

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        if task is not None:
            raise ValueError("Mimic has no task vector; call reset without `task`")
        rows = self.rows(mask)
        if seed is not None:
            self.seed_rows(seed, rows)
        self.env.reset(seed, mask=mask)
        return self.transform_obs(self._place(rows))

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        memory, clips = self.memory, self.clips
        waits = memory["wait"] > 0
        memory["frame"] = (memory["frame"] + ~waits).minimum(clips.last[memory["frame"]])
        memory["wait"] = (memory["wait"] - 1).clamp(min=0)
        z = self.frame_of(step.next_obs)
        memory["past"] = torch.cat([memory["past"][:, 1:], z[:, None]], 1)
        error = (z - self.reference[memory["frame"]]).square().mean(1)
        reward = self._paid((-self.config.precision * error).exp(), waits)
        memory["sum"] = memory["sum"] + reward
        memory["age"] = memory["age"] + 1
        late = (memory["frame"] == clips.last[memory["frame"]]) & ~step.ended
        following = self.transform_obs(step.next_obs)
        over = step.ended | late
        obs = step.obs
        if late.any():
            self._notify_before_reset(late)
            self.env.reset(mask=late)
        if over.any():
            self._learn(over)
            obs = self._place(over)
        truncated = step.truncated | late
        return replace(
            step,
            **{"obs": self.transform_obs(obs), "next_obs": following},
            **{"reward": reward, "truncated": truncated},
        )

    def _paid(self, reward: Tensor, waits: Tensor) -> Tensor:
        """`reward` [B]; where an env `waits` [B] (bool), the mean of what it got so far for
        following that clip (its own if it never did)."""
        clip = self.clips.clip[self.memory["frame"]]
        every = torch.arange(self.num_envs, device=self.device)
        followed = torch.stack([reward, torch.ones_like(reward)], 1) * ~waits[:, None]
        self.memory["followed"][every, clip] += followed
        total, count = self.memory["followed"][every, clip].unbind(1)
        return torch.where(waits & (count > 0), total / count.clamp(min=1), reward)

    def transform_obs(self, obs: Tensors) -> Tensors:
        memory = self.memory
        waits = memory["wait"] > 0
        following = (memory["frame"] + ~waits).minimum(self.clips.last[memory["frame"]])
        now = memory["past"][:, -1]
        added = {"reference": self.reference[following] - now}
        if self.config.history:
            added["history_frames"] = (memory["past"][:, :-1] - now[:, None]).flatten(1)
        return {**obs, **added}

    def _learn(self, over: Tensor) -> None:
        """Note the mean rewards of the episodes that are over [B] (bool) at their first frames."""
        memory = self.memory
        index = over.nonzero().flatten()
        began = memory["began"][index]
        got = memory["sum"][index] / memory["age"][index]
        memory["means"][index, began] = (memory["means"][index, began] + got) / 2

    def chances(self) -> Tensor:
        """The probability [F] of each frame but the last ones, by the mean of all envs."""
        clip, how = self.clips.clip, self.config
        mean = self.memory["means"].mean(0)
        inner = self.clips.inner.float()
        frames = torch.zeros(int(clip[-1]) + 1, device=inner.device).index_add(0, clip, inner)
        level = torch.zeros_like(frames).index_add(0, clip, mean * inner) / frames
        of_clip = (1 - how.adaptive) / len(frames) + how.adaptive * (-5 * level).softmax(0)
        hard = (-10 * mean).exp() * inner
        sums = torch.zeros_like(frames).index_add(0, clip, hard)
        within = (1 - how.adaptive) * inner / frames[clip] + how.adaptive * hard / sums[clip]
        return of_clip[clip] * within

    def _place(self, rows: Tensor) -> Tensors:
        """Begin episodes in the envs `rows` [B] (bool), which have just been reset; returns the
        inner environment's observations."""
        memory, how = self.memory, self.config
        index = rows.nonzero().flatten()
        self.streams.state = memory["generator"]
        where, chance = self.streams.uniform(2, index)
        edges = self.chances().cumsum(0)
        frame = torch.searchsorted(edges, where * edges[-1]).clamp(max=len(edges) - 1)
        switched = chance < how.switch
        strayed = ~switched & (chance < how.switch + how.stray)
        state = torch.where(switched, self.match[frame], frame)
        state = torch.where(strayed, frame + len(edges), state)
        sim = torch.where(switched, self.match_sim[frame], torch.ones_like(chance))
        sim = torch.where(strayed, self.retimed_sim[frame], sim)
        target = torch.where(strayed, self.retimed[frame], frame)
        wait = buffer_steps(sim) if how.buffers else torch.zeros_like(frame)
        for name, value in (("frame", target), ("began", frame), ("wait", wait)):
            memory[name][index] = value
        memory["age"][index] = 0
        memory["sum"][index] = 0.0
        new = restored(
            self.env.get_state(), index, self.clips.states, state.cpu(), self.env.state_roles
        )
        obs = self.env.set_state(new)
        memory["past"][index] = self.frame_of(obs)[index][:, None]
        return obs


def similarity(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """Similarity [n, m] in [0, 1] of frames [n, D] and [m, D]."""
    return (-weight * (a[:, None] - b[None]).square().mean(2)).exp()


def buffer_steps(sim: Tensor) -> Tensor:
    """Steps [n] without a reference after a beginning of similarity `sim` [n]."""
    steps = -sim.clamp(min=1e-30).log10().floor()
    return torch.where(sim > 0.5, 0, steps.clamp(max=LONGEST)).long()


def _columns(config: Config, env: VecEnv) -> Tensor:
    """Indices of the elements that are imitated."""
    leaf = env.spec.obs.get(config.leaf)
    if leaf is None or len(leaf.shape) != 1:
        raise ConfigError(f'Mimic: "{config.leaf}" is no vector that is observed')
    for name in config.elements:
        if name not in leaf.names:
            raise ConfigError(f"Mimic: no element {name}{nearest(name, leaf.names)}")
    if not config.elements:
        return torch.arange(leaf.size)
    return torch.tensor([leaf.names.index(name) for name in config.elements])
