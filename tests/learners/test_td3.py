"""TD3, ReBRAC, PRDC and MEX: targets, delays, noise, penalties by hand; problems with an answer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.offline.prdc import nearest, tree_of
from embodied.learners.offline.rebrac import behaved_loss
from tests.builders import LINE, SPEC, make_learner, make_policy, still, transitions
from tests.learners.parts import constant, copies, moved, require_average, slopes

FIRST = 3  # the place of the first element of the action in the input of the critics
TD3, MEX = "off_policy.td3.Td3", "off_policy.mex.Mex"
REBRAC, PRDC = "offline.rebrac.Rebrac", "offline.prdc.Prdc"


def make(target: str = TD3, spec: Spec = SPEC, **settings: Any) -> Any:
    policy = make_policy("deterministic.Deterministic", spec, hidden=[32])
    return make_learner(target, policy, **{"hidden": [32], "batch_size": 4, **settings})


def with_next_actions(n: int) -> Tensors:
    torch.manual_seed(1)
    return {**transitions(n, SPEC), "next_action": torch.rand(n, 2) * 2 - 1}


@torch.no_grad()
def acts(params: list[torch.Tensor], action: tuple[float, float]) -> None:
    """Make the policy of these parameters do the same everywhere."""
    for parameter in params:
        parameter.zero_()
    params[-1].copy_(torch.atanh(torch.tensor(action)))


def test_target_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise 0.2 e is cut off at 0.7, the action at 1, the smaller critic counts, the end is r."""
    learner = make(noise_clip=0.7, hidden=[])
    slopes(learner.target, [1.0, 2.0], FIRST, base=10.0)
    acts(learner.target_actor_params, (0.4, 0.0))
    e = torch.tensor([[1.0, 9.0], [-9.0, 9.0], [9.0, 0.0], [1.0, 0.0]])
    monkeypatch.setattr(torch, "randn_like", lambda like: e.clone())
    discount = torch.tensor([0.9, 0.9, 0.5, 0.0])
    following = under(transitions(4, SPEC), "next_obs")
    backup = learner._backup(torch.arange(1.0, 5.0), discount, following)
    # a_0: 0.4 + 0.2; 0.4 - 0.7, where twice the slope is less; 0.4 + 0.7 is 1; the end.
    expected = [1 + 0.9 * 10.6, 2 + 0.9 * 9.4, 3 + 0.5 * 11, 4.0]
    torch.testing.assert_close(backup, torch.tensor(expected))
    assert not backup.requires_grad


def test_delays() -> None:
    """Policy after 3 updates, every second; target critics every third; both from the start on."""
    learner = make(policy_delay=2, target_delay=3, actor_start=3)
    parts = {
        "policy": learner.actor_params,
        "target_policy": learner.target_actor_params,
        "critic": learner.critic_params,
        "target": learner.target_params,
    }
    seen: dict[str, list[int]] = {name: [] for name in parts}
    for update in range(1, 9):
        before = {name: copies(part) for name, part in parts.items()}
        metrics = learner.update(transitions(4, SPEC))
        assert ("actor_loss" in metrics) == (update >= 4)
        for name, part in parts.items():
            seen[name] += [update] * any(moved(before[name], part))
    slow = {"policy": [4, 6, 8], "target_policy": [4, 6, 8], "target": [3, 6]}
    assert seen == {**slow, "critic": list(range(1, 9))}


def test_targets_move_by_tau_and_weights_decay() -> None:
    learner = make(policy_delay=1, target_delay=1, tau=0.3, weight_decay=0.25)
    targets = [*learner.target_params, *learner.target_actor_params]
    old = copies(targets)
    learner.update(transitions(4, SPEC))
    require_average(targets, old, [*learner.critic_params, *learner.actor_params], 0.3)
    assert [a.param_groups[0]["weight_decay"] for a in learner.optims.values()] == [0.25, 0.25]


