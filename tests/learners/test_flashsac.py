"""FlashSAC: target, scale of the rewards and delays by hand; problems whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch

from embodied.buffers.replay import ReplayBuffer
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.learners.acceleration import accelerate
from embodied.learners.learner import Learner
from embodied.learners.off_policy.flashsac import Config, Flashsac, target_entropy
from embodied.training.collector import Collector
from tests.builders import make_learner, make_policy, node_of, still, transitions
from tests.learners.test_sac import score
from tests.toy_envs import Reach

SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


def make(spec: Spec = SPEC, **settings: object) -> Flashsac:
    policy = make_policy("block_gaussian.BlockGaussian", spec, width=16, depth=1)
    given = {"width": 16, "depth": 1, "batch_size": 4, **settings}
    return make_learner("off_policy.flashsac.Flashsac", policy, **given)


def test_target_by_hand() -> None:
    """Atoms -2 .. 2; of two certain critics the lower one counts; the end is r / s alone."""
    learner = make(atoms=5, high=2.0, scale=10.0, initial_temperature=0.5)
    net = learner.target.net
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        net.bias[0, 0] = torch.tensor([-99.0, -99.0, -99.0, 99.0, -99.0])  # 1
        net.bias[1, 0] = torch.tensor([-99.0, -99.0, 99.0, -99.0, -99.0])  # 0
    reward, discount = torch.tensor([5.0, 5.0, 15.0]), torch.tensor([0.5, 0.5, 0.0])
    log_prob = torch.tensor([0.0, -2.0, 7.0])
    obs = {"state": torch.randn(6, 3)}
    found = learner._backup(reward, discount, log_prob, obs, torch.zeros(6, 2))
    # 0.5 + 0.5 * 0; 0.5 + 0.5 * (0 + 0.5 * 2) = 1; 1.5
    by_hand = [[0, 0, 0.5, 0.5, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0.5, 0.5]]
    torch.testing.assert_close(found, torch.tensor(by_hand), atol=1e-5, rtol=0)


def test_critics_start_near_zero() -> None:
    """Without what the head adds: a normal of deviation 5 / 5 on the atoms from -5 to 5."""
    learner = make(high=5.0)
    with torch.no_grad():
        learner.critic.net.head.zero_()
    batch = transitions(4, SPEC)
    chances = learner.critic({"state": batch["obs/state"]}, batch["action"], False).softmax(-1)
    atoms = learner.support.atoms()
    torch.testing.assert_close(chances @ atoms, torch.zeros(2, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(chances @ atoms.square(), torch.ones(2, 4), atol=1e-2, rtol=0)


def test_rewards_are_scaled_by_the_mean_return() -> None:
    """3 * E|r| / (1 - E d) / 5; it only grows."""
    learner = make(headroom=3.0, high=5.0)
    rows = {"reward": torch.tensor([-2.0, 4.0]), "discount": torch.tensor([0.9, 0.7])}
    learner._rescale(rows)
    assert learner.scale.item() == pytest.approx(3 * 3 / (1 - 0.8) / 5)
    learner._rescale(rows | {"reward": torch.tensor([0.1, 0.1])})
    assert learner.scale.item() == pytest.approx(9.0)
    learner._rescale(rows | {"reward": torch.tensor([-4.0, -8.0])})
    assert learner.scale.item() == pytest.approx(18.0)
    fixed = make(scale=7.0)
    fixed._rescale(rows)
    assert fixed.scale.item() == 7.0


def test_the_entropy_sought() -> None:
    """That of N(0, 0.15^2): log(0.15 * 4.1327) = -0.478 per action element, or what is given."""
    assert target_entropy(Config()) == pytest.approx(-0.4782, abs=1e-4)
    assert make().entropy == pytest.approx(2 * -0.4782, abs=1e-3)
    assert target_entropy(Config(target_entropy=-1.0)) == -1.0
    assert math.isclose(make(target_entropy=-1.0).entropy, -2.0)


def test_both_halves_of_a_pass_share_their_statistics() -> None:
    learner = make()
    mean = learner.critic.net.norms[0].mean
    assert not mean.any()
    torch.manual_seed(1)
    batch = transitions(4, SPEC)
    learner.update(batch)
    seen = torch.cat([batch["obs/state"], batch["next_obs/state"]]).mean(0)
    torch.testing.assert_close(mean[0, 0, :3], 0.01 * seen)


def test_weights_keep_their_norm_and_the_policy_waits() -> None:
    learner = make(policy_delay=2)
    for update in range(1, 5):
        before = learner.policy.net.head.detach().clone()
        alpha = learner.log_alpha.item()
        metrics = learner.update(transitions(4, SPEC))
        moved = not torch.equal(before, learner.policy.net.head)
        assert moved == (update % 2 == 0) == (alpha != learner.log_alpha.item())
        assert ("actor_loss" in metrics) == (update >= 2)
        for net in (learner.critic.net, learner.policy.net):
            for weight in [*net.weights, net.head]:
                norms = weight.norm(dim=1)
                torch.testing.assert_close(norms, torch.ones_like(norms))
    assert all(weight.grad is None and weight.requires_grad for weight in learner.critic_params)


def test_value_of_a_constant_reward() -> None:
    """r = 8 for ever with discount 0.5: Q = 16, in the units of the world."""
    still: dict[str, object] = {"initial_temperature": 1e-6, "temperature_lr": 0.0}
    learner = make(SPEC, tau=0.05, critic_lr=3e-3, batch_size=64, headroom=3.0, **still)
    for _ in range(300):
        batch = transitions(64, SPEC)
        rewards = {"reward": torch.full((64,), 8.0), "discount": torch.full((64,), 0.5)}
        metrics = learner.update(batch | rewards)
    assert learner.scale.item() == pytest.approx(3 * 16 / 5)
    assert metrics["q_mean"].item() == pytest.approx(16.0, rel=0.06)


def test_bandit_is_solved() -> None:
    """The return of a is -|a - 0.5|, when every decision ends the world."""
    spec = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
    lrs = {"critic_lr": 3e-3, "actor_lr": 1e-3, "temperature_lr": 1e-2}
    learner = make(spec, batch_size=64, target_entropy=-3.0, **lrs)
    for _ in range(400):
        action, state = torch.rand(64, 1) * 2 - 1, torch.randn(64, 1)
        learner.update(still(state, action, -(action[:, 0] - 0.5).abs()))
    with torch.no_grad():
        obs = {"state": torch.randn(200, 1)}
        best = learner.policy.act(obs, {}, torch.zeros(200, 2))[0].mean().item()
    assert best == pytest.approx(0.5, abs=0.2)


def test_learns_to_reach() -> None:
    """The real collector, replay and update; a policy that stands still scores about -15."""
    torch.manual_seed(0)
    env = Reach(8)
    node = {"_target_": "embodied.policies.block_gaussian.BlockGaussian", "width": 32}
    policy = build(node, Policy, spec=env.spec)
    rates = {"critic_lr": 1e-3, "actor_lr": 1e-3, "temperature_lr": 1e-3}
    node = node_of("learners.off_policy.flashsac.Flashsac", width=32, batch_size=128)
    learner = build(node | rates, Learner, policy=policy, spec=env.spec)
    replay, rollout = ReplayBuffer(20_000), Collector(env, policy.warmup_policy(), 0.95, seed=0)
    for step in range(1000):
        if step == 50:
            rollout.act_with(policy)
        replay.add(rollout.step()[0])
        if step >= 50:
            learner.update(replay.sample(128))
    assert score(policy, Reach(50)) > -7.0  # full speed from everywhere scores about -3.5


def test_refusals() -> None:
    policy = build({"_target_": "embodied.policies.gaussian.Gaussian"}, Policy, spec=SPEC)
    with pytest.raises(ConfigError, match="block_gaussian"):
        make_learner("off_policy.flashsac.Flashsac", policy)
    with pytest.raises(ConfigError, match="cuda_graph=true needs a GPU"):
        accelerate(make(cuda_graph=True)).update(transitions(4, SPEC))
