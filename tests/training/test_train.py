"""Runs: exact resume, Ctrl-C, kill -9 while saving, NaN, a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embodied.cli import mistake
from embodied.core import checkpoint
from embodied.core.build import ConfigError, allow
from embodied.core.checkpoint import CheckpointError
from embodied.core.env import NotFinite, Step
from embodied.core.errors import RobotError
from embodied.core.tensors import Tensors
from embodied.training import trainer
from embodied.training.config import REGIMES, regime_of, settings_of
from embodied.training.logger import Log
from embodied.training.train import train
from embodied.training.trainer import Trainer
from tests.builders import node_of, python, wait_until
from tests.tiers import usually
from tests.toy_envs import Reach

allow("tests")


DATA_SETTINGS = {name for kind in REGIMES.values() for name in settings_of(kind)}
DATA = {"warmup_steps": 80, "utd_ratio": 0.25, "replay_size": 300}


def settings(folder: Path, data: str | None = None, **changes: Any) -> dict[str, Any]:
    """A small run; settings of its data are put there."""
    own = {key: changes.pop(key) for key in DATA_SETTINGS & changes.keys()}
    node: dict[str, Any] = {
        "env": {"_target_": "tests.toy_envs.Reach", "num_envs": 4},
        "policy": {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [32, 32]},
        "learner": node_of("learners.off_policy.sac.Sac", hidden=[32, 32], batch_size=32),
        "name": "reach",
        "out": str(folder),
        "steps": 400,
        "log_every": 100,
        "eval": {"episodes": 4, "num_envs": 4},
        "video": False,
        **changes,
    }
    regime = regime_of(node | {"data": data})
    node["data"] = {"regime": regime, **(DATA if regime == "off_policy" else {}), **own}
    return node


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.find(folder) / "policy.safetensors")


def step_of(folder: Path) -> int:
    return json.loads((checkpoint.find(folder) / "about.json").read_text())["step"]


def run(node: dict[str, Any]) -> Path:
    return train(node, Log(Path(node["out"])))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def resumed(node: dict[str, Any], cut: int) -> Path:
    """Where a run of `node` is, below its `out`; one that ends at `cut` and is resumed is the same:
    weights, optimiser, replay, environment, generators."""
    whole, half = (Path(node["out"]) / name for name in ("whole", "half"))
    run(node | {"out": str(whole)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "running", property(lambda self: self.step < cut))
        run(node | {"out": str(half)})
    assert step_of(half) == cut
    run(node | {"out": str(half), "resume": str(half)})
    assert same(weights(whole), weights(half))
    for name in ("learner", "loop"):
        one, other = (checkpoint.load_state(folder, name) for folder in (whole, half))
        assert flat(one) == flat(other)
    return whole


@pytest.mark.parametrize(
    "extra", [{}, {"learner_n_step": 3}, {"chunk": 3, "learner_n_step": 2}, {"fr3": True}]
)
def test_resume_is_exact(tmp_path: Path, extra: dict[str, Any]) -> None:
    node = settings(tmp_path, steps=240)
    node["learner"]["n_step"] = extra.get("learner_n_step", 1)
    node["policy"]["chunk"] = extra.get("chunk", 1)
    if "fr3" in extra:
        node["env"] = node_of("envs.fr3.env.Fr3", task="reach", num_envs=4, horizon=9)
    resumed(node, 120)


EXTENDED = {
    "sac": {},
    "td3": {
        "policy": node_of("policies.deterministic.Deterministic", hidden=[32, 32]),
        "learner": node_of("learners.off_policy.td3.Td3", hidden=[32, 32], batch_size=32),
    },
    "ppo": {
        "policy": node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[16]),
        "learner": node_of("learners.on_policy.ppo.Ppo", horizon=25, batch_size=50, epochs=2),
        "data": "on_policy",
    },
}


@pytest.mark.parametrize("learner", usually(["sac", "ppo"], EXTENDED))
def test_a_run_that_is_extended_is_the_one_that_was_longer_from_the_start(
    learner: str, tmp_path: Path
) -> None:
    """600 steps, resumed to 1,200: no schedule or count begins again."""
    long, short = (settings(tmp_path / name, **EXTENDED[learner]) for name in ("long", "short"))
    run(long | {"steps": 1200})
    run(short | {"steps": 600})
    run(short | {"steps": 1200, "resume": short["out"]})
    assert step_of(tmp_path / "short") == 1200
    assert same(weights(tmp_path / "long"), weights(tmp_path / "short"))


class Tired(Reach):
    """A robot that gives up in its 60th step, once, where nobody has mended it."""

    taken = 0

    def reset(self, *args: Any, **named: Any) -> Tensors:
        self.taken = 0  # also after the checks before the run
        return super().reset(*args, **named)

    def step(self, action: torch.Tensor) -> Step:
        self.taken += 1
        if self.taken == 60 and not Path(os.environ["MENDED"]).exists():
            raise RobotError("the arm stopped: look at it")
        return super().step(action)


def test_a_robot_that_gives_up_costs_nothing_that_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MENDED", str(tmp_path / "mended"))
    node = settings(tmp_path / "run", env={"_target_": f"{__name__}.Tired", "num_envs": 4})
    with pytest.raises(RobotError) as error:
        run(node)
    assert mistake(error.value) == "the arm stopped: look at it"
    assert step_of(tmp_path / "run") == 59 * 4
    (tmp_path / "mended").touch()
    run(node | {"resume": str(tmp_path / "run")})
    assert step_of(tmp_path / "run") == 400


def flat(value: Any) -> Any:
    """Nested state with tensors as bytes, so that == compares it bit for bit; a folder of the run
    (`resumed`) is that of the other one."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes())
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [flat(item) for item in value]
    return value.replace("/half/", "/whole/") if isinstance(value, str) else value


