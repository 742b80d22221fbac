"""Adopted checkpoints act as in LeRobot: its actions were recorded by LeRobot 0.6.1 itself.

`tests/interop/write_lerobot_checkpoints.py` wrote `data/` (configuration, processors, an episode of
observations, noise and actions); the weights follow a formula of their names.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied.adopt.adopt import UNUSED, Options, adopt, policy_node
from embodied.adopt.lerobot_config import read_config
from embodied.adopt.names import own_spec
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.datasets.mapping import short
from tests.adopt.formula_weights import weights

DATA = Path(__file__).parent / "data"
CASES = sorted(folder.name for folder in DATA.iterdir())
TOLERANCE = 1e-6  # of the largest action; an unclipped sampler with random weights reaches 1,000


def with_weights(case: str, folder: Path) -> Path:
    """A copy of the checkpoint of `case` with its weights."""
    copied = Path(shutil.copytree(DATA / case, folder / case))
    config = read_config(copied)
    names = {name: short(name) for name in config.inputs}
    separate = {"diffusion.rgb_encoder.0.": torch.zeros(())}
    shared = config.settings.get("use_separate_rgb_encoder_per_camera") is False
    node = policy_node(config, {} if shared else separate, names, None, None)
    own = build(node, Policy, spec=own_spec(config, {}, 10.0, "")).state_dict()
    state = {k: v for k, v in own.items() if k.startswith(("diffusion.", "model."))}
    made = weights({name: tuple(value.shape) for name, value in state.items()})
    unused = {f"{name}.layers.0.linear1.weight": torch.ones(2) for name in UNUSED[config.type]}
    found = {k: torch.from_numpy(v) for k, v in made.items()}
    save_file({**state, **found, **unused}, copied / "model.safetensors")
    return copied


def play(policy: Policy, played: Tensors) -> Tensor:
    """The actions [steps, rows, A] of the recorded episode, with the recorded noise."""
    noise, rows = list(played["noise"]), played["actions"].shape[1]
    if policy.noise_steps:
        policy.sample_noise = lambda n, explore=False: noise.pop(0)  # pyright: ignore
    actor, actions = Actor(policy, rows), []
    names = {short(key): value for key, value in played.items() if key.startswith("obs/")}
    for step in range(len(played["actions"])):
        obs = {short(name): value[step] for name, value in names.items()}
        actions.append(actor(obs, torch.full((rows,), step == 0)))
    return torch.stack(actions)


@pytest.mark.parametrize("case", CASES)
def test_same_actions_as_lerobot(case: str, tmp_path: Path) -> None:
    """In double precision, as recorded: how kernels round is not what is compared."""
    policy = adopt(with_weights(case, tmp_path), tmp_path / "run", Options(fps=10.0)).double()
    played = load_file(DATA / case / "played.safetensors")
    double = {k: v.double() if v.is_floating_point() else v for k, v in played.items()}
    torch.set_default_dtype(torch.float64)
    try:
        actions = play(policy, double)
    finally:
        torch.set_default_dtype(torch.float32)
    assert actions.std() > 0.05
    size = played["actions"].abs().max().clamp(min=1)
    assert (actions - played["actions"]).abs().max() <= TOLERANCE * size


def test_the_run_loads_as_it_was_adopted(tmp_path: Path) -> None:
    played = load_file(DATA / "diffusion_numbers" / "played.safetensors")
    made = adopt(with_weights("diffusion_numbers", tmp_path), tmp_path / "run", Options(fps=10.0))
    loaded = checkpoint.load_policy(tmp_path / "run")
    actions = play(loaded, played)
    assert torch.equal(actions, play(made, played))
    assert (actions - played["actions"]).abs().max() < 1e-4  # in single precision


def test_both_layouts_are_covered() -> None:
    kinds = {json.loads((DATA / case / "config.json").read_text())["type"] for case in CASES}
    assert kinds == {"act", "diffusion"}
