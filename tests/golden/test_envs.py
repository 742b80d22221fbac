"""Every environment does what it did when `envs.json` was recorded.

Two rows, a seed, twelve steps of random actions; then a fingerprint of what came out, with the
names of the observations, which may not change.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.env_contract import random_actions
from embodied.core.tensors import Tensors, nest
from tests.contract.environments import SLOW
from tests.golden import fingerprint
from tests.tiers import once_per_class

# Why these are not recorded.
APART = ("mjlab", "pusht", "robosuite_can", "robosuite_lift", "robosuite_square")
OGBENCH = ("antmaze", "cube", "puzzle", "scene")
# Why these are not recorded.
SKIPPED: dict[str, str] = {
    "gym": "any Gymnasium id",
    **dict.fromkeys(APART, "needs an environment of its own"),
    **{f"ogbench_{name}": "needs an extra that is not in `all`" for name in OGBENCH},
    **dict.fromkeys(("robot", "robot_shuttle"), "needs a robot: one row that no seed decides"),
}
# Settings that must not depend on the machine.
SETTINGS: dict[str, dict[str, Any]] = {
    "envpool_metaworld_drawer_open": {"kwargs": {}},  # its goal was hidden then
    "envpool_metaworld_reach": {"kwargs": {}},
    "fr3_lift_warp": {"device": "cpu"},
    "maniskill_pick_cube": {"backend": "cpu"},
    "maniskill_pick_cube_rgb": {"backend": "cpu"},
    "maniskill_push_cube": {"backend": "cpu"},
    "quadrotor": {"native": False},
    "quadrotor_randomized": {"native": False},
}

FILE = "envs.json"
CONFIGS = Path(__file__).parents[2] / "configs" / "env"
ROWS, STEPS, SEED = 2, 12, 7
RECORDED = fingerprint.read(FILE)


def make(stem: str) -> VecEnv:
    node = yaml.safe_load((CONFIGS / f"{stem}.yaml").read_text())
    return build(node | {"num_envs": ROWS} | SETTINGS.get(stem, {}), VecEnv)


def played(env: VecEnv) -> dict[str, list[Tensor]]:
    """Everything that comes out, by name, in the order of time."""
    seen: dict[str, list[Tensor]] = defaultdict(list)

    def keep(outputs: Tensors) -> None:
        for name, value in outputs.items():
            seen[name].append(value.clone())

    keep(nest(env.reset(seed=SEED), "obs"))
    for action in random_actions(env, STEPS, SEED):
        step = env.step(action)
        keep(nest(step.obs, "obs") | nest(step.next_obs, "next_obs"))
        keep({key: getattr(step, key) for key in ("reward", "terminated", "truncated")})
    return {name: seen[name] for name in sorted(seen)}


def record(stem: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    env = make(stem)
    try:
        seen = {name: torch.stack(values) for name, values in played(env).items()}
    finally:
        env.close()
    return {
        "sha256": {name: fingerprint.digest(value) for name, value in seen.items()},
        "summary": {name: fingerprint.summary([value]) for name, value in seen.items()},
    }


def record_all() -> dict[str, Any]:
    stems = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    return {stem: record(stem) for stem in stems if stem not in SKIPPED}


FILES = [CONFIGS / f"{stem}.yaml" for stem in sorted(RECORDED["records"])]


@pytest.mark.parametrize("file", once_per_class(FILES, without=SLOW))
def test_an_environment_does_what_it_did(file: Path, apart: ProcessPoolExecutor) -> None:
    stem = file.stem
    native = stem.startswith("envpool_")
    now = apart.submit(record, stem).result() if native else record(stem)
    then = RECORDED["records"][stem]
    assert now["summary"].keys() == then["summary"].keys()
    if fingerprint.platform() == RECORDED["platform"]:
        assert now["sha256"] == then["sha256"]
    for name, numbers in then["summary"].items():
        assert fingerprint.agree(now["summary"][name], numbers), name
