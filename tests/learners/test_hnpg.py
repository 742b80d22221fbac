"""HNPG: what its critic is fitted to, and what PPO gets of the demonstrations' states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each
from embodied.learners.on_policy.hnpg import action_values
from tests.builders import LINE, SPEC, make_learner, make_policy, transitions
from tests.contract.test_learner import segment
from tests.learners.bandit import slopes


def make(spec: Spec = SPEC, chunk: int = 1, mean: float = 0.0, **settings: Any) -> Any:
    policy = make_policy(
        "diagonal_gaussian.DiagonalGaussian", spec, hidden=[16], log_std=-3.0, chunk=chunk
    )
    policy.net[-1].bias.data.fill_(mean)
    given = {"horizon": 6, "batch_size": 8, "lr": 3e-3, "normalize": False, **settings}
    return make_learner("on_policy.hnpg.Hnpg", policy, **given)


def test_the_target_follows_the_current_policy() -> None:
    """f' = 2 a: r + 2 d E a', a' of the policy, whatever action the data have."""
    learner = make(LINE, mean=0.3, value={"hidden": []}, samples=50)
    slopes(learner.target, [2.0, 2.0])
    batch = transitions(8, LINE)
    batch["discount"][-1] = 0.0
    mean = learner.policy({"state": batch["next_obs/state"]})[:, 0]
    expected = batch["reward"] + 2 * batch["discount"] * mean
    torch.testing.assert_close(learner._backup(batch), expected, atol=0.05, rtol=0)


def chain(n: int) -> Tensors:
    """The first state leads to the second, whose reward is the action; all actions equally."""
    state, action = torch.randint(2, (n, 1)).float(), torch.rand(n, 1) * 2 - 1
    return {
        "obs/state": state,
        "action": action,
        "reward": (state * action)[:, 0],
        "discount": 0.9 * (1 - state[:, 0]),
        "next_obs/state": torch.ones(n, 1),
    }


def test_demonstrations_of_any_actions_value_the_policy() -> None:
    """Not the best action of the data, as in Q-learning: 0.9 * 0.5, and f(s', a) = a."""
    torch.manual_seed(0)
    learner = make(LINE, mean=0.5, critic_steps=400, tau=0.1)
    learner.set_demonstrations(chain(2000))
    online = {key: value[:64] for key, value in chain(64).items()}
    online["target"] = learner._backup(online) * 0 + online["reward"]
    kept = online["obs/state"][:, 0] == 1  # returns where the episode ends are known
    learner._fit_critic(each(online, lambda leaf: leaf[kept]))
    first = {"state": torch.zeros(1, 1)}
    value = action_values(learner.critic, first, torch.zeros(1, 1)).item()
    assert value == pytest.approx(0.45, abs=0.1)
    second = {"state": torch.ones(2, 1)}
    found = action_values(learner.critic, second, torch.tensor([[-0.8], [0.8]]))
    assert found.tolist() == pytest.approx([-0.8, 0.8], abs=0.15)


def test_states_of_demonstrations_join_the_batch() -> None:
    learner = make(offline_states=0.5)
    shown = transitions(40, SPEC)
    learner.set_demonstrations(shown)
    batch = segment(learner, torch.Generator().manual_seed(0))
    table, metrics = learner._table(batch, {})
    assert len(table["old"]) == 24 + 12 and metrics["critic_loss"] > 0
    rows = each(table, lambda leaf: leaf[24:])
    obs = {"state": rows["obs/state"]}
    assert (rows["obs/state"][:, None] == shown["obs/state"]).all(2).any(1).all()
    log_prob, _ = learner.policy.evaluate_actions(obs, rows["action"])
    torch.testing.assert_close(rows["old"], log_prob)  # new actions: the ratio starts at 1
    q = action_values(learner.critic, obs, rows["action"])
    torch.testing.assert_close(rows["advantage"], q - rows["value"])


def test_the_actor_step_leaves_the_critic_alone() -> None:
    learner = make()
    learner.set_demonstrations(transitions(40, SPEC))
    batch = segment(learner, torch.Generator().manual_seed(0))
    table, _ = learner._table(batch, {})
    before = each(learner.critic.state_dict(), torch.clone)
    learner._learn(table, 8)
    assert all(torch.equal(value, before[k]) for k, value in learner.critic.state_dict().items())


def test_what_has_no_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="single actions"):
        make(chunk=2)
    with pytest.raises(ConfigError, match="no effect"):
        make(value_weight=1.0)
