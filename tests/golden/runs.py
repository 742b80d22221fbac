"""What is done with the old runs below `data/`: each case is commands and the figures they give.

`make_old_runs` records the figures, `test_old_runs` compares. Paths are relative: a case runs in a
folder with copies of all data.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from embodied.cli import main
from embodied.core import checkpoint
from tests.golden import fingerprint

DATA = fingerprint.FOLDER / "data"
FILE = "expected.json"
OLD = (
    "old_clone",
    "old_dataset",
    "old_dsrl",
    "old_package",
    "old_residual",
    "old_run_ppo_teacher",
    "old_run_sac",
)
SMALL = (
    "size=debug device=cpu deterministic=true video=false "
    "save_every=0 eval.episodes=4 eval.num_envs=2"
)
Figures = dict[str, Any]


def embodied(line: str) -> None:
    """One command line, in this process, without `embodied` in front."""
    try:
        main(line.split())
    except SystemExit as stop:
        assert stop.code == 0, f"embodied {line}: {stop.code}"


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Copies of all data in `folder`, the current directory; a user's package can be imported."""
    for name in OLD:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(DATA / name, folder / name, ignore=ignored)
    before, path = Path.cwd(), [*sys.path]
    os.chdir(folder)
    sys.path.insert(0, str(folder / "old_package"))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in [name for name in sys.modules if name.split(".")[0] == "mypack"]:
            del sys.modules[name]  # the next folder has its own copy


def decided(run: str) -> Figures:
    """What the policy of a run does at made-up observations: three decisions of four rows."""
    policy = checkpoint.load_policy(run)
    torch.manual_seed(0)
    carry, played = policy.initial(4), []
    for _ in range(3):
        obs = {name: torch.randn(4, *leaf.shape) for name, leaf in policy.spec.obs.items()}
        noise = policy.sample_noise(4, explore=True)
        with torch.no_grad():
            actions, carry = policy.act(*policy.observe(obs, carry, noise), noise)
        played.append(actions)
    return {"sha256": fingerprint.exact(played), "summary": fingerprint.summary(played)}


def rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def evaluated(run: str, words: str = "episodes=6 num_envs=3") -> Figures:
    """What `embodied eval` adds to the run's evaluations."""
    embodied(f"eval {run} {words} device=cpu")
    row = rows(f"{run}/evaluations.jsonl")[-1]
    return {key: row[key] for key in ("return", "length", "successes") if key in row}


def weights(run: str) -> Figures:
    """Step and weights of the newest checkpoint, and its held-out return."""
    newest = sorted(Path(run, "checkpoints").iterdir())[-1]
    values = list(load_file(newest / "policy.safetensors").values())
    scored = [row for row in rows(f"{run}/metrics.jsonl") if "eval/return" in row]
    return {
        "step": int(newest.name),
        "sha256": fingerprint.exact(values),
        "summary": fingerprint.summary(values),
        "return": scored[-1]["eval/return"],
    }


def resumed(run: str, words: str) -> Figures:
    embodied(f"resume {run} {words}")
    return weights(run)


def trained(words: str) -> Figures:
    embodied(f"train {words} {SMALL} output=new")
    return weights("new")


def exported(run: str, words: str, *files: str) -> Figures:
    """What it writes is checked against PyTorch by the command itself."""
    embodied(f"export {run} --to exported {words}")
    return {name: Path("exported", name).exists() for name in files}


def own(words: str) -> Figures:
    """Training with the user's package."""
    return trained(f"--config-dir old_package/configs allow=[mypack] {words}")


def own_by_variable(words: str) -> Figures:
    """The same, its folder found by EMBODIED_CONFIGS."""
    os.environ["EMBODIED_CONFIGS"] = "old_package/configs"
    try:
        return trained(f"allow=[mypack] {words}")
    finally:
        del os.environ["EMBODIED_CONFIGS"]


def own_again() -> Figures:
    """A run with the user's package goes on and is evaluated."""
    own("env=windy_plane policy=bounded learner=careful reward=blend")
    words = "--config-dir old_package/configs allow=[mypack]"
    resumed("new", f"{words} steps=320")
    return evaluated("new", f"{words} episodes=3 num_envs=3")


def own_scripts() -> Figures:
    """What a user's scripts import and call."""
    import mypack.imports
    import mypack.rows

    count, spec = mypack.rows.played(Path("old_dataset"))
    score = mypack.rows.score(Path("old_run_sac"), mypack.rows.pendulum(), 2)
    return {"episodes": count, "obs": sorted(spec.obs), "return": score}


def info() -> Figures:
    embodied("demos info old_dataset")
    return {}


SMALL_SAC = "policy.hidden=[16,16] learner.hidden=[16,16]"
TEACHER = "teacher=middle teacher.signal=return teacher.returns=[-20,0]"
RUNS = ("old_run_sac", "old_run_ppo_teacher", "old_clone", "old_dsrl", "old_residual")
DECIDED: dict[str, Callable[[], Figures]] = {
    f"decide {run}": lambda run=run: decided(run) for run in RUNS
}
EVALUATED: dict[str, Callable[[], Figures]] = {
    f"eval {run}": lambda run=run: evaluated(run) for run in RUNS
}
DONE: dict[str, Callable[[], Figures]] = {
    "eval with other steps": lambda: evaluated("old_clone", "policy.steps=2 episodes=3 num_envs=3"),
    "eval with the best of few": lambda: evaluated(
        "old_dsrl", "policy=best policy.n=4 episodes=3 num_envs=3"
    ),
    "eval in real time": lambda: evaluated(
        "old_clone", "policy=realtime policy.delay=1 execute=4 episodes=3 num_envs=3"
    ),
    "export sac": lambda: exported(
        "old_run_sac", "--onnx --header --torchscript", "policy.onnx", "policy.h", "policy.pt"
    ),
    "export clone": lambda: exported("old_clone", "--onnx", "policy.onnx"),
    "export dsrl": lambda: exported("old_dsrl", "--onnx", "policy.onnx"),
    "demos info": info,
    "own scripts": own_scripts,
    "own again": own_again,
}
TRAINED: dict[str, Callable[[], Figures]] = {
    "resume sac": lambda: resumed("old_run_sac", "steps=900"),
    "resume ppo with teacher": lambda: resumed("old_run_ppo_teacher", "steps=1200"),
    "resume clone": lambda: resumed("old_clone", "steps=260"),
    "resume dsrl": lambda: resumed("old_dsrl", "steps=600"),
    "resume residual": lambda: resumed("old_residual", "steps=480"),
    "train clone of old demos": lambda: trained(
        "experiment=two_gap_flow demos=old_dataset policy.width=16 steps=40"
    ),
    "train dsrl of old clone": lambda: trained(
        f"experiment=two_gap_dsrl init=old_clone {SMALL_SAC}"
    ),
    "own, from nothing": lambda: own(f"env=plane policy=linear learner=rwr reward=near {TEACHER}"),
    "own, of parts": lambda: own("env=windy_plane policy=linear learner=pathwise normalize=true"),
    "own, of classes": lambda: own("env=windy_plane policy=bounded learner=careful reward=blend"),
    "own name of a learner": lambda: own(
        "env=plane policy=gaussian policy.hidden=[16,16] learner=my_dsact"
    ),
    "own experiment": lambda: own("experiment=plane_dsact"),
    "own folder by variable": lambda: own_by_variable(
        "env=two_gap policy=my_flow learner=my_clone demos=old_dataset steps=40"
    ),
}
CASES = {**DECIDED, **EVALUATED, **DONE, **TRAINED}