def test_the_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(settings(tmp_path / name, steps=200, seed=seed))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_an_interrupt_saves_and_resumes_and_its_echo_is_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent that is killed sends SIGINT for each of its threads; a later one stops at once."""
    advance = Trainer.advance

    def interrupting(self: Trainer, *args: Any) -> None:
        advance(self, *args)
        if self.step == 200:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)

    run(settings(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", interrupting)
        with pytest.raises(KeyboardInterrupt):
            run(settings(tmp_path / "cut"))
        patch.setattr(trainer, "ECHO", -1.0)
        with pytest.raises(KeyboardInterrupt):
            run(settings(tmp_path / "twice"))
    with pytest.raises(CheckpointError):
        checkpoint.find(tmp_path / "twice")
    assert step_of(tmp_path / "cut") == 200
    run(settings(tmp_path / "cut", resume=str(tmp_path / "cut")))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


HERE = "import sys; sys.path.insert(0, '.'); from tests.training.test_train import *\n"


def test_killed_while_saving_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    """kill -9 of a process that saves all the time leaves whole checkpoints."""
    code = f"{HERE}run(settings(Path(sys.argv[1]), steps=10**6, save_every=4, warmup_steps=8))"
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.DEVNULL)
    folder = tmp_path / "checkpoints"
    wait_until(lambda: len(list(folder.glob("[0-9]*"))) >= 5, "checkpoints", tick=0.05)
    process.kill()
    process.wait()
    step = step_of(tmp_path)
    assert step > 0
    checkpoint.load_policy(tmp_path)
    run(settings(tmp_path, steps=step + 8, resume=str(tmp_path)))
    assert step_of(tmp_path) == step + 8


def test_full_disk_is_one_line_and_keeps_the_old(tmp_path: Path) -> None:
    """A file-size limit makes the real write fail as a full disk does."""
    code = f"""{HERE}
import resource
folder = Path(sys.argv[1])
run(settings(folder, steps=100))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
policy = checkpoint.load_policy(folder)
try:
    checkpoint.save(folder / "checkpoints" / "00000200", policy, 200)
except CheckpointError as error:
    print("line:", error)
"""
    done = python("-c", code, tmp_path)
    assert "line: could not write" in done.stdout, done.stdout + done.stderr
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["00000100"]
    checkpoint.load_policy(tmp_path)


def test_nan_from_an_environment_stops_the_run(tmp_path: Path) -> None:
    world = {"_target_": "tests.training.actors.helper.Counting", "num_envs": 4, "bad": 31}
    with pytest.raises(NotFinite, match=r"reward .*\[0, 1, 2, 3\]"):
        run(settings(tmp_path, env=world))


def test_a_run_inside_a_thread_works_without_signal_handlers(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, settings(tmp_path, steps=100)).result() == tmp_path


def test_a_policy_that_init_does_not_hold_is_refused(tmp_path: Path) -> None:
    """Settings of a policy that is loaded would be ignored: one line says so."""
    base = run(settings(tmp_path / "base", steps=120))
    again = settings(tmp_path / "again", steps=120, init=str(base))
    run(again)
    for policy, line in (
        (again["policy"] | {"hidden": [64, 64]}, r"policy\.hidden=\(64, 64\) has no effect"),
        (node_of("policies.deterministic.Deterministic"), "a Gaussian, not a Deterministic"),
    ):
        with pytest.raises(ConfigError, match=line):
            run({**again, "out": str(tmp_path / "other"), "policy": policy})
