"""Factors, shaping, kinesthetic utilities, products, reward programs and curiosity, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.device import forked
from embodied.core.env import NotFinite, VecEnv
from embodied.core.reward import AugmentsEnv, ObservesSteps, Potential, Reward
from embodied.core.saved_node import read_run_settings
from embodied.core.spec import Leaf, Spec, mixed_leaf
from embodied.core.tensors import Tensors, nest
from embodied.learners.learner import load_learner
from embodied.learners.run_value import RunValue
from embodied.nn.normalizers import RunningMeanStd
from embodied.rewards.handcrafted.factors import (
    Factor,
    alignment,
    closeness,
    fading,
    held,
    proximity,
    within,
)
from embodied.rewards.handcrafted.kinesthetic import krc
from embodied.rewards.handcrafted.program import KEPT, Program, statistics
from embodied.rewards.intrinsic.features import ObservationFeatures
from tests.builders import exit_of, node_of
from tests.rewards.rows import SPEC, drawn, make, rows, state, step

SHAPING = {
    "_target_": "embodied.rewards.handcrafted.factors.Shaping",
    "potential": {"of": "distance", "a": "tool", "b": "goal", "weight": -2.0},
}


def worth(node: dict[str, Any], batch: Tensors) -> list[float]:
    return Factor(node, SPEC)(batch).tolist()


def test_parts_of_an_observation_by_name() -> None:
    batch = rows(state(0.0)[None], state(1.0, 3.0, 6.0)[None])
    assert worth({"of": "distance", "a": "tool", "b": "goal"}, batch) == [5.0]
    assert worth({"of": "distance", "a": "state[0:3]", "b": "cube"}, batch) == [2.0]
    assert worth({"of": "distance", "a": "tool_x,goal_x", "b": [1.0, 2.0]}, batch) == [4.0]
    assert worth({"of": "value", "a": "goal_x", "weight": -0.5}, batch) == [-3.0]
    assert worth({"of": "above", "a": "cube_x", "than": 2.5}, batch) == [1.0]
    assert worth({"of": "value", "a": "reward"}, batch) == [0.5]
    assert Factor({"of": "value", "a": "tool_x"}, SPEC)(batch, "obs").tolist() == [0.0]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"of": "distance", "a": "tool", "b": "gaol"}, 'did you mean "goal"'),
        ({"of": "distance", "a": "tool"}, "missing a required argument: 'b'"),
        ({"of": "value", "a": "state[8:12]"}, "is out of range"),
        ({"a": "tool"}, "a factor needs `of`"),
        ({"of": "os.path.join", "a": "tool"}, "allow="),
    ],
)
def test_mistakes_in_a_factor_are_one_line(node: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        Factor(node, SPEC)


def test_geometry_by_hand() -> None:
    """Alignment is a cosine; proximity is 1/2 and closeness 0 at 2 log 2."""
    zero, one, up = (torch.tensor([v]) for v in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0]))
    cosines = [alignment(zero, one, to).item() for to in (2 * one, zero, one + up)]
    assert cosines == pytest.approx([1.0, -1.0, 0.0])
    half = 2 * np.log(2.0) * one
    assert proximity(zero, half).item() == pytest.approx(0.5)
    assert closeness(zero, half).item() == pytest.approx(0.0, abs=1e-6)
    assert closeness(zero, zero, density=2.0).item() == pytest.approx(1.0)
    assert closeness(zero, 1e6 * one, density=0.5).item() == pytest.approx(-1.0)


def test_the_values_of_a_run_as_a_potential(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("env=two_gap", "policy=deterministic", "policy.std=0.3", "learner=td3", "size=debug")
    assert exit_of("train", *words, "steps=40", "eval_every=0", "video=false", f"out={run}") == 0
    saved = checkpoint.find(run)
    policy = checkpoint.load_policy(saved)
    node = {"_target_": f"{RunValue.__module__}.RunValue", "run": str(run), "actions": 2}
    reward = build({**SHAPING, "potential": node}, Reward, spec=policy.spec)
    obs = {name: torch.rand(2, *leaf.shape) for name, leaf in policy.spec.obs.items()}
    learner: Any = load_learner(saved, read_run_settings(run / "run.yaml"), policy)
    with forked(0):
        one, other = policy.sample_noise(2, explore=True)[:, None]
    actions = [policy.act(obs, {}, noise.expand(2, -1))[0].flatten(1) for noise in (one, other)]
    now, then = torch.stack([learner.critic(obs, a) for a in actions]).mean((0, 1)).tolist()
    step = {f"obs/{name}": value[:1] for name, value in obs.items()}
    step |= {f"next_obs/{name}": value[1:] for name, value in obs.items()}
    step |= {"reward": torch.tensor([0.5]), "discount": torch.tensor([0.9])}
    assert reward(step).item() == pytest.approx(0.5 + 0.9 * then - now, abs=1e-5)
    potential: Any = build(node, Potential, spec=policy.spec)
    there = {f"next_obs/{name}": torch.cat([v, v[:1]]) for name, v in obs.items()}
    values = potential({**there, "reward": torch.zeros(3)})
    assert values[2].item() == pytest.approx(values[0].item()), "the same in another place"
    with pytest.raises(ConfigError, match=r"potential\.run=RUN"):
        build({**SHAPING, "potential": node | {"run": ""}}, Reward, spec=policy.spec)


def test_shaping_by_hand() -> None:
    """Phi = -2 distance: from 3 to 1: own 0.5 + 0.9 (-2) - (-6) = 4.7; at a true end nothing is
    left of the potential: 0.5 + 6 = 6.5; a decision of two steps has 0.81."""
    reward = make(SHAPING)
    now, then = state(3.0).repeat(3, 1), state(1.0).repeat(3, 1)
    paid = reward(rows(now, then, [0.9, 0.0, 0.81]))
    torch.testing.assert_close(paid, torch.tensor([4.7, 6.5, 0.5 - 1.62 + 6]))
    assert not isinstance(reward, ObservesSteps | AugmentsEnv)


def test_summed_by_hand() -> None:
    near = {"of": "distance", "a": "tool", "b": "goal", "weight": -0.1}
    factors = {"near": near, "effort": {"of": "effort", "a": "action", "weight": -1.0}}
    reward = make(node_of("rewards.handcrafted.factors.WeightedSum", factors=factors, scale=10.0))
    batch = rows(state(3.0)[None], state(2.0)[None], action=torch.tensor([[1.0, 0.0]]))
    assert reward(batch).item() == pytest.approx(0.5 - 10 * 0.1 * 2 - 10 * 0.5)


ALIGNED = {"of": "alignment", "a": "tool", "b": "cube", "c": "goal"}
NEAR = {"of": "proximity", "a": "tool", "b": "cube"}
ARRIVE = {"of": "distance", "a": "cube", "b": "goal", "weight": -1.0}
KRC = node_of(
    "rewards.handcrafted.kinesthetic.Kinesthetic",
    utilities={"offence": {"weight": 2.0, "all": [ALIGNED, NEAR]}, "arrive": ARRIVE},
    events={"there": {"of": "above", "a": "cube_x", "than": 1.5, "weight": 10.0}},
)


def test_the_table_of_signs() -> None:
    """|product|^(1/n); one negative factor is enough for a minus."""
    table = {
        (0.25, 1.0): 0.5,
        (-0.25, 1.0): -0.5,
        (-0.25, -1.0): -0.5,
        (0.0, -1.0): 0.0,
        (1.0, 1.0, 0.008): 0.2,
        (4.0, 1.0): 1.0,
    }
    joined = [krc([torch.tensor([value]) for value in factors]).item() for factors in table]
    assert joined == pytest.approx([*table.values()], abs=1e-6)


def test_utilities_are_potentials_and_events_are_paid() -> None:
    """Tool 0, cube 1, goal 2: aligned, proximity e^-1/2: KRC = e^-1/4, U = 2 e^-1/4 - 1. Then the
    cube is at 2: no way is left (cosine 0), U = 0; 10 for the event."""
    reward = make(KRC)
    now, there = state(0.0, 1.0, 2.0)[None], state(0.0, 2.0, 2.0)[None]
    before = 2 * float(np.exp(-0.25)) - 1
    for batch, paid in (
        (rows(now, there), 0.5 - before + 10),
        (rows(now, now, 0.0), 0.5 - before),
        (rows(now, now), 0.5 + (0.9 - 1) * before),
    ):
        assert reward(batch).item() == pytest.approx(paid, abs=1e-4)
        assert set(reward.components(batch)) == {"env", "offence", "arrive", "there"}


def test_the_sum_of_the_same_factors_buys_one_with_the_other() -> None:
    """Behind the goal's side but close by: the product is negative, the mean is not."""
    now = state(1.1, 1.0, 2.0)[None]
    apart = {}
    for join in ("krc", "sum"):
        reward = make(KRC | {"join": join, "env_weight": 0.0})
        apart[join] = reward.components(rows(now, now, 0.0))["offence"].item()
    near = torch.tensor(-0.05).exp().item()
    assert apart["krc"] == pytest.approx(2 * near**0.5, abs=1e-4)
    assert apart["sum"] == pytest.approx(-2 * (near - 1) / 2, abs=1e-4)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(ConfigError, match="offence has no setting wheight"):
        make(KRC | {"utilities": {"offence": {"all": [], "wheight": 1.0}}})
    speeding = PRODUCT["factors"]["speeding"] | {"weight": 2.0}
    with pytest.raises(ConfigError, match=r"reward\.factors\.speeding\.weight is 2"):
        make(PRODUCT | {"factors": {"speeding": speeding}}, DRIVE)


