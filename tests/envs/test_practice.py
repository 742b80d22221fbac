"""Practising: the state machine by hand, and worlds that go on without being put back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import yaml
from torch import Tensor

from embodied.core import build as build_module
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv
from embodied.envs.reset_free import wrapper as practice
from embodied.envs.reset_free.wrapper import Config, Facts, Mode, ResetFreeWrapper
from embodied.envs.row_rng import RowRng
from embodied.policies.random import Config as RandomConfig
from embodied.policies.random import Random
from embodied.policies.scripted.intervener import Intervener
from embodied.policies.scripted.simple import Script
from embodied.training.collector import Collector
from tests.builders import make_policy, node_of


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


SHORT = practice.StatesConfig(window=3, radius=0.5, timeout=6, recovery=2, tries=2)
GOES, CRASH, WON = "LEARNING", "terminated RECOVERY", "terminated won LEARNING"
STUCK, LATE = "truncated stuck RECOVERY", "truncated late RECOVERY"
STORIES: dict[str, tuple[dict[str, Any], list[float | str], list[str]]] = {
    "stuck is three places within half a metre, of a trail of its own": (
        {}, [0.0, 1.0, 1.2, 1.3, 1.3, 1.3, 1.3], [*[GOES] * 3, STUCK, GOES, GOES, STUCK],
    ),
    "a crash terminates and a goal does": ({}, ["crash", "goal"], [CRASH, WON]),
    "a lap ends a race as it is set": (
        {"lap": 2, "wins": "truncated"},
        ["goal", "goal", "goal"],
        [GOES, "truncated won LEARNING", GOES],
    ),
    "late is so many steps without a goal": (
        {"lap": 5},
        [0, 10, 20, 30, 40, "goal", 0, 10, 20, 30, 40, 50],
        [*[GOES] * 11, LATE],
    ),
    "after too many tries somebody has to come": (
        {}, ["crash"] * 4, [CRASH, CRASH, "terminated ERRORED", CRASH],
    ),
    "with a goal between them the count begins again": (
        {}, ["crash", "goal", *["crash"] * 3], [CRASH, WON, CRASH, CRASH, "terminated ERRORED"],
    ),
    "what is lost nobody can mend": ({}, ["lost"], ["truncated ERRORED"]),
}  # fmt: skip
"""Settings, where the row is or what happens to it, and what follows: the flags and the mode."""


@pytest.mark.parametrize(("settings", "events", "told"), STORIES.values(), ids=STORIES)
def test_what_happens_decides_the_mode(
    settings: dict[str, Any], events: list[float | str], told: list[str]
) -> None:
    machine = practice.PracticeStates(replace(SHORT, **settings), 1, 1)
    machine.begin(flags(1))
    seen = []
    for at, event in enumerate(events):
        place = torch.tensor([[10.0 * at if isinstance(event, str) else event]])
        crashed = flags(event in ("crash", "lost"))
        verdict = machine.learn(
            Facts(place, flags(event == "goal"), crashed, flags(event == "lost"))
        )
        mode = Mode(int(machine.memory["mode"]))
        ends = ("terminated", "truncated", "won", "stuck", "late")
        seen.append(" ".join([*(name for name in ends if getattr(verdict, name)), mode.name]))
        if mode == Mode.RECOVERY:
            machine.recovered()
        if mode == Mode.ERRORED:
            machine.begin(flags(1))
    assert seen == told


@dataclass(frozen=True)
class CorridorConfig:
    num_envs: int = 1


class Corridor(BatchedEnv):
    """x moves by the action; goals are at 0 and 3; below -2 there is a hole that nobody leaves."""

    name = "corridor"
    kept: ClassVar = {"x": "x", "goal": "goal"}

    def __init__(self, config: CorridorConfig) -> None:
        n = self.num_envs = config.num_envs
        self.spec = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1, text="walk")
        self.streams, self.never = RowRng(0, n), torch.zeros(n, dtype=torch.bool)
        self.x, self.goal = torch.zeros(n), torch.ones(n, dtype=torch.int64)
        self.taken, self.homes, self.resets = 0, 0, 0
        self.obs = self.look()

    def observe(self, rows: Tensor) -> Tensors:
        return {"state": torch.stack([self.x, 3.0 * self.goal], 1)[rows]}

    def look(self) -> Tensors:
        return self.observe(torch.arange(self.num_envs))

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        self.resets += 1
        self.x = self.x.index_fill(0, rows, 0.0)
        self.goal = self.goal.index_fill(0, rows, 1)

    def step(self, action: Tensor) -> Step:
        self.taken += 1
        self.x = torch.where(self.x < -2, self.x, self.x + action[:, 0])
        return self.finish(self.look(), 0.0 * self.x, self.never, self.never.clone(), {})

    def facts(self) -> Facts:
        reached = (self.x - 3.0 * self.goal).abs() < 0.5
        return Facts(self.x[:, None].clone(), reached, self.never, self.x < -2)

    def advance(self, rows: Tensor) -> None:
        self.goal = torch.where(rows, 1 - self.goal, self.goal)

    def rehome(self, rows: Tensor) -> None:
        self.homes += int(rows.sum())


class Towards(Script):
    """`speed` towards the goal that is seen (negative: away from it)."""

    def __init__(self, config: TowardsConfig, spec: Spec) -> None:
        super().__init__(config, spec)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        x, goal = obs["state"].unbind(1)
        return (self.config.speed * torch.sign(goal - x))[:, None, None], carry


@dataclass(frozen=True)
class TowardsConfig:
    speed: float = 1.0


def script(speed: float) -> dict[str, object]:
    return {"_target_": "tests.envs.test_practice.Towards", "speed": speed}


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "ALLOWED", [*build_module.ALLOWED, "tests."])


def corridor(
    states: practice.StatesConfig = SHORT, num_envs: int = 1, **settings: Any
) -> tuple[ResetFreeWrapper, Corridor]:
    world = Corridor(CorridorConfig(num_envs))
    env = ResetFreeWrapper(Config(states, **settings), world)
    env.reset(0)
    return env, world


def push(env: VecEnv, *actions: float) -> list[Step]:
    return [env.step(torch.full((env.num_envs, 1), a)) for a in actions]


def test_there_and_back_and_nobody_puts_it_back() -> None:
    env, world = corridor()
    steps = push(env, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0)
    ends = [0, 0, 1, 0, 0, 1, 0]
    assert [(s.terminated.item(), s.log["success"].item()) for s in steps] == [(e, e) for e in ends]
    assert steps[2].next_obs["state"].tolist() == [[3.0, 3.0]], "the goal that it had"
    assert steps[2].obs["state"].tolist() == [[3.0, 0.0]], "where it is, and the other goal"
    assert world.resets == 1 and world.homes == 2


def test_what_is_stuck_frees_itself_and_that_is_not_learned_from() -> None:
    env, world = corridor(primitive=script(-1.0))
    steps = push(env, 0.0, 0.0, 0.0)
    assert [s.truncated.item() for s in steps] == [False, False, True]
    assert steps[2].next_obs["state"].tolist() == [[0.0, 3.0]]
    assert steps[2].obs["state"].tolist() == [[-2.0, 3.0]], "two steps of the primitive later"
    assert steps[2].log["aside"].tolist() == [2.0] and bool(steps[2].log["stuck"])
    assert world.taken == 5 and world.resets == 1


def test_actions_change_by_so_much_at_most() -> None:
    """0.5 a step: 0 -> 0.5 -> 1.0 -> 0.5 -> 0.0, and the rollout learns from what was done."""
    env, _ = corridor(states=replace(SHORT, window=9), slew=0.5)
    steps = push(env, 9.0, 1.0, -1.0, -1.0)
    assert [s.log["executed"].item() for s in steps] == [0.5, 1.0, 0.5, 0.0]
    assert steps[-1].next_obs["state"][0, 0] == 2.0, "0.5 + 1 + 0.5 + 0"
    saved = env.get_state()
    push(env, -1.0)
    env.set_state(saved)
    assert push(env, 1.0)[0].log["executed"].item() == 0.5, "from 0, as it was saved"
    env.reset(mask=flags(1))
    assert push(env, 1.0)[0].log["executed"].item() == 0.5, "from rest"
    rollout = Collector(env, Random(RandomConfig(), env.spec), gamma=1.0)
    for row, step in (rollout.step() for _ in range(20)):
        assert torch.equal(row["action"], step.log["executed"])


def test_the_bound_goes_on_from_what_the_primitive_did() -> None:
    """In its own row; the other row's last action is its own."""
    env, _ = corridor(primitive=script(-1.0), slew=0.25, num_envs=2)
    actions = torch.tensor([[0.0], [1.0]])
    steps = [env.step(actions) for _ in range(3)]
    assert steps[2].truncated.tolist() == [True, False]
    assert steps[2].log["executed"].tolist() == [[0.0], [0.75]]
    assert env.step(actions).log["executed"].tolist() == [[-0.75], [1.0]]


