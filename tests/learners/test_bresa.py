"""Bresa by hand: the risk's target, decisions that are held, who was proposed and who acted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.off_policy.bresa import Bresa, Held, risk_target
from embodied.learners.off_policy.sac import Config as SacConfig
from embodied.learners.off_policy.sac import Sac
from embodied.policies import gaussian
from embodied.policies.gaussian import Gaussian
from embodied.policies.wrappers.reflex_override import ReflexOverride
from embodied.policies.wrappers.reflex_rule import reflexing
from tests.builders import make_learner, make_policy, still, transitions
from tests.learners.parts import constant

SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.02)


def made(**settings: object) -> Bresa:
    small = {"batch_size": 64, "hidden": [32], "risk_lr": 0.01, "recovery_lr": 0.01}
    policy = make_policy("gaussian.Gaussian", SPEC, hidden=[16])
    given = {**small, "task": {"hidden": [16]}, **settings}
    return make_learner("off_policy.bresa.Bresa", policy, **given)


def rows(n: int, violated: Tensor | None = None, action: Tensor | None = None) -> Tensors:
    """One tick is the whole world: going up is a violation, going down is none."""
    action = torch.rand(n, 1) * 2 - 1 if action is None else action
    bad = action[:, 0] > 0 if violated is None else violated
    more = {"executed": action, "violated": bad, "reflex": torch.zeros(n)}
    return still(torch.rand(n, 1) * 2 - 1, action, torch.zeros(n)) | more


def test_the_target_of_the_risk_is_a_probability_of_violation() -> None:
    """c = 1: 1; the world ended well: 0; it goes on: gamma times what comes."""
    violated, goes_on = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    target = risk_target(violated, goes_on, 0.9, torch.full((4,), 0.5))
    torch.testing.assert_close(target, torch.tensor([1.0, 0.0, 0.45, 1.0]))


def test_the_risk_is_discounted_per_decision() -> None:
    """Five ticks a decision at 0.85: 0.85^(1/5) = 0.9680 a tick, of the worse critic's 0.5."""
    learner = made(risk_gamma=0.85, decision_steps=5)
    for parameter in learner.target.parameters():
        parameter.zero_()
    none, zeros = torch.zeros(2), torch.zeros(2, 1)
    batch = {"violated": none, "goes_on": none + 1, "next_seen": zeros, "next_action": zeros}
    expected = torch.full((2,), 0.9680 * 0.5)
    torch.testing.assert_close(learner._risk_target(batch), expected, atol=1e-4, rtol=0)


def test_what_was_interrupted_is_decided_anew_and_the_rest_goes_on() -> None:
    learner = made(decision_steps=10**9)
    batch = rows(4, violated=torch.zeros(4, dtype=torch.bool))
    batch["executed"] = torch.where(torch.arange(4)[:, None] < 2, batch["action"], -0.5)
    risk_rows = learner._risk_transitions(batch)
    assert torch.equal(risk_rows["next_action"][:2], batch["action"][:2])
    assert not torch.equal(risk_rows["next_action"][2:], batch["action"][2:])
    assert torch.equal(risk_rows["executed"], batch["executed"])


def test_violations_are_remembered_the_newest_of_them() -> None:
    learner = made(violation_buffer=8)
    for number, where in enumerate(([3, 9], [], [1, 2, 60], [0, 7], [4, 5, 6])):
        bad = torch.isin(torch.arange(64), torch.tensor(where))
        batch = rows(64, violated=bad, action=torch.full((64, 1), number / 10))
        learner._remember(learner._risk_transitions(batch))
    assert learner.stored == 8 and learner.cursor == 2
    kept = torch.tensor([0.4, 0.4, 0.2, 0.2, 0.2, 0.3, 0.3, 0.4])
    torch.testing.assert_close(learner.done[:, 0], kept)


