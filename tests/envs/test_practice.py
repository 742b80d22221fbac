"""Practising: the state machine by hand, and worlds that go on without being put back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import yaml
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.env import Step, VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv
from embodied.envs.reset_free.wrapper import (
    Config,
    Facts,
    Mode,
    PracticeStates,
    ResetFreeWrapper,
    StatesConfig,
    Verdict,
)
from embodied.envs.row_rng import RowRng
from embodied.policies.random import Config as RandomConfig
from embodied.policies.random import Random
from embodied.policies.scripted.intervener import Intervener
from embodied.training.collector import Collector


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def states(n: int = 1, **more: object) -> PracticeStates:
    settings = {"window": 3, "radius": 0.5, "timeout": 6, "recovery": 2, "tries": 2} | more
    made = PracticeStates(StatesConfig(**settings), n, 1)  # pyright: ignore[reportArgumentType]
    made.begin(torch.ones(n, dtype=torch.bool))
    return made


def facts(x: float, reached: int = 0, crashed: int = 0, lost: int = 0) -> Facts:
    return Facts(torch.tensor([[x]]), flags(reached), flags(crashed), flags(lost))


def names(machine: PracticeStates, verdict: Verdict) -> tuple[str, str]:
    """How the episode went on, and the mode."""
    end = "terminated" if verdict.terminated else "truncated" if verdict.truncated else "-"
    return end, Mode(int(machine.memory["mode"])).name


def test_stuck_is_three_places_within_half_a_metre() -> None:
    machine = states()
    ends = [names(machine, machine.learn(facts(x))) for x in (0.0, 1.0, 1.2)]
    assert ends == [("-", "LEARNING")] * 3, "of three, one is 1.2 m from the newest"
    verdict = machine.learn(facts(1.3))
    assert names(machine, verdict) == ("truncated", "RECOVERY") and bool(verdict.stuck)
    machine.recovered()
    assert int(machine.memory["mode"]) == Mode.LEARNING
    ends = [names(machine, machine.learn(facts(1.3))) for _ in range(3)]
    assert ends == [("-", "LEARNING")] * 2 + [("truncated", "RECOVERY")], "a trail of its own"


def test_a_crash_terminates_and_a_goal_does_as_it_is_set() -> None:
    machine = states()
    assert names(machine, machine.learn(facts(0, crashed=1))) == ("terminated", "RECOVERY")
    machine.recovered()
    verdict = machine.learn(facts(5, reached=1))
    assert names(machine, verdict) == ("terminated", "LEARNING") and bool(verdict.won)
    race = states(lap=2, wins="truncated")
    assert names(race, race.learn(facts(0, reached=1))) == ("-", "LEARNING")
    verdict = race.learn(facts(5, reached=1))
    assert names(race, verdict) == ("truncated", "LEARNING") and bool(verdict.won)
    assert names(race, race.learn(facts(9, reached=1))) == ("-", "LEARNING"), "another lap"


def test_late_is_so_many_steps_without_a_goal() -> None:
    machine = states(lap=5)
    for k in range(5):
        assert names(machine, machine.learn(facts(10.0 * k))) == ("-", "LEARNING")
    assert names(machine, machine.learn(facts(90, reached=1))) == ("-", "LEARNING")
    ends = [names(machine, machine.learn(facts(10.0 * k))) for k in range(6)]
    assert ends == [("-", "LEARNING")] * 5 + [("truncated", "RECOVERY")]


def test_after_too_many_tries_or_when_something_is_lost_somebody_has_to_come() -> None:
    machine = states()
    modes = []
    for _ in range(3):
        modes.append(names(machine, machine.learn(facts(0, crashed=1)))[1])
        machine.recovered()
    assert modes == ["RECOVERY", "RECOVERY", "ERRORED"], "2 tries"
    machine.begin(flags(1))
    machine.learn(facts(0, crashed=1))
    machine.recovered()
    machine.learn(facts(9, reached=1))  # a goal between them: the count begins again
    for wanted in ("RECOVERY", "RECOVERY", "ERRORED"):
        assert names(machine, machine.learn(facts(0, crashed=1)))[1] == wanted
        machine.recovered()
    machine.begin(flags(1))
    assert names(machine, machine.learn(facts(0, lost=1, crashed=1))) == ("truncated", "ERRORED")


def test_rows_are_their_own() -> None:
    machine = states(2)
    both = Facts(torch.zeros(2, 1), flags(0, 1), flags(1, 0), flags(0, 0))
    verdict = machine.learn(both)
    assert verdict.terminated.tolist() == [True, True] and verdict.won.tolist() == [False, True]
    assert machine.memory["mode"].tolist() == [Mode.RECOVERY, Mode.LEARNING]


@dataclass(frozen=True)
class CorridorConfig:
    num_envs: int = 1


class Corridor(BatchedEnv):
    """x moves by the action; goals are at 0 and 3; below -2 there is a hole that nobody leaves."""

    name = "corridor"
    kept: ClassVar = {"x": "x", "goal": "goal"}

    def __init__(self, config: CorridorConfig) -> None:
        n = self.num_envs = config.num_envs
        leaf = Leaf((2,), names=("x", "goal"))
        self.spec = Spec({"state": leaf}, Leaf((1,), low=-1.0, high=1.0), dt=0.1, text="walk")
        self.streams = RowRng(0, n)
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

    def begun(self, obs: Tensors | None, rows: Tensor) -> Tensors:
        return self.look()

    def step(self, action: Tensor) -> Step:
        self.taken += 1
        self.x = torch.where(self.x < -2, self.x, self.x + action[:, 0])
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        return self.finish(self.look(), torch.zeros(self.num_envs), never, never.clone(), {})

    def facts(self) -> Facts:
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        reached = (self.x - 3.0 * self.goal).abs() < 0.5
        return Facts(self.x[:, None].clone(), reached, never, self.x < -2)

    def advance(self, rows: Tensor) -> None:
        self.goal = torch.where(rows, 1 - self.goal, self.goal)

    def rehome(self, rows: Tensor) -> None:
        self.homes += int(rows.sum())


class Towards(Policy):
    """`speed` towards the goal that is seen (negative: away from it)."""

    def __init__(self, config: TowardsConfig, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec = config, spec

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.zeros(n, 1)

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
    from embodied.core import build as module

    monkeypatch.setattr(module, "ALLOWED", [*module.ALLOWED, "tests."])


SHORT = StatesConfig(window=3, radius=0.5, timeout=6, recovery=2, tries=2)


def corridor(
    states: StatesConfig = SHORT, num_envs: int = 1, **settings: Any
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
    assert [s.terminated.item() for s in steps] == [0, 0, 1, 0, 0, 1, 0]
    assert steps[2].next_obs["state"].tolist() == [[3.0, 3.0]], "the goal that it had"
    assert steps[2].obs["state"].tolist() == [[3.0, 0.0]], "where it is, and the other goal"
    assert [s.log["success"].item() for s in steps] == [0, 0, 1, 0, 0, 1, 0]
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
    assert push(env, -1.0)[0].log["executed"].item() == -0.5
    env.set_state(saved)
    assert push(env, 0.2)[0].log["executed"].item() == pytest.approx(0.2)
    env.reset(mask=torch.tensor([True]))
    assert push(env, 1.0)[0].log["executed"].item() == 0.5, "from rest"
    rollout = Collector(env, Random(RandomConfig(), env.spec), gamma=1.0)
    for _ in range(20):
        row, step = rollout.step()
        assert torch.equal(row["action"], step.log["executed"]), "what was done is learned from"


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
        config = self.config
        return (self.asked >= config.waits) & (self.asked < config.waits + config.drives)

    def act(self, obs: Tensors, first: Tensor) -> Tensor:
        config, asked = self.config, self.asked
        mine = (asked >= config.waits) & (asked < config.waits + config.drives)
        return 0.9 * mine[:, None].float()


def test_somebody_drives_free_what_is_stuck_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    world = Corridor(CorridorConfig())
    person = {"_target_": "tests.envs.test_practice.Somebody"}
    env = ResetFreeWrapper(Config(SHORT, teleop=person), world)
    env.reset(0)
    steps = push(env, *[0.0] * 9)  # three times stuck: once more than `tries`
    assert [s.truncated.item() for s in steps] == [False, False, True] * 3
    assert [bool(s.log["manual"]) for s in steps] == [False] * 8 + [True]
    assert world.resets == 1 and "drive it free" in capsys.readouterr().err
    # Two steps until they come, two of 0.9 m; then they have let go.
    assert steps[-1].log["aside"].tolist() == [4.0]
    assert steps[-1].obs["state"][0].tolist() == pytest.approx([1.8, 3.0])
    assert int(env.memory["mode"]) == Mode.LEARNING and int(env.memory["tries"]) == 0
    late = ResetFreeWrapper(Config(SHORT, teleop={**person, "waits": 50}, waits=5), world)
    late.reset(0)
    step = push(late, *[0.0] * 9)[-1]
    assert step.log["aside"].tolist() == [5.0] and world.resets == 3, "nobody came: put right"
    gone = push(late, -1.0, -1.0, -1.0)[-1]
    assert bool(gone.log["manual"]) and world.resets == 4, "out of reach: no one can drive that"


def test_what_nobody_can_mend_is_asked_for() -> None:
    env, world = corridor()
    step = push(env, -1.0, -1.0, -1.0)[-1]
    assert step.truncated.item() and step.log["manual"].item() and world.resets == 2
    assert step.obs["state"].tolist() == [[0.0, 3.0]]
    steps = push(env, *[0.0] * 9)
    assert [s.log["manual"].item() for s in steps] == [False] * 8 + [True], "the third time stuck"


def test_the_way_back_may_have_a_script() -> None:
    """The learner sees the way to 3 only; somebody else walks back, three steps each time."""
    env, world = corridor(played={"0": script(1.0)})
    steps = push(env, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert [s.terminated.item() for s in steps] == [0, 0, 1, 0, 0, 1]
    assert steps[2].obs["state"].tolist() == [[0.0, 3.0]]
    assert steps[2].log["aside"].tolist() == [3.0]
    assert world.taken == 12 and world.resets == 1


def test_a_script_that_fails_is_tried_again_and_then_somebody_comes() -> None:
    world = Corridor(CorridorConfig())
    still = {"0": script(0.0)}
    env = ResetFreeWrapper(Config(SHORT, played=still), world)
    env.reset(0)
    step = push(env, 1.0, 1.0, 1.0)[-1]
    assert step.log["manual"].item() and world.resets == 2 and step.log["aside"].item() == 3 * 6
    assert step.obs["state"].tolist() == [[0.0, 3.0]]


def test_a_script_that_never_gets_there_is_said() -> None:
    env = ResetFreeWrapper(Config(SHORT, played={"1": script(0.0)}), Corridor(CorridorConfig()))
    with pytest.raises(ConfigError, match="goal 1 did not reach"):
        env.reset(0)


def test_others_wait_while_one_frees_itself() -> None:
    world = Corridor(CorridorConfig(2))
    env = ResetFreeWrapper(Config(SHORT, primitive=script(-1.0)), world)
    env.reset(0)
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
    world = build({"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 1}, VecEnv)
    with pytest.raises(ConfigError, match=r"TwoGap is not a ResetFreeEnv.*facts"):
        ResetFreeWrapper(Config(), world)


def race(n: int, **more: object) -> VecEnv:
    with open("configs/env/race.yaml") as file:
        node = yaml.safe_load(file)
    node["wrappers"][0] |= more
    return build(node | {"num_envs": n}, VecEnv)


def test_the_slow_lap_is_one() -> None:
    env = race(4, par=300)
    spec = env.spec
    actor = Actor(
        build({"_target_": "embodied.policies.scripted.simple.Lap"}, Policy, spec=spec), 4
    )
    torch.manual_seed(0)
    obs, first = env.reset(1), torch.ones(4, dtype=torch.bool)
    laps = torch.zeros(4)
    for _ in range(400):
        step = env.step(actor(obs, first))
        assert not (step.log["crashed"] | step.log["stuck"] | step.log["manual"]).any()
        laps += step.log["success"]
        obs, first = step.obs, step.ended
    assert (laps >= 1).all()


def test_a_wall_stops_a_car_and_it_goes_on_from_there() -> None:
    env = race(1)
    env.reset(3)
    ends = []
    for _ in range(200):
        before = env.place.clone()
        step = env.step(torch.tensor([[0.0, 1.0]]))  # straight on
        if step.ended.any():
            ends.append((step.log["crashed"].item(), step.terminated.item()))
            assert (env.place - before).norm() < 4, "it is where it was, a little further back"
        assert env.track.inside(env.place).all()
    assert (True, True) in ends and not step.log["manual"].item()


def test_practice_goes_on_exactly_where_it_was() -> None:
    """Saved in the middle of a rollout with a primitive's steps in it, and played again."""
    torch.manual_seed(4)
    env = race(1)
    rollout = Collector(env, Random(RandomConfig(), env.spec), 0.99, seed=0)
    for _ in range(30):
        rollout.step()
    saved, generator = rollout.get_state(), torch.get_rng_state()
    runs, recovered = [], 0.0
    for _ in range(2):
        rollout.set_state(saved)
        torch.set_rng_state(generator)
        rows = []
        for _ in range(120):
            row, step = rollout.step()
            rows.append(torch.cat([row["obs/state"], row["next_obs/state"]], 1))
            recovered += float(step.log["aside"].sum())
        runs.append(torch.cat(rows))
    assert torch.equal(*runs) and recovered > 0
