"""Training from pictures that are decoded as they are sampled is the same as from memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embodied.commands.train import train
from embodied.datasets.lerobot import pictures
from embodied.training.logger import read_metrics
from tests.foreign import foreign_two_gap

pytest.importorskip("av")


def test_imitation_is_the_same_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filmed = foreign_two_gap(tmp_path / "filmed", 4, camera=True)
    real, loads = pictures.load_all, []

    def counting(all_: Sequence[pictures.LazyPictures]) -> list[torch.Tensor]:
        loads.extend(all_)
        return real(all_)

    monkeypatch.setattr(pictures, "load_all", counting)
    words = [f"demos={filmed}", "policy=flow", "learner=imitate", "size=debug", "steps=8"]
    words += ["learner.batch_size=4", "eval_every=4", "data.random_shift=2"]
    policies, losses, lazy = [], [], []
    for name, memory in (("whole", 2000), ("lazy", 0.05)):
        loads.clear()
        out = train([*words, f"out={tmp_path / name}", f"demo_memory_mb={memory}"])
        lazy.append(len(loads))
        policies.append(load_file(out / "checkpoints" / "00000008" / "policy.safetensors"))
        losses.append([row["eval/loss"] for row in read_metrics(out) if "eval/loss" in row])
    assert lazy[0] == 0 and lazy[1] >= 8
    assert policies[0].keys() == policies[1].keys()
    assert all(torch.equal(value, policies[1][key]) for key, value in policies[0].items())
    assert losses[0] == losses[1] and len(losses[0]) == 2
