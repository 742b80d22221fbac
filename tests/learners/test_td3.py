"""TD3 and ReBRAC: targets, delays, noise and penalties by hand; problems whose answer is known."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import yaml

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.off_policy.td3 import Td3
from embodied.learners.offline.rebrac import Rebrac, behaved_loss
from embodied.nn.optim import Adam
from tests.builders import make_learner, make_policy, transitions

SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


def make(spec: Spec = SPEC, **settings: object) -> Td3:
    policy = make_policy("deterministic.Deterministic", spec, hidden=[32])
    given = {"hidden": [32], "batch_size": 4, **settings}
    return make_learner("off_policy.td3.Td3", policy, **given)


def batch_of(n: int, spec: Spec = SPEC) -> Tensors:
    return transitions(n, spec, shift=0.1)


@torch.no_grad()
def slopes(learner: Td3, values: tuple[float, float]) -> None:
    """Make target critic i answer 10 + values[i] * a_0, and the target policy act 0.4 and 0."""
    ensemble = learner.target.ensemble
    for parameter in [*ensemble.parameters(), *learner.target_actor_params]:
        parameter.zero_()
    ensemble.weights[0][:, 3, :2] = torch.tensor([1.0, -1.0])  # relu(a_0), relu(-a_0)
    ensemble.weights[1][:, :2, 0] = torch.tensor(values)[:, None] * torch.tensor([1.0, -1.0])
    ensemble.biases[1].fill_(10.0)
    learner.target_actor_params[-1].copy_(torch.atanh(torch.tensor([0.4, 0.0])))


def test_target_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise 0.2 e is cut off at 0.5, the action at 1, the smaller critic counts, the end is r."""
    learner = make(noise_clip=0.5)
    slopes(learner, (1.0, 2.0))
    e = torch.tensor([[1.0, 9.0], [-9.0, 9.0], [4.0, 0.0], [1.0, 0.0]])
    monkeypatch.setattr(torch, "randn_like", lambda like: e.clone())
    reward = torch.tensor([1.0, 2.0, 3.0, 4.0])
    discount = torch.tensor([0.9, 0.9, 0.5, 0.0])
    backup = learner._backup(reward, discount, under(batch_of(4), "next_obs"))
    # a_0: 0.4 + 0.2; 0.4 - 0.5 (cut off), where twice the slope is less; 0.4 + 0.5; the end.
    expected = [1 + 0.9 * 10.6, 2 + 0.9 * 9.8, 3 + 0.5 * 10.9, 4.0]
    torch.testing.assert_close(backup, torch.tensor(expected))
    assert not backup.requires_grad


def test_smoothed_actions_stay_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(noise_clip=5.0, target_noise=2.0)
    slopes(learner, (1.0, 1.0))
    monkeypatch.setattr(torch, "randn_like", lambda like: torch.full_like(like, 2.0))
    one = torch.ones(1)
    backup = learner._backup(0 * one, one, under(batch_of(1), "next_obs"))
    assert backup.item() == pytest.approx(11.0)  # 0.4 + 4 is cut off at 1


def test_delays() -> None:
    """Policy after 3 updates, every second; target critics every third; both from the start on."""
    learner = make(policy_delay=2, target_delay=3, actor_start=3)
    parts = {
        "policy": learner.actor_params,
        "target_policy": learner.target_actor_params,
        "critic": learner.critic_params,
        "target": learner.target_params,
    }
    moved: dict[str, list[int]] = {name: [] for name in parts}
    for update in range(1, 9):
        before = {name: [p.detach().clone() for p in part] for name, part in parts.items()}
        metrics = learner.update(batch_of(4))
        assert ("actor_loss" in metrics) == (update >= 4)
        for name, part in parts.items():
            if any(not torch.equal(a, b) for a, b in zip(before[name], part, strict=True)):
                moved[name].append(update)
    slow = {"policy": [4, 6, 8], "target_policy": [4, 6, 8], "target": [3, 6]}
    assert moved == {**slow, "critic": list(range(1, 9))}