def test_held_for_one_tick_it_is_sac() -> None:
    torch.manual_seed(0)
    policy, config = Gaussian(gaussian.Config(hidden=(16,)), SPEC), SacConfig(hidden=(16,))
    sac, held = Sac(config, policy, SPEC), Held(config, policy, SPEC)
    held.critic, held.target, held.log_alpha = sac.critic, sac.target, sac.log_alpha
    batch = rows(8) | {"reward": torch.randn(8), "discount": torch.full((8,), 0.9)}

    def loss(learner: Sac, steps: int) -> Tensor:
        held.held_steps = steps
        torch.manual_seed(1)
        return learner._critic_loss(batch)[0]

    torch.testing.assert_close(loss(held, 1), loss(sac, 1))
    assert not torch.allclose(loss(held, 5), loss(sac, 1))


def test_it_learns_what_is_dangerous_and_how_to_get_away() -> None:
    learner = made(reflex_start=150)
    for update in range(150):
        assert not learner.policy.armed, update
        metrics = learner.update(rows(64))
    assert learner.policy.armed
    obs = {"state": torch.linspace(-1, 1, 9)[:, None]}
    up, down = (learner.policy.risk(obs, torch.full((9, 1), a)) for a in (0.9, -0.9))
    assert (up > 0.8).all() and (down < 0.2).all()
    assert (learner.policy.recover(learner.policy.encoder(obs)) < -0.2).all()
    assert metrics["risk_violating"] > 0.8


def test_violations_weigh_as_much_as_their_share() -> None:
    """p n / (v + k) each: with p = 0.25 in the first batch, 16 in it and 7 of the buffer, 16."""
    learner, violated = made(calibrated=True), (torch.arange(64) < 16).float()
    assert learner.extra == 7
    ones, none = torch.ones(64), torch.zeros(7)
    assert torch.equal(learner._risk_weights(torch.zeros(64)), torch.cat([ones, none]))
    learner.stored.fill_(5)
    weight = learner._risk_weights(violated)
    expected = torch.cat([torch.where(violated > 0, 16 / 23, ones), none + 16 / 23])
    torch.testing.assert_close(weight, expected)


def test_without_a_reflex_it_is_not_armed() -> None:
    learner = made(reflex=False, reflex_start=1)
    learner.update(rows(64))
    assert not learner.policy.armed


@pytest.mark.parametrize("penalty", [0.0, 10.0])
def test_the_task_hears_of_violations_only_where_they_cost_something(penalty: float) -> None:
    """Rewards are 0 and the world ends: the critic's error is Q^2 without a penalty."""
    learner = made(violation_penalty=penalty)
    constant(learner.task.critic.ensemble, [0.0, 0.0])
    metrics = learner.update(rows(64, violated=torch.arange(64) < 16))
    assert metrics["critic_loss"].item() == 2 * 0.25 * penalty**2


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
def alarm(policy: ReflexOverride) -> None:
    """Make everything dangerous to a policy whose reflex is armed."""
    policy.armed.fill_(True)
    for bias in policy.risks.biases:
        bias.fill_(9.0)


@torch.no_grad()
def test_a_decision_is_held_and_an_interrupted_one_is_taken_anew() -> None:
    policy = made(decision_steps=3).policy
    first = policy.warmup_policy()
    assert isinstance(first, ReflexOverride)
    for one in (policy, first):
        done, kept = play(one, 6)
        assert len(set(done[:3])) == len(set(done[3:])) == 1 and done[0] != done[3]
        assert all(carry["row/reflex"] == 0 for carry in kept)
    alarm(policy)
    done, kept = play(policy, 4)
    proposed = [carry["row/action"].item() for carry in kept]
    assert len(set(proposed)) == 4, "it is asked again at every tick"
    for k, carry in enumerate(kept):
        obs = {"state": torch.full((1, 1), 0.1 * k)}
        assert carry["row/reflex"] == 1 and carry["row/executed"].item() == done[k]
        assert done[k] == policy.recover(policy.encoder(obs)).item() != proposed[k]


