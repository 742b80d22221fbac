"""Saved files: a base by path and hash, which may be gone; a format that may be newer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.core import checkpoint, formats
from embodied.core.build import ConfigError, build
from embodied.core.checkpoint import CheckpointError
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.saved_node import read_run_settings
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.schema import OURS, new_info, read_info
from embodied.policies.steering.dsrl import Dsrl
from embodied.policies.wrappers.best_of_n import BestOfN

SPEC = Spec({"state": Leaf((5,))}, Leaf((3,), low=-1.0, high=1.0), dt=0.05)
FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 4, "width": 64}
INNER = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]}
DSRL = {"_target_": "embodied.policies.steering.dsrl.Dsrl", "bound": 1.5}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a base policy."""
    torch.manual_seed(0)
    policy = build(FLOW, Policy, spec=SPEC)
    checkpoint.save(tmp_path / "base" / "checkpoints" / "00000001", policy, 1)
    return tmp_path / "base"


def steered(run: Path) -> Dsrl:
    torch.manual_seed(1)
    return Dsrl.wrap(checkpoint.load_policy(run), DSRL, INNER)


def saved(policy: Policy, folder: Path, mb: float = 0.0) -> Path:
    return checkpoint.save(folder / "checkpoints" / "00000002", policy, 2, copy_base_mb=mb)


def actions(policy: Policy) -> torch.Tensor:
    torch.manual_seed(2)
    obs = {"state": torch.randn(4, 5)}
    noise = policy.sample_noise(4, explore=True)
    seen, carry = policy.observe(obs, policy.initial(4), noise)
    return policy.act(seen, carry, noise)[0]


def test_only_what_was_trained_is_written(run: Path, tmp_path: Path) -> None:
    policy = steered(run)
    folder = saved(policy, tmp_path / "steered")
    whole = saved(policy, tmp_path / "copied", mb=16.0)
    small, large = (f / "policy.safetensors" for f in (folder, whole))
    base = run / "checkpoints" / "00000001" / "policy.safetensors"
    assert small.stat().st_size < large.stat().st_size - 0.9 * base.stat().st_size
    assert not (whole / "references.json").exists()
    (entry,) = json.loads((folder / "references.json").read_text())
    assert entry["part"] == "base"
    assert entry["sha256"] == checkpoint.file_hash(base)
    for made in (folder, whole):
        assert torch.equal(actions(checkpoint.load_policy(made)), actions(policy))


def test_it_can_be_wrapped_and_saved_again(run: Path, tmp_path: Path) -> None:
    loaded = checkpoint.load_policy(saved(steered(run), tmp_path / "steered"))
    node = {"_target_": "embodied.policies.wrappers.best_of_n.BestOfN", "n": 2}
    node |= {"critic": {"_target_": "embodied.learners.critics.Critic", "n": 2, "hidden": [8]}}
    best = BestOfN.wrap(loaded, node)
    folder = saved(best, tmp_path / "best")
    entries = json.loads((folder / "references.json").read_text())
    assert {entry["part"] for entry in entries} == {"base", "base.base"}
    assert torch.equal(actions(checkpoint.load_policy(folder)), actions(best))


