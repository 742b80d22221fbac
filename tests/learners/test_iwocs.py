"""IWOCS: the static method in a windy walk, the choice among members, values without entropy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.commands.eval import evaluate_run
from embodied.core.build import ConfigError
from embodied.evaluation.worst_case import Floats
from embodied.policies.wrappers.iwocs import Iwocs, Member, most_pessimistic
from tests.builders import LINE, make_learner, make_policy, node_of, run_folder, transitions

GAMMA = 0.95
CORRIDORS = ((2, 1), (4, 3), (7, 6))  # cells, and the power of the wind with which one slips
WINDS = np.linspace(0, 0.5, 25)
MEMBER = node_of("policies.wrappers.iwocs.Member", hidden=[8], predictor=[8])


def backup(values: Floats, wind: float, corridor: int) -> float:
    """One step of the corridor's value from its start: each cell is passed with probability
    1 - wind^power, else one is back at the start; the end pays 1."""
    cells, power = CORRIDORS[corridor]
    slip = wind**power
    value = 1.0
    for _ in range(cells):
        value = GAMMA * ((1 - slip) * value + slip * values)
    return value


def solve(choice: Any) -> float:
    """The fixed point of the value of the start, the only state with a choice."""
    value = 0.0
    for _ in range(500):
        value = choice([[backup(value, wind, c) for c in range(3)] for wind in WINDS])
    return value


def test_the_windy_walk_equals_robust_value_iteration() -> None:
    """Members are solved for one wind each; the set acts as its most pessimistic member; the next
    wind is the worst one for that. The value that is left equals the robust one."""
    robust = solve(lambda q: np.max(np.min(q, axis=0)))
    winds, members = [0], []  # of WINDS; values and corridors
    for _ in range(3):
        value = solve(lambda q, at=winds[-1]: np.max(q[at]))
        members.append(
            (value, int(np.argmax([backup(value, WINDS[winds[-1]], c) for c in range(3)])))
        )
        values = torch.tensor([[value] for value, _ in members])
        index, known = most_pessimistic(values, torch.ones(len(members), 1, dtype=torch.bool))
        corridor = members[int(index)][1]
        played = [solve(lambda q, at=at, c=corridor: q[at][c]) for at in range(len(WINDS))]
        assert known.all() and min(played) <= values.min().item() + 1e-9
        if min(played) >= values.min().item() - 1e-9:
            break
        winds.append(int(np.argmin(played)))
    assert len(members) == 2 and winds[1] == len(WINDS) - 1
    assert min(played) == pytest.approx(robust, abs=1e-9)
    assert [corridor for _, corridor in members] == [0, 1], "a longer corridor than without wind"


def test_the_least_value_among_those_that_fit() -> None:
    values = torch.tensor([[3.0, 1.0, 2.0], [1.0, 5.0, 4.0]])
    fits = torch.tensor([[True, False, False], [True, True, False]])
    index, known = most_pessimistic(values, fits)
    assert index.tolist()[:2] == [1, 1] and known.tolist() == [True, True, False]


def member() -> Member:
    torch.manual_seed(0)
    policy = make_policy("wrappers.iwocs.Member", LINE, hidden=[8], predictor=[8])
    assert isinstance(policy, Member)
    return policy


def test_the_error_and_the_values_by_hand() -> None:
    """A predictor of no change misses by the change in units of the normaliser; the values' target
    has no entropy bonus."""
    policy = member()
    torch.nn.init.zeros_(policy.predictor[-1].weight)
    torch.nn.init.zeros_(policy.predictor[-1].bias)
    policy.encoder.norm.std.fill_(2.0)
    state = torch.tensor([[1.0], [3.0]])
    assert policy.error(state, torch.zeros(2, 1), state + 0.5).tolist() == [0.25, 0.25]
    learner: Any = make_learner("off_policy.iwocs.Iwocs", policy, hidden=[8])
    batch = transitions(6, LINE)
    torch.manual_seed(1)
    found = learner.value_loss(batch)
    torch.manual_seed(1)
    after = {"state": batch["next_obs/state"]}
    action, _ = policy.sample(after, policy.sample_noise(6, True))
    target = batch["reward"] + 0.9 * policy.value(after, action).amin(0).detach()
    error = policy.value({"state": batch["obs/state"]}, batch["action"]) - target
    assert found.item() == pytest.approx(error.square().mean(1).sum().item(), rel=1e-5)


def test_it_learns_to_predict_and_leaves_the_policy_to_sac() -> None:
    """The predictor of s' = s + a / 2 misses by less than a quarter of the change."""
    learner: Any = make_learner("off_policy.iwocs.Iwocs", member(), hidden=[8], batch_size=64)
    names = {id(each) for each in learner.actor_params}
    assert names == {
        id(each)
        for name, each in learner.policy.named_parameters()
        if not name.startswith(("value", "predictor"))
    }
    for _ in range(400):
        batch = transitions(64, LINE)
        batch["next_obs/state"] = batch["obs/state"] + batch["action"] / 2
        metrics = learner.update(batch)
    assert metrics["prediction_error"].item() < 0.06


