"""Bresa by hand: the risk's target, decisions that are held, who was proposed and who acted."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.build import build
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.off_policy.bresa import Bresa, Held, risk_target
from embodied.learners.off_policy.sac import Config as SacConfig
from embodied.learners.off_policy.sac import Sac
from policies.gaussian import Config as GaussianConfig
from policies.gaussian import Gaussian
from policies.wrappers.reflex_override import ReflexOverride
from policies.wrappers.reflex_rule import reflexing

SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.02)


def made(**settings: object) -> Bresa:
    torch.manual_seed(0)
    policy = build({"_target_": "policies.gaussian.Gaussian", "hidden": [16]}, spec=SPEC)
    node = {
        "_target_": "embodied.learners.off_policy.bresa.Bresa",
        "batch_size": 64,
        "hidden": [32],
        "risk_lr": 0.01,
        "recovery_lr": 0.01,
        "task": {"hidden": [16]},
        **settings,
    }
    return build(node, policy=policy, spec=SPEC)


def rows(n: int, violated: Tensor | None = None, action: Tensor | None = None) -> Tensors:
    """One tick is the whole world: going up is a violation, going down is none."""
    action = torch.rand(n, 1) * 2 - 1 if action is None else action
    bad = action[:, 0] > 0 if violated is None else violated
    return {
        "obs/state": torch.rand(n, 1) * 2 - 1,
        "action": action,
        "executed": action,
        "reward": torch.zeros(n),
        "discount": torch.zeros(n),
        "next_obs/state": torch.zeros(n, 1),
        "violated": bad,
        "reflex": torch.zeros(n),
    }


def test_the_target_of_the_risk_is_a_probability_of_violation() -> None:
    """c = 1: 1; the world ended well: 0; it goes on: gamma times what comes."""
    violated, goes_on = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    target = risk_target(violated, goes_on, 0.9, torch.full((4,), 0.5))
    assert torch.allclose(target, torch.tensor([1.0, 0.0, 0.45, 1.0]))


def test_the_risk_is_discounted_per_decision() -> None:
    """Five ticks a decision at 0.85: 0.85^(1/5) = 0.9680 a tick, of the worse critic's 0.5."""
    learner = made(risk_gamma=0.85, ticks=5)
    for parameter in learner.target.parameters():
        parameter.zero_()
    batch = {
        "violated": torch.zeros(2),
        "goes_on": torch.ones(2),
        "next_seen": torch.zeros(2, 1),
        "next_action": torch.zeros(2, 1),
    }
    assert torch.allclose(learner._risk_target(batch), torch.full((2,), 0.9680 * 0.5), atol=1e-4)


def test_what_was_interrupted_is_decided_anew_and_the_rest_goes_on() -> None:
    learner = made(ticks=10**9)
    batch = rows(4, violated=torch.zeros(4, dtype=torch.bool))
    batch["executed"] = torch.where(torch.arange(4)[:, None] < 2, batch["action"], -0.5)
    ticks = learner._ticks(batch)
    assert torch.equal(ticks["next_action"][:2], batch["action"][:2])
    assert not torch.equal(ticks["next_action"][2:], batch["action"][2:])
    assert torch.equal(ticks["executed"], batch["executed"])


def test_violations_are_remembered_the_newest_of_them() -> None:
    learner = made(memory=8)
    bad = torch.zeros(64, dtype=torch.bool)
    for number, where in enumerate(([3, 9], [], [1, 2, 60], [0, 7], [4, 5, 6])):
        bad[:] = False
        bad[where] = True
        batch = rows(64, violated=bad, action=torch.full((64, 1), number / 10))
        learner._remember(learner._ticks(batch))
    assert learner.stored == 8 and learner.cursor == 2
    kept = torch.tensor([0.4, 0.4, 0.2, 0.2, 0.2, 0.3, 0.3, 0.4])
    assert torch.allclose(learner.done[:, 0], kept)


