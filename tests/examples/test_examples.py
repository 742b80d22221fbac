"""The single files of examples/ update as the library's learners do, and run at debug size."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from embodied.core.build import parse
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.learner import RunPlan
from examples import dsrl, fql, iql, ppo, sac, td3_bc
from tests.builders import ROOT, SPEC, exit_of, make_learner, make_policy, node_of, transitions

FILES = sorted(file for file in (ROOT / "examples").glob("*.py") if file.stem != "__init__")
MOST = 250  # lines of a file
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture
def precise() -> Iterator[None]:
    """Numbers have 64 bits: sums in another order agree to more than the 1e-6 asked for."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def require_same_updates(mine: Any, learner: Any, batches: list[Tensors]) -> None:
    """Fail unless the example `mine` and the `learner`, from the same weights and with the same
    random numbers, have the same parameters and losses after each of `batches`."""
    known = learner.state_dict()
    mine.load_state_dict({name: known[name] for name in mine.state_dict()})
    before = copy.deepcopy(mine.state_dict())
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        own = mine.update(dict(batch))
        torch.manual_seed(number)
        theirs = learner.update(dict(batch))
        assert own.keys() <= theirs.keys()
        for name, value in own.items():
            torch.testing.assert_close(value, theirs[name].to(value), **CLOSE, msg=name)
        known = learner.state_dict()
        for name, value in mine.state_dict().items():
            torch.testing.assert_close(value, known[name], **CLOSE, msg=name)
    trained = {name for name, _ in mine.named_parameters()}
    for name, value in mine.state_dict().items():
        if name in trained and not name.startswith("target"):
            assert not torch.equal(value, before[name]), f"{name} was not trained"


def test_sac(precise: None) -> None:
    settings = sac.Settings(batch_size=16, hidden=(32, 32))
    policy = make_policy("gaussian.Gaussian", SPEC, hidden=[32, 32])
    given = {"batch_size": 16, "hidden": [32, 32]}
    learner = make_learner("off_policy.sac.Sac", copy.deepcopy(policy), **given)
    batches = [transitions(16, SPEC) for _ in range(3)]
    require_same_updates(sac.Sac(settings, policy), learner, batches)


CHOICE = Spec({"state": Leaf((3,))}, Leaf((), "int64", low=0, high=2), dt=0.1)


def rollout(spec: Spec, action: Tensor, horizon: int, envs: int) -> Tensors:
    """A batch of PPO, [horizon, envs], in which episodes terminate and are cut by a time limit."""
    ended = torch.rand(horizon, envs) < 0.3
    terminated = ended & (torch.rand(horizon, envs) < 0.5)
    first = torch.cat([torch.ones(1, envs, dtype=torch.bool), ended[:-1]])
    return {
        "obs/state": torch.randn(horizon, envs, 3) * 2 + 1,
        "action": action,
        "reward": torch.randn(horizon, envs),
        "discount": 0.99 * (~terminated).to(torch.get_default_dtype()),
        "next_obs/state": torch.randn(horizon, envs, 3) * 2 + 1,
        "ended": ended,
        "first": first,
        "valid": torch.ones(horizon, envs, dtype=torch.bool),
    }


@pytest.mark.parametrize("kind", ["diagonal_gaussian.DiagonalGaussian", "categorical.Categorical"])
def test_ppo(kind: str, precise: None) -> None:
    settings = ppo.Settings(horizon=8, batch_size=10, epochs=3, entropy=0.01)
    discrete = kind.startswith("categorical")
    spec = CHOICE if discrete else SPEC
    policy = make_policy(kind, spec, hidden=[16])
    given = {"horizon": 8, "batch_size": 10, "epochs": 3, "entropy": 0.01}
    learner = make_learner("on_policy.ppo.Ppo", copy.deepcopy(policy), **given)
    batches = []
    for _ in range(3):
        action = torch.randint(3, (8, 3)) if discrete else torch.randn(8, 3, 2)
        batches.append(rollout(spec, action, 8, 3))
    require_same_updates(ppo.Ppo(settings, policy), learner, batches)


