"""Scenes: pictures of our worlds in random and scripted states, with the facts that hold in them.

States are picked so that every rung of the ladder that success climbs is seen about as often; the
end of an episode is drawn before the world begins the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build, nearest
from embodied.core.env import VecEnv
from embodied.core.tensors import Tensors
from embodied.foundation.captions import Scenes, placed, stated
from envs.facts import FR3, Told
from envs.facts_small import SMALL
from policies.scripted import Config as Script
from policies.scripted import Scripted

ROWS = 32
WORLDS = (*(f"fr3_{task}" for task in FR3), *SMALL)
Progress = Callable[[int], None]


@dataclass
class Album:
    """What was kept so far: pictures, named elements, track numbers."""

    told: Told
    size: int
    wanted: int
    pictures: list[Tensor] = field(default_factory=list)
    named: list[dict[str, Tensor]] = field(default_factory=list)
    tracks: list[Tensor] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    kept: int = 0

    @property
    def full(self) -> bool:
        return self.kept >= self.wanted

    def rungs(self, named: dict[str, Tensor]) -> Tensor:
        """The rung of each row on the ladder that success climbs."""
        quantities, _ = self.told.read(named)
        ladder = next(each for each in self.told.words.ladders if each.name == self.told.climbs)
        return ladder.rung(quantities[self.told.climbs])

    def rare(self, named: dict[str, Tensor], most: int) -> Tensor:
        """Up to `most` rows whose rung is not seen too often already, in random order."""
        rungs, chosen = self.rungs(named), []
        ladder = next(each for each in self.told.words.ladders if each.name == self.told.climbs)
        fair = 1.5 * self.kept / len(ladder.rungs) + 16
        for row in torch.randperm(len(rungs)).tolist():
            rung = int(rungs[row])
            if len(chosen) < most and self.counts.get(rung, 0) < fair:
                self.counts[rung] = self.counts.get(rung, 0) + 1
                chosen.append(row)
        return torch.tensor(chosen, dtype=torch.int64)

    def add(self, pictures: Tensor, named: dict[str, Tensor], track: Tensor | None = None) -> None:
        if len(pictures):
            self.pictures.append(pictures)
            self.named.append(named)
            none = torch.full((len(pictures),), -1) if track is None else track
            self.tracks.append(none)
            self.kept += len(pictures)

    def scenes(self, world: str) -> Scenes:
        named = {k: torch.cat([part[k] for part in self.named]) for k in self.named[0]}
        quantities, flags = self.told.read(named)
        return Scenes(
            world,
            self.told.words,
            torch.cat(self.pictures),
            stated(self.told.words, quantities, flags),
            placed(self.told.words, quantities),
            torch.cat(self.tracks),
            (self.told.climbs,),
        )


def told_of(world: str) -> Told:
    """What can be said of a world; ConfigError for one that has no words yet."""
    known = {**{f"fr3_{task}": told for task, told in FR3.items()}, **SMALL}
    if world not in known:
        raise ConfigError(f"nothing can be said of the world {world!r}{nearest(world, known)}")
    return known[world]


def collect(
    world: str,
    count: int,
    size: int,
    seed: int,
    tracks: int = 0,
    shown: Progress = lambda kept: None,
) -> Scenes:
    """`count` pictures of `size` pixels in states of all kinds, or (with `tracks`) that many
    scripted ways to success, every step of them; another `seed`, other scenes."""
    album = Album(told_of(world), size, count)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if world.startswith("fr3_"):
            _robot(world.removeprefix("fr3_"), album, seed, tracks, shown)
        elif world == "minigrid_doorkey":
            _rooms(album, seed, tracks, shown)
        else:
            _posed(world, album, seed, tracks, shown)
    return album.scenes(world)


def elements(env: VecEnv, obs: Tensors) -> dict[str, Tensor]:
    """The elements [n] of the state by name."""
    return dict(zip(env.spec.obs["state"].names, obs["state"].unbind(1), strict=True))


def picked(named: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    return {key: value[index] for key, value in named.items()}


def _robot(task: str, album: Album, seed: int, tracks: int, shown: Progress) -> None:
    """Steady and clumsy scripts, and hands that go to a place at any distance of a thing."""
    rows = tracks if tracks else ROWS
    env = build(
        {"_target_": "envs.fr3.Fr3", "task": task, "num_envs": rows, "drawing": "light"}
        | {"threads": 1, "seed": seed, "horizon": 60, "portraits": ["front", "wrist"]}
    )
    obs = env.reset(seed)
    script = Scripted(Script(task, 1.0 if tracks else 0.7), env.spec)
    wander = Wander(rows, {"reach": "goal", "insert": "hole_seen"}.get(task, "cube"))
    carry, last, ends = script.initial(rows), {}, torch.zeros(rows, dtype=torch.bool)

    def leave(over: Tensor) -> None:
        last.update({row: env.photographs(torch.tensor([row]), album.size)[0] for row in _of(over)})

    env.before_reset(leave)
    number, alive = torch.arange(rows), torch.ones(rows, dtype=torch.bool)
    while not album.full and alive.any():
        named = elements(env, obs)
        index = alive.nonzero().flatten() if tracks else album.rare(named, 5)
        track = number[index] if tracks else None
        album.add(env.photographs(index, album.size), picked(named, index), track)
        action, carry = script.act(obs, carry, script.draw(rows))
        action = action[:, 0]
        if not tracks:
            # A third of the rows follow the script, a third in a shaky way, a third wander.
            third = rows // 3
            action[third : 2 * third] += 0.5 * torch.randn(third, action.shape[1])
            action[2 * third :] = wander(named, action)[2 * third :]
        last.clear()
        step = env.step(action.clamp(-1, 1))
        ends, obs = step.ended, step.obs
        over = torch.tensor([row for row in sorted(last) if alive[row]], dtype=torch.int64)
        if len(over):
            named = picked(elements(env, step.next_obs), over)
            shots = torch.stack([last[row] for row in over.tolist()])
            some = torch.arange(len(over)) if tracks else album.rare(named, 4)
            album.add(shots[some], picked(named, some), over[some] if tracks else None)
        carry = {
            k: torch.where(_like(ends, v), script.initial(rows)[k], v) for k, v in carry.items()
        }
        wander.renew(ends | (torch.rand(rows) < 0.04))
        if tracks:
            alive &= ~ends
        shown(album.kept)
    env.close()


class Wander:
    """Hands on the way to a place near `thing`: from touching it to far away."""

    def __init__(self, rows: int, thing: str) -> None:
        self.thing, self.offset = thing, torch.zeros(rows, 3)
        self.hand = torch.zeros(rows)
        self.renew(torch.ones(rows, dtype=torch.bool))

    def renew(self, rows: Tensor) -> None:
        """Other places for `rows` [B] (bool)."""
        count = int(rows.sum())
        away = torch.randn(count, 3)
        # Distances from 1 to 35 cm, as many between 1 and 2 as between 10 and 20.
        far = torch.empty(count, 1).uniform_(-4.6, -1.05).exp()
        self.offset[rows] = far * away / away.norm(dim=1, keepdim=True)
        self.hand[rows] = torch.randint(0, 2, (count,)) * 2.0 - 1

    def __call__(self, named: dict[str, Tensor], like: Tensor) -> Tensor:
        names = [[f"{word}_{axis}" for axis in "xyz"] for word in (self.thing, "tool", "lead")]
        thing, tool, lead = (torch.stack([named[n] for n in each], 1) for each in names)
        move = (thing + self.offset - tool - lead) / 0.025
        move = move / move.norm(dim=1, keepdim=True).clamp(min=1.0)
        move = move + 0.2 * torch.randn_like(move)
        rest = torch.zeros(len(like), like.shape[1] - 4)
        return torch.cat([move, rest, self.hand[:, None]], 1)


def _of(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def _like(mask: Tensor, value: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (value.ndim - 1))


def _posed(world: str, album: Album, seed: int, tracks: int, shown: Progress) -> None:
    """Worlds that can be put into any state."""
    put, way, names = POSES[world]
    node: dict[str, object] = {"_target_": "envs.planar.TwoGap"}
    if world != "two_gap":
        node = {"_target_": "envs.gym.Gym", **MADE[world]}
    env = build({**node, "num_envs": 1})
    env.reset(seed)
    row = torch.zeros(1, dtype=torch.int64)
    env.photographs(row, album.size)  # MuJoCo's free camera looks at where things are at first
    for track in range(max(tracks, 1)):
        states = way(torch.rand(2)) if tracks else torch.rand(20 * album.wanted, 2)
        for state in states:
            if album.full:
                break
            named = put(env, state)
            if tracks or len(album.rare(named, 1)):
                album.add(env.photographs(row, album.size), named, row + track if tracks else None)
                shown(album.kept)
    assert names <= set(album.named[0])
    env.close()


def _put_pendulum(env: Any, where: Tensor) -> dict[str, Tensor]:
    inner = env.envs[0].unwrapped
    angle = (2 * where[0] - 1) * torch.pi
    inner.state = (torch.stack([angle, 8 * where[1] - 4])).double().numpy()
    inner.last_u = None if where[1] < 0.3 else float(4 * torch.rand(()) - 2)
    return {"cos": angle.cos()[None], "sin": angle.sin()[None]}


def _put_cartpole(env: Any, where: Tensor) -> dict[str, Tensor]:
    x, angle = 4.4 * where[0] - 2.2, 0.35 * (2 * where[1] - 1)
    env.envs[0].unwrapped.state = [float(x), 0.0, float(angle), 0.0]
    return {"x": x[None], "angle": angle[None]}


def _put_inverted(env: Any, where: Tensor) -> dict[str, Tensor]:
    # As many near the middle and upright as far from it.
    x, angle = (
        torch.tensor([1.0, 0.35]) * (2 * where - 1).abs().pow(1.5) * (where - 0.5).sign()
    ).unbind()
    inner = env.envs[0].unwrapped
    inner.set_state(numpy.array([float(x), float(angle)]), numpy.zeros(2))
    return {"x": x[None], "angle": angle[None]}


def _put_point(env: Any, where: Tensor) -> dict[str, Tensor]:
    # Half of the states are near the goal.
    place = where if where[1] < 0.5 else 0.7 * torch.tensor([1.0, 0.5]) + 0.3 * where
    env.place[0] = place
    return {"x": place[:1].clone(), "y": place[1:].clone()}


MADE: dict[str, dict[str, object]] = {
    "pendulum": {"id": "Pendulum-v1"},
    "cartpole": {"id": "CartPole-v1"},
    "inverted_pendulum": {"id": "InvertedPendulum-v5", "kwargs": {"width": 96, "height": 96}},
}
POSES: dict[str, tuple[Callable[..., dict[str, Tensor]], Callable[[Tensor], Tensor], set[str]]] = {
    "pendulum": (
        _put_pendulum,
        lambda r: torch.stack([torch.linspace(0.0, 0.5, 40), torch.full((40,), float(r[0]))], 1),
        {"cos", "sin"},
    ),
    "cartpole": (
        _put_cartpole,
        lambda r: torch.stack([torch.full((40,), float(r[0])), torch.linspace(0.02, 0.5, 40)], 1),
        {"x", "angle"},
    ),
    "inverted_pendulum": (
        _put_inverted,
        lambda r: torch.stack([torch.full((40,), float(r[0])), torch.linspace(0.02, 0.5, 40)], 1),
        {"x", "angle"},
    ),
    "two_gap": (
        _put_point,
        lambda r: torch.stack(
            [torch.linspace(0.05, 0.95, 40), 0.2 * r[0] + torch.linspace(0.1, 0.3, 40)], 1
        ),
        {"x", "y"},
    ),
}


def _rooms(album: Album, seed: int, tracks: int, shown: Progress) -> None:
    """A planner that makes many mistakes, or none."""
    from policies.minigrid import Config as Plan
    from policies.minigrid import Planner

    rows = tracks if tracks else ROWS
    env = build(
        {"_target_": "envs.minigrid.MiniGrid", "id": "MiniGrid-DoorKey-6x6-v0", "num_envs": rows}
        | {"backend": "gymnasium", "privileged": True}
    )
    obs = env.reset(seed)
    planner = Planner(Plan(0.0 if tracks else 0.5), env.spec)
    last: dict[int, Tensor] = {}

    def leave(over: Tensor) -> None:
        last.update({row: env.photographs(torch.tensor([row]), album.size)[0] for row in _of(over)})

    env.before_reset(leave)
    alive, carry = torch.ones(rows, dtype=torch.bool), planner.initial(rows)
    while not album.full and alive.any():
        named = level(obs)
        index = alive.nonzero().flatten() if tracks else album.rare(named, 5)
        shots = env.photographs(index, album.size)
        album.add(shots, picked(named, index), index if tracks else None)
        action, carry = planner.act(obs, carry, planner.draw(rows))
        last.clear()
        step = env.step(action[:, 0])
        obs = step.obs
        over = torch.tensor([row for row in sorted(last) if alive[row]], dtype=torch.int64)
        if len(over):
            named = picked(level(step.next_obs), over)
            shots = torch.stack([last[row] for row in over.tolist()])
            some = torch.arange(len(over)) if tracks else album.rare(named, 4)
            album.add(shots[some], picked(named, some), over[some] if tracks else None)
        if tracks:
            alive &= ~step.ended
        shown(album.kept)
    env.close()


def level(obs: Tensors) -> dict[str, Tensor]:
    """Steps from the agent to the goal (across cells, doors and walls not minded), what it carries,
    the door's state (3: it is on the doorstep), each [n]."""
    from envs.minigrid_text import KIND

    grid, agent = obs["privileged/grid"].long(), obs["privileged/agent"].long()
    height = grid.shape[2]
    kinds = grid[..., 0].flatten(1)
    goal = (kinds == KIND["goal"]).float().argmax(1)
    steps = (goal // height - agent[:, 0]).abs() + (goal % height - agent[:, 1]).abs()
    door = (kinds == KIND["door"]).float()
    state = grid[..., 2].flatten(1).gather(1, door.argmax(1, keepdim=True))[:, 0]
    return {
        "steps": steps,
        "carries": agent[:, 3],
        "door": torch.where(door.any(1), state, 3),
    }