def test_targets_move_by_tau() -> None:
    learner = make(policy_delay=1, target_delay=1, tau=0.3)
    old = copy.deepcopy([*learner.target_params, *learner.target_actor_params])
    learner.update(batch_of(4))
    new = [*learner.critic_params, *learner.actor_params]
    for before, weight, after in zip(
        old, new, [*learner.target_params, *learner.target_actor_params], strict=True
    ):
        torch.testing.assert_close(after, 0.7 * before + 0.3 * weight.detach())


def test_the_policy_climbs_the_first_critic() -> None:
    """With Q_1 = a_0 and Q_2 = -5 a_0 the action a_0 grows; the loss is minus its mean."""
    learner = make(actor_lr=0.02)
    with torch.no_grad():
        ensemble = learner.critic.ensemble
        for parameter in ensemble.parameters():
            parameter.zero_()
        ensemble.weights[0][:, 3, :2] = torch.tensor([1.0, -1.0])
        signs = torch.tensor([1.0, -5.0])
        ensemble.weights[1][:, :2, 0] = signs[:, None] * torch.tensor([1.0, -1.0])
    batch = batch_of(16)
    before = [weight.detach().clone() for weight in learner.critic_params]
    acts = learner.policy(under(batch, "obs")).detach()
    loss = learner._actor_step(batch)["actor_loss"]
    assert loss.item() == pytest.approx(-acts[:, 0].mean().item(), rel=1e-5)
    for _ in range(100):
        learner._actor_step(batch)
    assert learner.policy(under(batch, "obs"))[:, 0].min() > 0.9
    assert all(torch.equal(a, b) for a, b in zip(before, learner.critic_params, strict=True))
    assert all(weight.grad is None and weight.requires_grad for weight in learner.critic_params)


def test_weight_decay_by_hand() -> None:
    """The first step of Adam is lr g / (|g| + eps); L2 makes g = gradient + decay * weight."""
    weight = torch.nn.Parameter(torch.tensor([2.0, -2.0, 2.0]))
    weight.grad = torch.tensor([0.0, 0.0, -0.5])
    adam = Adam([weight], lr=0.1, weight_decay=0.2)
    adam.step()
    # 0.4, -0.4 and -0.5 + 0.4: the signs decide where each goes.
    torch.testing.assert_close(weight.detach(), torch.tensor([1.9, -1.9, 2.1]))
    learner = make(weight_decay=0.25)
    assert [a.param_groups[0]["weight_decay"] for a in learner.optims.values()] == [0.25, 0.25]
    theirs = torch.nn.Parameter(torch.tensor([2.0, -2.0, 2.0]))
    theirs.grad = torch.tensor([0.0, 0.0, -0.5])
    torch.optim.Adam([theirs], 0.1, weight_decay=0.2, fused=True).step()
    assert torch.equal(weight, theirs)


def test_critics_see_exactly_what_they_are_given() -> None:
    spec = SPEC.with_obs(**{"critic/state": Leaf((1,))})
    learner = make(spec, critic_obs=["critic/state"])
    assert learner.critic.encoder.size == 1 and learner.policy.encoder.size == 3
    learner.update(batch_of(4, spec))
    obs = {"state": torch.zeros(1, 3), "critic/state": torch.zeros(1, 1)}
    action = torch.zeros(1, 2)
    q = learner.critic(obs, action)
    assert torch.equal(q, learner.critic(obs | {"state": torch.ones(1, 3)}, action))
    assert not torch.equal(q, learner.critic(obs | {"critic/state": torch.ones(1, 1)}, action))
    with pytest.raises(ConfigError, match='did you mean "critic/state"'):
        make(spec, critic_obs=["critic/stat"])