def test_held_for_one_tick_it_is_sac() -> None:
    torch.manual_seed(0)
    policy = Gaussian(GaussianConfig(hidden=(16,)), SPEC)
    sac = Sac(SacConfig(hidden=(16,)), policy, SPEC)
    held = Held(SacConfig(hidden=(16,)), policy, SPEC)
    held.critic, held.target, held.log_alpha = sac.critic, sac.target, sac.log_alpha
    batch = rows(8) | {"reward": torch.randn(8), "discount": torch.full((8,), 0.9)}
    losses = []
    for learner, ticks in ((sac, 0), (held, 1), (held, 5)):
        if isinstance(learner, Held):
            learner.ticks = ticks
        torch.manual_seed(1)
        losses.append(learner._critic_loss(batch)[0])
    assert torch.allclose(losses[0], losses[1]) and not torch.allclose(losses[0], losses[2])


def test_it_learns_what_is_dangerous_and_how_to_get_away() -> None:
    learner = made(calm=150)
    for _ in range(149):
        metrics = learner.update(rows(64))
    assert not learner.policy.armed
    metrics = learner.update(rows(64))
    assert learner.policy.armed
    obs = {"state": torch.linspace(-1, 1, 9)[:, None]}
    up, down = (learner.policy.risk(obs, torch.full((9, 1), a)) for a in (0.9, -0.9))
    assert (up > 0.8).all() and (down < 0.2).all()
    assert (learner.policy.recover(learner.policy.encoder(obs)) < -0.2).all()
    assert metrics["risk_violating"] > 0.8


def test_without_a_reflex_it_is_never_armed() -> None:
    learner = made(calm=1, reflex=False)
    learner.update(rows(64))
    learner.update(rows(64))
    assert not learner.policy.armed


def test_the_task_hears_of_violations_only_where_they_cost_something() -> None:
    """Rewards are 0 and the world ends: the critic's error is Q^2 without a penalty."""
    losses = []
    for penalty in (0.0, 10.0):
        learner = made(penalty=penalty)
        for parameter in learner.task.critic.parameters():
            parameter.data.zero_()
        bad = torch.arange(64) < 16
        losses.append(learner.update(rows(64, violated=bad))["critic_loss"].item())
    assert losses == [0.0, 2 * 0.25 * 10.0**2]


def test_two_thresholds_and_a_least_duration() -> None:
    """Begins above 0.3, ends at 0.2 or below, lasts for three ticks at least."""
    acting, age, seen = False, 0, []
    for risk in (0.25, 0.31, 0.1, 0.1, 0.1, 0.31, 0.25, 0.25, 0.25, 0.2):
        acting = reflexing(risk, acting, age, 0.3, 0.2, 3)
        age = age + 1 if acting else 0
        seen.append(acting)
    assert seen == [False, True, True, True, False, True, True, True, True, False]


def play(policy: ReflexOverride, steps: int) -> tuple[list[float], list[Tensors]]:
    carry, done, kept = policy.initial(1), [], []
    for k in range(steps):
        obs = {"state": torch.full((1, 1), 0.1 * k)}
        action, carry = policy.act(obs, carry, policy.sample_noise(1, explore=True))
        done.append(action.item())
        kept.append(carry)
    return done, kept


@torch.no_grad()
def test_a_decision_is_held_and_an_interrupted_one_is_taken_anew() -> None:
    policy = made(ticks=3).policy
    done, kept = play(policy, 6)
    assert len(set(done[:3])) == len(set(done[3:])) == 1 and done[0] != done[3]
    assert all(carry["row/reflex"] == 0 for carry in kept)
    policy.armed.fill_(True)
    for bias in policy.risks.biases:
        bias.fill_(9.0)  # everything is dangerous
    done, kept = play(policy, 4)
    proposed = [carry["row/action"].item() for carry in kept]
    assert len(set(proposed)) == 4, "it is asked again at every tick"
    for k, carry in enumerate(kept):
        obs = {"state": torch.full((1, 1), 0.1 * k)}
        assert carry["row/reflex"] == 1 and carry["row/executed"].item() == done[k]
        assert done[k] == policy.recover(policy.encoder(obs)).item() != proposed[k]


def test_what_it_begins_with_is_held_too() -> None:
    first = made(ticks=3).policy.warmup_policy()
    assert isinstance(first, ReflexOverride)
    done, _ = play(first, 6)
    assert len(set(done[:3])) == 1 and done[0] != done[3]
