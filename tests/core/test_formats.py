"""Saved files carry the number of their format; a newer one is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.core import checkpoint, formats
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.saved_node import read_run_settings
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.schema import OURS, new_info, read_info

SPEC = Spec(obs={"state": Leaf((3,))}, act=Leaf((2,), low=-1.0, high=1.0), dt=0.05)


def changed(file: Path, **facts: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def test_a_newer_checkpoint_is_refused(tmp_path: Path) -> None:
    policy = build({"_target_": "embodied.policies.random.Random"}, Policy, spec=SPEC)
    folder = checkpoint.save(tmp_path / "00000001", policy, 1, loop={"step": torch.ones(1)})
    assert checkpoint.read_about(folder)["format"] == formats.CHECKPOINT
    assert checkpoint.load_state(folder, "loop")["step"] == 1
    changed(folder / "about.json", format=formats.CHECKPOINT + 1)
    for read in (checkpoint.load_policy, lambda path: checkpoint.load_state(path, "loop")):
        with pytest.raises(ConfigError, match=r"the checkpoint has format 2, .* up to 1"):
            read(folder)


def test_a_newer_dataset_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "meta" / "info.json"
    file.parent.mkdir()
    info = new_info(SPEC, (), "", "png", 20.0)
    file.write_text(json.dumps(info))
    assert read_info(tmp_path)[OURS]["format"] == formats.DATASET
    changed(file, **{OURS: info[OURS] | {"format": formats.DATASET + 1}})
    with pytest.raises(ConfigError, match=r"the dataset has format 2, .* up to 1"):
        read_info(tmp_path)


def test_a_newer_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"format": formats.RUN, "seed": 3}))
    assert read_run_settings(file) == {"seed": 3}
    file.write_text(yaml.safe_dump({"format": formats.RUN + 1, "seed": 3}))
    with pytest.raises(ConfigError, match=r"the run folder has format 2, .* up to 1"):
        read_run_settings(file)


@pytest.mark.parametrize("format", [0, True, "1", None])
def test_a_format_that_is_no_number_is_refused(format: Any) -> None:
    with pytest.raises(ConfigError, match="no number from 1 on"):
        formats.upgrade("run folder", {}, format)