def test_a_changed_base_is_copied(run: Path, tmp_path: Path) -> None:
    """What is trained is never taken from the file."""
    policy = steered(run)
    with torch.no_grad():
        next(policy.base.parameters()).add_(1.0)
    folder = saved(policy, tmp_path / "steered")
    assert not (folder / "references.json").exists()
    assert torch.equal(actions(checkpoint.load_policy(folder)), actions(policy))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_policy(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_base_that_moved(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = steered(run)
    folder = saved(policy, tmp_path / "steered")
    moved = tmp_path / "elsewhere"
    run.rename(moved)
    assert "EMBODIED_BASES=RUN" in refused(folder)
    monkeypatch.setenv("EMBODIED_BASES", f"{tmp_path / 'nothing'}:{moved}")
    assert torch.equal(actions(checkpoint.load_policy(folder)), actions(policy))


def test_runs_that_moved_together(run: Path, tmp_path: Path) -> None:
    saved(steered(run), tmp_path / "outputs" / "steered")
    shutil.move(run, tmp_path / "outputs" / "base")
    first = checkpoint.load_policy(tmp_path / "outputs" / "base")
    saved(Dsrl.wrap(first, DSRL, INNER), tmp_path / "outputs" / "steered")
    (tmp_path / "outputs").rename(tmp_path / "archive")
    assert isinstance(checkpoint.load_policy(tmp_path / "archive" / "steered"), Dsrl)


def test_a_base_that_changed(run: Path, tmp_path: Path) -> None:
    folder = saved(steered(run), tmp_path / "steered")
    other = build({**FLOW, "depth": 1}, Policy, spec=SPEC)
    checkpoint.save(run / "checkpoints" / "00000001", other, 1)
    line = refused(folder)
    assert "has changed" in line
    assert "EMBODIED_BASES=RUN" in line


ENTRIES: dict[str, Any] = {
    "not a list": {"part": "base"},
    "a number": [1],
    "no hash": [{"part": "base", "file": "x.safetensors", "relative": "x"}],
    "another kind": [{"part": "base", "file": "/etc/passwd", "relative": "x", "sha256": "0"}],
    "a device": [{"part": "base", "file": "/dev/zero", "relative": "/dev/zero", "sha256": "0"}],
    "lines": [{"part": "ba\nse", "file": "x", "relative": "x", "sha256": "0"}],
}


@pytest.mark.parametrize("case", ENTRIES)
def test_files_from_other_people(case: str, run: Path, tmp_path: Path) -> None:
    folder = saved(steered(run), tmp_path / "steered")
    (folder / "references.json").write_text(json.dumps(ENTRIES[case]))
    checkpoint.seal(folder, checkpoint.read_about(folder))
    refused(folder)


def test_a_pipe_is_not_waited_for(run: Path, tmp_path: Path) -> None:
    folder = saved(steered(run), tmp_path / "steered")
    entry = json.loads((folder / "references.json").read_text())[0]
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    entry |= {"file": str(pipe), "relative": "nothing.safetensors"}
    (folder / "references.json").write_text(json.dumps([entry]))
    checkpoint.seal(folder, checkpoint.read_about(folder))
    assert "is not there" in refused(folder)


def test_a_reference_cannot_replace_what_was_saved(run: Path, tmp_path: Path) -> None:
    """A file of the right hash with other names does not fit the policy."""
    folder = saved(steered(run), tmp_path / "steered")
    entry = json.loads((folder / "references.json").read_text())[0]
    (folder / "references.json").write_text(json.dumps([{**entry, "part": "inner"}]))
    checkpoint.seal(folder, checkpoint.read_about(folder))
    assert "do not fit" in refused(folder)


def test_wrappers_note_where_the_base_is_from(run: Path) -> None:
    policy = steered(run)
    assert isinstance(policy, PolicyWrapper)
    assert policy.base.saved_file is not None
    assert policy.saved_file is None


def changed(file: Path, **facts: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def test_what_a_newer_version_wrote_is_refused(tmp_path: Path) -> None:
    policy = build({"_target_": "embodied.policies.random.Random"}, Policy, spec=SPEC)
    folder = checkpoint.save(tmp_path / "00000001", policy, 1, loop={"step": torch.ones(1)})
    assert checkpoint.read_about(folder)["format"] == formats.CHECKPOINT
    assert checkpoint.load_state(folder, "loop")["step"] == 1
    changed(folder / "about.json", format=formats.CHECKPOINT + 1)
    for read in (checkpoint.load_policy, lambda path: checkpoint.load_state(path, "loop")):
        with pytest.raises(ConfigError, match=r"the checkpoint has format 3, .* up to 2"):
            read(folder)
    file = tmp_path / "meta" / "info.json"
    file.parent.mkdir()
    info = new_info(SPEC, (), "", "png", 20.0)
    file.write_text(json.dumps(info))
    assert read_info(tmp_path)[OURS]["format"] == formats.DATASET
    changed(file, **{OURS: info[OURS] | {"format": formats.DATASET + 1}})
    with pytest.raises(ConfigError, match=r"the dataset has format 2, .* up to 1"):
        read_info(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"format": formats.RUN, "seed": 3}))
    assert read_run_settings(file) == {"seed": 3}
    file.write_text(yaml.safe_dump({"format": formats.RUN + 1, "seed": 3}))
    with pytest.raises(ConfigError, match=r"the run folder has format 3, .* up to 2"):
        read_run_settings(file)


@pytest.mark.parametrize("format", [0, True, "1", None])
def test_a_format_that_is_no_number_is_refused(format: Any) -> None:
    with pytest.raises(ConfigError, match="no number from 1 on"):
        formats.upgrade("run folder", {}, format)
