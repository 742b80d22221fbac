"""`embodied adopt` against the real LeRobot: same checkpoint, same noise, same actions; and the way
back: LeRobot loads what `embodied export --lerobot` writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interop import need

need("lerobot")

from safetensors.torch import load_file, save_file  # noqa: E402

from embodied.adopt.adopt import Options, adopt  # noqa: E402
from embodied.core import checkpoint  # noqa: E402
from tests.adopt.checkpoints import embodied  # noqa: E402
from tests.adopt.test_adopt import DATA, TOLERANCE, play_in_double, with_weights  # noqa: E402
from tests.builders import make_learner  # noqa: E402
from tests.interop.write_lerobot_checkpoints import cases, write  # noqa: E402

CASES = ("act_pictures", "diffusion_numbers", "diffusion_shared", "act_dilated")
LOAD = """
import sys
from pathlib import Path
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from safetensors.torch import load_file, save_file

def doubled(layer, given):
    return tuple(each.double() for each in given)

for name in sys.argv[1:]:
    torch.set_default_dtype(torch.float32)
    folder, given = Path(name) / "back", load_file(Path(name) / "given.safetensors")
    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
    pre, post = make_pre_post_processors(config, pretrained_path=str(folder))
    noise = {"noise": given.pop("noise")} if config.type == "diffusion" else {}
    torch.set_default_dtype(torch.float64)
    policy.double()
    if config.type == "act":  # its latent is float32 always
        policy.model.encoder_latent_input_proj.register_forward_pre_hook(doubled)
    given = {n: v.permute(0, 3, 1, 2) / 255 if v.ndim == 4 else v for n, v in given.items()}
    policy.reset()
    said = post(policy.select_action(pre(given), **noise))
    save_file({"action": said}, Path(name) / "said.safetensors")
assert "embodied" not in sys.modules
"""


def imitated(policy: Any) -> None:
    """A few updates by imitation, so that all weights are others."""
    n, obs = 8, {f"obs/{k}": leaf.sample(8) for k, leaf in policy.spec.obs.items()}
    action = 0.3 * torch.randn(n, policy.chunk, policy.spec.act.size)
    batch = {**obs, "action": action, "valid": torch.ones(n, policy.chunk, dtype=torch.bool)}
    learner = make_learner("imitation.behavior_cloning.BehaviorCloning", policy, lr=1e-3)
    for _ in range(3):
        learner.update(batch)


@pytest.fixture(scope="module")
def acted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Tensor]]:
    """Our action and LeRobot's [rows, A] of each case: adopted, trained on, given back, loaded by
    LeRobot in a process without this project. In double precision, as rounding is not compared."""
    torch.manual_seed(0)
    out, own = tmp_path_factory.mktemp("back"), dict[str, Tensor]()
    for case in CASES:
        folder = out / case
        policy = adopt(with_weights(case, out / "from"), folder / "run", Options(fps=10.0))
        imitated(policy)
        checkpoint.save(folder / "run" / "checkpoints" / "00000001", policy, 1)
        embodied("export", str(folder / "run"), "--lerobot", str(folder / "back"))
        noise = policy.sample_noise(2).double()
        obs = {name: leaf.sample(2) for name, leaf in policy.spec.obs.items()}
        obs = {name: value.double() for name, value in obs.items()}
        names = {each.obs: name for name, each in policy.inputs.items()}  # pyright: ignore
        given = {names[name]: value for name, value in obs.items()}
        save_file({**given, "noise": noise}, folder / "given.safetensors")
        torch.set_default_dtype(torch.float64)
        own[case] = policy.double().act(obs, policy.initial(2), noise)[0][:, 0].detach()
        torch.set_default_dtype(torch.float32)
    words = [sys.executable, "-c", LOAD, *(str(out / case) for case in CASES)]
    done = subprocess.run(words, cwd=out, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {c: (own[c], load_file(out / c / "said.safetensors")["action"]) for c in CASES}


@pytest.mark.parametrize("case", CASES)
def test_lerobot_acts_the_same(case: str, acted: dict[str, tuple[Tensor, Tensor]]) -> None:
    own, said = acted[case]
    assert own.std() > 1e-3
    torch.testing.assert_close(said, own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["act_numbers", "diffusion_numbers", "diffusion_pictures"])
def test_lerobots_own_checkpoint(case: str, tmp_path: Path) -> None:
    """Written by LeRobot with all its tensors, played by it, adopted and played by us."""
    write(case, cases()[case], tmp_path, with_weights=True)
    torch.set_default_dtype(torch.float32)
    policy = adopt(tmp_path / case, tmp_path / "run", Options(fps=10.0))
    played = load_file(tmp_path / case / "played.safetensors")
    assert (play_in_double(policy, played) - played["actions"]).abs().max() <= TOLERANCE
    # What the ordinary tests compare with is what this LeRobot does.
    recorded = load_file(DATA / case / "played.safetensors")
    assert torch.allclose(recorded["actions"], played["actions"], atol=1e-9)
