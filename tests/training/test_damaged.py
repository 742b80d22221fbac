"""Damaged checkpoints: what was saved is what is loaded, or one line says what is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from embodied.core import checkpoint
from embodied.core.checkpoint import CheckpointError
from embodied.core.errors import ContractWarning
from embodied.viewer.launch import open_session
from tests.builders import exit_of

WORDS = ["env=two_gap", "policy=gaussian", "learner=sac", "size=debug", "steps=300"]
WORDS += ["env.num_envs=4", "save_every=100", "eval_every=0", "video=false"]


def flip(file: Path) -> None:
    """One bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit of the learner": (flip, "learner.pt"),
    "half of the loop": (cut, "loop.pt"),
    "no facts": (empty, "about.json"),
    "a bit of the policy": (flip, "policy.safetensors"),
    "a bit of the spec": (flip, "spec.json"),
    "a file is gone": (Path.unlink, "learner.pt"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints 100, 200 and 300."""
    run = tmp_path_factory.mktemp("damaged") / "whole"
    assert exit_of("train", *WORDS, f"out={run}") == 0
    names = sorted(folder.name for folder in (run / "checkpoints").iterdir())
    assert names == ["00000100", "00000200", "00000300"]
    kept = [file.parent.name for file in sorted(run.glob("checkpoints/*/loop.pt"))]
    assert kept == names[1:], "the newest one, and one to fall back to"
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    yaml = copy / "run.yaml"
    yaml.write_text(yaml.read_text().replace(str(whole), str(copy)))
    return copy


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resume_falls_back_to_the_newest_whole_checkpoint(
    damage: str, run: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how, name = DAMAGES[damage]
    newest = checkpoint.find(run)
    how(newest / name)
    capsys.readouterr()
    assert exit_of("resume", run) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{newest} is damaged ({name} " in line and "going on from 00000200" in line
    again, before = (checkpoint.load_state(each, "learner") for each in (run, whole))
    assert checkpoint.find(run) == newest, "trained again"
    for key, value in before["module"].items():
        assert torch.equal(again["module"][key], value), "as it was without damage"
    assert newest.with_name(f"damaged-{newest.name}").is_dir(), "kept for who wants to look"


def test_where_none_is_whole_one_line_says_so(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in sorted((run / "checkpoints").iterdir())[1:]:
        flip(folder / "loop.pt")
    capsys.readouterr()
    assert exit_of("resume", run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "00000300 is damaged (loop.pt is not what was saved), and no earlier" in line
    assert exit_of("resume", run / "checkpoints" / "00000200") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "00000200 is damaged (loop.pt is not what was saved)" in line
    assert len(list((run / "checkpoints").iterdir())) == 3, "nothing was set aside"


@pytest.mark.parametrize("damage", [k for k, (_, name) in DAMAGES.items() if name[0] != "l"])
def test_eval_and_view_of_a_damaged_one_are_one_line(
    damage: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how, name = DAMAGES[damage]
    how(checkpoint.find(run) / name)
    capsys.readouterr()
    assert exit_of("eval", run, "episodes=1", "num_envs=1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    with pytest.raises(CheckpointError) as refused:
        open_session(run)
    for said in (line, str(refused.value)):
        assert "00000300 is damaged" in said and name in said and "\n" not in said


def test_a_checkpoint_without_hashes_is_loaded_and_said_to_be_unchecked(run: Path) -> None:
    """Format 1, of earlier versions."""
    file = checkpoint.find(run) / "about.json"
    facts = json.loads(file.read_text())
    assert facts.pop("format") == 2 and len(facts.pop("files")) == 5
    file.write_text(json.dumps(facts))
    with pytest.warns(ContractWarning, match="has no hashes .* its files are not checked"):
        checkpoint.load_policy(run)
    file.write_text(json.dumps({**facts, "format": 2}))
    with pytest.raises(CheckpointError, match=r"damaged \(about.json"):
        checkpoint.load_policy(run)