@dataclass(frozen=True)
class SomebodyConfig:
    waits: int = 2
    drives: int = 2


class Somebody(Intervener):
    """Comes `waits` steps after the row began to need them, drives 0.9 on for `drives` steps."""

    def __init__(self, config: SomebodyConfig, spec: Spec, num_envs: int) -> None:
        self.config, self.asked = config, torch.zeros(num_envs, dtype=torch.int64)

    def over(self, obs: Tensors, first: Tensor) -> Tensor:
        self.asked = torch.where(first, 0, self.asked + 1)
        return self.mine

    @property
    def mine(self) -> Tensor:
        late = self.asked - self.config.waits
        return (late >= 0) & (late < self.config.drives)

    def act(self, obs: Tensors, first: Tensor) -> Tensor:
        return 0.9 * self.mine[:, None].float()


def test_somebody_drives_free_what_is_stuck_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    person = {"_target_": "tests.envs.test_practice.Somebody"}
    env, world = corridor(teleop=person)
    steps = push(env, *[0.0] * 9)  # three times stuck: once more than `tries`
    assert [s.truncated.item() for s in steps] == [False, False, True] * 3
    assert [bool(s.log["manual"]) for s in steps] == [False] * 8 + [True]
    assert world.resets == 1 and "drive it free" in capsys.readouterr().err
    # Two steps until they come, two of 0.9 m; then they have let go.
    assert steps[-1].log["aside"].tolist() == [4.0]
    assert steps[-1].obs["state"][0].tolist() == pytest.approx([1.8, 3.0])
    assert int(env.memory["mode"]) == Mode.LEARNING and int(env.memory["tries"]) == 0
    late, world = corridor(teleop={**person, "waits": 50}, waits=5)
    step = push(late, *[0.0] * 9)[-1]
    assert step.log["aside"].tolist() == [5.0] and world.resets == 2, "nobody came: put right"
    gone = push(late, -1.0, -1.0, -1.0)[-1]
    assert bool(gone.log["manual"]) and world.resets == 3, "out of reach: no one can drive that"


