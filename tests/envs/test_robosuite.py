"""robosuite in a Python of its own: seeds, states, ends, and its scripted demonstrators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.envs.process.env import Robosuite, RobosuiteConfig, interpreter
from embodied.policies.scripted.simulators import angle, frame, wrapped

QUARTER = torch.tensor([[0.0, 0.0, 0.5**0.5, 0.5**0.5]])  # about z, x y z w


@pytest.fixture(scope="module")
def lift() -> Iterator[Robosuite]:
    try:
        python = interpreter("robosuite")
    except ConfigError as reason:
        pytest.skip(str(reason))
    env = Robosuite(RobosuiteConfig("Lift", 2, horizon=60, python=python))
    yield env
    env.close()


def demonstrator(name: str, spec: Spec, **settings) -> Policy:
    node = yaml.safe_load(Path(f"configs/demonstrator/robosuite_{name}.yaml").read_text())
    return build(node | settings, Policy, spec=spec)


def test_the_demonstrator_lifts_the_cube_which_ends_the_episode(lift: Robosuite) -> None:
    policy = demonstrator("lift", lift.spec)
    obs, carry = lift.reset(seed=0), policy.initial(2)
    done = torch.zeros(2, dtype=torch.bool)
    torch.manual_seed(0)
    for _ in range(60):
        action, carry = policy.act(obs, carry, policy.sample_noise(2))
        step = lift.step(action[:, 0])
        assert torch.equal(step.terminated, step.log["success"])
        assert torch.equal(step.reward, step.log["success"].float())
        assert (step.next_obs["object"][step.terminated, 2] > 0.84).all(), "4 cm above the table"
        obs, done = step.obs, done | step.terminated
        if done.all():
            break
    assert done.all() and lift.spec.dt == 0.05


def test_seeds_decide_sizes_places_and_the_arm_and_states_are_exact(lift: Robosuite) -> None:
    plan = torch.rand(3, 2, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1
    first = {key: value.clone() for key, value in lift.reset(seed=5).items()}
    went = [lift.step(action).next_obs["object"] for action in plan]
    again = lift.reset(seed=5)
    assert all(torch.equal(first[key], again[key]) for key in first)
    for action in plan[:2]:
        lift.step(action)
    state = lift.get_state()
    other = lift.reset(seed=6)
    assert not torch.equal(first["object"], other["object"])
    assert not torch.equal(first["robot0_eef_pos"], other["robot0_eef_pos"])
    lift.set_state(state)
    assert torch.equal(lift.step(plan[2]).next_obs["object"], went[2])


def test_angles() -> None:
    turned = frame(QUARTER)[0] @ torch.tensor([1.0, 0.0, 0.0])
    assert torch.allclose(turned, torch.tensor([0.0, 1.0, 0.0]), atol=1e-6)
    assert angle(frame(QUARTER)).abs().item() == pytest.approx(torch.pi, abs=1e-5)
    assert wrapped(torch.tensor([2.0, -2.0]), 3.0).tolist() == [-1.0, 1.0]


def test_a_lost_object_is_reached_for_again() -> None:
    """The carry goes back to the first stage; Square's script turns along with the nut."""
    leaves = {"object": Leaf((14,)), "robot0_eef_pos": Leaf((3,)), "robot0_eef_quat": Leaf((4,))}
    policy = demonstrator(
        "square", Spec(leaves, Leaf((7,), low=-1.0, high=1.0), 0.05), unsteady=0.0
    )
    nut = torch.cat([torch.zeros(1, 7), torch.tensor([[0.0, 0.0, 0.9]]), QUARTER], 1)
    obs = {"object": nut, "robot0_eef_quat": torch.tensor([[1.0, 0.0, 0.0, 0.0]])}
    over = {"stage": torch.tensor([4]), "since": torch.tensor([3])}

    def acted(place: list[float]) -> tuple[torch.Tensor, int]:
        here = {**obs, "robot0_eef_pos": torch.tensor([place])}
        action, carry = policy.act(here, over, torch.zeros(1, 4))
        return action[0, 0], carry["stage"].item()

    action, stage = acted([0.0, 0.054, 0.9])
    assert stage == 4 and action[6] == 1
    assert (action[:3] > 0).all(), "to the peg at (0.23, 0.1), and up"
    action, stage = acted([0.3, 0.3, 1.0])
    assert stage == 0 and action[6] == -1
    assert action[5].abs() == 1, "a quarter turn to the handle"


def test_mistakes_are_one_line(monkeypatch, tmp_path: Path) -> None:
    spec = Spec({"state": Leaf((3,))}, Leaf((7,), low=-1.0, high=1.0), 0.05)
    with pytest.raises(ConfigError, match="lift, can, square with env=robosuite_TASK"):
        demonstrator("lift", spec)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EMBODIED_ROBOSUITE_PYTHON", raising=False)
    with pytest.raises(ConfigError, match=r"install it with: sh scripts/apart\.sh robosuite"):
        Robosuite(RobosuiteConfig("Lift"))
