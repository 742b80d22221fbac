"""`embodied adopt` against the real LeRobot: same checkpoint, same noise, same actions."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.interop import need

need("lerobot")

from safetensors.torch import load_file  # noqa: E402

from embodied.adopt.adopt import Options, adopt  # noqa: E402
from tests.adopt.test_adopt import DATA, TOLERANCE, play  # noqa: E402
from tests.interop.write_lerobot_checkpoints import cases, write  # noqa: E402


@pytest.mark.parametrize("case", ["act_numbers", "diffusion_numbers", "diffusion_pictures"])
def test_lerobots_own_checkpoint(case: str, tmp_path: Path) -> None:
    """Written by LeRobot with all its tensors, played by it, adopted and played by us."""
    try:
        write(case, cases()[case], tmp_path, with_weights=True)
        torch.set_default_dtype(torch.float32)
        policy = adopt(tmp_path / case, tmp_path / "run", Options(fps=10.0)).double()
        played = load_file(tmp_path / case / "played.safetensors")
        torch.set_default_dtype(torch.float64)
        double = {k: v.double() if v.is_floating_point() else v for k, v in played.items()}
        actions = play(policy, double)
    finally:
        torch.set_default_dtype(torch.float32)
        gc.collect()
    assert (actions - played["actions"]).abs().max() <= TOLERANCE
    # What the ordinary tests compare with is what this LeRobot does.
    recorded = load_file(DATA / case / "played.safetensors")
    assert torch.allclose(recorded["actions"], played["actions"], atol=1e-9)