def test_what_nobody_can_mend_is_asked_for() -> None:
    env, world = corridor()
    step = push(env, -1.0, -1.0, -1.0)[-1]
    assert step.truncated.item() and step.log["manual"].item() and world.resets == 2
    assert step.obs["state"].tolist() == [[0.0, 3.0]]
    manual = [step.log["manual"].item() for step in push(env, *[0.0] * 9)]
    assert manual == [False] * 8 + [True], "the third time stuck"


def test_the_way_back_may_have_a_script() -> None:
    """The learner sees the way to 3 only; somebody else walks back, three steps each time."""
    env, world = corridor(played={"0": script(1.0)})
    steps = push(env, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert [s.terminated.item() for s in steps] == [0, 0, 1, 0, 0, 1]
    assert steps[2].obs["state"].tolist() == [[0.0, 3.0]]
    assert steps[2].log["aside"].tolist() == [3.0]
    assert world.taken == 12 and world.resets == 1


def test_a_script_that_fails_is_tried_again_and_then_somebody_comes() -> None:
    env, world = corridor(played={"0": script(0.0)})
    step = push(env, 1.0, 1.0, 1.0)[-1]
    assert step.log["manual"].item() and world.resets == 2 and step.log["aside"].item() == 3 * 6
    assert step.obs["state"].tolist() == [[0.0, 3.0]]


def test_a_script_that_never_gets_there_is_said() -> None:
    with pytest.raises(ConfigError, match="goal 1 did not reach"):
        corridor(played={"1": script(0.0)})


def test_others_wait_while_one_frees_itself() -> None:
    env, _ = corridor(num_envs=2, primitive=script(-1.0))
    for a in (0.5, 0.7, 0.9):
        step = env.step(torch.tensor([[0.0], [a]]))
    assert step.truncated.tolist() == [True, False]
    assert step.obs["state"][:, 0].tolist() == pytest.approx([-2.0, 2.1])


def test_free_resets_are_what_it_is_compared_with() -> None:
    env, world = corridor(resets="free", primitive=script(-1.0))
    steps = push(env, 0.0, 0.0, 0.0)
    assert steps[2].truncated.item() and steps[2].obs["state"].tolist() == [[0.0, 3.0]]
    assert world.resets == 2 and world.taken == 3


def test_not_everything_can_be_practised_in() -> None:
    world = build(node_of("envs.toy.two_gap.TwoGap", num_envs=1), VecEnv)
    with pytest.raises(ConfigError, match=r"TwoGap is not a ResetFreeEnv.*facts"):
        ResetFreeWrapper(Config(), world)


def race(n: int, **more: object) -> VecEnv:
    with open("configs/env/race.yaml") as file:
        node = yaml.safe_load(file)
    node["wrappers"][0] |= more
    return build(node | {"num_envs": n}, VecEnv)


def test_the_slow_lap_is_one() -> None:
    env = race(4, par=300)
    actor = Actor(make_policy("scripted.simple.Lap", env.spec), 4)
    obs, first, laps = env.reset(1), torch.ones(4, dtype=torch.bool), torch.zeros(4)
    for _ in range(400):
        step = env.step(actor(obs, first))
        assert not (step.log["crashed"] | step.log["stuck"] | step.log["manual"]).any()
        laps += step.log["success"]
        obs, first = step.obs, step.ended
    assert (laps >= 1).all()


def test_a_wall_stops_a_car_and_it_goes_on_from_there() -> None:
    env, crashed = race(1), 0
    env.reset(3)
    for _ in range(200):
        before = env.place.clone()
        step = env.step(torch.tensor([[0.0, 1.0]]))  # straight on
        if step.ended.any():
            crashed += int(step.log["crashed"] & step.terminated)
            assert (env.place - before).norm() < 4, "it is where it was, a little further back"
        assert env.track.inside(env.place).all()
    assert crashed and not step.log["manual"].item()
