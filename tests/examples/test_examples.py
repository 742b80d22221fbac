"""The single files of examples/ update as the library's learners do, and run at debug size."""

from __future__ import annotations

import copy
import importlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from embodied import cli
from embodied.core.actor import Actor
from embodied.core.build import parse
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.learner import RunPlan
from embodied.policies import gaussian
from embodied.policies.denoising_mdp.noisy_diffusion import NoisyDiffusion
from examples import dppo, dsrl, fql, iql, ppo, residual_sac, sac, td3_bc
from tests.builders import ROOT, SPEC, exit_of, make_learner, make_policy, node_of, transitions
from tests.docs.shared import Shared

FILES = sorted(file for file in (ROOT / "examples").glob("*.py") if file.stem != "__init__")
PAGE = ROOT / "docs" / "examples.md"
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
    for name, value in mine.named_parameters():
        if value.requires_grad:
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


def test_residual_sac(precise: None) -> None:
    spec = SPEC.with_obs(base_action=Leaf((2,), low=-1.0, high=1.0))
    settings = residual_sac.Settings(batch_size=16, hidden=(32, 32))
    policy = make_policy("gaussian.Gaussian", spec, hidden=[32, 32], zero_head=True)
    given = {"batch_size": 16, "hidden": [32, 32], "layer_norm": True}
    soft = {"initial_temperature": 0.005, "entropy_in_backup": False}
    learner = make_learner("off_policy.sac.Sac", copy.deepcopy(policy), **given, **soft)
    batches = [transitions(16, spec) for _ in range(3)]
    require_same_updates(residual_sac.ResidualSac(settings, policy), learner, batches)


def flow_policy() -> Any:
    return make_policy("generative.flow.Flow", SPEC, chunk=3, width=16, depth=1)


def require_same_actions(mine: Policy, saved: Policy) -> None:
    """Fail unless both act the same, and store the same, with the same noise over two plans."""
    one, other = (Actor(policy, 4, explore=True) for policy in (mine, saved))
    for step in range(5):
        obs = {"state": torch.randn(4, 3)}
        first = torch.tensor([step == 0] * 3 + [step in (0, 2)])
        actions: list[Tensor] = []
        for actor in (one, other):
            torch.manual_seed(step)
            actions.append(actor(obs, first))
        torch.testing.assert_close(*actions)
        torch.testing.assert_close(one.stored_action, other.stored_action)
        torch.testing.assert_close(one.decision_obs, other.decision_obs)


def test_the_policy_of_dsrl_is_that_which_is_saved() -> None:
    shape = gaussian.Config(hidden=(16,))
    actor = gaussian.Gaussian(shape, SPEC.with_act(Leaf((6,), low=-1.0, high=1.0)))
    mine = dsrl.Steered(flow_policy(), actor, 1.5)
    saved = dsrl.saved_policy(mine)
    require_same_actions(mine, saved)
    mine.warm_up = True
    require_same_actions(mine, saved.warmup_policy())


def test_the_policy_of_residual_sac_is_that_which_is_saved() -> None:
    spec = SPEC.with_obs(base_action=Leaf((2,), low=-1.0, high=1.0))
    actor = gaussian.Gaussian(gaussian.Config(hidden=(16,)), spec)
    mine = residual_sac.Corrected(flow_policy(), actor, 0.5)
    require_same_actions(mine, residual_sac.saved_policy(mine))


def test_dppo(precise: None) -> None:
    """With a warm-up of the value function, and padding at the end of two environments."""
    base = make_policy("generative.diffusion.Diffusion", SPEC, chunk=2, width=16, depth=1)
    base.fit({"obs/state": torch.randn(50, 3) * 2 + 1, "action": torch.rand(50, 2, 2) * 2 - 1})
    node = node_of("policies.denoising_mdp.noisy_diffusion.NoisyDiffusion", steps=5)
    policy = NoisyDiffusion.build_around(base, node)
    settings = dppo.Settings(horizon=6, batch_size=10, epochs=2, hidden=(16,))
    value = {"hidden": [16], "activation": "mish"}
    given = {"horizon": 6, "batch_size": 10, "epochs": 2, "value": value}
    learner = make_learner("finetune.dppo.Dppo", copy.deepcopy(policy), **given)
    batches: list[Tensors] = []
    for _ in range(3):
        noise = policy.sample_noise(24, explore=True)
        with torch.no_grad():
            _, carry = policy.act({"state": torch.randn(24, 3)}, {}, noise)
        batch = rollout(SPEC, carry["row/action"].unflatten(0, (6, 4)), 6, 4)
        batch["valid"][4:, 0] = False
        batch["valid"][5:, 2] = False
        batches.append(batch)
    require_same_updates(dppo.Dppo(settings, policy), learner, batches)


def words_of(command: str) -> list[str]:
    return shlex.split(command.split(" # ")[0])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_file_and_its_page_say_of_it(file: Path) -> None:
    """It is short, its commands have the settings that they name, the page has its row."""
    text = file.read_text()
    example = importlib.import_module(f"examples.{file.stem}")
    assert len(text.splitlines()) <= MOST
    lines = [line.strip() for line in (example.__doc__ or "").splitlines()]
    own = [line for line in lines if line.startswith("python ")]
    ours = [line for line in lines if line.startswith("embodied ")]
    assert own and ours
    for command in ours:
        cli.parse(words_of(command)[1:])
    row = next(line for line in PAGE.read_text().splitlines() if f"`examples/{file.name}`" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[4] == str(len(text.splitlines()))
    for command in (*own, cells[3].strip("`")):
        _, script, *words = words_of(command)
        assert script == f"examples/{file.name}"
        settings = yaml.safe_load("{" + ", ".join(words).replace("=", ": ") + "}")
        parse(example.Settings, settings, file.name)


OFFLINE = {"steps": 3, "batch_size": 8, "hidden": (8,)}
STEERED = {"steps": 80, "warmup_steps": 48, "batch_size": 8, "hidden": (8,), "num_envs": 4}
# What is smaller in a short run, and the folder that it begins with.
SHORT: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "sac": ({"steps": 60, "warmup_steps": 20, "batch_size": 8, "hidden": (8,)}, {}),
    "ppo": ({"steps": 64, "num_envs": 2, "horizon": 16, "batch_size": 8, "epochs": 2}, {}),
    "iql": (OFFLINE, {"demos": "gap_demos"}),
    "td3_bc": (OFFLINE, {"demos": "gap_demos"}),
    "fql": ({**OFFLINE, "policy_hidden": (8,)}, {"demos": "gap_demos"}),
    "dsrl": (STEERED, {"init": "gap_base"}),
    "residual_sac": (STEERED, {"init": "gap_base"}),
    "dppo": ({"steps": 128, "num_envs": 8, "horizon": 2, "hidden": (8,)}, {"init": "gap_noise"}),
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_runs_and_what_it_saves_can_be_evaluated(
    file: Path, tmp_path: Path, shared: Shared
) -> None:
    example = importlib.import_module(f"examples.{file.stem}")
    small, given = SHORT[file.stem]
    folders = {key: str(shared[name]) for key, name in given.items()}
    settings = {"out": str(tmp_path / "run"), "eval_episodes": 2, **small, **folders}
    example.train(parse(example.Settings, settings, file.name))
    assert exit_of("eval", tmp_path / "run", "episodes=2", "num_envs=2") == 0
