"""Checkpoints: folders with the policy and the state for an exact resume, written atomically.

checkpoints/00020000/
    policy.yaml  spec.json  policy.safetensors     the policy, for inference
    learner.pt  loop.pt                            training state, for resume (loaded weights-only)
    about.json                                     format, versions, step, metrics, hashes
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.core.spec import Spec, require_same

FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message is one line that says what to do."""


def save(
    folder: Path,
    policy: Policy,
    step: int,
    learner: Mapping[str, Any] | None = None,
    loop: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint under a temporary name, fsync it, then rename it to `folder`.

    `learner` and `loop` are nested dicts of tensors and plain values. If the disk is full, raises
    CheckpointError; earlier checkpoints are unchanged.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        weights = {k: v.detach().cpu().contiguous().clone() for k, v in policy.state_dict().items()}
        save_file(weights, partial / "policy.safetensors")
        (partial / "policy.yaml").write_text(yaml.safe_dump(policy.node, sort_keys=False))
        (partial / "spec.json").write_text(json.dumps(policy.spec.to_json(), indent=1))
        for name, state in {"learner": learner, "loop": loop}.items():
            if state is not None:
                torch.save(dict(state), partial / f"{name}.pt")
        facts = _about(partial, step) | dict(about or {})
        (partial / "about.json").write_text(json.dumps(facts, indent=1))
        for path in partial.iterdir():
            _sync(path)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError, RuntimeError) as error:  # errors of the libraries
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"could not write {folder}: {error}; "
            "free disk space and resume from the previous checkpoint"
        ) from error
    return folder


def find(path: Path | str) -> Path:
    """The checkpoint folder of `path`: itself, or the last checkpoint of a run folder."""
    path = Path(path)
    if (path / "policy.yaml").exists():
        return path
    folders = sorted(
        p for p in (path / "checkpoints").glob("[0-9]*") if (p / "about.json").exists()
    )
    if not folders:
        raise CheckpointError(
            f"{path} holds no checkpoint (expected {path}/checkpoints/STEP/policy.yaml)"
        )
    return folders[-1]


def load_policy(
    path: Path | str, spec: Spec | None = None, device: torch.device | str = "cpu"
) -> Policy:
    """Load the policy of a run or checkpoint folder; SpecMismatch if its spec is not `spec`."""
    folder = find(path)
    try:
        saved = Spec.from_json(json.loads((folder / "spec.json").read_text()))
        node = yaml.safe_load((folder / "policy.yaml").read_text())
        weights = load_file(folder / "policy.safetensors", device="cpu")
    except Exception as error:  # damaged files raise many kinds of errors
        raise CheckpointError(
            f"{folder} is damaged ({error}); use an earlier checkpoint"
        ) from error
    if spec is not None:
        require_same(spec, saved, "environment", f"checkpoint {folder}")
    policy: Policy = build(node, spec=saved)
    policy.load_state_dict(weights)
    return policy.to(device).eval()


def load_spec(path: Path | str) -> Spec:
    """The spec of the policy of a run or checkpoint folder."""
    return Spec.from_json(json.loads((find(path) / "spec.json").read_text()))


def load_state(path: Path | str, name: str) -> dict[str, Any]:
    """Load `learner.pt` or `loop.pt` of a checkpoint, weights-only."""
    file = find(path) / f"{name}.pt"
    if not file.exists():
        raise CheckpointError(f"{file} is missing: this checkpoint can act but cannot be resumed")
    return torch.load(file, map_location="cpu", weights_only=True)


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, for `about.json`."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _about(folder: Path, step: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": step,
        "policy_sha256": file_hash(folder / "policy.safetensors"),
        "versions": {name: version(name) for name in ("embodied-rl", "torch", "numpy")},
        "git": git_revision(),
    }


def git_revision() -> str | None:
    """The git commit of this source tree; None if it is not a git checkout."""
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
