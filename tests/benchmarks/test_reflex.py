"""The comparison of reflexes at debug size: faults, random segments, outcomes, whole commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import reflex
from benchmarks.reflex import ENVS, Faulty, Segments
from embodied.compose import compose
from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.learners.off_policy.bresa import Bresa
from embodied.policies.wrappers.reflex_override import ReflexOverride
from tests.builders import make_policy, node_of

SPEC = Spec({"state": Leaf((2,))}, Leaf((3,), low=-1.0, high=1.0), dt=0.02)
N = 2000
OBS = {"state": torch.zeros(N, 2)}


def overriding(rate: str) -> ReflexOverride:
    steps = {"decision_steps": 5, "min_duration_steps": 3, "hidden": [8], "rate": rate}
    base = node_of("policies.gaussian.Gaussian", hidden=[8])
    return make_policy("wrappers.reflex_override.ReflexOverride", SPEC, base=base, **steps)


@pytest.fixture(scope="module")
def task_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of `experiment=fr3_channel_bresa` whose task policy has not learned anything."""
    made = compose("train", ["experiment=fr3_channel_bresa"]).node
    env = build({**made["env"], "num_envs": 1}, VecEnv)
    policy = build(made["policy"], Policy, spec=env.spec)
    learner = build(made["learner"], Bresa, policy=policy, spec=env.spec)
    folder = tmp_path_factory.mktemp("task")
    checkpoint.save(folder / "checkpoints" / "00000000", learner.policy, 0)
    return str(folder)


@torch.no_grad()
def test_a_share_of_the_decisions_is_wrong_half_of_them_into_the_wall() -> None:
    base = overriding("control").base
    policy = Faulty(base, 0.5)
    noise = policy.sample_noise(N, explore=True)
    action = policy.act(OBS, {}, noise)[0][:, 0]
    right = base.act(OBS, {}, noise[:, 2 + 3 :])[0][:, 0]
    wrong = (action != right).any(1)
    into_wall = wrong & (action[:, 0] >= 0.5) & (action[:, 1:].abs() <= 0.3).all(1)
    assert wrong.float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert into_wall.sum().item() / wrong.sum().item() == pytest.approx(0.5, abs=0.06)
    assert not (Faulty(base, 0.0).act(OBS, {}, noise)[0][:, 0] != right).any()


@pytest.mark.parametrize(("rate", "calls"), [("control", 3), ("decision", 1)])
@torch.no_grad()
def test_segments_hold_one_random_action_and_last_as_long_as_a_reflex(
    rate: str, calls: int
) -> None:
    policy = Segments(overriding(rate), 0.25)
    assert policy.calls == calls
    carry, begun, within = policy.initial(N), 0, 0
    for _ in range(60):
        before = carry
        plan, carry = policy.act(OBS, carry, policy.sample_noise(N, explore=True))
        inside = (plan == carry["random"][:, None]).all(2).all(1)
        goes_on = before["rest"] > 0
        assert inside[goes_on].all()
        assert carry["random"][goes_on].equal(before["random"][goes_on])
        assert carry["row/executed"].equal(plan[:, 0])
        begun, within = begun + int((inside & ~goes_on).sum()), within + int(inside.sum())
    assert within / (60 * N) == pytest.approx(0.25, abs=0.03)
    assert within / begun == pytest.approx(calls, abs=0.1)


def test_the_outcome_is_one_at_a_violation_and_discounted_before_it() -> None:
    first = torch.arange(ENVS) == 0
    kept = [
        {"env": torch.arange(ENVS), "violated": first & violated, "ended": first & ended}
        for violated, ended in ((False, False), (False, True), (False, False), (True, True))
    ]
    outcome = reflex.outcomes([*kept, kept[0]], 0.5).reshape(5, ENVS)
    assert outcome[:, 0].tolist() == [0.0, 0.0, 0.5, 1.0, 0.0]
    assert not outcome[:, 1:].any()


SIZE = ("steps=1280", "updates=30", "episodes=8", "faults=1.0", "seed=0")


def test_a_reflex_learns_from_faults_and_acts_in_the_test(
    task_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a threshold that any risk exceeds the learned reflex acts all the time, at once."""
    words = (f"task_run={task_run}", f"out={tmp_path}", "threshold=1e-6", *SIZE)
    result = reflex.main([*words, "rate=control"])
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == result
    assert (result["reflex"], result["latency_ms"]) == (1.0, 0.0)
    assert 0 <= result["violated"] <= 1 and 0 <= result["success"] <= 1
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "risk predicted outcome transitions"
    counted = sum(int(line.split()[-1]) for line in table[1:])
    assert counted == 1280 // 4 // ENVS * ENVS  # each control step of the other episodes, once


def test_the_critic_can_be_asked_once_per_decision_or_never(task_run: str, tmp_path: Path) -> None:
    words = (f"task_run={task_run}", f"out={tmp_path}", *SIZE)
    decision = reflex.main([*words, "rate=decision", "threshold=0.999999"])
    none = reflex.main([*words, "rate=none", "threshold=1e-6"])
    assert decision["reflex"] == none["reflex"] == 0.0  # no risk exceeds the threshold
    assert none["violated"] > 0  # faults press on the wall


def test_an_unknown_setting_is_one_line() -> None:
    with pytest.raises(ConfigError, match="treshold"):
        reflex.main(["task_run=x", "out=y", "treshold=1"])
