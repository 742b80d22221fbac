"""The rollout loop and the collector against arithmetic by hand, behaviour policies, resume."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embodied.core import tensors as tt
from embodied.core.build import ConfigError, allow
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each
from embodied.learners.learner import UNPLANNED, Learner, RunPlan
from embodied.learners.off_policy import sac
from embodied.learners.on_policy import ppo
from embodied.training import on_policy as loops
from embodied.training.collector import Collector
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.on_policy import OnPolicyLoop
from embodied.training.reward_pipeline import RewardPipeline
from embodied.training.trainer import Every, Trainer
from tests.builders import Patch, make_policy, node_of
from tests.toy_envs import Config, Counter
from tests.training.test_train import resumed, run, same, settings, weights

allow("tests")


class Listener(Learner):
    """Keeps what it is fed."""

    data = "on_policy"
    gamma = 0.5

    def __init__(self, policy: Policy, horizon: int) -> None:
        super().__init__()
        self.policy, self.horizon = policy, horizon
        self.batches: list[Tensors] = []

    def update(self, batch: Tensors) -> Tensors:
        self.batches.append(each(batch, torch.clone))
        return {"loss": torch.zeros(())}


@dataclass(frozen=True)
class Twice:
    """Twice the reward; learns from rows."""

    frozen = False

    def __call__(self, rows: Tensors) -> torch.Tensor:
        assert rows["reward"].ndim == 1 and rows["obs/state"].shape[1:] == (1,)
        return 2 * rows["reward"]

    def update(self, rows: Tensors) -> Tensors:
        return {"rows": torch.tensor(float(len(rows["reward"])))}


def listen(steps: int, chunk: int = 1, horizon: int = 2, reward: Any = None) -> Any:
    """The batches of a run, and its loop."""
    env = Counter(Config())
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", env.spec, chunk=chunk, hidden=[4])
    learner = Listener(policy, horizon)
    collector = Collector(env, policy, learner.gamma)
    loop = OnPolicyLoop(collector, learner, RewardPipeline(env, reward))
    log: Any = SimpleNamespace(write=lambda step, values: None, advance=lambda step: None)
    keeper = Trainer(log, steps, Every(0, 0, 0), lambda _: None, lambda _: None)
    loop.run(keeper)
    assert keeper.step == steps
    return learner.batches, loop


def grid(batch: Tensors, name: str) -> list[list[float]]:
    return batch[name].view(batch["valid"].shape).tolist()


def test_single_steps() -> None:
    """Row 0 terminates after 3 steps, row 1 (from 100) is cut by the clock after 5, which does not
    end the world."""
    batches = listen(12)[0]
    expected = {
        "obs/state": [[[0, 100], [1, 101]], [[2, 102], [0, 103]], [[1, 104], [2, 100]]],
        "next_obs/state": [[[1, 101], [2, 102]], [[3, 103], [1, 104]], [[2, 105], [3, 101]]],
        "reward": [[[0, 100], [1, 101]], [[2, 102], [0, 103]], [[1, 104], [2, 100]]],
        "discount": [[[0.5, 0.5]] * 2, [[0, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0, 0.5]]],
        "first": [[[1, 1], [0, 0]], [[0, 0], [1, 0]], [[0, 0], [0, 1]]],
        "ended": [[[0, 0], [0, 0]], [[1, 0], [0, 0]], [[0, 1], [1, 0]]],
        "valid": [[[1, 1]] * 2] * 3,
    }
    assert {name: [grid(each, name) for each in batches] for name in expected} == expected
    assert batches[0]["action"].shape == (2, 2, 1)


def test_chunks_are_cut_and_rows_close_different_numbers() -> None:
    """Chunks of 2, 6 steps a batch. Row 0: decisions at 0 (2 steps) and 2 (1 step), twice; row 1:
    at 100, 102, 104 (1 step), then one at 100 that is running when the batch is full."""
    one, two = listen(24, chunk=2, horizon=3)[0]
    assert grid(one, "obs/state") == [[0, 100], [2, 102], [0, 104], [2, 0]]
    assert grid(one, "valid") == [[1, 1], [1, 1], [1, 1], [1, 0]]
    assert grid(one, "reward")[0] == [0.5, 100 + 50.5]
    assert grid(one, "discount") == [[0.25, 0.25], [0, 0.25], [0.25, 0.5], [0, 0]]
    assert grid(one, "ended") == [[0, 0], [1, 0], [0, 1], [1, 0]]
    assert grid(one, "first") == [[1, 1], [0, 0], [1, 0], [0, 0]]
    assert one["action"].shape == (4, 2, 2)
    # The decision that was running (row 1, from 100) is nobody's: older parameters made it.
    assert grid(two, "obs/state") == [[0, 102], [2, 104], [0, 100], [2, 0]]
    assert grid(two, "valid") == [[1, 1], [1, 1], [1, 1], [1, 0]]
    assert grid(two, "first") == [[1, 0], [0, 0], [1, 1], [0, 0]]


def test_rewards_are_asked_when_the_batch_is_complete() -> None:
    for plain, paid in zip(listen(8)[0], listen(8, reward=Twice())[0], strict=True):
        assert torch.equal(2 * plain["reward"], paid["reward"])
    chunked = listen(12, chunk=2, horizon=3, reward=Twice())[0][0]
    assert grid(chunked, "reward")[0] == [1, 301] and chunked["reward"][3, 1] == 0


def test_the_batch_is_what_the_policy_did() -> None:
    """The stored action, clipped, is what the density is of: ratio 1 before any step."""
    (batch, *_), loop = listen(8, horizon=4)
    policy = loop.learner.policy
    state, action = (batch[name].flatten(0, 1) for name in ("obs/state", "action"))
    noise = (action - policy({"state": state})) / policy.log_std.exp()
    again, carry = policy.act({"state": state}, {}, noise)
    torch.testing.assert_close(carry["row/action"], action)
    assert again.abs().max() <= 1 and action.abs().max() > 1


INNER = node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[])
KINDS: list[dict[str, Any]] = [
    node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[8]),
    node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[8], chunk=3),
    node_of("policies.recurrent.Recurrent", width=8, inner=INNER),
]


@pytest.mark.parametrize("policy", KINDS, ids=("single", "chunks", "memory"))
def test_resume_is_exact(tmp_path: Path, policy: dict[str, Any]) -> None:
    """train(2N) == train(N) + resume(N), stopped in the middle of a segment."""
    more = {"scale_rewards": True, "schedule": "adaptive"}
    learner = node_of("learners.on_policy.ppo.Ppo", horizon=7, epochs=2, batch_size=14, **more)
    resumed(settings(tmp_path, learner=learner, policy=policy, steps=240), 120)


def test_a_batch_that_cannot_fit_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    learner = node_of("learners.on_policy.ppo.Ppo", horizon=8, epochs=1, batch_size=8)
    node = settings(tmp_path / "run", learner=learner, policy=KINDS[0], steps=64)
    monkeypatch.setattr(loops, "free_bytes", lambda device: 32 * 32 - 1)
    with pytest.raises(ConfigError, match=r"a batch \(32 decisions of 32 bytes\).*learner.horizon"):
        run(node)
    node["learner"]["horizon"] = 4
    run(node)


SHIFT = 100.0  # of the behaviour policy's actions, before they are squashed or clipped


class Behaving(ppo.Ppo):
    """PPO that collects with a copy of the policy whose actions are larger, and keeps 3 batches."""

    keep_batches = 3

    def __init__(
        self, config: ppo.Config, policy: Policy, spec: Spec, run: RunPlan = UNPLANNED
    ) -> None:
        super().__init__(config, policy, spec, run)
        self.behaviour = shifted(policy)
        self.shapes: list[tuple[int, ...]] = []

    def behaviour_policy(self) -> Policy:
        return self.behaviour

    def update(self, batch: Tensors) -> Tensors:
        self.shapes.append(tuple(batch["valid"].shape))
        return super().update(batch)


class BehavingSac(sac.Sac):
    """SAC that collects with a copy of the policy whose actions are larger."""

    def __init__(self, config: sac.Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy, spec)
        self.behaviour = shifted(policy)

    def behaviour_policy(self) -> Policy:
        return self.behaviour


def shifted(policy: Policy) -> Policy:
    made = copy.deepcopy(policy).requires_grad_(False)
    for name, value in made.named_parameters():
        if name.endswith("bias"):
            value += SHIFT
    return made


def on_policy(folder: Path, learner: str = f"{__name__}.Behaving", **more: Any) -> Any:
    policy = node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[8])
    made = {"_target_": learner, "horizon": 5, "batch_size": 20, "epochs": 2}
    return settings(folder, "on_policy", policy=policy, learner=made, **more)


def test_the_behaviour_policy_collects_and_batches_are_kept(tmp_path: Path) -> None:
    components: Any = RunComponents(read_config(on_policy(tmp_path)))
    usual: Any = RunComponents(read_config(on_policy(tmp_path, f"{ppo.__name__}.Ppo")))
    loop, learner = components.loop, components.learner
    assert loop.collector.actor.policy is learner.behaviour is not components.policy
    assert usual.loop.collector.actor.policy is usual.policy
    for _ in range(5 * 4):
        loop.advance()
    assert learner.shapes == [(5, 4), (5, 8), (5, 12), (5, 12)]
    means: list[float] = []
    for each_loop in (loop, usual.loop):
        for _ in range(4):
            each_loop.advance()
        means.append(float(each_loop.buffer.held["action"].mean()))
    assert means[0] > means[1] + 1


def test_on_policy_resume_is_exact(tmp_path: Path) -> None:
    """In the middle of a batch, with two batches before it."""
    resumed(on_policy(tmp_path, steps=120), 52)


def off_policy(folder: Path, **more: Any) -> Any:
    made = settings(folder, **more)
    made["learner"]["_target_"] = f"{__name__}.BehavingSac"
    return made


def test_off_policy_after_the_warm_up(tmp_path: Path) -> None:
    components: Any = RunComponents(read_config(off_policy(tmp_path / "a", warmup_steps=0)))
    learner = components.learner
    assert components.loop.collector.actor.policy is learner.behaviour is not components.policy
    whole = weights(resumed(off_policy(tmp_path, steps=240), 120))
    run(settings(tmp_path / "usual", steps=240))
    assert not same(whole, weights(tmp_path / "usual"))


def test_actors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a policy of its own: data\.actors=0"):
        RunComponents(read_config(off_policy(tmp_path, actors=1)))


GAMMA = 0.5


def rollout(chunk: int, n_step: int) -> Collector:
    env = Counter(Config())
    policy = make_policy("random.Random", env.spec, seed=None, chunk=chunk)
    return Collector(env, policy, GAMMA, n_step)


def gather(chunk: int, n_step: int, steps: int) -> dict[str, list[float]]:
    run = rollout(chunk, n_step)
    parts = [rows for rows, _ in (run.step() for _ in range(steps)) if rows and len(rows["reward"])]
    rows = tt.cat(parts)
    order = torch.argsort(rows["obs/state"].flatten(), stable=True)
    names = ("obs/state", "reward", "discount", "next_obs/state")
    return {name: rows[name].flatten()[order].tolist() for name in names}


def test_chunks_are_cut_at_the_end_and_rows_are_independent() -> None:
    """Row 0 (3 steps, terminates): decisions at 0 (2 steps) and 2 (1 step), twice. Row 1 (5 steps,
    time limit): decisions at 100, 102 and 104 (cut to 1 step); then 100 again."""
    assert gather(2, 1, 6) == {
        "obs/state": [0, 0, 2, 2, 100, 102, 104],
        "reward": [0.5, 0.5, 2, 2, 100 + 50.5, 102 + 51.5, 104],
        "discount": [0.25, 0.25, 0, 0, 0.25, 0.25, 0.5],
        "next_obs/state": [2, 2, 3, 3, 102, 104, 105],
    }


def test_n_step_windows() -> None:
    """Row 0 ends after 3 steps and leaves three rows, the last two of 2 and of 1 step."""
    ones = [100 + 101 / 2, 101 + 102 / 2, 102 + 103 / 2, 103 + 104 / 2, 104]
    assert gather(1, 2, 5) == {
        "obs/state": [0, 0, 1, 2, 100, 101, 102, 103, 104],
        "reward": [0 + 0.5, 0 + 0.5, 1 + 1.0, 2, *ones],
        "discount": [0.25, 0.25, 0, 0, 0.25, 0.25, 0.25, 0.25, 0.5],
        "next_obs/state": [2, 2, 3, 3, 102, 103, 104, 105, 105],
    }


def test_n_step_windows_of_chunks() -> None:
    """The same as of recordings: row 0 (3 steps, terminates) and row 1 (5 steps, time limit) finish
    their chunks of two steps at different times."""
    whole = [100 + 101 / 2 + 102 / 4 + 103 / 8, 102 + 103 / 2 + 104 / 4, 104]
    assert gather(2, 2, 6) == {
        "obs/state": [0, 0, 2, 2, 100, 102, 104],
        "reward": [0 + 1 / 2 + 2 / 4] * 2 + [2] * 2 + whole,
        "discount": [0] * 4 + [0.5**4, 0.5**3, 0.5],
        "next_obs/state": [3, 3, 3, 3, 104, 105, 105],
    }


@pytest.mark.parametrize(("chunk", "n_step"), [(1, 1), (2, 3)])
def test_state_round_trip(chunk: int, n_step: int) -> None:
    run, other = rollout(chunk, n_step), rollout(chunk, n_step)
    for _ in range(4):
        run.step()
    other.set_state(run.get_state())
    generator = torch.get_rng_state()
    expected = [run.step()[0] for _ in range(5)]
    torch.set_rng_state(generator)
    for rows in expected:
        assert same(rows, other.step()[0])
