"""Checkpoints: folders with the policy and the state for an exact resume, written atomically.

checkpoints/00020000/
    policy.yaml  spec.json  policy.safetensors     the policy, for inference
    references.json                                files of a large frozen base, by path and hash
    learner.pt  loop.pt                            training state, for resume (loaded weights-only)
    about.json                                     format, versions, step, metrics, file hashes
"""

from __future__ import annotations

import json
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from embodied.core import formats, saved_file
from embodied.core.atomic_write import sync
from embodied.core.build import ConfigError, build
from embodied.core.errors import ContractWarning
from embodied.core.files import read_json, require_file
from embodied.core.hashes import ABOUT, FILES, damage, file_hash, hashes_in
from embodied.core.hashes import read_about as about_of
from embodied.core.policy import Policy, policies_in
from embodied.core.saved_file import WEIGHTS, BaseFileError, SavedFile, fitting, load_tensors
from embodied.core.saved_node import read_saved, require_inside
from embodied.core.spec import Spec, require_same

REFERENCES = "references.json"
SAVED = ("policy.yaml", "spec.json", WEIGHTS, REFERENCES, "learner.pt", "loop.pt")
COPY_BASE_MB = 16.0  # frozen bases with larger files (MB) are saved by path and hash


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message is one line that says what to do."""


def save(
    folder: Path,
    policy: Policy,
    step: int,
    learner: Mapping[str, Any] | None = None,
    loop: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
    copy_base_mb: float = COPY_BASE_MB,
) -> Path:
    """Write a checkpoint under a temporary name, fsync it, then rename it to `folder`. `learner`
    and `loop` are nested dicts of tensors and plain values. A frozen base that was loaded from a
    file of `copy_base_mb` MB or more is saved by the path and hash of that file. If the disk is
    full, raises CheckpointError; earlier checkpoints are unchanged."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        parts = referable(policy, copy_base_mb)
        elsewhere = {f"{name}.{key}" for name, saved in parts.items() for key in saved.names()}
        weights = {
            key: value.detach().cpu().contiguous().clone()
            for key, value in policy.state_dict().items()
            if key not in elsewhere
        }
        save_file(weights, partial / WEIGHTS)
        if parts:
            entries = [file.reference(name, folder) for name, file in parts.items()]
            (partial / REFERENCES).write_text(json.dumps(entries, indent=1))
        (partial / "policy.yaml").write_text(yaml.safe_dump(policy.node, sort_keys=False))
        (partial / "spec.json").write_text(json.dumps(policy.spec.to_json(), indent=1))
        for name, state in {"learner": learner, "loop": loop}.items():
            if state is not None:
                torch.save(dict(state), partial / f"{name}.pt")
        facts = {
            "format": formats.CHECKPOINT,
            "step": step,
            "policy_sha256": file_hash(partial / "policy.safetensors"),
            "versions": {name: version(name) for name in ("embodied-rl", "torch", "numpy")},
            "git": git_revision(),
        } | dict(about or {})
        seal(partial, facts)
        for path in partial.iterdir():
            sync(path)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError, RuntimeError) as error:  # errors of the libraries
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"could not write {folder}: {error}; "
            "free disk space and resume from the previous checkpoint"
        ) from error
    return folder


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the about.json of a checkpoint: `facts`, and the hashes of its files as they are."""
    (folder / ABOUT).write_text(json.dumps({**facts, FILES: hashes_in(folder)}, indent=1))


def referable(policy: Policy, copy_base_mb: float = COPY_BASE_MB) -> dict[str, SavedFile]:
    """The submodules of `policy`, by name, whose parameters are those of a file of at least
    `copy_base_mb` MB, and that file."""
    found: dict[str, SavedFile] = {}
    for name, part in policies_in(policy):
        file = part.saved_file if name else None
        if file is None or not file.path.is_file():
            continue
        large = file.path.stat().st_size >= copy_base_mb * 1e6
        if large and file.holds(part.state_dict()):
            found[name] = file
    return found


def find(path: Path | str) -> Path:
    """The checkpoint folder of `path`: itself, or the last checkpoint of a run folder."""
    path = Path(path)
    if (path / "policy.yaml").exists():
        return path
    folders = sorted(p for p in _numbered(path) if (p / ABOUT).exists())
    if not folders:
        raise CheckpointError(
            f"{path} holds no checkpoint (expected {path}/checkpoints/STEP/policy.yaml)"
        )
    return folders[-1]


def _numbered(run: Path) -> list[Path]:
    return [each for each in (run / "checkpoints").glob("[0-9]*") if each.name.isdecimal()]


def newest_whole(path: Path | str) -> tuple[Path, dict[Path, str]]:
    """The checkpoint from which `path` (a run, or one of its checkpoints) is resumed: of a run, the
    newest one whose files are those that were saved. And the newer ones that are not, newest first,
    each with what is wrong with it."""
    path = Path(path)
    folders = sorted(_numbered(path), reverse=True)
    if (path / "policy.yaml").exists() or not folders:
        return find(path), {}
    damaged: dict[Path, str] = {}
    for folder in folders:
        if not (wrong := damage(folder, SAVED)):
            return folder, damaged
        damaged[folder] = wrong
    newest, wrong = next(iter(damaged.items()))
    raise CheckpointError(
        f"{newest} is damaged ({wrong}), and no earlier checkpoint can be resumed"
    )


def load_policy(
    path: Path | str,
    spec: Spec | None = None,
    device: torch.device | str = "cpu",
    part: bool = False,
) -> Policy:
    """Load the policy of a run or checkpoint folder; SpecMismatch if its spec is not `spec`, of
    which it may observe a `part`. The folder may be another person's: only classes that are a
    `Policy`, and the networks of one, are built (`core.build`, `core.saved_node`). ConfigError for
    any other."""
    folder = find(path)
    format = _require_saved(folder, "policy.yaml", "spec.json", WEIGHTS)
    try:
        saved = Spec.from_json(read_json(folder / "spec.json"))
        node = read_saved(folder / "policy.yaml")
        weights = load_tensors(folder / WEIGHTS)
    except Exception as error:  # damaged files raise many kinds of errors
        raise _damaged(folder, error) from error
    if spec is not None:
        require_same(spec, saved, "environment", f"checkpoint {folder}", part=part)
    node = formats.upgrade("checkpoint", {"policy": node}, format)["policy"]
    require_inside(node, folder / "policy.yaml")
    parts = references(folder)
    try:
        for name, file in parts.items():
            found = load_tensors(file.path)
            weights |= {f"{name}.{key}": value for key, value in found.items()}
    except (OSError, SafetensorError) as error:
        line = str(error).splitlines()[0]
        raise CheckpointError(f"a file that {folder} refers to is damaged ({line})") from error
    with fitting(weights, folder / "policy.yaml"):
        policy = build(node, Policy, spec=saved)
    try:
        policy.load_state_dict(weights)
        for name, file in {"": SavedFile(folder / WEIGHTS), **parts}.items():
            module = policy.get_submodule(name)
            if isinstance(module, Policy):
                module.saved_file = file
    except (RuntimeError, AttributeError, SafetensorError) as error:
        line = str(error).splitlines()[0]
        raise CheckpointError(
            f"the weights in {folder} do not fit its policy.yaml ({line}); use another checkpoint"
        ) from error
    return policy.to(device).eval()


def with_settings(policy: Policy, settings: Mapping[str, Any], path: Path | str) -> Policy:
    """`policy`, of the folder `path`, with other settings that keep the shapes of its weights, such
    as the steps of a sampler; ConfigError for other ones."""
    other = build({**policy.node, **settings}, Policy, spec=policy.spec)
    try:
        other.load_state_dict(policy.state_dict())
    except RuntimeError as error:
        raise ConfigError(
            f"the policy settings do not fit the weights in {path}; change only settings that "
            "keep their shapes"
        ) from error
    return other.eval()


def references(path: Path | str) -> dict[str, SavedFile]:
    """The files that a checkpoint refers to, by the submodule of its policy; CheckpointError if one
    is missing or has changed."""
    folder = find(path)
    _require_saved(folder, REFERENCES)
    file = folder / REFERENCES
    if not file.exists():
        return {}
    try:
        entries: list[Any] = list(read_json(file))
        return {str(entry["part"]): saved_file.referred(entry, folder) for entry in entries}
    except BaseFileError as error:
        raise CheckpointError(str(error)) from error
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise CheckpointError(f"{file} is damaged; use an earlier checkpoint") from error


def load_spec(path: Path | str) -> Spec:
    folder = find(path)
    _require_saved(folder, "spec.json")
    try:
        return Spec.from_json(read_json(folder / "spec.json"))
    except Exception as error:  # damaged files raise many kinds of errors
        raise _damaged(folder, error) from error


MAPPINGS = ("kernels", "metrics", "adopted")


def read_about(path: Path | str) -> dict[str, Any]:
    """The facts of a checkpoint: format, versions, step, metrics, hashes, kernels."""
    folder = find(path)
    try:
        about = about_of(folder)
        int(about["step"])
        if wrong := [k for k in MAPPINGS if not isinstance(about.get(k, {}), dict)]:
            raise TypeError(wrong[0])
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise _damaged(folder, f"{ABOUT} cannot be read, or has no step") from error
    return about


def load_state(path: Path | str, name: str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Load `learner.pt` or `loop.pt` of a checkpoint, weights-only, with all tensors on `device`.
    Parts of the loop's state belong to the CPU (environments, generators): whoever takes a part
    moves it."""
    file = find(path) / f"{name}.pt"
    if not file.exists():
        raise CheckpointError(f"{file} is missing: this checkpoint can act but cannot be resumed")
    require_file(file)
    format = _require_saved(file.parent, file.name)
    try:
        state = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # as above
        raise _damaged(file.parent, f"{file.name}: {error}") from error
    return formats.upgrade("checkpoint", {name: state}, format)[name]


def _require_saved(folder: Path, *names: str) -> int:
    """The format of a checkpoint; CheckpointError if a file of `names` is not the one that was
    saved. A checkpoint of format 1 has no hashes: a warning says that it is not checked."""
    format = read_about(folder).get("format", 1)
    if format == 1:
        line = f"{folder} has no hashes (an earlier version saved it): its files are not checked"
        warnings.warn(line, ContractWarning, stacklevel=3)
    elif wrong := damage(folder, names):
        raise _damaged(folder, wrong)
    return format


def _damaged(folder: Path, wrong: object) -> CheckpointError:
    line = str(wrong).strip().partition("\n")[0][:300]
    return CheckpointError(f"{folder} is damaged ({line}); use an earlier checkpoint")


def git_revision() -> str | None:
    """The git commit of this source tree; None if it is not a git checkout."""
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None
