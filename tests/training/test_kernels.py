"""The kernels of a run: chosen by a test, switched off by a setting, kept by an exact resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core import checkpoint
from embodied.nn import kernels
from embodied.nn.kernels import Kernels, choose
from tests.builders import exit_of

CPU = torch.device("cpu")
PPO = "experiment=pendulum_ppo size=debug device=cpu video=false"


def command(line: str) -> None:
    assert exit_of(*line.split()) == 0


def saved(run: Path) -> dict[str, Any]:
    return checkpoint.read_about(checkpoint.find(run))["kernels"]


def test_torch_is_as_it_was_after_the_choice_and_after_a_run() -> None:
    state = torch.get_rng_state()
    made = choose(CPU)
    assert made.native and "float32 product" in made.note
    assert torch.equal(torch.get_rng_state(), state)
    with Kernels("onednn").active():
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("exact", "ratio", "product", "says"),
    [
        (True, 1.9, "onednn", "1.90 times"),
        (True, 1.1, "torch", "1.10 times"),
        (False, 3.0, "torch", "not exact"),
    ],
)
def test_the_product_is_exact_and_faster(
    monkeypatch: pytest.MonkeyPatch, exact: bool, ratio: float, product: str, says: str
) -> None:
    monkeypatch.setattr(kernels, "is_exact", lambda: exact)
    monkeypatch.setattr(kernels, "speed_ratio", lambda: ratio)
    made = choose(CPU)
    assert made.product == product and says in made.note
    resumed = choose(CPU, saved={"product": "onednn", "native": False})
    assert (resumed.product == "onednn") == exact and not resumed.native


def test_runs_of_a_process_use_the_same_product() -> None:
    """Else two runs of one seed differ in the last bits whenever the machine is busy."""
    assert len({kernels.speed_ratio() for _ in range(5)}) == 1


def test_a_product_of_bfloat16_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are computed here: whether oneDNN rounds to bfloat16 depends on the CPU's units."""

    def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.double() @ b.double()).to(a.dtype) if a.dtype == torch.float32 else product(a, b)

    def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        short = torch.get_float32_matmul_precision() == "medium" and a.dtype == torch.float32
        return exact(a.bfloat16().float(), b.bfloat16().float()) if short else product(a, b)

    product = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", exact)
    assert kernels.is_exact()
    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert not kernels.is_exact()


def test_the_users_own_precision_and_deterministic_and_a_gpu_use_pytorch_only() -> None:
    for made in (choose(CPU, deterministic=True), choose(torch.device("cuda", 0))):
        assert (made.product, made.native) == ("torch", False)
    torch.set_float32_matmul_precision("high")
    try:
        assert choose(CPU).product == "torch"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_run_prints_its_kernels_and_resumes_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command(f"train {PPO} out={run}")
    assert "update: native code" in capsys.readouterr().out
    assert saved(run)["native"]
    about = checkpoint.find(run) / "about.json"
    facts = json.loads(about.read_text())
    del facts["kernels"]  # a checkpoint of an earlier version
    about.write_text(json.dumps(facts))
    command(f"resume {run} steps=1200")
    assert "as in the checkpoint" in capsys.readouterr().out
    assert saved(run) == {"product": "torch", "native": False}


def test_deterministic_is_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(f"train {PPO} deterministic=true out={tmp_path / 'run'}")
    assert "deterministic=true" in capsys.readouterr().out
    assert saved(tmp_path / "run") == {"product": "torch", "native": False}
