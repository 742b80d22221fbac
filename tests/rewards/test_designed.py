"""ExpRD, ExpAdaRD, ExploRS: small MDPs by hand, optima that stay, learning that is faster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.core.env import Step
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.toy import chain, two_gap
from embodied.rewards.analysis.informative import Designer, FiniteMdp, one_hot
from embodied.rewards.handcrafted.exprd import AdaptiveConfig, Config, ExpAdaRd, ExpRd
from embodied.rewards.intrinsic.explors import ExploRs, ExploRsConfig, informative

Table = NDArray[np.float64]
CPU = torch.device("cpu")


def pair(gamma: float = 0.5) -> FiniteMdp:
    """Two states: 0 stays or goes to 1, and 1 stays or ends with the reward 1."""
    dynamics = np.zeros((2, 2, 2))
    dynamics[0, 0, 0] = dynamics[0, 1, 1] = dynamics[1, 0, 1] = 1.0
    reward = np.array([[0.0, 0.0], [0.0, 1.0]])
    return FiniteMdp(dynamics, reward, np.array([1.0, 0.0]), gamma)


def test_values_and_gaps_by_hand() -> None:
    """Q = (0.25, 0.5) in state 0 and (0.5, 1) in state 1."""
    mdp = pair()
    designer = Designer(mdp)
    np.testing.assert_allclose(designer.q, [[0.25, 0.5], [0.5, 1.0]])
    np.testing.assert_allclose(designer.delta, [0.25, 0.5])
    np.testing.assert_allclose(mdp.visits(designer.policy), [0.5, 0.25])
    table = np.array([1.0, 2.0, 3.0, 4.0])
    # One step: 2 - 1 and 4 - 3. Two: (2 + 0.5 * 4) - (1 + 0.5 * 2), and 4 - (3 + 0.5 * 4).
    np.testing.assert_allclose(designer.gaps(0) @ table, [1, 0, 1, 0])
    np.testing.assert_allclose(designer.gaps(1) @ table, [2, 0, -1, 0])
    # All: staying in 0 is worth 1 + 0.5 (2 + 0.5 * 4) = 3.
    np.testing.assert_allclose(designer.gaps(None) @ table, [1, 0, -1, 0])


def test_informativeness_by_hand() -> None:
    """At once, the original reward tells nothing in state 0 (0.25 is missing), and 1 in state 1."""
    designer = Designer(pair())
    assert designer.informativeness(designer.mdp.reward, (0,)) == pytest.approx(-0.25 / 2)
    table = designer.expert([0, 1], (0, 1))
    assert designer.informativeness(table, (0, 1)) == pytest.approx(0.0, abs=1e-6)
    assert designer.keeps_optimal(table) and not designer.keeps_optimal(-table)


def test_the_adaptive_table_by_hand() -> None:
    """One state, actions worth 1 and 0, a uniform learner: as far apart as allowed."""
    mdp = FiniteMdp(np.zeros((1, 2, 1)), np.array([[1.0, 0.0]]), np.ones(1), 0.5)
    table = Designer(mdp, most=3.0).adaptive(np.array([[0.5, 0.5]]), [0])
    np.testing.assert_allclose(table, [[3.0, -3.0]])
    with pytest.raises(ConfigError, match="no reward in these states"):
        Designer(mdp, most=0.2).adaptive(np.array([[0.5, 0.5]]), [0])


def rooms(slip: float = 0.1) -> FiniteMdp:
    """49 cells in four rooms with four doors; the goal in the last one pays 10 and ends."""
    dynamics, reward = np.zeros((49, 4, 49)), np.zeros((49, 4))
    reward[48] = 10.0
    closed = {((r, 3), (r, 4)) for r in (0, 2, 3, 4, 6)} | {((3, c), (4, c)) for c in range(7)}
    closed -= {((3, 2), (4, 2))}
    ways = [(0, 1), (1, 0), (0, -1), (-1, 0)]
    for state in range(48):
        here = divmod(state, 7)
        for drift, (down, right) in enumerate(ways):
            there = (here[0] + down, here[1] + right)
            blocked = (here, there) in closed or (there, here) in closed
            if blocked or not all(0 <= place < 7 for place in there):
                there = here
            for action in range(4):
                chance = slip / 4 + (1 - slip) * (action == drift)
                dynamics[state, action, there[0] * 7 + there[1]] += chance
    return FiniteMdp(dynamics, reward, np.eye(49)[0], 0.95)


def episodes_to_optimal(mdp: FiniteMdp, table: Table, seed: int, most: int = 60) -> int:
    """Episodes until the greedy policy of Q-learning on `table` is within 5% of the best one."""
    random = np.random.default_rng(seed)
    best = float(mdp.solved(mdp.reward)[0].max())
    reach = mdp.dynamics.cumsum(2)
    q = np.zeros(mdp.reward.shape)
    for episode in range(most):
        state = 0
        for _ in range(50):
            ties = np.flatnonzero(q[state] == q[state].max())
            action = random.integers(4) if random.random() < 0.1 else random.choice(ties)
            over = reach[state, action, -1] == 0
            following = 0 if over else int((reach[state, action] < random.random()).sum())
            later = 0.0 if over else 0.95 * q[following].max()
            q[state, action] += 0.5 * (table[state, action] + later - q[state, action])
            if over:
                break
            state = following
        greedy = one_hot(q)
        if float((mdp.values(mdp.reward, greedy)[0] * greedy[0]).sum()) >= 0.95 * best:
            return episode
    return most


def test_a_designed_reward_teaches_faster_and_keeps_the_optimum() -> None:
    mdp = rooms()
    designer = Designer(mdp)
    value = designer.q.max(1)
    shaped = mdp.reward + mdp.gamma * mdp.dynamics @ value - value[:, None]
    designed = designer.expert(range(49))
    assert designer.keeps_optimal(designed) and designer.keeps_optimal(shaped)
    assert designer.informativeness(designed) > designer.informativeness(mdp.reward)
    counts = [
        sum(episodes_to_optimal(mdp, table, seed) for seed in range(5))
        for table in (designed, shaped, mdp.reward)
    ]
    assert counts[0] < counts[1] < counts[2]


def test_states_that_pay_are_chosen_by_what_they_add() -> None:
    designer = Designer(rooms())
    states = designer.chosen(1, (1, 4))
    assert states[0] == 48 and len(states) == 2
    scores = [designer.informativeness(designer.expert(some), (1, 4)) for some in (states, [48])]
    assert scores[0] > scores[1]
    assert not designer.expert(states)[[s for s in range(49) if s not in states]].any()


def rows(env: chain.Chain, cell: list[int], action: list[int]) -> tuple[Tensors, Step]:
    """The transitions of a step from `cell` [B], and the step."""
    env.cell = torch.tensor(cell)
    obs = env.observe(torch.arange(env.num_envs))
    step = env.step(torch.tensor(action))
    found = {"obs/cell": obs["cell"], "action": torch.tensor(action), "reward": step.reward}
    found |= {"discount": 0.9 * (~step.terminated).float()}
    return found | {"next_obs/cell": step.next_obs["cell"]}, step


def test_the_chains_model_is_what_it_does() -> None:
    env = chain.Chain(chain.Config(cells=4, start=1, slip=0.25, num_envs=4000))
    env.reset(0)
    dynamics, reward, start = env.finite_model()
    assert start.tolist() == [0, 1, 0, 0]
    assert dynamics[1, chain.LEFT].tolist() == [0, 0, 0.25, 0]
    assert reward[1].tolist() == pytest.approx([0.075, 0.025])
    found, step = rows(env, [2] * 4000, [chain.RIGHT] * 4000)
    assert float(step.log["success"].float().mean()) == pytest.approx(0.75, abs=0.03)
    assert float(found["reward"].mean()) == pytest.approx(float(reward[2, 1]), abs=0.03)
    assert env.state_numbers(step.next_obs).unique().tolist() == [1, 3]


def test_designed_rewards_of_a_run() -> None:
    env = chain.Chain(chain.Config(cells=6, start=2, num_envs=2))
    env.reset(0)
    reward = ExpRd(Config(), 0.9, CPU)
    assert reward.augment_env(env) is env
    found, _ = rows(env, [2, 3], [chain.RIGHT, chain.LEFT])
    given = reward(found)
    assert given.tolist() == [reward.table[2, 1].item(), reward.table[3, 0].item()]
    assert given[0] > reward.table[2, 0]
    with pytest.raises(ConfigError, match="env=chain"):
        ExpRd(Config(), 0.9, CPU).augment_env(two_gap.TwoGap(two_gap.Config()))


def test_the_adaptive_table_follows_the_learner() -> None:
    env = chain.Chain(chain.Config(cells=6, start=2, slip=0.0, num_envs=2))
    env.reset(0)
    reward = ExpAdaRd(AdaptiveConfig(every=1), 0.9, CPU)
    reward.augment_env(env)
    before = reward.table.clone()
    found, step = rows(env, [2, 3], [chain.LEFT, chain.LEFT])
    reward.observe_step(found, torch.arange(2), step)
    assert reward.counts.sum() == 2 and torch.equal(reward.table, before)
    found, step = rows(env, [1, 3], [chain.LEFT, chain.LEFT])
    reward.observe_step(found, torch.arange(2), step)  # the first has ended
    assert reward.episodes == 0 and not reward.counts.any()
    assert reward.designer.keeps_optimal(reward.table.double().numpy())


SPEC = Spec({"cell": Leaf((1,), "uint8", 0, 5, SYMBOL)}, Leaf((), "int64", 0, 1), dt=0.1)


def explors(**settings: Any) -> ExploRs:
    return ExploRs(ExploRsConfig(**settings), SPEC, num_envs=2, device=CPU, seed=0)


def test_the_step_of_the_learned_reward_by_hand() -> None:
    """pi(a) A (R(a) - sum_b pi(b) R(b)): 0.25 * 2 * (1 - 0.25) and 0.75 * -1 * (0 - 0.25)."""
    reward, policy = torch.tensor([[1.0, 0.0]] * 2), torch.tensor([[0.25, 0.75]] * 2)
    worth = informative(reward, policy, torch.tensor([[0], [1]]), torch.tensor([2.0, -1.0]))
    assert float(worth) == pytest.approx((0.375 + 0.1875) / 2)


def test_the_bonus_by_hand() -> None:
    """1 / sqrt(1/4 + N) of at most 2, and the environment's reward beside it."""
    env = chain.Chain(chain.Config(cells=6, start=2, slip=0.0, num_envs=2))
    env.reset(0)
    reward = explors(most_bonus=2.0, env_weight=3.0)
    found, step = rows(env, [2, 4], [chain.LEFT, chain.RIGHT])
    assert reward.components(found)["visits"].tolist() == pytest.approx([2.0, 2.0])
    assert reward.components(found)["env"].tolist() == [0.0, 3.0]
    for _ in range(2):
        reward.observe_step(found, torch.arange(2), step)
    assert reward.components(found)["visits"].tolist() == pytest.approx([2 / 3, 2 / 3])