def test_the_policy_climbs_the_first_critic() -> None:
    """With Q_1 = a_0 and Q_2 = -5 a_0 the action a_0 grows; the loss is minus its mean."""
    learner = make(actor_lr=0.02, hidden=[])
    slopes(learner.critic, [1.0, -5.0], FIRST)
    batch = transitions(16, SPEC)
    before, obs = copies(learner.critic_params), under(batch, "obs")
    expected = -learner.policy(obs)[:, 0].mean().item()
    assert learner._actor_step(batch)["actor_loss"].item() == pytest.approx(expected, rel=1e-5)
    for _ in range(100):
        learner._actor_step(batch)
    assert learner.policy(obs)[:, 0].min() > 0.9
    assert not any(moved(before, learner.critic_params))
    assert all(weight.grad is None and weight.requires_grad for weight in learner.critic_params)


def test_critics_see_exactly_what_they_are_given() -> None:
    spec = SPEC.with_obs(**{"critic/state": Leaf((1,))})
    learner = make(spec=spec, critic_obs=["critic/state"])
    assert learner.critic.encoder.size == 1 and learner.policy.encoder.size == 3
    obs = {"state": torch.zeros(1, 3), "critic/state": torch.zeros(1, 1)}
    action = torch.zeros(1, 2)
    q = learner.critic(obs, action)
    assert torch.equal(q, learner.critic(obs | {"state": torch.ones(1, 3)}, action))
    assert not torch.equal(q, learner.critic(obs | {"critic/state": torch.ones(1, 1)}, action))
    with pytest.raises(ConfigError, match='did you mean "critic/state"'):
        make(spec=spec, critic_obs=["critic/stat"])


def test_normalisers_are_the_same_everywhere() -> None:
    learner = make()
    rows = transitions(200, SPEC)
    rows["obs/state"] = 3 * rows["obs/state"] + 5
    learner.fit(rows)
    obs = under(rows, "obs")
    assert torch.equal(learner.policy(obs), learner.target_policy(obs))
    assert torch.equal(learner.critic(obs, rows["action"]), learner.target(obs, rows["action"]))
    assert learner.critic.encoder(obs).std(0).sub(1).abs().max() < 0.01


def test_categorical_target_by_hand() -> None:
    """Atoms 0 .. 4; the distribution of the critic with the smaller mean moves to r + d z."""
    learner = make(atoms=5, values=[0.0, 4.0])
    constant(learner.target.ensemble, 99 * torch.eye(5)[[3, 2]])  # one says 3, the other 2
    reward, discount = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([0.5, 0.5, 0.0])
    backup = learner._backup(reward, discount, under(transitions(3, SPEC), "next_obs"))
    by_hand = [[0, 0, 1, 0, 0], [0, 0.5, 0.5, 0, 0], [0, 0, 1, 0, 0]]
    torch.testing.assert_close(backup, torch.tensor(by_hand))


def test_the_policy_climbs_the_smaller_mean() -> None:
    learner = make(atoms=3, values=[-1.0, 1.0])
    batch = transitions(4, SPEC)
    obs = under(batch, "obs")
    means = learner.critic(obs, learner.policy(obs)).softmax(-1) @ torch.tensor([-1.0, 0.0, 1.0])
    loss = learner._actor_loss(batch)
    assert loss.item() == pytest.approx(-means.amin(0).mean().item(), rel=1e-5)


@torch.no_grad()
def test_every_episode_has_its_own_deviation() -> None:
    policy = make_policy("deterministic.Deterministic", SPEC, hidden=[8], std_range=[0.1, 0.5])
    obs = {"state": torch.zeros(3, 3)}
    e = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0], [1.0, 0.0, -9.0]])
    # Uniform from 0.1 to 0.5: the share of normal numbers below the last of e.
    noise = e[:, :2] * (0.1 + 0.4 * torch.tensor([0.5, 0.8413, 0.0]))[:, None]
    mean, carry = policy(obs), policy.initial(3)
    for sign in (1, -1):  # what was drawn first stays
        action, carry = policy.act(obs, carry, sign * e)
        expected = (mean + sign * noise).clamp(-1, 1)
        torch.testing.assert_close(action[:, 0], expected, atol=1e-4, rtol=0)
    calm, _ = policy.act(obs, policy.initial(3), policy.sample_noise(3))
    assert torch.equal(calm[:, 0], mean)


