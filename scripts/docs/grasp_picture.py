"""Draws clouds with the masks and grasps that a trained M2T2 proposes, on shapes it has not seen.

python scripts/docs/grasp_picture.py outputs/grasping_m2t2-0 docs/images/grasping_m2t2.png
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from matplotlib import pyplot

from embodied.core import checkpoint
from embodied.envs.grasping.env import Config, GraspingScenes
from embodied.policies.m2t2 import M2t2, placed

SURE = 0.3  # score from which a grasp is drawn
SEED = 3  # of the scenes


def draw(axes: Any, policy: M2t2, points: torch.Tensor, held: torch.Tensor) -> None:
    """One cloud [N, 3] from above: the points of each sure query's mask, and its best pose."""
    axes.scatter(points[:, 1], points[:, 0], s=3, c="0.8")
    with torch.no_grad():
        mask = policy(points[None], held[None]).mask[-1][0]
    grasps, places = policy.propose(points[None], held[None])
    if held.any():
        free = mask[policy.queries :].amax(0) > 0
        axes.scatter(points[free, 1], points[free, 0], s=8, c="tab:green")
        best = int(places.score[0].argmax())
        put = (held @ (places.turn[0, best] @ placed(torch.zeros(())).T).T) + places.place[0, best]
        axes.scatter(put[:, 1], put[:, 0], s=3, c="k")
        return
    for query in (grasps.score[0] > SURE).nonzero().flatten().tolist():
        own = mask[query] > 0
        shade = f"C{query}"
        axes.scatter(points[own, 1], points[own, 0], s=8, c=shade)
        half = grasps.width[0, query] / 2 * grasps.turn[0, query, :, 1]
        ends = torch.stack([grasps.place[0, query] - half, grasps.place[0, query] + half])
        axes.plot(ends[:, 1], ends[:, 0], c=shade, marker="s", ms=4)


def main(run: str, out: str) -> None:
    policy = checkpoint.load_policy(run)
    assert isinstance(policy, M2t2)
    figure, every = pyplot.subplots(1, 3, figsize=(12, 3.2), sharex=True, sharey=True)
    for axes, placing in zip(every, (0.0, 0.0, 1.0), strict=True):
        env = GraspingScenes(Config(num_envs=2, shapes="held_out", placing=placing, seed=SEED))
        obs = env.reset(seed=SEED)
        row = int(axes is every[1])
        draw(axes, policy, obs["points"][row], obs["held"][row])
        axes.set_aspect("equal")
        axes.set_xlabel("y (m)")
    every[0].set_ylabel("x (m)")
    figure.tight_layout()
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    main(*sys.argv[1:])
