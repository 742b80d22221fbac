"""Actors on Ray, on a cluster of two cores that this file starts: what actor processes are tested
for too, and what only a cluster has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied.core import checkpoint
from embodied.core.build import ConfigError, allow
from embodied.core.env import NotFinite
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from tests.training.actors.helper import (
    CHUNKS,
    INTERVENED,
    LOCKSTEP,
    NODE,
    alive,
    equal,
    pid_of,
    run,
)

ray: Any = pytest.importorskip("ray")
ON_RAY = {"actors": 1, "actors_on": "ray"}
COUNTING = {"env": {"_target_": "tests.training.actors.helper.Counting", "num_envs": 4}}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    """Its address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(autouse=True)
def _tests_may_be_built() -> None:
    allow("tests")


@pytest.mark.parametrize("more", [{}, CHUNKS, INTERVENED], ids=["sac", "chunks", "interventions"])
def test_one_actor_in_lockstep_equals_the_local_loop(tmp_path: Path, more: dict[str, Any]) -> None:
    node = {**NODE, **more}
    local, here = run(tmp_path / "local", node)
    remote, there = run(tmp_path / "remote", node, {**ON_RAY, **LOCKSTEP})
    assert equal(local, remote)
    ours = {k: v for k, v in here[-1].items() if k.startswith("eval/")}
    assert ours and ours.items() <= there[-1].items()


def test_a_resume_with_a_lag_is_exact(tmp_path: Path) -> None:
    """A step has the weights of when it was allowed, so speed changes nothing."""
    data = {**ON_RAY, "actors": 2, "max_lag": 3}
    whole, lines = run(tmp_path / "whole", NODE, data, log_every=40)
    run(tmp_path / "half", NODE, data, steps=120)
    resumed, after = run(tmp_path / "half", NODE, data, resume=str(tmp_path / "half"), log_every=40)
    assert equal(whole, resumed)
    one, other = (checkpoint.load_state(tmp_path / n, "loop")["loop"] for n in ("whole", "half"))
    assert equal(one["replay"], other["replay"])
    lags = [line["train/policy_lag"] for line in lines + after if "train/policy_lag" in line]
    assert lags and min(lags) == 3 and max(lags) < 4, "an evaluation makes a version too"


def test_a_run_goes_on_with_the_other_kind_of_actors(tmp_path: Path) -> None:
    """No step is lost or doubled from processes to Ray: the env counts its steps."""
    data = {"actors": 2, "max_lag": 5, "warmup_steps": 40}
    node = {**NODE, **COUNTING}
    run(tmp_path, node, data, steps=120)
    run(tmp_path, node, {**data, "actors_on": "ray"}, resume=str(tmp_path))
    rows = checkpoint.load_state(tmp_path, "loop")["loop"]["replay"]["rows"]
    assert rows["obs/state"][:, 0].view(-1, 4).T.tolist() == [list(range(60))] * 4


def test_a_killed_actor_is_replaced(tmp_path: Path) -> None:
    data = {**NODE["data"], **ON_RAY, "actors": 2}
    parts = RunComponents(read_config({**NODE, "out": str(tmp_path), "data": data}))
    try:
        loop: Any = parts.loop
        env: Any = parts.env
        for _ in range(10):
            loop._step()
        os.kill(pid_of(env.actors[1]), signal.SIGKILL)
        with pytest.warns(UserWarning, match="an actor on Ray ended.*another one takes its place"):
            while loop.collector.restarted is None:
                loop._step()
        assert loop.collector.restarted.tolist() == [2, 3] and loop.collector.deaths == 1
        for _ in range(10):
            loop._step()
        assert loop.collector.restarted is None
        pids = [pid_of(actor) for actor in env.actors]
    finally:
        parts.close()
    assert ended(pids), "closed with the run"


def test_actors_end_with_a_killed_learner(tmp_path: Path, cluster: str) -> None:
    node = {**NODE, "out": str(tmp_path / "run"), "steps": 100_000, "save_every": 80}
    node["data"] = {**NODE["data"], **ON_RAY, "actors": 2}
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(node))
    program = "import sys, tests.training.actors.helper as h; h.learn(sys.argv[1])"
    environment = {**os.environ, "RAY_ADDRESS": cluster}
    learner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "node.yaml")], env=environment
    )
    end = time.monotonic() + 60
    while not list((tmp_path / "run").glob("checkpoints/[0-9]*/loop.pt")):
        assert learner.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    learner.kill()
    learner.wait()
    pids = [int(word) for word in (tmp_path / "run" / "actors.txt").read_text().split()]
    assert len(pids) == 2 and ended(pids), "actors live on without a learner"


def ended(pids: list[int]) -> bool:
    """Whether all processes end within a minute."""
    end = time.monotonic() + 60
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(alive(pid) for pid in pids)


def test_an_error_of_the_environment_is_raised_by_the_learner(tmp_path: Path) -> None:
    broken = {"env": {**COUNTING["env"], "bad": 7, "num_envs": 2}}
    with pytest.raises(NotFinite, match=r"^Counting: reward is not finite"):
        run(tmp_path, {**NODE, **broken}, {**ON_RAY, "actors": 2})


def test_an_environment_that_cannot_be_built_is_an_error_of_the_learner(tmp_path: Path) -> None:
    wrong = {"env": {**NODE["env"], "task": "fly"}}
    with pytest.raises(ValueError, match="unknown FR3 task 'fly'"):
        run(tmp_path, {**NODE, **wrong}, ON_RAY)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"actors": 4}, "data.actors=4 with threads=1 need 4 cores.*has 2: data.actors=2"),
        ({"actors": 3}, "env.num_envs=3"),
        ({"actors": 0}, "data.actors_on is for actors: data.actors=1"),
        ({"when_behind": "skip"}, "data.when_behind=skip is for a robot.*data.actors_on=here"),
        ({"actors_on": "rey"}, "actors_on=.rey. is not allowed"),
    ],
)
def test_bad_settings_are_one_line(tmp_path: Path, data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, NODE, {**ON_RAY, **data})


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'needs Ray: pip install "embodied-rl\[ray\]"'):
        run(tmp_path, NODE, ON_RAY)


TRAIN = ["-m", "embodied.cli", "train", "env=two_gap", "policy=gaussian", "learner=sac"]
TRAIN += ["size=debug", "data.actors=2", "data.actors_on=ray"]


def train(folder: Path, **environment: str) -> subprocess.Popen[str]:
    words = [sys.executable, *TRAIN, f"out={folder / 'run'}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env={**os.environ, **environment}, **pipes)  # type: ignore[call-overload]


def test_the_command_starts_a_cluster_and_ends_it(tmp_path: Path) -> None:
    process = train(tmp_path)
    _, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert checkpoint.read_about(tmp_path / "run")["step"] > 0
    assert not left_of(process.pid)


def left_of(driver: int) -> list[Path]:
    """The processes of the cluster that `driver` started: Ray's folders have its number."""
    session = f"_{driver}/".encode()
    return [file for file in Path("/proc").glob("[0-9]*/cmdline") if session in contents(file)]


def contents(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it ended
        return b""


def test_a_cluster_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    process = train(tmp_path, RAY_ADDRESS="127.0.0.1:1")
    out, err = process.communicate(timeout=110)
    assert process.returncode == 2, err
    assert "no Ray cluster at 127.0.0.1:1" in err + out and "Traceback" not in err
