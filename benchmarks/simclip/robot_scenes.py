"""Scenes of the FR3 tasks: from accurate and inaccurate scripted policies and random motions."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.simclip.album import ROWS, Progress, SceneStore, numbers, picked
from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.tensors import Tensors
from embodied.policies.scripted.fr3 import Config as Script
from embodied.policies.scripted.fr3 import Scripted


def robot(task: str, album: SceneStore, seed: int, tracks: int, shown: Progress) -> None:
    """Add scenes of accurate and inaccurate scripted policies and of random motions."""
    rows = tracks if tracks else ROWS
    env = build(
        {
            "_target_": "embodied.envs.fr3.env.Fr3",
            "task": task,
            "num_envs": rows,
            "drawing": "light",
        }
        | {"threads": 1, "seed": seed, "horizon": 60, "portraits": ["front", "wrist"]},
        VecEnv,
    )
    obs = env.reset(seed)
    script = Scripted(Script(task, 1.0 if tracks else 0.7), env.spec)
    wander = Wander(rows, {"reach": "goal", "insert": "hole_seen"}.get(task, "cube"))
    carry, last, ends = script.initial(rows), {}, torch.zeros(rows, dtype=torch.bool)

    def leave(over: Tensor) -> None:
        last.update(
            {row: env.render_batch(torch.tensor([row]), album.size)[0] for row in numbers(over)}
        )

    env.add_pre_reset_hook(leave)
    number, alive = torch.arange(rows), torch.ones(rows, dtype=torch.bool)
    while not album.full and alive.any():
        named = elements(env, obs)
        index = alive.nonzero().flatten() if tracks else album.rare(named, 5)
        track = number[index] if tracks else None
        album.add(env.render_batch(index, album.size), picked(named, index), track)
        action, carry = script.act(obs, carry, script.sample_noise(rows))
        action = action[:, 0]
        if not tracks:
            # Of the parallel envs, one third follows the script, one third does so with noise,
            # and one third moves randomly.
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
    """Random motion towards points at any distance from `thing`."""

    def __init__(self, rows: int, thing: str) -> None:
        self.thing, self.offset = thing, torch.zeros(rows, 3)
        self.hand = torch.zeros(rows)
        self.renew(torch.ones(rows, dtype=torch.bool))

    def renew(self, rows: Tensor) -> None:
        """New target points for the envs `rows` [B] (bool)."""
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


def elements(env: VecEnv, obs: Tensors) -> dict[str, Tensor]:
    """The elements [n] of the state by name."""
    return dict(zip(env.spec.obs["state"].names, obs["state"].unbind(1), strict=True))


def _like(mask: Tensor, value: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (value.ndim - 1))