def test_the_loss_of_rebrac_by_hand_counts_values_in_their_own_units() -> None:
    q, apart = torch.tensor([2.0, -4.0], requires_grad=True), torch.tensor([1.0, 3.0])
    # 0.1 * 2 - (-1) / 3
    assert behaved_loss(q, 0.1 * apart.mean()).item() == pytest.approx(0.2 + 1 / 3)
    for scale in (1.0, 1000.0):
        (slope,) = torch.autograd.grad(behaved_loss(scale * q, 0.1 * apart.mean()), q)
        assert slope.tolist() == pytest.approx([-1 / 6, -1 / 6])  # 1 / N / mean |q|


@pytest.mark.parametrize(("distance", "over"), [("sum", 1), ("mean", 2)])
def test_the_critic_penalty_by_hand(distance: str, over: int) -> None:
    """Q' = min(4, 3): y = r + 0.9 (3 - 0.5 |a~' - a'|^2), without it where a' is unknown."""
    learner = make(REBRAC, critic_bc=0.5, distance=distance, target_noise=0.0)
    constant(learner.target.ensemble, [4.0, 3.0])
    batch = with_next_actions(3)
    batch["next_action"][2] = math.nan
    action = learner.target_policy({"state": batch["next_obs/state"]})
    apart = (action - batch["next_action"]).square().sum(1).nan_to_num(0.0) / over
    backup = batch["reward"] + 0.9 * (3 - 0.5 * apart)
    q = learner.critic({"state": batch["obs/state"]}, batch["action"])
    expected = (q - backup).square().mean(1).sum().item()
    assert learner._critic_loss(batch)[0].item() == pytest.approx(expected, rel=1e-5)


def test_without_penalties_rebrac_is_td3() -> None:
    """The critics' loss and its noise are TD3's, bit for bit."""
    losses = []
    for target, more in ((REBRAC, {"critic_bc": 0.0}), (TD3, {})):
        learner = make(target, layer_norm=False, **more)
        torch.manual_seed(2)
        losses.append(learner._critic_loss(with_next_actions(4))[0].item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["td3_bc", "smaller critic"])
def test_td3_bc_is_a_setting_of_rebrac_that_climbs_its_first_critic(name: str) -> None:
    """Fujimoto and Gu: -2.5 / mean|Q| Q_1 + mse, here divided by 2.5; else that of min Q."""
    settings: dict[str, Any] = {"actor_bc": 0.0}
    if name == "td3_bc":
        file = Path(__file__).parents[2] / "configs" / "learner" / "td3_bc.yaml"
        settings = yaml.safe_load(file.read_text())
        del settings["_target_"]
    learner = make(REBRAC, **settings)
    batch = with_next_actions(4)
    obs = {"state": batch["obs/state"]}
    action = learner.policy(obs)
    q = learner.critic(obs, action)
    value, penalty = q.amin(0), torch.zeros(())
    if name == "td3_bc":
        assert learner.columns == ()
        value, penalty = q[0], (action - batch["action"]).square().mean() / 2.5
    expected = penalty - value.mean() / value.abs().mean()
    assert learner._actor_loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)


def trained(target: str, **settings: Any) -> tuple[Tensors, Tensors]:
    learner = make(target, hidden=[16], batch_size=16, **settings)
    for seed in range(8):
        torch.manual_seed(seed)
        metrics = learner.update(transitions(16, SPEC))
    return learner.state_dict(), metrics


@pytest.mark.parametrize("atoms", [0, 11])
def test_mex_is_td3_without_optimism(atoms: int) -> None:
    td3, _ = trained(TD3, atoms=atoms)
    for optimism, same in ((0.0, True), (0.1, False)):
        mex, metrics = trained(MEX, atoms=atoms, optimism=optimism)
        assert all(torch.equal(mex[key], td3[key]) for key in td3) == same
        assert (metrics["promise"] == 0) == same


