"""Demonstrators: MetaWorld's and MiniGrid's scripts, and a trained policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.core import checkpoint
from embodied.core.build import ConfigError, allow, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec, SpecMismatch
from embodied.datasets.collect import CollectConfig, collect
from embodied.datasets.lerobot.reader import DatasetError, read_episodes
from embodied.policies.scripted.grids import (
    DROP,
    FORWARD,
    PICK,
    RIGHT,
    TOGGLE,
    WAIT,
    Planner,
    PlannerConfig,
    State,
)
from embodied.policies.scripted.grids import search as find
from embodied.policies.scripted.simple import CheckpointDemonstrator
from tests.builders import make_policy, node_of
from tests.tiers import usually
from tests.toy_envs import Reach

FILES = sorted(Path("configs/demonstrator").glob("envpool_metaworld_*.yaml"))


@pytest.mark.parametrize("file", usually(FILES[:2], FILES), ids=lambda file: file.stem)
def test_it_solves_its_task(file: Path) -> None:
    pytest.importorskip("envpool")
    node = yaml.safe_load((Path("configs/env") / file.name).read_text())
    env = build(node | {"num_envs": 10}, VecEnv)
    policy = build(yaml.safe_load(file.read_text()), Policy, spec=env.spec)
    obs, carry = env.reset(seed=2), policy.initial(10)
    assert obs["state"][:, 36:39].abs().sum(1).min() > 0.1, "the goal is shown"
    done = torch.zeros(10, dtype=torch.bool)
    torch.manual_seed(0)
    for _ in range(150):
        action, carry = policy.act(obs, carry, policy.sample_noise(10))
        step = env.step(action[:, 0])
        obs, done = step.obs, done | step.log["success"]
        if done.all():
            break
    assert done.sum() >= 9
    env.close()


def test_a_puck_that_is_lost_is_reached_for_again() -> None:
    spec = Spec({"state": Leaf((39,))}, Leaf((4,), low=-1.0, high=1.0), 0.0125)
    node = node_of("policies.scripted.simulators.MetaWorld", task="push", unsteady=0.0)
    policy = build(node, Policy, spec=spec)
    state = torch.zeros(2, 39)
    state[:, 4:7] = torch.tensor([0.0, 0.6, 0.02])  # the puck
    state[:, 0:3] = torch.tensor([[0.0, 0.6, 0.05], [0.2, 0.6, 0.05]])  # the hand
    state[:, 36:39] = torch.tensor([0.1, 0.8, 0.02])
    carry = {"stage": torch.tensor([3, 3]), "since": torch.tensor([5, 5])}
    action, carry = policy.act({"state": state}, carry, torch.zeros(2, 3))
    assert carry["stage"].tolist() == [3, 0] and action[:, 0, 3].tolist() == [1, -1]
    assert action[0, 0, 0] > 0 > action[1, 0, 0], "to the goal; back to the puck"
    with pytest.raises(ConfigError, match="reach, push, pick_place, door_open, drawer_open"):
        build(node | {"task": "fly"}, Policy, spec=spec)


CODES = {"#": (2, 5, 0), ".": (1, 0, 0), "G": (8, 1, 0), "D": (4, 4, 2), "K": (5, 4, 0)}
CODES |= {"o": (6, 0, 0), "~": (9, 0, 0), "d": (4, 0, 1)}
LEVEL = Leaf((6, 3, 3), "uint8", 0, (10, 5, 3) * 18, unit="symbol")
AGENT = Leaf((5,), "int64", 0, (5, 2, 3, 10, 5), unit="symbol")
SPEC = Spec({"privileged/grid": LEVEL, "privileged/agent": AGENT}, Leaf((), "int64", 0, 6), dt=1.0)


def start(*lines: str, turn: int = 0) -> State:
    """A level drawn in letters; the agent `A` stands on an empty cell."""
    columns = ["".join(column) for column in zip(*lines, strict=True)]
    (place,) = [(x, column.index("A")) for x, column in enumerate(columns) if "A" in column]
    codes = [[CODES[letter.replace("A", ".")] for letter in column] for column in columns]
    return State(*place, turn, (1, 0), np.array(codes, np.uint8).tobytes())


def actions(state: State, height: int = 3) -> list[int]:
    """The way as the planner takes it, in order."""
    way = find(state, height, False) or find(state, height, True)
    return list(way.values())[::-1]


def test_ways_counted_by_hand() -> None:
    assert actions(start("######", "#A..G#", "######")) == [FORWARD] * 3
    assert actions(start("######", "#A..G#", "######", turn=3)) == [RIGHT] + [FORWARD] * 3
    assert actions(start("######", "#A.d.G", "######")) == [FORWARD, TOGGLE] + [FORWARD] * 3
    key = start("#A####", "#KD.G#", "#.####", turn=1)
    # Take the key below, step down, turn to the door, open it and go through.
    assert actions(key) == [PICK, FORWARD, 0, TOGGLE, FORWARD, FORWARD, FORWARD]


def test_things_in_the_way_are_put_aside() -> None:
    assert actions(start("######", "#.Ao.G", "######")) == [PICK] + [FORWARD] * 3
    # Two of them: put the first one down behind, then carry the second.
    two = actions(start("#######", "#.AooG#", "#######"))
    assert two[0] == PICK and two.count(DROP) == 1 and two.count(PICK) == 2
    assert two.count(FORWARD) == 3 and len(two) == 10
    assert actions(start("######", "#A~.G#", "######")) == []  # lava is not walked on


def test_it_waits_where_there_is_no_way_and_refuses_other_missions() -> None:
    planner = Planner(PlannerConfig(), SPEC)
    assert planner.best(start("######", "#A#.G#", "######")) == WAIT
    with pytest.raises(ValueError, match="no goal cell"):
        planner.best(start("######", "#A...#", "######"))
    with pytest.raises(ConfigError, match=r"set env\.privileged=true"):
        Planner(PlannerConfig(), Spec({"x": Leaf((1,))}, SPEC.act, 1.0))


def test_mistakes_are_turns_or_safe_steps() -> None:
    planner = Planner(PlannerConfig(mistakes=1.0), SPEC)
    state = start("######", "#A~.G#", "######")
    grid = torch.from_numpy(np.frombuffer(state.grid, np.uint8).reshape(1, 6, 3, 3).copy())
    obs = {
        "privileged/grid": grid.expand(300, 6, 3, 3),
        "privileged/agent": torch.tensor([[1, 1, 0, 1, 0]]).expand(300, 5),
    }
    torch.manual_seed(0)
    noise = planner.sample_noise(300)
    drawn, _ = planner.act(obs, {}, noise)
    assert drawn.shape == (300, 1) and set(drawn.flatten().tolist()) == {0, 1}
    again, _ = planner.act(obs, {}, noise)
    assert torch.equal(drawn, again)


TRAINED = "policies.scripted.simple.CheckpointDemonstrator"
TRAINED_SPEC = Spec({"state": Leaf((2,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
SMALL_FLOW: dict[str, Any] = {"kind": "generative.flow.Flow", "chunk": 3, "width": 16, "depth": 1}


def saved(
    folder: Path, kind: str = "gaussian.Gaussian", spec: Spec = TRAINED_SPEC, **settings: Any
) -> Path:
    policy = make_policy(kind, spec, **settings)
    checkpoint.save(folder / "checkpoints" / "00000001", policy, 1)
    return folder


def trained(run: Path, spec: Spec = TRAINED_SPEC, **settings: Any) -> CheckpointDemonstrator:
    return build(node_of(TRAINED, run=str(run), **settings), Policy, spec=spec)


def test_noise_has_its_deviation_and_random_decisions_their_share(tmp_path: Path) -> None:
    run, obs = saved(tmp_path), {"state": torch.randn(4000, 2)}

    def acted(**settings: float) -> tuple[torch.Tensor, torch.Tensor]:
        policy = trained(run, **settings)
        mean = policy.base.act(obs, {}, torch.zeros(4000, 2))[0]
        return policy.act(obs, {}, policy.sample_noise(4000))[0], mean

    assert torch.equal(*acted())
    action, mean = acted(noise=0.1)
    assert (action - mean)[action.abs() < 1].std().item() == pytest.approx(0.1, rel=0.05)
    assert acted(noise=3.0)[0].abs().max().item() == 1
    action, mean = acted(random=0.25)
    other = (action != mean).flatten(1).any(1)
    assert other.float().mean().item() == pytest.approx(0.25, abs=0.03)
    lost = action[other].flatten()
    assert lost.mean().abs().item() < 0.05 and lost.std().item() == pytest.approx(3**-0.5, rel=0.05)


def test_exploring_as_it_did(tmp_path: Path) -> None:
    policy, obs = trained(saved(tmp_path), explore=True), {"state": torch.randn(8, 2)}
    noise = policy.sample_noise(8)
    expected = policy.base.act(obs, {}, noise[:, :2])[0]
    assert torch.equal(policy.act(obs, {}, noise)[0], expected) and (noise[:, :2] != 0).all()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    other = Spec({"state": Leaf((3,))}, TRAINED_SPEC.act, dt=0.1)
    with pytest.raises(SpecMismatch):
        trained(saved(tmp_path), other)
    symbols = Spec({"state": Leaf((2,))}, Leaf((), "int64", low=0, high=3), dt=0.1)
    run = saved(tmp_path / "symbols", "categorical.Categorical", symbols)
    with pytest.raises(ConfigError, match="continuous"):
        trained(run, symbols, noise=0.1)


def test_other_settings_of_the_policy(tmp_path: Path) -> None:
    run = saved(tmp_path, **SMALL_FLOW)
    usual, fine = trained(run), trained(run, settings={"steps": 16})
    expected = checkpoint.with_settings(checkpoint.load_policy(run), {"steps": 16}, run)
    noise, obs = usual.sample_noise(5), {"state": torch.randn(5, 2)}
    assert torch.equal(fine.act(obs, {}, noise)[0], expected.act(obs, {}, usual._own(noise))[0])
    assert not torch.equal(fine.act(obs, {}, noise)[0], usual.act(obs, {}, noise)[0])
    with pytest.raises(ConfigError, match="do not fit"):
        trained(run, settings={"width": 8})


def test_collecting_from_a_run_with_a_new_plan_in_every_step(tmp_path: Path) -> None:
    allow("tests")
    run = saved(tmp_path / "run", spec=Reach(1).spec, **SMALL_FLOW)

    def first(name: str, execute: int | None, **more: object) -> torch.Tensor:
        settings = CollectConfig(
            env={"_target_": "tests.toy_envs.Reach"},
            demonstrator=node_of(TRAINED, run=str(run), settings={"steps": 2}, **more),
            episodes=2,
            out=str(tmp_path / name),
            num_envs=2,
            success_only=False,
            execute=execute,
        )
        assert collect(settings, lambda kept, played: None) == (2, 2)
        return read_episodes(tmp_path / name).episode(0)["action"]

    whole, every = first("whole", None), first("every", 1)
    assert torch.equal(whole, first("all", 3))
    assert torch.equal(whole[0], every[0]) and not torch.equal(whole[1], every[1])
    noisy = first("noisy", None, noise=0.1, random=0.5)
    assert noisy.shape == whole.shape and not torch.equal(noisy, whole)
    assert read_episodes(tmp_path / "noisy").info[0]["random"] == 0.5
    for wrong in (0, 4):
        with pytest.raises(ConfigError, match=r"1\.\.3"):
            first("wrong", wrong)
    with pytest.raises(DatasetError, match="other settings"):
        first("every", 2)
