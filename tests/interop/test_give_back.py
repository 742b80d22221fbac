"""The way back: LeRobot loads what `embodied export --lerobot` writes, and acts the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop import need

need("lerobot")

from embodied.adopt.adopt import Options, adopt  # noqa: E402
from embodied.core import checkpoint  # noqa: E402
from embodied.core.tensors import Tensors  # noqa: E402
from tests.adopt.checkpoints import embodied  # noqa: E402
from tests.adopt.test_adopt import with_weights  # noqa: E402
from tests.builders import make_learner  # noqa: E402

TRAINED = ("act_pictures", "diffusion_numbers", "diffusion_shared")
LOAD = """
import sys
from pathlib import Path
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from safetensors.torch import load_file, save_file
folder, given = Path(sys.argv[1]), load_file(sys.argv[2])
config = PreTrainedConfig.from_pretrained(folder)
policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
pre, post = make_pre_post_processors(config, pretrained_path=str(folder))
noise = {"noise": given.pop("noise")} if config.type == "diffusion" else {}
steps, actions = len(next(iter(given.values()))), []
policy.reset()
for step in range(steps):
    now = {name: value[step] for name, value in given.items()}
    now = {n: v.permute(0, 3, 1, 2).float() / 255 if v.ndim == 4 else v for n, v in now.items()}
    actions.append(post(policy.select_action(pre(now), **noise)).clone())
assert "embodied" not in sys.modules
save_file({"actions": torch.stack(actions)}, sys.argv[3])
"""


def lerobots(folder: Path, given: Tensors, tmp: Path) -> torch.Tensor:
    """The actions [steps, rows, A] of LeRobot, in a process without this project."""
    from safetensors.torch import load_file, save_file

    save_file({k: v.contiguous() for k, v in given.items()}, tmp / "given.safetensors")
    words = [str(folder), str(tmp / "given.safetensors"), str(tmp / "said.safetensors")]
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *words], cwd=tmp, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(tmp / "said.safetensors")["actions"]


def imitated(policy: Any) -> None:
    """A few updates by imitation, so that all weights are others."""
    n, obs = 8, {f"obs/{k}": leaf.sample(8) for k, leaf in policy.spec.obs.items()}
    action = 0.3 * torch.randn(n, policy.chunk, policy.spec.act.size)
    batch = {**obs, "action": action, "valid": torch.ones(n, policy.chunk, dtype=torch.bool)}
    learner = make_learner("imitation.behavior_cloning.BehaviorCloning", policy, lr=1e-3)
    for _ in range(3):
        learner.update(batch)


@pytest.mark.parametrize("case", [*TRAINED, "act_dilated", "diffusion_pictures"])
def test_lerobot_acts_the_same(case: str, tmp_path: Path) -> None:
    """Adopted, trained on, given back: pictures, crops, resizing, all normalisations."""
    torch.manual_seed(0)
    policy = adopt(with_weights(case, tmp_path), tmp_path / "run", Options(fps=10.0))
    if case in TRAINED:
        imitated(policy)
    policy.eval()
    checkpoint.save(tmp_path / "run" / "checkpoints" / "00000001", policy, 1)
    embodied("export", str(tmp_path / "run"), "--lerobot", str(tmp_path / "back"))
    noise = policy.sample_noise(2)
    obs = {name: leaf.sample(2) for name, leaf in policy.spec.obs.items()}
    names = {each.obs: name for name, each in policy.inputs.items()}  # pyright: ignore
    given = {names[name]: value[None] for name, value in obs.items()}
    said = lerobots(tmp_path / "back", {**given, "noise": noise}, tmp_path)[0]
    own = policy.act(obs, policy.initial(2), noise)[0][:, 0]
    assert own.std() > 1e-3
    torch.testing.assert_close(said, own, atol=1e-5, rtol=1e-5)