def test_recovery_rl_asks_once_per_decision_and_holds_what_it_says() -> None:
    """A transition is a whole decision: one gamma_risk, and SAC's own target."""
    learner = made(rate="decision", decision_steps=5, risk_gamma=0.5)
    policy = learner.policy
    assert policy.chunk == 5 and learner.held_steps == learner.task.held_steps == 1
    alarm(policy)
    obs = {"state": torch.zeros(1, 1)}
    plan, carry = policy.act(obs, policy.initial(1), policy.sample_noise(1, explore=True))
    assert plan.shape == (1, 5, 1) and len(plan.unique()) == 1
    assert carry["row/executed"].item() == plan[0, 0, 0] and carry["row/reflex"] == 1


JOINTS = {"state": Leaf((2,)), "joints": Leaf((4,))}
ARM = Spec(JOINTS, Leaf((3,), low=-1.0, high=1.0), dt=0.02)


def arm(**settings: object) -> Bresa:
    small = {"batch_size": 8, "hidden": [8], "task": {"hidden": [16], "n_step": 5}}
    given = {**small, "reflex_obs": "joints", "held_stiffness": [1.0], **settings}
    policy = make_policy("gaussian.Gaussian", ARM, hidden=[16])
    return make_learner("off_policy.bresa.Bresa", policy, spec=ARM, **given)


def test_the_reflex_sees_its_own_observation_and_alone_changes_the_stiffness() -> None:
    policy = arm().policy
    assert policy.encoder.size == 4 and set(policy.base.spec.obs) == {"state"}
    obs = {"state": torch.randn(6, 2), "joints": torch.randn(6, 4)}
    action, _ = policy.act(obs, policy.initial(6), policy.sample_noise(6, explore=True))
    assert action.shape == (6, 1, 3) and (action[..., 2] == 1).all()
    alone = policy.without_reflex()
    assert alone.spec.act.size == 2 and alone.spec.dt == 5 * ARM.dt
    noise = torch.zeros(6, 2)
    expected = policy.base.act(obs, {}, noise)[0]
    assert torch.equal(alone.act({"state": obs["state"]}, {}, noise)[0], expected)


def test_n_steps_for_the_task_and_single_steps_for_the_risk() -> None:
    learner, n = arm(), 8
    batch = transitions(n, ARM) | {"violated": torch.zeros(n, dtype=torch.bool)}
    with pytest.raises(ConfigError, match="demos=null"):
        learner.update(batch)
    single = {f"single/{k}": torch.randn_like(v) for k, v in batch.items() if "next_obs" in k}
    single["single/discount"] = torch.zeros(n)
    learner.update(batch | single)
    rows_ = learner._risk_transitions(learner._single(batch | single))
    assert torch.equal(rows_["next_seen"], single["single/next_obs/joints"])
    assert (rows_["goes_on"] == 0).all()
    with pytest.raises(ConfigError, match=r"task\.actor_start must be 0"):
        arm(task={"hidden": [16], "n_step": 5, "actor_start": 1})
    with pytest.raises(ConfigError, match=r"task\.n_step=3 should be 1, or at least"):
        arm(task={"hidden": [16], "n_step": 3})


def test_a_task_policy_that_is_trained_already_stays_as_it_is(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "checkpoints" / "00000001", arm().policy, 1)
    learner = arm(task_run=str(tmp_path), task={"hidden": [16], "n_step": 1}, hidden=[4])
    before = [p.clone() for p in learner.policy.base.parameters()]
    batch = transitions(8, ARM) | {"violated": torch.zeros(8, dtype=torch.bool)}
    learner.fit(batch)
    metrics = learner.update(batch)
    assert "risk_loss" in metrics and "critic_loss" not in metrics
    assert all(map(torch.equal, before, learner.policy.base.parameters()))
    assert learner.policy.warmup_policy() is learner.policy