def chooser(*values: float, rho: float = 0.5) -> Any:
    """A set whose member i acts with tanh(i + 1), predicts no change and has a constant value."""
    base = node_of("policies.gaussian.Gaussian", hidden=[8])
    made: Any = make_policy(
        "wrappers.iwocs.Iwocs", LINE, base=base, members=[MEMBER] * len(values), rho=rho
    )
    for k, (each, value) in enumerate(zip(made.members, values, strict=True)):
        for net, end in ((each.net, k + 1.0), (each.predictor, 0.0)):
            torch.nn.init.zeros_(net[-1].weight)
            torch.nn.init.constant_(net[-1].bias, end)
        for weight in each.value.parameters():
            torch.nn.init.zeros_(weight)
        torch.nn.init.constant_(each.value.ensemble.biases[-1], value)
    return made


def test_the_base_acts_until_something_was_seen_and_where_nothing_fits() -> None:
    policy = chooser(2.0, 1.0)
    obs, noise = {"state": torch.tensor([[0.3], [0.3]])}, policy.sample_noise(2)
    usual = policy.base.act(obs, {}, noise[:, :1])[0]
    first, carry = policy.act(obs, policy.initial(2), noise)
    assert torch.equal(first, usual) and torch.equal(carry["acted"], usual.flatten(1))
    moved = {"state": torch.tensor([[0.7], [0.9]])}  # by 0.4 and by 0.6; rho is 0.5
    action, _ = policy.act(moved, carry, noise)
    assert action[0].item() == pytest.approx(np.tanh(2.0)), "the member with the least value"
    assert torch.equal(action[1], policy.base.act(moved, {}, noise[:, :1])[0][1])


def test_a_set_of_runs_is_evaluated(tmp_path: Path) -> None:
    env = {**node_of("envs.fr3.env.Fr3", task="reach", horizon=3), "threads": 1}
    base = run_folder(
        tmp_path / "base", env, node_of("policies.gaussian.Gaussian", hidden=[8]), (1,)
    )
    runs = [run_folder(tmp_path / str(step), env, MEMBER, (step,)) for step in (2, 3)]
    words = ["policy=iwocs", f"policy.members=[{runs[0]},{runs[1]}]", "execute=1", "episodes=2"]
    row = evaluate_run(base, words, [])
    assert row["episodes"] == 2 and len(row["policy"]["members"]) == 2
    assert json.loads((base / "evaluations.jsonl").read_text())["policy"] == row["policy"]
    for word in (f"policy.members=[{base}]", "policy.members=[]"):
        with pytest.raises(ConfigError, match=r"policy\.members"):
            evaluate_run(base, ["policy=iwocs", word, "execute=1"], [])


def test_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match="policy=iwocs_member"):
        make_learner("off_policy.iwocs.Iwocs", make_policy("gaussian.Gaussian", LINE))
    with pytest.raises(ConfigError, match="n_step=1"):
        make_learner("off_policy.iwocs.Iwocs", member(), n_step=3)
    assert Iwocs.for_evaluation