def test_counts_go_on_after_a_save() -> None:
    learner = make(policy_delay=3, actor_start=1)
    batches = [batch_of(4) for _ in range(6)]
    for batch in batches[:2]:
        learner.update(batch)
    other = make(policy_delay=3, actor_start=1)
    other.set_state(copy.deepcopy(learner.get_state()))
    for each in (learner, other):
        torch.manual_seed(1)
        for batch in batches[2:]:
            each.update(batch)
    for one, two in zip(learner.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    assert other.updates == 6


def test_normalisers_are_the_same_everywhere() -> None:
    learner = make()
    rows = batch_of(200)
    rows["obs/state"] = 3 * rows["obs/state"] + 5
    learner.fit(rows)
    obs = under(rows, "obs")
    assert torch.equal(learner.policy(obs), learner.target_policy(obs))
    assert torch.equal(learner.critic(obs, rows["action"]), learner.target(obs, rows["action"]))
    assert learner.critic.encoder(obs).std(0).sub(1).abs().max() < 0.01


def test_categorical_target_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Atoms 0 .. 4; the distribution of the critic with the smaller mean moves to r + d z."""
    learner = make(atoms=5, values=[0.0, 4.0])
    with torch.no_grad():
        for parameter in learner.target.ensemble.parameters():
            parameter.zero_()
        certain = torch.full((2, 1, 5), -99.0)
        certain[0, 0, 3] = certain[1, 0, 2] = 99.0  # one says 3, the other 2
        learner.target.ensemble.biases[-1].copy_(certain)
    reward, discount = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([0.5, 0.5, 0.0])
    backup = learner._backup(reward, discount, under(batch_of(3), "next_obs"))
    by_hand = [[0, 0, 1, 0, 0], [0, 0.5, 0.5, 0, 0], [0, 0, 1, 0, 0]]
    torch.testing.assert_close(backup, torch.tensor(by_hand))
    assert not backup.requires_grad


def test_the_policy_climbs_the_smaller_mean() -> None:
    learner = make(atoms=3, values=[-1.0, 1.0])
    batch = batch_of(4)
    obs = under(batch, "obs")
    means = learner.critic(obs, learner.policy(obs)).softmax(-1) @ torch.tensor([-1.0, 0.0, 1.0])
    loss = learner._actor_loss(batch)
    assert loss.item() == pytest.approx(-means.amin(0).mean().item(), rel=1e-5)


def test_every_episode_has_its_own_deviation() -> None:
    node = {"_target_": "embodied.policies.deterministic.Deterministic", "hidden": [8]}
    policy = build({**node, "std_range": [0.1, 0.5]}, Policy, spec=SPEC)
    obs = {"state": torch.zeros(3, 3)}
    e = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0], [1.0, 0.0, -9.0]])
    with torch.no_grad():
        mean = policy(obs)
        action, carry = policy.act(obs, policy.initial(3), e)
        chances = torch.tensor([0.5, 0.8413, 0.0])
        stds = 0.1 + 0.4 * chances  # uniform: the share of normal numbers below e
        expected = (mean + e[:, :2] * stds[:, None]).clamp(-1, 1)
        torch.testing.assert_close(action[:, 0], expected, atol=1e-4, rtol=0)
        again, kept = policy.act(obs, carry, -e)  # what was drawn first stays
        expected = (mean - e[:, :2] * stds[:, None]).clamp(-1, 1)
        torch.testing.assert_close(again[:, 0], expected, atol=1e-4, rtol=0)
        assert torch.equal(kept["explore/std"], carry["explore/std"])
        calm, _ = policy.act(obs, policy.initial(3), policy.sample_noise(3))
        assert torch.equal(calm[:, 0], mean)


CONFIGS = Path(__file__).parents[2] / "configs" / "learner"


def make_rebrac(target: str = "offline.rebrac.Rebrac", **settings: object) -> Td3:
    policy = make_policy("deterministic.Deterministic", SPEC, hidden=[32])
    return make_learner(target, policy, **{"hidden": [32], "batch_size": 4, **settings})


def batch_of_rebrac(n: int) -> Tensors:
    torch.manual_seed(1)
    return {**transitions(n, SPEC), "next_action": torch.rand(n, 2) * 2 - 1}


@torch.no_grad()
def constant_targets(learner: Td3, values: list[float]) -> None:
    for parameter in learner.target.ensemble.parameters():
        parameter.zero_()
    learner.target.ensemble.biases[-1].copy_(torch.tensor(values).view(-1, 1, 1))


def test_the_actor_loss_by_hand_counts_values_in_their_own_units() -> None:
    q, apart = torch.tensor([2.0, -4.0], requires_grad=True), torch.tensor([1.0, 3.0])
    # 0.1 * 2 - (-1) / 3
    assert behaved_loss(q, 0.1 * apart.mean()).item() == pytest.approx(0.2 + 1 / 3)
    slopes = []
    for scale in (1.0, 1000.0):
        q.grad = None
        behaved_loss(scale * q, 0.1 * apart.mean()).backward()
        assert q.grad is not None
        slopes.append(q.grad.tolist())
    assert slopes[0] == pytest.approx(slopes[1])
    assert slopes[0] == pytest.approx([-1 / 6, -1 / 6])  # 1 / N / mean |q|


@pytest.mark.parametrize(("distance", "over"), [("sum", 1), ("mean", 2)])
def test_the_critic_penalty_by_hand(distance: str, over: int) -> None:
    """Q' = min(4, 3): y = r + 0.9 (3 - 0.5 |a~' - a'|^2), without it where a' is unknown."""
    learner = make_rebrac(critic_bc=0.5, distance=distance, target_noise=0.0)
    constant_targets(learner, [4.0, 3.0])
    batch = batch_of_rebrac(3)
    batch["next_action"][2] = math.nan
    action = learner.target_policy({"state": batch["next_obs/state"]})
    apart = (action - batch["next_action"]).square().sum(1) / over
    backup = batch["reward"] + 0.9 * (3 - 0.5 * torch.stack([*apart[:2], torch.tensor(0.0)]))
    q = learner.critic({"state": batch["obs/state"]}, batch["action"])
    expected = (q - backup).square().mean(1).sum().item()
    loss, _ = learner._critic_loss(batch)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_without_penalties_it_is_td3() -> None:
    """The critics' loss and its noise are TD3's, bit for bit."""
    losses = []
    for target, more in (("offline.rebrac.Rebrac", {"critic_bc": 0.0}), ("off_policy.td3.Td3", {})):
        learner = make_rebrac(target, layer_norm=False, **more)
        torch.manual_seed(2)
        losses.append(learner._critic_loss(batch_of_rebrac(4))[0].item())
    assert losses[0] == losses[1]


def test_td3_bc_is_a_setting() -> None:
    """Fujimoto and Gu: -2.5 / mean|Q| Q_1 + mse, here divided by 2.5."""
    node = yaml.safe_load((CONFIGS / "td3_bc.yaml").read_text())
    learner = make_rebrac(**{key: value for key, value in node.items() if key != "_target_"})
    assert isinstance(learner, Rebrac) and learner.columns == ()
    batch = batch_of_rebrac(4)
    obs = {"state": batch["obs/state"]}
    action = learner.policy(obs)
    q = learner.critic(obs, action)[0]
    mse = torch.nn.functional.mse_loss(action, batch["action"])
    expected = (-2.5 / q.abs().mean() * q.mean() + mse) / 2.5
    assert learner._actor_loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_actor_climbs_the_smaller_critic() -> None:
    learner = make_rebrac(actor_bc=0.0)
    batch = batch_of_rebrac(4)
    obs = {"state": batch["obs/state"]}
    q = learner.critic(obs, learner.policy(obs)).amin(0)
    assert learner._actor_loss(batch).item() == pytest.approx((-q.mean() / q.abs().mean()).item())
