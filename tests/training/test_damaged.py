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


def flip(content: bytes) -> bytes:
    """One bit in the middle is another one."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def damage(how: str, folder: Path) -> str:
    """Damage a file of a checkpoint; its name."""
    name, change = DAMAGES[how]
    file = folder / name
    content = change(file.read_bytes())
    file.unlink() if content is None else file.write_bytes(content)
    return name


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "a bit of the learner": ("learner.pt", flip),
    "half of the loop": ("loop.pt", lambda content: content[: len(content) // 2]),
    "no facts": ("about.json", lambda content: b""),
    "a bit of the policy": ("policy.safetensors", flip),
    "a bit of the spec": ("spec.json", flip),
    "a file is gone": ("learner.pt", lambda content: None),
}


def said(capsys: pytest.CaptureFixture[str], status: int, *words: object) -> str:
    """The one line on stderr of a command."""
    capsys.readouterr()
    assert exit_of(*words) == status
    (line,) = capsys.readouterr().err.splitlines()
    return line


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


@pytest.mark.parametrize("how", DAMAGES)
def test_a_resume_falls_back_to_the_newest_whole_checkpoint(
    how: str, run: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoint.find(run)
    name = damage(how, newest)
    line = said(capsys, 0, "resume", run)
    assert f"{newest} is damaged ({name} " in line and "going on from 00000200" in line
    again, before = (checkpoint.load_state(each, "learner") for each in (run, whole))
    assert checkpoint.find(run) == newest, "trained again"
    for key, value in before["module"].items():
        assert torch.equal(again["module"][key], value), "as it was without damage"
    assert newest.with_name(f"damaged-{newest.name}").is_dir(), "kept for who wants to look"


def test_where_none_is_whole_one_line_says_so(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (200, 300):
        damage("half of the loop", run / "checkpoints" / f"{number:08d}")
    damaged = "is damaged (loop.pt is not what was saved)"
    assert f"00000300 {damaged}, and no earlier" in said(capsys, 2, "resume", run)
    earlier = run / "checkpoints" / "00000200"
    assert f"00000200 {damaged}" in said(capsys, 2, "resume", earlier)
    assert len(list((run / "checkpoints").iterdir())) == 3, "nothing was set aside"


@pytest.mark.parametrize("how", [how for how, (name, _) in DAMAGES.items() if name[0] != "l"])
def test_eval_and_view_of_a_damaged_one_are_one_line(
    how: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = damage(how, checkpoint.find(run))
    line = said(capsys, 2, "eval", run, "episodes=1", "num_envs=1")
    with pytest.raises(CheckpointError) as refused:
        open_session(run)
    for each in (line, str(refused.value)):
        assert "00000300 is damaged" in each and name in each and "\n" not in each


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