def test_its_rivals_are_recorded_neighbouring_and_random_actions() -> None:
    """Critics that answer a_0 (1 and -5 times), for a policy that does 0.4 everywhere."""
    learner = make(MEX, optimism=2.0, hidden=[])
    slopes(learner.critic, [1.0, -5.0], FIRST)
    acts(learner.actor_params, (0.4, 0.0))
    batch = transitions(1, SPEC) | {"action": torch.tensor([[-0.3, 0.0]])}
    q = learner.critic({"state": batch["obs/state"]}, batch["action"])
    torch.manual_seed(3)
    own, following, uniform = learner._proposals(batch)[0, :, 0].tolist()
    assert (own, following) == pytest.approx((0.4, 0.4)) and abs(uniform) < 1
    expected = 0.0
    for scale in (1.0, -5.0):
        rivals = scale * torch.tensor([-0.3, 0.4, uniform])
        expected += scale * 0.4 - rivals.logsumexp(0).item()
    torch.manual_seed(3)
    assert learner.critic_terms(batch, q).item() == pytest.approx(-2 * expected, rel=1e-5)


def test_optimism_of_data_raises_every_value() -> None:
    """The least of (Q - y)^2 - eta Q is eta / 2 above the target."""
    learner = make(MEX, optimism=0.8, raised="data")
    batch = transitions(4, SPEC) | {"discount": torch.zeros(4)}  # the target is the reward
    q = (batch["reward"] + 0.4).expand(2, 4).clone().requires_grad_()
    loss, _ = learner.critic_error(batch, q, batch["reward"])
    loss.backward()
    assert q.grad is not None and q.grad.abs().max() < 1e-6
    assert learner.promise.item() == pytest.approx(2 * 1.9)


TD3_BC = {"layer_norm": False, "critic_bc": 0.0, "distance": "mean", "value": "first", "hidden": []}


def test_the_nearest_by_tree_and_by_product_is_that_of_all_distances() -> None:
    torch.manual_seed(0)
    points, query = torch.randn(500, 5), torch.randn(40, 5)
    query[0] = points[123]
    by_hand = (query[:, None] - points).norm(dim=2).argmin(1)
    assert by_hand[0] == 123
    for tree in (tree_of(points), None):
        assert torch.equal(nearest(query, points, tree), by_hand)


def test_states_are_standardised_and_weighed() -> None:
    """Two transitions, whose states are standardised to -1 and 1 in every element."""
    learner = make(PRDC, LINE, beta=0.5, **TD3_BC)
    rows = still(torch.tensor([[3.0], [7.0]]), torch.tensor([[0.9], [-0.9]]), torch.zeros(2))
    with pytest.raises(ConfigError, match="searches a dataset"):
        learner._actor_loss(rows)
    learner.fit(rows)
    assert learner.points.tolist() == [[-0.5, pytest.approx(0.9)], [0.5, pytest.approx(-0.9)]]
    # At the first state (0.9 - a)^2 against 1 + (-0.9 - a)^2: equal at a = -1 / 3.6.
    for action, taken in ((-0.2, 0.9), (-0.3, -0.9)):
        given = torch.tensor([[action]])
        penalty = learner.actor_penalty({"obs/state": torch.tensor([[3.0]])}, given)
        assert penalty.item() == pytest.approx(0.01 * (action - taken) ** 2, rel=1e-4)


def test_a_large_beta_is_td3_bc() -> None:
    torch.manual_seed(1)
    rows = transitions(64, SPEC)
    prdc, other = make(PRDC, beta=1e3, **TD3_BC), make(REBRAC, **TD3_BC)
    other.load_state_dict(prdc.state_dict())
    for learner in (prdc, other):
        learner.fit(rows)
        learner._actor_loss(rows).backward()
    for one, two in zip(prdc.actor_params, other.actor_params, strict=True):
        torch.testing.assert_close(one.grad, two.grad)
