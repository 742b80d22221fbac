"""Actors: messages, weights in shared memory; runs with them, in processes and on a Ray cluster of
two cores: equal to one process in lockstep, resumed, killed, refused."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from embodied import configs
from embodied.core import checkpoint
from embodied.core.build import ConfigError, allow
from embodied.core.env import NotFinite, Step
from embodied.training.actors.actor import Collected, decode, encode, joined, learned
from embodied.training.actors.pool import Inbox, SharedWeights
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from tests.builders import node_of, python, require_same, wait_until
from tests.tiers import only_all, usually
from tests.training.actors import helper
from tests.training.actors.helper import CHUNKS, NODE, alive, equal, lost_in, pid_of, run, step_of

ACTED = {**NODE["data"], "actors": 2}
COUNTING = {"_target_": "tests.training.actors.helper.Counting", "num_envs": 4}
DEATHS = {"here": "exit code -9.*another", "ray": "an actor on Ray ended.*another"}


@pytest.fixture(autouse=True)
def _tests_may_be_built() -> None:
    allow("tests")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster on Ray."""
    ray: Any = pytest.importorskip("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(params=usually(["here"], DEATHS))
def where(request: pytest.FixtureRequest) -> str:
    """What `data.actors_on` is: processes, or the cluster."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
    return request.param


@contextmanager
def parts_of(folder: Path, data: dict[str, Any], **changes: Any) -> Iterator[Any]:
    node = {**NODE, "out": str(folder), "data": {**NODE["data"], **data}, **changes}
    parts = RunComponents(read_config(node))
    try:
        yield parts
    finally:
        parts.close()


@pytest.mark.parametrize(
    ("where", "more"),
    [
        *(("here", more) for more in ({}, CHUNKS, helper.N_STEP, helper.INTERVENED)),
        ("ray", {}),
        *(pytest.param("ray", more, marks=only_all) for more in (CHUNKS, helper.INTERVENED)),
    ],
    indirect=["where"],
    ids=["sac", "chunks", "n_step", "interventions", "ray-sac", "ray-chunks", "ray-interventions"],
)
def test_one_actor_in_lockstep_equals_the_local_loop(
    tmp_path: Path, where: str, more: dict[str, Any]
) -> None:
    node = {**NODE, **more}
    local, here = run(tmp_path / "local", node)
    remote, there = run(tmp_path / "remote", node, {**helper.LOCKSTEP, "actors_on": where})
    assert equal(local, remote)
    ours = {k: v for k, v in here[-1].items() if k.startswith("eval/")}
    assert ours and ours.items() <= there[-1].items()


@pytest.mark.parametrize("actors", [1, 2])
def test_a_resume_in_lockstep_is_exact(tmp_path: Path, actors: int) -> None:
    data = {"actors": actors, "max_lag": 0}
    whole, _ = run(tmp_path / "whole", NODE, data)
    run(tmp_path / "half", NODE, data, steps=120)
    resumed, _ = run(tmp_path / "half", NODE, data, resume=str(tmp_path / "half"))
    assert equal(whole, resumed)


@only_all
@pytest.mark.usefixtures("cluster")
def test_on_ray_a_resume_with_a_lag_is_exact(tmp_path: Path) -> None:
    """A step has the weights of when it was allowed, so speed changes nothing."""
    data = {"actors_on": "ray", "actors": 2, "max_lag": 3}
    node = {**NODE, "steps": 160, "log_every": 40}
    whole, lines = run(tmp_path / "whole", node, data)
    run(tmp_path / "half", node, data, steps=80)
    resumed, after = run(tmp_path / "half", node, data, resume=str(tmp_path / "half"))
    assert equal(whole, resumed)
    one, other = (checkpoint.load_state(tmp_path / n, "loop")["loop"] for n in ("whole", "half"))
    assert equal(one["replay"], other["replay"])
    lags = [line["train/policy_lag"] for line in lines + after if "train/policy_lag" in line]
    assert lags and min(lags) == 3 and max(lags) < 4, "an evaluation makes a version too"


@pytest.mark.parametrize("where", ["here", pytest.param("ray", marks=only_all)], indirect=True)
def test_with_a_lag_no_step_is_lost_or_doubled_by_a_resume(tmp_path: Path, where: str) -> None:
    """Also from processes to Ray. The env counts its steps; what the replay buffer holds are all
    counts, each once."""
    node = {**NODE, "env": COUNTING}
    data = {"actors": 2, "max_lag": 5, "warmup_steps": 40}
    run(tmp_path, node, data, steps=120)
    run(tmp_path, node, {**data, "actors_on": where}, resume=str(tmp_path))
    rows = checkpoint.load_state(tmp_path, "loop")["loop"]["replay"]["rows"]
    counts = rows["obs/state"][:, 0].view(-1, 4)
    assert counts.T.tolist() == [list(range(60))] * 4


def test_a_killed_actor_is_replaced(tmp_path: Path, where: str) -> None:
    with parts_of(tmp_path, {"actors": 2, "actors_on": where}) as parts:
        loop, actors = parts.loop, parts.env.actors
        for _ in range(10):
            loop._step()
        os.kill(pid_of(actors[1]), signal.SIGKILL)
        with pytest.warns(UserWarning, match=f"{DEATHS[where]} one takes its place"):
            while loop.collector.restarted is None:
                loop._step()
        assert loop.collector.restarted.tolist() == [2, 3] and loop.collector.deaths == 1
        for _ in range(10):
            loop._step()
        assert loop.collector.restarted is None
        pids = [pid_of(actor) for actor in actors]
        assert all(map(alive, pids))
    wait_until(lambda: not any(map(alive, pids)), "closed with the run")


def test_actors_end_with_a_killed_learner_which_can_be_resumed(
    tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    out, file = tmp_path / "run", tmp_path / "node.yaml"
    node = {**NODE, "out": str(out), "steps": 100_000, "save_every": 80}
    node["data"] = {**ACTED, "actors_on": where}
    file.write_text(yaml.safe_dump(node))
    program = "import sys, tests.training.actors.helper as h; h.learn(sys.argv[1])"
    environment = dict(os.environ)
    if where == "ray":
        environment["RAY_ADDRESS"] = request.getfixturevalue("cluster")
    learner = subprocess.Popen([sys.executable, "-c", program, file], env=environment)
    wait_until(lambda: list(out.glob("checkpoints/[0-9]*/loop.pt")) or learner.poll(), tick=0.1)
    assert learner.poll() is None
    learner.kill()
    learner.wait()
    actors = [int(word) for word in (out / "actors.txt").read_text().split()]
    assert len(actors) == 2
    wait_until(lambda: not any(map(alive, actors)), "actors end with their learner")
    if where == "here":
        step = int(checkpoint.load_state(out, "loop")["step"])
        _, lines = run(out, node, steps=step + 80, resume=str(out))
        assert lines[-1]["step"] == step + 80


def test_an_error_of_the_environment_is_raised_by_the_learner(tmp_path: Path, where: str) -> None:
    broken = {"env": {**COUNTING, "bad": 7, "num_envs": 2}}
    with pytest.raises(NotFinite, match=r"^Counting: reward is not finite"):
        run(tmp_path, {**NODE, **broken}, {"actors": 2, "actors_on": where})


def test_an_arm_that_never_waits_leaves_updates_out(tmp_path: Path) -> None:
    """The actor steps at its own rate, and the learner makes fewer than the 16,000 updates."""
    paced = {"env": {**COUNTING, "num_envs": 1, "hz": 100}}
    data = {"actors": 1, "when_behind": "skip", "utd_ratio": 200.0, "warmup_steps": 20}
    learner, lines = run(tmp_path, {**NODE, **paced}, data, log_every=20, steps=100)
    optimizer = next(iter(learner["optimizers"].values()))
    assert next(iter(optimizer["state"].values()))["step"] < 8_000
    waiting = [line["train/waiting_steps"] for line in lines if "train/waiting_steps" in line]
    assert waiting and waiting[-1] < 100


@pytest.mark.parametrize(
    ("where", "data", "more", "said"),
    [
        ("here", {"actors": 3}, {}, "env.num_envs=3"),
        ("here", {"max_lag": 3}, {}, "data.actors=1"),
        ("here", {"actors": -1}, {}, "data.actors=-1 should be at least 0"),
        ("here", {"actors": 1}, {"teacher": {"_target_": "x"}}, "a teacher .* data.actors=0"),
        ("here", {"actors": 1, "actors_on": "rey"}, {}, "actors_on=.rey. is not allowed"),
        (
            "ray",
            {"actors": 4},
            {},
            "data.actors=4 with threads=1 need 4 cores.*has 2: data.actors=2",
        ),
        ("ray", {"actors": 0}, {}, "data.actors_on is for actors: data.actors=1"),
        ("ray", {"actors": 1, "when_behind": "skip"}, {}, "=skip is for a robot.*actors_on=here"),
        ("ray", {"actors": 1}, {"env": {**NODE["env"], "task": "fly"}}, "unknown FR3 task 'fly'"),
    ],
    indirect=["where"],
)
def test_bad_settings_are_one_line(
    tmp_path: Path, where: str, data: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        run(tmp_path, {**NODE, **more}, {"actors_on": where, **data})


@pytest.mark.parametrize("reward", ["preference", "annotate", "vlm_progress", "composite"])
def test_a_reward_that_keeps_what_is_seen_needs_the_environment_here(
    tmp_path: Path, reward: str
) -> None:
    """An actor's observations would be kept in the actor, and the learner would label none. As a
    term of a sum too."""
    name = "preference" if reward == "composite" else reward
    node = yaml.safe_load((Path(configs.__file__).parent / "reward" / f"{name}.yaml").read_text())
    if reward == "composite":
        terms = {"it": {"reward": node}}
        node = node_of("rewards.handcrafted.composite.CompositeReward", terms=terms)
    with pytest.raises(ConfigError, match=r"keeps what the environment shows.*data\.actors=0"):
        run(tmp_path, {**NODE, "reward": node}, {"actors": 2})


def test_an_actor_that_dies_in_an_evaluation_is_replaced(tmp_path: Path) -> None:
    """Another one evaluates; no step that was sent is lost or doubled."""
    data = {"actors": 1, "max_lag": 5, "warmup_steps": 20}
    env, evaluation = {**COUNTING, "num_envs": 2, "hz": 100}, {"episodes": 40, "num_envs": 2}
    with parts_of(tmp_path, data, env=env, eval=evaluation) as parts:
        loop = parts.loop
        counts = [step_of(loop) for _ in range(30)]
        (actor,) = loop.collector.env.actors
        wait_until(lambda: actor.waiting == 5)
        threading.Timer(0.5, actor.process.kill).start()
        with pytest.warns(UserWarning, match=f"{DEATHS['here']} one takes its place"):
            metrics = parts.evaluate(60)
        assert metrics["episodes"] == 40 and loop.collector.deaths == 1
        state = loop.get_state()["collector"]
        for _ in range(5):
            counts.append(step_of(loop))
            assert not lost_in(loop)
        assert counts == list(range(1, 36)), "what was sent is trained on, once"
        assert (step_of(loop), lost_in(loop)) == (1, [0, 1])
        assert (step_of(loop), lost_in(loop)) == (2, [])
    with parts_of(tmp_path, data, env=env) as parts:
        parts.loop.collector.set_state(state)
        assert [step_of(parts.loop) for _ in range(6)] == [31, 32, 33, 34, 35, 1], "as in a resume"
        assert lost_in(parts.loop) == [0, 1]


def test_an_actor_that_died_before_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    with parts_of(tmp_path, ACTED) as parts:
        for _ in range(5):
            parts.loop._step()
        killed = parts.env.actors[0].process
        killed.kill()
        killed.join()
        with pytest.warns(UserWarning, match="another one takes its place"):
            parts.save(tmp_path, 20, {})
        assert parts.loop.collector.deaths == 1
        parts.loop._step()


def test_the_log_has_what_the_actors_do(tmp_path: Path) -> None:
    _, lines = run(tmp_path, NODE, ACTED, log_every=40)
    line = next(line for line in reversed(lines) if "train/policy_lag" in line)
    assert line["train/actor_hours"] > 0 and line["train/actor_deaths"] == 0
    assert 0 < line["train/updates_per_second"] < line["train/steps_per_second"]


def test_a_cluster_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = ["train", "env=two_gap", "policy=gaussian", "learner=sac", "size=debug"]
    words += ["data.actors=2", "data.actors_on=ray", f"out={tmp_path / 'run'}"]
    done = python("-m", "embodied.cli", *words, RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 2, done.stderr
    assert "no Ray cluster at 127.0.0.1:1" in done.stderr and "Traceback" not in done.stderr


def test_a_writer_never_waits_and_its_end_is_that_of_the_inbox() -> None:
    """16 MB, which no pipe holds; half a message at the end, as of a killed writer, is none."""
    received, steps = mp.Pipe(duplex=False)
    inbox = Inbox(received)
    for number in range(2000):
        steps.send_bytes(number.to_bytes(8, "little") * (1 + number % 5000))
    os.write(steps.fileno(), (100).to_bytes(4, "big") + bytes(99))
    steps.close()
    inbox.thread.join(60)
    assert not inbox.thread.is_alive() and inbox.received == 2000
    for number, message in enumerate(inbox.queue):
        assert message == number.to_bytes(8, "little") * (1 + number % 5000)


def net(value: float) -> nn.Module:
    made = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))
    with torch.no_grad():
        for tensor in learned(made).values():
            tensor.fill_(int(value))
    made[2].requires_grad_(False)
    return made


def test_weights_are_copied_whole_and_only_when_they_are_new() -> None:
    ours, theirs = net(1), net(2)
    shared = SharedWeights(ours)
    assert shared.load_into(theirs, 0) == 0 and float(theirs.get_parameter("0.bias").data[0]) == 2
    assert shared.publish(ours) == 1 and shared.load_into(theirs, 0) == 1
    assert all(bool((each == 1).all()) for each in learned(theirs).values())
    assert float(theirs.get_parameter("2.bias")[0]) == 2, "frozen"
    assert "1.num_batches_tracked" in learned(theirs), "int64 buffers too"


def test_a_reader_never_sees_half_a_version() -> None:
    ours, theirs, stop = net(0), net(0), threading.Event()
    shared = SharedWeights(ours)

    @torch.no_grad()
    def write() -> None:
        while not stop.is_set():
            for tensor in learned(ours).values():
                tensor.add_(1)
            shared.publish(ours)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    held = 0
    for _ in range(300):
        held = shared.load_into(theirs, held)
        values = torch.cat([each.double().flatten() for each in learned(theirs).values()])
        assert bool((values == held).all())
    stop.set()
    writer.join()


def collected(start: float, finished: bool, rows: bool = True) -> Collected:
    state, view = torch.arange(6.0).view(2, 3) + start, torch.zeros(2, 2, 2, 3).byte()
    obs = {"state": state, "view/rgb": view}
    following = {key: value.clone() for key, value in obs.items()} if finished else obs
    flags = torch.tensor([finished, False])
    reward, log = torch.tensor([start, 0.0]), {"success": flags.clone()}
    step = Step(obs, following, reward, flags, ~flags & False, log)
    made = {"obs/state": state[:1], "reward": reward[:1]} if rows else {}
    return Collected(made, step, torch.tensor([0]) if rows else None, int(start))


@pytest.mark.parametrize("finished", [True, False])
def test_a_vector_step_is_sent_whole(finished: bool) -> None:
    sent = collected(3, finished)
    got = decode(encode(sent))
    require_same(asdict(got), asdict(sent))
    assert got.step.obs["view/rgb"].dtype == torch.uint8
    assert got.finished is not None and got.finished.tolist() == [0]
    assert (got.step.next_obs is got.step.obs) == (not finished)


def test_the_envs_of_several_actors_are_numbered_one_after_the_other() -> None:
    sent = [collected(1, True), collected(2, False, rows=False), collected(5, False)]
    made = joined(sent, [0, 2, 4], [2] * 3)
    assert made.finished is not None and made.finished.tolist() == [0, 4] and made.version == 1
    assert made.step.reward.tolist() == [1, 0, 2, 0, 5, 0]
    assert made.rows["reward"].tolist() == [1, 5]
