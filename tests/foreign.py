"""A dataset as another project records it: physical units, its own names, no key of ours."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import torch

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.datasets.collect import play
from embodied.datasets.lerobot.reader import EpisodeWriter

DEGREES = 45.0  # degrees of an action of 1
MILLIMETRES = 1000.0  # of a position of 1
SPEC = Spec(
    {"state": Leaf((2,), names=("x.pos", "y.pos"))},
    Leaf((2,), names=("x.vel", "y.vel")),
    dt=0.1,
    text="pass the wall",
)
MAPPING = f"""
obs:
  state: {{name: observation.state, scale: {1 / MILLIMETRES}}}
action: {{low: [-{DEGREES}, -{DEGREES}], high: [{DEGREES}, {DEGREES}], elements: [x, y]}}
"""


def foreign_two_gap(folder: Path, episodes: int, camera: bool = False) -> Path:
    """Demonstrations of env=two_gap in millimetres and degrees, without our key in info.json."""
    env = build({"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 8}, VecEnv)
    node = {"_target_": "embodied.policies.scripted.two_gap.TwoGapDemonstrator"}
    demonstrator = build(node, Policy, spec=env.spec)
    top = {"top": Leaf((16, 24, 3), "uint8")} if camera else {}
    spec = SPEC.with_obs(**top)
    with EpisodeWriter(folder, spec, images="png") as writer:
        for rows in islice(play(demonstrator, env, 0), episodes):
            writer.add(_foreign(rows, camera))
    file = folder / "meta" / "info.json"
    info = json.loads(file.read_text())
    del info["embodied"]
    file.write_text(json.dumps(info))
    return folder


def _foreign(rows: dict[str, torch.Tensor], camera: bool) -> dict[str, torch.Tensor]:
    made = {key: rows[key] for key in ("reward", "terminated", "truncated")}
    made["action"] = rows["action"] * DEGREES
    for when in ("obs", "next_obs"):
        place = rows[f"{when}/state"]
        made[f"{when}/state"] = place * MILLIMETRES
        if camera:
            shade = (place[..., :1, None, None] * 200).clamp(0, 255).to(torch.uint8)
            made[f"{when}/top"] = shade.expand(*place.shape[:-1], 16, 24, 3).contiguous()
    return made
