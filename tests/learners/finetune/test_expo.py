"""EXPO and DSRL-NA: targets and losses by hand, what each step moves, problems to solve."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.finetune.dsrl_na import DsrlNa
from embodied.learners.finetune.expo import Expo
from embodied.learners.learner import RunPlan
from embodied.policies.steering import dsrl_na
from tests.builders import LINE, make_learner, make_policy, node_of, still
from tests.learners.parts import copies, moved, require_average, slopes

FLOW = node_of("policies.generative.flow.Flow", width=16, depth=1)
EDIT = node_of("policies.gaussian.Gaussian", hidden=[16])


def make(
    chunk: int = 1,
    n: int = 3,
    critics: int = 2,
    hidden: tuple[int, ...] = (16,),
    scale: float = 0.2,
    **settings: Any,
) -> Expo:
    critic = node_of("learners.critics.Critic", n=critics, hidden=list(hidden))
    parts = {"base": FLOW, "edit": EDIT, "critic": critic}
    policy = make_policy("wrappers.edit.Edit", LINE, chunk=chunk, n=n, scale=scale, **parts)
    return make_learner("finetune.expo.Expo", policy, **{"batch_size": 16, **settings})


def rows(n: int) -> Tensors:
    """Actions around 0; the world ends, and pays up to 1 at 0.4."""
    action = 0.15 * torch.randn(n, 1)
    zeros = torch.zeros(n, 1)
    return still(zeros, action, 1 - (action[:, 0] - 0.4).square())


def test_the_on_the_fly_target_by_hand() -> None:
    """Both critics in the subset: the argmax over base and edits of min(a, 3 a), and its value."""
    learner = make(hidden=(), n=4)
    torch.nn.init.normal_(learner.online.edit.net[-1].weight, std=3.0)
    slopes(learner.target, [1.0, 3.0])
    slopes(learner.critic, [-1.0, -1.0])  # the learning critics have no say in the target
    following, reward = {"state": torch.randn(8, 1)}, torch.arange(8.0)
    discount = torch.tensor([0.9] * 4 + [0.81] * 3 + [0.0])
    torch.manual_seed(4)
    best = learner.online.proposals(following, learner.online.sample_noise(8, True))[..., 0].amax(1)
    torch.manual_seed(4)
    backup = learner._backup(reward, discount, following)
    torch.testing.assert_close(backup, reward + discount * torch.minimum(best, 3 * best))


def test_the_base_that_learns_proposes_for_the_target() -> None:
    learner = make(hidden=(), n=4)
    slopes(learner.target, [1.0, 1.0])
    following, one = {"state": torch.randn(8, 1)}, torch.ones(8)
    backups = []
    for change in (None, learner.policy.base, learner.online.base):
        if change is not None:
            torch.nn.init.normal_(change.net.leave.weight)
        torch.manual_seed(1)
        backups.append(learner._backup(0 * one, one, following))
    assert torch.equal(backups[0], backups[1]) and not torch.equal(backups[1], backups[2])


def test_one_subset_chooses_and_another_one_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """With critics a and -a, one of each: chosen by either, valued by either, as often."""
    learner = make(hidden=(), subset=1)
    slopes(learner.target, [1.0, -1.0])
    state, one = {"state": torch.zeros(1, 1)}, torch.ones(1)
    noise = torch.tensor([[-0.5, 0.1, 0.7, 0.0, 0.0, 0.0]])
    monkeypatch.setattr(learner.online, "sample_noise", lambda n, explore: noise)
    proposals = learner.online.proposals(state, noise)
    high, low = proposals.max().item(), proposals.min().item()
    seen = torch.cat([learner._backup(0 * one, one, state) for _ in range(400)])
    for value in (high, -high, low, -low):
        share = (seen - value).abs().lt(1e-5).float().mean().item()
        assert share == pytest.approx(0.25, abs=0.09)


@pytest.mark.parametrize("scale", [0.2, 1.0])
def test_the_entropy_of_an_edit_is_sought_in_units_of_its_scale(scale: float) -> None:
    """D = 2, h = -0.5, as the density of an edit is that of the scaled one."""
    assert make(chunk=2, scale=scale).entropy == pytest.approx(2 * (-0.5 + math.log(scale)))


def test_the_edit_loss_by_hand() -> None:
    learner = make(hidden=(), critics=2, initial_temperature=0.3)
    slopes(learner.critic, [1.0, 5.0])
    batch = rows(16)
    batch["action"][0] = 0.95  # an edit may leave the box: it is cut off
    torch.manual_seed(6)
    loss, _ = learner._actor_loss(batch)
    torch.manual_seed(6)
    seen = {"state": batch["obs/state"], "base_action": batch["action"]}
    u, plain = learner.online.edit.sample(seen, torch.randn(16, 1))
    edited = (batch["action"] + 0.2 * u).clamp(-1, 1)
    expected = (0.3 * (plain - math.log(0.2)) - 3 * edited[:, 0]).mean()
    torch.testing.assert_close(loss, expected)


def test_what_each_step_moves() -> None:
    learner = make(base_tau=0.25)
    online = learner.online
    parts = {
        "base": learner.base_params,
        "edit": list(online.edit.parameters()),
        "critic": learner.critic_params,
        "acting base": learner.ema_base_params,
    }
    for step, changed in (
        (lambda: learner._base_step(rows(16)), {"base", "acting base"}),
        (lambda: learner.soft_actor_step(rows(16)), {"edit"}),
        (lambda: learner.critic_step(rows(16)), {"critic"}),
    ):
        before = {name: copies(part) for name, part in parts.items()}
        step()
        assert {name for name in parts if any(moved(before[name], parts[name]))} == changed
        if "base" in changed:
            require_average(parts["acting base"], before["acting base"], parts["base"], 0.25)
    acting = learner.policy
    assert acting.edit is online.edit and acting.critic is online.critic is learner.critic
    assert not any(weight.requires_grad for weight in acting.base.parameters())


SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def made(execute: int | None = None, **settings: Any) -> DsrlNa:
    torch.manual_seed(0)
    around = node_of("policies.steering.dsrl_na.DsrlNa", bound=2.0)
    inner = node_of("policies.gaussian.Gaussian", hidden=[32])
    base = build({**FLOW, "chunk": 2}, Policy, spec=SPEC)
    policy = dsrl_na.DsrlNa.wrap(base, around, inner)
    given = {"batch_size": 64, "hidden": [32], **settings}
    return make_learner("finetune.dsrl_na.DsrlNa", policy, RunPlan(execute=execute), **given)


def test_backup_is_the_least_value_of_what_the_base_does_at_the_chosen_noise() -> None:
    learner = made(entropy_in_backup=True, initial_temperature=0.5)
    reward, discount = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.9])
    state = {"state": torch.tensor([[0.1, 0.2], [0.3, 0.4]])}
    torch.manual_seed(5)
    found = learner._backup(reward, discount, state)
    torch.manual_seed(5)
    u, log_prob = learner.actor.sample(state, learner.actor.sample_noise(2, True))
    chunk, _ = learner.policy.base.act(state, {}, 2.0 * u)
    q = learner.target(state, chunk.flatten(1)).amin(0)
    torch.testing.assert_close(found, reward + discount * (q - 0.5 * log_prob))


def test_rows_hold_what_was_executed() -> None:
    learner = made()
    actor = Actor(learner.policy, 3, explore=True)
    first = actor({"state": torch.randn(3, 2)}, torch.ones(3, dtype=torch.bool))
    assert actor.stored_action.shape == (3, 2)
    assert torch.equal(actor.stored_action[:, :1], first)


def test_noises_are_the_actors_and_normal_ones() -> None:
    learner = made(actor_share=0.25)
    torch.manual_seed(1)
    u = learner._noises({"state": torch.zeros(4000, 2)})
    assert u[:1000].abs().max() <= 1
    assert (2.0 * u[1000:]).std().item() == pytest.approx(1, abs=0.03)
    assert made(actor_share=0.0)._noises({"state": torch.zeros(9, 2)}).shape == (9, 2)


def test_it_learns_from_what_another_policy_did_and_the_base_stays() -> None:
    """One decision pays -|a - a*|^2; the rows are uniform actions, none of them the base's. a* is
    what the base does at a noise within the bound, so the best that steering can do is 0."""
    learner = made(actor_lr=3e-3, critic_lr=3e-3, initial_temperature=1e-4)
    base, state = learner.policy.base, {"state": torch.zeros(1, 2)}
    before = copies(base.state_dict().values())

    def miss(u: Tensor) -> float:
        return float((learner.policy.play(state, u).flatten(1) - best).square().sum())

    best = learner.policy.play(state, torch.tensor([[0.8, -0.7]])).flatten(1)
    begun = miss(torch.zeros(1, 2))
    for _ in range(400):
        action = torch.rand(64, 2) * 2 - 1
        learner.update(still(torch.zeros(64, 2), action, -(action - best).square().sum(1)))
    ended = miss(learner.actor.act(state, {}, learner.actor.sample_noise(1))[0].squeeze(1))
    assert begun > 0.1 and ended < 0.1 * begun, (begun, ended)
    assert not any(moved(before, base.state_dict().values()))
    assert all(p.grad is None for p in base.parameters())


def test_part_of_a_chunk() -> None:
    """With execute=1 of 2, critics judge the one action that was played."""
    learner = made(execute=1)
    learner.update(still(torch.zeros(64, 2), torch.zeros(64, 1), torch.ones(64)))
    assert learner.critic.ensemble.weights[0].shape[1] == 2 + 1


def test_a_base_that_ignores_its_noise_and_too_large_a_subset_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"subset=3 is not in 1\.\.2"):
        make(subset=3)
    learner, given = made(), still(torch.zeros(64, 2), torch.zeros(64, 2), torch.zeros(64))
    learner.fit(given)
    learner.policy.base.get_buffer("range.radius").zero_()
    with pytest.raises(ConfigError, match="nothing to steer"):
        learner.fit(given)