def test_iql(precise: None) -> None:
    settings = iql.Settings(steps=5, batch_size=16, hidden=(32, 32))
    policy = make_policy("deterministic.Deterministic", SPEC, hidden=[32, 32])
    given = {"batch_size": 16, "hidden": [32, 32]}
    learner = make_learner("offline.iql.Iql", copy.deepcopy(policy), RunPlan(updates=5), **given)
    batches = [transitions(16, SPEC) for _ in range(3)]
    require_same_updates(iql.Iql(settings, policy), learner, batches)


def test_td3_bc(precise: None) -> None:
    settings = td3_bc.Settings(batch_size=16, hidden=(32, 32))
    policy = make_policy("deterministic.Deterministic", SPEC, hidden=[32, 32])
    option = option_of("learner", "td3_bc")
    given = {**option, "batch_size": 16, "hidden": [32, 32]}
    learner = make_learner("offline.rebrac.Rebrac", copy.deepcopy(policy), **given)
    batches = [transitions(16, SPEC) for _ in range(4)]
    require_same_updates(td3_bc.Td3Bc(settings, policy), learner, batches)


def option_of(group: str, name: str) -> dict[str, Any]:
    """The settings of configs/GROUP/NAME.yaml."""
    node = yaml.safe_load((ROOT / "configs" / group / f"{name}.yaml").read_text())
    return {key: value for key, value in node.items() if key != "_target_"}


def chunks(count: int, chunk: int) -> Tensors:
    """Transitions of chunks, some of which the end of an episode cut short."""
    batch = transitions(count, SPEC)
    batch["action"] = torch.rand(count, chunk * SPEC.act.size) * 2 - 1
    return {**batch, "executed_steps": torch.randint(1, chunk + 1, (count,))}


def test_fql(precise: None) -> None:
    settings = fql.Settings(batch_size=16, hidden=(32, 32))
    flow = node_of("policies.generative.flow.Flow", width=16, depth=1)
    policy = make_policy("generative.one_step.OneStep", SPEC, flow=flow, chunk=4, hidden=[16])
    given = {"batch_size": 16, "hidden": [32, 32]}
    learner = make_learner("offline.fql.Fql", copy.deepcopy(policy), **given)
    batches = [chunks(16, 4) for _ in range(3)]
    require_same_updates(fql.Fql(settings, policy), learner, batches)


def test_dsrl(precise: None) -> None:
    settings = dsrl.Settings(batch_size=16, hidden=(32, 32))
    policy = make_policy("gaussian.Gaussian", SPEC, hidden=[32, 32])
    given = {"batch_size": 16, "hidden": [32, 32], "layer_norm": True}
    soft = {"initial_temperature": 0.005, "target_entropy": 0.0, "entropy_in_backup": False}
    learner = make_learner("off_policy.sac.Sac", copy.deepcopy(policy), **given, **soft)
    batches = [transitions(16, SPEC) for _ in range(3)]
    require_same_updates(dsrl.Dsrl(settings, policy), learner, batches)


SHORT: dict[str, dict[str, Any]] = {
    "sac": {"steps": 60, "warmup_steps": 20, "batch_size": 8, "hidden": (8,)},
    "ppo": {"steps": 64, "num_envs": 2, "horizon": 16, "batch_size": 8, "epochs": 2},
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_runs_and_what_it_saves_can_be_evaluated(file: Path, tmp_path: Path) -> None:
    assert len(file.read_text().splitlines()) <= MOST
    example = {"sac": sac, "ppo": ppo}[file.stem]
    given = {"out": str(tmp_path / "run"), "eval_episodes": 2, **SHORT[file.stem]}
    example.train(parse(example.Settings, given, file.name))
    assert exit_of("eval", tmp_path / "run", "episodes=2", "num_envs=2") == 0