DRIVEN = Leaf((6,), names=("gain", "over", "off", "hit", "since_a", "since_b"))
DRIVE = Spec({"state": DRIVEN}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
PRODUCT: dict[str, Any] = {
    "_target_": "embodied.rewards.handcrafted.factors.Multiplicative",
    "progress": {"of": "value", "a": "gain"},
    "factors": {
        "speeding": {"of": "fading", "a": "over", "scale": 2.0},
        "centre": {"of": "within", "a": "off", "limit": 0.5, "otherwise": 0.5},
        "comfort": {"of": "held", "a": "since_a,since_b", "seconds": 5.0},
    },
    "penalties": {"collision": {"of": "value", "a": "hit", "weight": 3.0}},
    "scale": 10.0,
}


def test_a_product_of_factors_less_penalties_by_hand() -> None:
    reward = make(PRODUCT, DRIVE)
    then = [
        [0.4, 0.0, 0.2, 0.0, 9.0, 9.0],  # nothing is broken: 0.4
        [0.4, 0.5, 0.6, 0.0, 9.0, 1.0],  # 0.4 x 0.75 x 0.5 x 0.75
        [0.4, 3.0, 0.2, 0.0, 9.0, 9.0],  # far too fast
        [0.4, 0.0, 0.2, 1.0, 0.0, 0.0],  # 0.4 x 0.5 - 3
    ]
    given = {"next_obs/state": torch.tensor(then), "reward": torch.full((4,), 7.0)}
    given["obs/state"] = torch.full((4, 6), 9.0)  # must not matter
    expected = torch.tensor([4.0, 1.125, 0.0, -28.0])
    torch.testing.assert_close(reward(given), expected)
    parts = reward.components(given)
    torch.testing.assert_close(parts["progress"] + parts["collision"], expected)
    assert parts["collision"].tolist() == [0.0, 0.0, 0.0, -30.0]


def test_factors() -> None:
    values = torch.tensor([[0.0], [1.0], [2.5]])
    assert within(values, 1.0).tolist() == [1.0, 1.0, 0.0]
    assert fading(values, 2.0).tolist() == [1.0, 0.5, 0.0]
    assert held(values, 2.0, 0.2).tolist() == pytest.approx([0.2, 0.2, 1.0])
    assert held(torch.tensor([[0.0, 9.0, 9.0, 9.0]]), 1.0).tolist() == [0.875]


TOOL = ("tool_x", "tool_y", "tool_z", "width")
GOAL = ("goal_from_tool_x", "goal_from_tool_y", "goal_from_tool_z")
ACT = Leaf((2,), low=-1.0, high=1.0)
PROGRAM_SPEC = Spec({"state": Leaf((7,), names=TOOL + GOAL)}, ACT, dt=0.1)
CODE = """
def reward(next_goal_from_tool, goal_from_tool, width, action):
    gain = goal_from_tool.norm(dim=-1) - next_goal_from_tool.norm(dim=-1)
    cost = -0.5 * action.square().sum(dim=-1) * width
    return gain + cost, {"gain": gain, "cost": cost}
"""
OS = "import os\n\ndef reward(tool):\n    return tool[:, 0] * os.getpid()\n"


def made(code: str = CODE, folder: Path | None = None, **settings: Any) -> Program:
    node = node_of("rewards.handcrafted.program.Program", code=code, **settings)
    return build(node, Reward, spec=PROGRAM_SPEC, folder=folder)


def two_rows() -> dict[str, torch.Tensor]:
    """Two rows: 5 m to 3 m from the goal, and 1 m to 2 m; widths 2 and 0."""
    obs, after = torch.zeros(2, 7), torch.zeros(2, 7)
    obs[:, 4:6] = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    obs[0, 3] = 2.0
    after[:, 4:7] = torch.tensor([[0.0, 0.0, 3.0], [0.0, 2.0, 0.0]])
    return {
        "obs/state": obs,
        "next_obs/state": after,
        "action": torch.tensor([[1.0, 1.0], [3.0, 4.0]]),
        "reward": torch.tensor([7.0, 7.0]),
    }


def test_what_it_pays_by_hand() -> None:
    """5 - 3 - 0.5 * 2 * 2 = 0 and 1 - 2 - 0 = -1."""
    program = made()
    assert program(two_rows()).tolist() == [0.0, -1.0]
    terms = {name: part.tolist() for name, part in program.components(two_rows()).items()}
    assert terms == {"gain": [2.0, -1.0], "cost": [-2.0, 0.0]}


def test_components_are_written_down_exactly_and_cut_on_resume(tmp_path: Path) -> None:
    """Mean, lowest and highest of each part since the line before."""
    reward = made(folder=tmp_path, every=100)
    for count in (50, 100, 150, 200):
        reward(two_rows())
        reward.set_step(count)
    terms = {"gain": [0.5, -1.0, 2.0], "cost": [-1.0, -2.0, 0.0], "total": [-0.5, -1.0, 0.0]}
    assert statistics(tmp_path) == [{"step": count, "terms": terms} for count in (100, 200)]
    state = reward.get_state() | {"step": 150, "written": 100}
    reward.set_state(state)
    assert [line["step"] for line in statistics(tmp_path)] == [100]
    with pytest.raises(ConfigError, match="changed since this run"):
        made(CODE.replace("0.5", "0.6"), tmp_path).set_state(state)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"file": "nowhere.py"}, r"nowhere\.py does not exist"),
        ({"code": OS}, r"rejected: language: line 1: os cannot be imported"),
        ({"code": "def reward(goal):\n    return goal[:, 0]"}, r'goal \(did you mean "tool"\?\)'),
        ({"code": "def reward(tool):\n    return tool"}, r"shape \[64, 3\]; it should be \[64\]"),
    ],
)
def test_refusals_are_one_line_that_says_what_to_do(settings: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        made(**settings)
    assert "\n" not in str(caught.value)


def test_nan_on_rows_of_the_world_stops_with_one_line() -> None:
    """Made-up rows say nothing about it, the world's do."""
    reward = made("def reward(width):\n    return torch.log(width - 1)")
    with pytest.raises(NotFinite, match="failed in this environment: result: the reward is nan"):
        reward(two_rows())


def test_each_env_has_the_memory_of_its_episode() -> None:
    """16 envs, whose episodes end at different times: the memory counts their steps, and every
    second one is rewarded. A transition carries what it needs, so that order does not matter."""
    code = """
def reward(memory):
    return memory[:, 0] % 2, {}, memory + 1
"""
    env = build({"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 16}, VecEnv)
    node = node_of("rewards.handcrafted.program.Program", code=code)
    reward = build(node, Reward, spec=env.spec)
    assert isinstance(reward, AugmentsEnv)
    wrapped = reward.augment_env(env)
    random, age = torch.Generator().manual_seed(0), torch.zeros(16)
    obs, kept, ended = wrapped.reset(0), [], 0
    for _ in range(120):
        assert torch.equal(obs[KEPT], age[:, None].expand(16, 8))
        action = torch.rand(16, 2, generator=random) * 2 - 1
        step = wrapped.step(action)
        age += 1
        assert torch.equal(step.next_obs[KEPT][:, 0], age)
        row = {**nest(obs, "obs"), "action": action, **nest(step.next_obs, "next_obs")}
        kept.append(row | {"reward": (age - 1) % 2})
        ended += int(step.ended.sum())
        age[step.ended] = 0
        obs = step.obs
    assert ended > 16
    rows = {key: torch.cat([row[key] for row in kept]) for key in kept[0]}
    order = torch.randperm(len(rows["reward"]), generator=random)
    rows = {key: value[order] for key, value in rows.items()}
    assert torch.equal(reward(rows), rows["reward"])
    with pytest.raises(ConfigError, match="a memory, which recordings lack"):
        reward({key: value for key, value in rows.items() if key != f"obs/{KEPT}"})


def test_what_is_slow_is_said(caplog: pytest.LogCaptureFixture) -> None:
    slow = """
def reward(tool, width):
    total = torch.norm(tool)
    for i in range(3):
        if total > 0.1 * i:
            total = total - 0.1 * width.abs()
    return total
"""
    made(slow)
    assert "microseconds per transition, one transition at a time" in caplog.text


RND = node_of("rewards.intrinsic.rnd.Rnd", env_weight=0.0, hidden=[64, 64], lr=1e-3)
ICM = node_of("rewards.intrinsic.icm.Icm", env_weight=0.0, hidden=[64], lr=1e-3)


def around(place: float, seed: int = 0) -> Tensors:
    """128 rows that lead to places near (place, place)."""
    generator = torch.Generator().manual_seed(seed)
    near = place + 0.2 * torch.randn(128, 2, generator=generator)
    return {**drawn(128, seed), "next_obs/other": near}


def test_what_is_known_is_no_news() -> None:
    """Both places are in the statistics; only one of them is visited again and again."""
    reward, nobody = make(RND | {"leaves": ["other"]}), torch.zeros(128, dtype=torch.int64)
    for place in (-1.0, 1.0):
        reward.observe_step(around(place), nobody, step(2))
    before, elsewhere = reward(around(-1.0)).mean(), reward(around(1.0)).mean()
    for seed in range(200):
        reward.update(around(-1.0, seed=seed))
    assert reward(around(-1.0, seed=999)).mean() < 0.05 * before
    assert reward(around(1.0, seed=999)).mean() > 0.3 * elsewhere


def test_the_target_is_not_learned() -> None:
    reward = make(RND)
    nets = reward.target, reward.predictor
    target, predictor = ([value.clone() for value in net.parameters()] for net in nets)
    reward.update(drawn(64))
    assert all(map(torch.equal, target, reward.target.parameters()))
    assert not any(map(torch.equal, predictor, reward.predictor.parameters()))


def test_the_bonus_is_divided_by_the_deviation_of_its_returns() -> None:
    """Two worlds, three steps: running sums R <- 0.9 R + e, of each world on its own; their
    deviation is the unit."""
    reward, everyone = make(RND), torch.arange(2)
    sums, seen = torch.zeros(2), []
    for seed in range(3):
        rows = drawn(2, seed)
        reward.observe_step(rows, everyone, step(2, ended=[True, False]))
        sums = 0.9 * sums + reward.errors(rows).detach()
        seen.append(sums.clone())
    unit = torch.cat(seen).std(correction=0)
    assert reward.scale.std.item() == pytest.approx(unit.item(), rel=1e-4)
    rows = drawn(2, 9)
    torch.testing.assert_close(reward(rows), reward.errors(rows).detach() / reward.scale.std)


def test_a_long_segment_is_learned_in_parts() -> None:
    """PPO's batches hold thousands of rows: one step of Adam each would teach next to nothing."""
    parts, whole = make(RND), make(RND | {"batch_size": 4096})
    start = parts.errors(drawn(256)).mean().item()
    for seed in range(3):
        parts.update(drawn(4096, seed))
        whole.update(drawn(4096, seed))
    assert parts.errors(drawn(256)).mean() < 0.5 * start
    assert whole.errors(drawn(256)).mean() > 0.8 * start


@pytest.mark.parametrize("method", [RND, ICM])
def test_the_bonus_does_not_fade_beside_its_first_errors(method: dict[str, object]) -> None:
    """By the time that outcomes are foreseen, errors of late are the unit, not the first ones."""
    late, ever = make(method | {"memory": 256}), make(method | {"memory": None})
    nobody = torch.zeros(64, dtype=torch.int64)
    for seed in range(300):
        for reward in (late, ever):
            reward.observe_step(caused(64, seed), nobody, step(2))
            reward.update(caused(256, seed))
    rows = caused(512, 999)
    assert late(rows).mean() > 3 * ever(rows).mean()


def caused(n: int, seed: int, law: float = 1.0) -> Tensors:
    """The tool moves by `law` times the action; the goal moves by chance."""
    rows = drawn(n, seed)
    after = rows["obs/state"].clone()
    after[:, :2] += law * rows["action"]
    generator = torch.Generator().manual_seed(seed + 1)
    after[:, 6:] += torch.randn(n, 3, generator=generator)
    return {**rows, "next_obs/state": after}


def test_an_unforeseen_outcome_is_a_surprise() -> None:
    """What follows from actions is learned; the same actions with other outcomes are not."""
    reward = make(ICM | {"leaves": ["state"]})
    reward.observe_step(caused(512, 0), torch.zeros(512, dtype=torch.int64), step(2))
    first = reward.update(caused(256, 0))
    for seed in range(150):
        last = reward.update(caused(256, seed))
    assert last["inverse_loss"] < 0.3 * first["inverse_loss"]
    usual, odd = reward(caused(512, 999)).mean(), reward(caused(512, 999, law=-3.0)).mean()
    assert odd > 2 * usual


@pytest.mark.parametrize("act", [Leaf((), "int64", 0, 3), mixed_leaf((0, 4))])
def test_choices(act: Leaf) -> None:
    reward = make(ICM, replace(SPEC, act=act))
    which = torch.randint(4, (256,), generator=torch.Generator().manual_seed(0))
    moves = torch.tensor([[0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [-1.0, 0.0]])
    action = torch.stack([0 * which, which], 1).float() if act.shape else which
    rows = caused(256, 0) | {"action": action}
    rows["next_obs/state"][:, :2] = rows["obs/state"][:, :2] + moves[which]
    losses = [reward.update(rows)["inverse_loss"] for _ in range(121)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_chunk_of_actions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy\.chunk=1"):
        make(ICM)(drawn(4) | {"action": torch.zeros(4, 6)})


def test_running_moments_are_those_of_all_rows() -> None:
    values = 5 + 2 * torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    moments, of_late = RunningMeanStd(3), RunningMeanStd(3, memory=100)
    assert moments.std.tolist() == [1.0] * 3
    for part in values.split([1, 9, 490, 500]):
        moments.update(part)
        of_late.update(part)
    torch.testing.assert_close(moments.mean.float(), values.mean(0))
    torch.testing.assert_close(moments.std, values.std(0, correction=0))
    assert of_late.count.item() == pytest.approx(100)


def test_all_kinds_of_observations_are_seen() -> None:
    obs = {
        "state": Leaf((3,)),
        "front": Leaf((32, 48, 3), "uint8", 0, 255),
        "cell": Leaf((2,), "uint8", 0, (3, 1), unit="symbol"),
        "privileged/more": Leaf((5,)),
    }
    rows = {f"obs/{name}": leaf.zeros(2) for name, leaf in obs.items()}
    rows["obs/front"][1] = 255
    numbers = ObservationFeatures(obs, None)(rows, "obs")
    assert numbers.shape == (2, 3 + 3 * 16 * 16 + 4 + 2)
    assert numbers[1, 3 : 3 + 768].unique().tolist() == [1.0]
    assert ObservationFeatures(obs, ("privileged/more",)).size == 5
    with pytest.raises(ConfigError, match="no observation fornt"):
        ObservationFeatures(obs, ("fornt",))
