"""MDPO: exact divergences, a bandit whose answer is known, SAC as a special case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

from embodied.core.build import ConfigError
from embodied.core.spec import MASK, Leaf, Spec, mixed_leaf
from embodied.core.tensors import Tensors
from embodied.learners.learner import RunPlan
from tests.builders import make_learner, make_policy, transitions

OBS = {"state": Leaf((3,))}
LINE = Spec(OBS, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
ARMS = Spec(OBS, Leaf((), "int64", 0, 2), dt=0.1)
MIXED = Spec({**OBS, MASK: Leaf((5,), low=0.0, high=1.0)}, mixed_leaf((3, 0, 2)), dt=0.1)


def pair(target: str, spec: Spec, **settings: Any) -> tuple[Any, Any, Tensors]:
    """Two policies and five observations."""
    one, other = (make_policy(target, spec, seed, hidden=[8], **settings) for seed in (0, 1))
    for policy in (one, other):
        if getattr(policy, "log_std", None) is not None:
            policy.log_std.data.normal_()
    return one, other, {"state": torch.randn(5, 3)}


def test_divergences_are_those_of_torch() -> None:
    one, other, obs = pair("diagonal_gaussian.DiagonalGaussian", LINE, head=1.0)
    normal = [Normal(policy(obs), policy.log_std.exp()) for policy in (one, other)]
    torch.testing.assert_close(one.kl(obs, other), kl_divergence(*normal).sum(1))
    one, other, obs = pair("gaussian.Gaussian", LINE)
    normal = [Normal(mean, log_std.exp()) for mean, log_std in (one(obs), other(obs))]
    torch.testing.assert_close(one.kl(obs, other), kl_divergence(*normal).sum(1))
    one, other, obs = pair("categorical.Categorical", ARMS, head=1.0)
    choice = [Categorical(logits=policy(obs)[0][:, 0, 0]) for policy in (one, other)]
    torch.testing.assert_close(one.kl(obs, other), kl_divergence(*choice))


def test_a_forbidden_class_adds_no_divergence() -> None:
    one, other, obs = pair("categorical.Categorical", MIXED, head=1.0)
    obs[MASK] = torch.tensor([1.0, 0, 1, 1, 0]).expand(5, 5)
    (logs, mean), (other_logs, other_mean) = one(obs), other(obs)
    normal = kl_divergence(Normal(mean, one.log_std.exp()), Normal(other_mean, other.log_std.exp()))
    first = kl_divergence(
        *(Categorical(logits=part[:, 0, 0, [0, 2]]) for part in (logs, other_logs))
    )
    torch.testing.assert_close(one.kl(obs, other), first + normal.sum((1, 2)))


START = torch.tensor([0.5, 0.25, 0.25])
REWARD = torch.tensor([1.0, 0.0, -1.0])


def pull(learner: Any) -> Tensors:
    """A batch of four arms as often as START says, whose rewards are REWARD."""
    arm = torch.tensor([[0, 0, 1, 2]])
    yes = torch.ones(1, 4, dtype=torch.bool)
    state = torch.zeros(1, 4, 3)
    return {
        "obs/state": state,
        "next_obs/state": state,
        "action": arm,
        "reward": REWARD[arm],
        "discount": torch.zeros(1, 4),
        **{key: yes for key in ("ended", "first", "valid")},
    }


def bandit(**settings: Any) -> Any:
    policy = make_policy("categorical.Categorical", ARMS, hidden=[4])
    policy.net[-1].weight.data.zero_()
    policy.net[-1].bias.data.copy_(START.log())
    given = {"normalize": False, "advantage": "raw", "grad_clip": 0.0, "lr": 0.03, **settings}
    sizes = {"horizon": 1, "batch_size": 4, "epochs": 1}
    return make_learner("on_policy.mdpo.Mdpo", policy, RunPlan(decisions=8), **sizes, **given)


def chances(learner: Any) -> Tensor:
    return learner.policy({"state": torch.zeros(1, 3)})[0].detach().exp().flatten()


@pytest.mark.parametrize("t", [0.7, 2.0])
def test_one_iteration_is_the_step_of_mirror_descent(t: float) -> None:
    """pi_{k+1} = pi_k exp(t A) / Z, where PPO would stop at its clip."""
    learner = bandit(t=t, anneal=False, policy_steps=600)
    metrics = learner.update(pull(learner))
    expected = START * (t * REWARD).exp()
    expected = expected / expected.sum()
    torch.testing.assert_close(chances(learner), expected, atol=2e-3, rtol=0)
    divergence = (expected * (expected / START).log()).sum()
    assert metrics["kl"].item() == pytest.approx(divergence.item(), abs=5e-3)


def test_steps_become_smaller() -> None:
    """A run of two batches of four: t is 1, then a half; beyond the end it stays above 0."""
    learner = bandit()
    seen = [learner.update(pull(learner))["t"].item() for _ in range(3)]
    assert seen == pytest.approx([1.0, 0.5, 1e-3])


def test_a_policy_without_a_known_divergence_is_refused() -> None:
    inner = {"_target_": "embodied.policies.diagonal_gaussian.DiagonalGaussian"}
    policy = make_policy("recurrent.Recurrent", LINE, inner=inner)
    with pytest.raises(ConfigError, match="policy=diagonal_gaussian"):
        make_learner("on_policy.mdpo.Mdpo", policy)


def trained(target: str, updates: int = 12, **settings: Any) -> Any:
    given = {"hidden": [16], "batch_size": 16, "actor_lr": 3e-3, "temperature_lr": 0.0}
    given |= {"initial_temperature": 1.0, **settings}
    learner = make_learner(target, make_policy("gaussian.Gaussian", LINE, hidden=[16]), **given)
    for seed in range(updates):
        torch.manual_seed(seed)
        learner.update(transitions(16, LINE))
    return learner


def test_it_is_sac_where_c_is_lambda() -> None:
    sac = trained("off_policy.sac.Sac").state_dict()
    for c, same in ((1.0, True), (3.0, False)):
        mdpo = trained("off_policy.mdpo.MdpoOffPolicy", c=c, refresh=5).state_dict()
        assert all(torch.equal(mdpo[key], sac[key]) for key in sac) == same


def test_its_actor_loss_is_that_of_the_paper() -> None:
    """Against E[c log pi + (lambda - c) log pi_k - Q] over many samples."""
    learner = trained("off_policy.mdpo.MdpoOffPolicy", c=2.0, refresh=100)
    obs = {"state": torch.randn(3, 3).repeat(20_000, 1)}
    with torch.no_grad():
        loss, _ = learner._actor_loss({"obs/state": obs["state"]})
        action, log_prob = learner.policy.sample(obs, torch.randn(60_000, 2))
        before = learner.before.log_prob(obs, action)
        sampled = 2.0 * log_prob + (1.0 - 2.0) * before - learner.critic(obs, action).amin(0)
    assert (log_prob - before).mean() > 0.01
    assert loss.item() == pytest.approx(sampled.mean().item(), abs=0.02)


def test_the_copy_is_renewed_every_m_updates() -> None:
    def is_copy(updates: int) -> bool:
        learner = trained("off_policy.mdpo.MdpoOffPolicy", updates, refresh=4)
        held = trained("off_policy.mdpo.MdpoOffPolicy", 4, refresh=4).policy.state_dict()
        return all(
            torch.equal(held[key], value) for key, value in learner.before.state_dict().items()
        )

    assert [is_copy(updates) for updates in (4, 5, 8, 9)] == [False, True, True, False]