def test_it_rewards_what_led_to_success() -> None:
    """Episodes of one step in which the right action succeeds: R_phi tells the actions apart."""
    env = chain.Chain(chain.Config(cells=6, start=2, slip=0.0, bait=0.0, num_envs=2))
    env.reset(0)
    reward = explors(every=2, steps=50, lr=0.01)
    left, step = rows(env, [1, 1], [chain.LEFT, chain.LEFT])
    reward.observe_step(left, torch.arange(2), step)
    assert not reward.armed and "learned" not in reward.components(left)
    both, step = rows(env, [4, 4], [chain.RIGHT, chain.LEFT])
    step.terminated[1] = True
    reward.observe_step(both, torch.arange(2), step)
    assert reward.armed and reward.finished == 4
    assert [float(each["returns"][0]) for each in reward.finest] == [1.0, 0.0, 0.0, 0.0]
    reward.update(both)
    learned = reward.components(both)["learned"]
    assert learned[0] > learned[1] and reward.finished == 0


def test_the_best_and_the_newest_episodes_are_kept() -> None:
    reward = explors(recent=2, best=2)
    for value in (1.0, 3.0, 2.0, 0.0):
        reward._keep({"returns": torch.tensor([value])})
    assert [float(each["returns"]) for each in reward.finest] == [3.0, 2.0]
    assert [float(each["returns"]) for each in reward.newest] == [2.0, 0.0]


def test_it_needs_a_choice() -> None:
    numbers = SPEC.with_act(Leaf((2,), low=-1.0, high=1.0))
    with pytest.raises(ConfigError, match="one choice"):
        ExploRs(ExploRsConfig(), numbers, num_envs=2, device=CPU, seed=0)
