"""PPO: what a batch teaches, memory lived through again, schedules, a problem to solve."""

from __future__ import annotations

import inspect
import math
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.core.spec import MASK, Leaf, Spec, mixed_leaf
from embodied.core.tensors import Tensors, each, nest, take
from embodied.envs.gym import Config as GymConfig
from embodied.envs.gym import Gym
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy.ppo import Ppo
from embodied.learners.on_policy.ppo_parts import (
    Moments,
    ObservationStats,
    RecurrentPolicy,
    RewardScaler,
    StochasticPolicy,
    clip_loss,
    clip_norm,
    gae,
    normalized,
    variance,
)
from embodied.policies.networks.encoders import Encoder
from embodied.policies.recurrent import inner_obs
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop
from embodied.training.trainer import Every, Trainer
from tests.builders import make_learner, node_of
from tests.learners.parts import copies, moved
from tests.toy_envs import Config, Counter

OBS = {"state": Leaf((3,)), "critic/truth": Leaf((2,))}
SPECS = {
    "normal": Spec(OBS, Leaf((2,), low=-1.0, high=1.0), dt=0.1),
    "categorical": Spec(OBS, Leaf((), "int64", 0, 3), dt=0.1),
    "masked": Spec({**OBS, MASK: Leaf((5,), low=0.0, high=1.0)}, mixed_leaf((3, 0, 2)), dt=0.1),
}
NODES: dict[str, dict[str, Any]] = {
    "normal": node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[8], head=1.0),
    "categorical": {"_target_": "embodied.policies.categorical.Categorical", "hidden": [8]},
    "masked": {"_target_": "embodied.policies.categorical.Categorical", "hidden": [8], "head": 1.0},
}
MEMORY = {"_target_": "embodied.policies.recurrent.Recurrent", "width": 5}
ALL = [(name, memory) for name in NODES for memory in (False, True)]


def make(name: str = "normal", memory: bool = False, seed: int = 0, **settings: Any) -> Ppo:
    torch.manual_seed(seed)
    spec = SPECS[name]
    node = {**MEMORY, "inner": NODES[name]} if memory else NODES[name]
    given = {"horizon": 6, "batch_size": 12, "epochs": 1, "value": {"hidden": [8]}, **settings}
    return make_learner(
        "on_policy.ppo.Ppo", build(node, Policy, spec=spec), run=RunPlan(decisions=240), **given
    )


def played(learner: Ppo, times: int = 6, rows: int = 4, padded: bool = False) -> Tensors:
    """A batch that the policy has really played, step by step, on random observations."""
    torch.manual_seed(1)
    actor = Actor(learner.policy, rows, explore=True)
    actor.carry = each(actor.carry, lambda leaf: 0.5 * torch.randn(leaf.shape))
    carry = {k: v for k, v in actor.carry.items() if not k.startswith("row/")}
    obs = {"state": torch.randn(times, rows, 3), "critic/truth": torch.randn(times, rows, 2)}
    if MASK in learner.policy.spec.obs:
        obs[MASK] = (torch.rand(times, rows, 5) < 0.5).float()
        obs[MASK][..., [1, 3]] = 1.0
    first = torch.rand(times, rows) < 0.3
    action = []
    for t in range(times):
        actor(each(obs, lambda leaf, t=t: leaf[t]), first[t])
        action.append(actor.stored_action)
    valid = torch.ones(times, rows, dtype=torch.bool)
    if padded:
        valid[-2:, 1] = False
    return {
        **nest(obs, "obs"),
        **nest({k: v.roll(-1, 0) for k, v in obs.items()}, "next_obs"),
        "action": torch.stack(action),
        "reward": torch.randn(times, rows),
        "discount": torch.full((times, rows), 0.9),
        "ended": first.roll(-1, 0),
        "first": first,
        "valid": valid,
        **nest(carry, "carry"),
    }


@pytest.mark.parametrize(("name", "memory"), ALL)
def test_policies_are_found_on_python_3_12(name: str, memory: bool) -> None:
    """There `isinstance` looks attributes up without `__getattr__`, which is where a Module has its
    submodules."""
    policy, protocol = make(name, memory).policy, RecurrentPolicy if memory else StochasticPolicy
    methods = {key for key in vars(protocol) if not key.startswith("_")}
    for member in methods | set(protocol.__annotations__):
        inspect.getattr_static(policy, member)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "memory"), ALL)
def test_the_first_ratio_is_one(name: str, memory: bool, padded: bool) -> None:
    """Against densities noted while acting, decision by decision."""
    learner = make(name, memory, normalize=False)
    batch = played(learner, padded=padded)
    acted = densities(learner, batch)
    table, _ = learner._table(batch, carry_of(batch))
    old, expected = (table["old"].mT, acted) if memory else (table["old"], acted[batch["valid"]])
    torch.testing.assert_close(old, expected, atol=1e-5, rtol=0)
    part = take(table, torch.randperm(len(table["old"]))[:3])
    log_prob, _ = learner._evaluate_actions(part)
    torch.testing.assert_close((log_prob - part["old"]).exp(), torch.ones_like(log_prob))
    _, metrics = learner._loss(part)
    assert abs(metrics["kl"]) < 1e-5 and not metrics["clipped"]


@torch.no_grad()
def densities(learner: Ppo, batch: Tensors) -> Tensor:
    """log pi of every action, one decision after another with the policy's own step."""
    policy = cast(Any, learner.policy)
    found = []
    h = batch.get("carry/h")
    for t in range(len(batch["reward"])):
        obs, inner = {name: batch[f"obs/{name}"][t] for name in policy.spec.obs}, policy
        if h is not None:
            h = policy.memory(obs, torch.where(batch["first"][t][:, None], torch.zeros_like(h), h))
            obs, inner = inner_obs(policy.inner, h, obs), policy.inner
        found.append(inner.evaluate_actions(obs, batch["action"][t])[0])
    return torch.stack(found)


@pytest.mark.parametrize(("name", "memory"), ALL)
def test_only_valid_decisions_teach(name: str, memory: bool) -> None:
    """What is in the padding changes neither weights nor normalisers."""
    after = []
    for junk in (0.0, 50.0):
        learner = make(name, memory, scale_rewards=True, epochs=2)
        batch = played(learner, padded=True)
        for key in ("obs/state", "next_obs/state", "reward", "obs/critic/truth"):
            batch[key][~batch["valid"]] = junk
        torch.manual_seed(2)
        learner.update(batch)
        after.append({k: v for k, v in learner.state_dict().items() if "memory" not in k})
    torch.testing.assert_close(after[0], after[1])


@torch.no_grad()
def test_values_with_memory_by_hand() -> None:
    """V of a successor is one more step of the critic's memory; the next batch goes on from it."""
    learner = make(memory=True, normalize=False)
    batch, critic = played(learner), cast(Any, learner.value)
    _, value, following, kept = learner._evaluate_recurrent(batch, {"h": batch["carry/h"]})
    assert not kept["memory"].any()
    h = torch.zeros(4, 5)
    for t in range(6):
        now, after = ({k: batch[f"{when}/{k}"][t] for k in OBS} for when in ("obs", "next_obs"))
        h = critic.memory(now, torch.where(batch["first"][t][:, None], torch.zeros_like(h), h))
        torch.testing.assert_close(value[t], critic.net(h).squeeze(1))
        torch.testing.assert_close(following[t], critic.net(critic.memory(after, h)).squeeze(1))
    torch.testing.assert_close(learner.memory, h)


def heard(learner: Ppo, monkeypatch: pytest.MonkeyPatch) -> list[Tensors]:
    """The minibatches that the learner's steps will be given."""
    seen: list[Tensors] = []
    step = learner._step
    monkeypatch.setattr(learner, "_step", lambda rows: (seen.append(rows), step(rows))[1])
    return seen


def test_minibatches_are_every_decision_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(epochs=2, batch_size=6)
    parts = heard(learner, monkeypatch)
    learner.update(played(learner))
    seen = [rows["target"] for rows in parts]
    assert [len(part) for part in seen] == [6] * 8
    one, other = torch.cat(seen[:4]), torch.cat(seen[4:])
    assert torch.equal(one.sort()[0], other.sort()[0]) and not torch.equal(one, other)


def test_with_memory_minibatches_are_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(memory=True, batch_size=12)
    parts = heard(learner, monkeypatch)
    learner.update(played(learner))
    assert [rows["old"].shape for rows in parts] == [(2, 6), (2, 6)]


def test_the_loss_by_hand() -> None:
    """With zero biases the mean is 0, the deviation 1 and V = 0; the ratio is 1.5."""
    learner = make(advantage="raw", entropy=0.1, value_weight=2.0, normalize=False)
    log_prob = -0.5 - math.log(2 * math.pi)
    rows = {
        "obs/state": torch.zeros(1, 3),
        "obs/critic/truth": torch.zeros(1, 2),
        "action": torch.tensor([[1.0, 0.0]]),
        "advantage": torch.tensor([2.0]),
        "value": torch.zeros(1),
        "target": torch.tensor([3.0]),
        "old": torch.tensor([log_prob - math.log(1.5)]),
    }
    entropy = math.log(2 * math.pi) + 1
    expected = {"policy_loss": -2.4, "value_loss": 4.5, "entropy": entropy, "clipped": 1.0}
    expected["kl"] = 0.5 - math.log(1.5)
    loss, parts = learner._loss(rows)  # the ratio is held at 1.2
    assert {key: parts[key].item() for key in expected} == pytest.approx(expected, rel=1e-4)
    assert loss.item() == pytest.approx(-2.4 + 2 * 4.5 - 0.1 * entropy)
    loss.backward()
    bias = learner.policy.net[-1].bias
    assert not bias.grad.any()  # held: the policy's loss has no gradient
    rows["old"] += math.log(1.5)
    learner.zero_grad()
    learner._loss(rows)[0].backward()
    assert bias.grad[0].item() == pytest.approx(-2.0)  # -A d log_prob / d mean, and z = 1


@pytest.mark.parametrize(("name", "memory"), ALL)
def test_the_gradient_is_that_of_the_loss(name: str, memory: bool) -> None:
    """Against autograd on the formula at the top of ppo.py."""
    learner = make(name, memory, entropy=0.3, value_weight=0.7, advantage="raw")
    table, _ = learner._table(batch := played(learner, padded=memory), carry_of(batch))
    generator = torch.Generator().manual_seed(0)
    table["old"] = table["old"] + 0.3 * torch.randn(table["old"].shape, generator=generator)
    learner._loss(table)[0].backward()
    weights = [p for p in learner.parameters() if p.requires_grad]
    found = [p.grad.clone() for p in weights if p.grad is not None]
    assert len(found) == len(weights)
    learner.zero_grad()
    log_prob, entropy = learner._evaluate_actions(table)
    value = learner._values(table)
    ratio, gain = (log_prob - table["old"]).exp(), table["advantage"]
    policy = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    each_one = policy + 0.7 * 0.5 * (value - table["target"]) ** 2 - 0.3 * entropy
    (each_one[table["valid"]] if memory else each_one).mean().backward()
    for got, weight in zip(found, weights, strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(got, weight.grad, atol=1e-6, rtol=1e-4)


def carry_of(batch: Tensors) -> Tensors:
    return {k[6:]: v for k, v in batch.items() if k.startswith("carry/")}


def test_gradients_are_clipped_together() -> None:
    grads = [torch.tensor([3.0]), torch.tensor([[4.0]])]
    assert clip_norm(grads, 1.0).item() == pytest.approx(5)
    assert [g.item() for g in grads] == pytest.approx([0.6, 0.8])
    assert clip_norm(grads, 2.0).item() == pytest.approx(1)
    assert [g.item() for g in grads] == pytest.approx([0.6, 0.8])


def rate(learner: Ppo) -> float:
    return float(next(iter(learner.optims.values())).param_groups[0]["lr"])


def test_schedules() -> None:
    """A run of 240 decisions is ten updates of 24."""
    linear, cosine = make(schedule="linear", lr=1e-2), make(schedule="cosine", lr=1e-2)
    for done in range(3):
        for learner in (linear, cosine):
            learner.update(played(learner))
        assert rate(linear) == pytest.approx(1e-2 * (1 - done / 10))
        assert rate(cosine) == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * done / 10)))


def test_the_adaptive_rate_follows_the_divergence() -> None:
    learner = make(schedule="adaptive", target_kl=0.01, lr=1e-3, critic_lr=1e-4)
    learner._set_rates()
    seen = [0.021, 0.019, 0.004, 0.006, *[0.0] * 20]
    expected = [1 / 1.5, 1 / 1.5, 1.0, 1.0, *(min(1.5**k, 10.0) for k in range(1, 21))]
    for kl, factor in zip(seen, expected, strict=True):
        learner.lr.adapt(torch.tensor(kl), learner.config.target_kl)
        learner.lr.write(learner.optims.values())
        assert rate(learner) == pytest.approx(1e-3 * factor)
    assert float(learner.optims["critic"].param_groups[0]["lr"]) == pytest.approx(1e-3)


@pytest.mark.parametrize(("stop", "epochs"), [(1e-9, 2), (0.0, 5)])
def test_no_more_epochs_beyond_the_divergence(
    stop: float, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make(epochs=5, batch_size=24, stop_kl=stop, lr=1e-2)
    parts = heard(learner, monkeypatch)
    learner.update(played(learner))
    assert len(parts) == epochs  # the first epoch's only minibatch has a divergence of 0


def test_a_new_normaliser_is_used_at_once_and_changes_after_updates_only() -> None:
    learner = make(normalize=True)
    batch = played(learner)
    learner.update(batch)
    mean, norm = batch["obs/state"].flatten(0, 1).mean(0), cast(Any, learner.policy).encoder.norm
    torch.testing.assert_close(norm.mean, mean)
    assert len(learner.value.encoder.norm.mean) == 5  # it sees critic/truth too
    seen: list[Tensor] = []
    table = learner._table
    learner._table = lambda *given: (seen.append(norm.mean.clone()), table(*given))[1]  # type: ignore[method-assign]
    learner.update({**batch, "obs/state": batch["obs/state"] + 2})
    torch.testing.assert_close([*seen, norm.mean], [mean, mean + 1])


def test_deviation_that_does_not_learn() -> None:
    node = {**NODES["normal"], "learn_std": False, "log_std": -1.0}
    policy = build(node, Policy, spec=SPECS["normal"])
    fixed = make_learner("on_policy.ppo.Ppo", policy, horizon=6, batch_size=12, epochs=1)
    fixed.update(played(fixed))
    assert (fixed.policy.log_std == -1).all()


def test_only_the_played_part_of_a_chunk_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    env = Counter(Config())
    node = node_of("policies.diagonal_gaussian.DiagonalGaussian", chunk=3, hidden=[4])
    policy, given = build(node, Policy, spec=env.spec), {"horizon": 4, "batch_size": 4, "epochs": 1}
    learner = make_learner("on_policy.ppo.Ppo", policy, run=RunPlan(execute=2), **given)
    parts = heard(learner, monkeypatch)
    loop = OnPolicyLoop(Collector(env, learner.policy, learner.gamma, execute=2), learner)
    steps(loop, 8 * env.num_envs)
    assert parts[0]["action"].shape[1] == 2
    assert learner.policy.log_std.shape == (3,) and learner.policy.log_std[2] == 0


def steps(loop: OnPolicyLoop, count: int) -> None:
    nothing = Every(0, 0, 0)
    log: Any = Mock()
    keeper = Trainer(log, count, nothing, lambda _: None, lambda _: None)
    loop.run(keeper)


def test_cartpole_is_learned() -> None:
    env = Gym(GymConfig("CartPole-v1", num_envs=8))
    node = {**NODES["categorical"], "hidden": [64], "activation": "tanh", "head": 0.01}
    settings = {"horizon": 64, "batch_size": 128, "epochs": 10, "lr": 2e-3, "gamma": 0.98}
    torch.manual_seed(0)
    learner = make_learner("on_policy.ppo.Ppo", build(node, Policy, spec=env.spec), **settings)
    steps(OnPolicyLoop(Collector(env, learner.policy, learner.gamma, seed=0), learner), 12_000)
    actor, obs = Actor(learner.policy, 8), env.reset(seed=3)
    first, age = torch.ones(8, dtype=torch.bool), torch.zeros(8)
    for _ in range(200):  # no pole falls within four seconds; untrained ones fall in 0.2 s
        step = env.step(actor(obs, first))
        obs, first, age = step.obs, step.ended, age + ~step.ended
    assert age.mean() > 190


def columns(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).mT.contiguous()


def test_gae_over_three_steps() -> None:
    """Gamma 0.5, lambda 0.5. Row 0 is cut by the clock at step 1, row 1 ends at step 1, row 2 has
    two decisions and padding."""
    reward = columns([1.0, 2, 3], [1, 2, 3], [1, 2, 9])
    discount = columns([0.5, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.25, 0.5])
    ended = columns([0.0, 1, 0], [0, 1, 0], [0, 0, 1]).bool()
    valid = columns([1.0, 1, 1], [1, 1, 1], [1, 1, 0]).bool()
    value = columns([1.0, 1, 1], [1, 1, 1], [1, 1, 7])
    following = columns([2.0, 4, 6], [2, 4, 6], [2, 4, 8])
    got = gae(reward, discount, ended, valid, value, following, 0.5)
    # delta: r + d V(s') - V(s)
    cut = [1 + 1 - 1 + 0.25 * 3, 2 + 2 - 1, 3 + 3 - 1]  # the time limit still bootstraps
    over = [1 + 1 - 1 + 0.25 * 1, 2 + 0 - 1, 3 + 3 - 1]
    short = [1 + 1 - 1 + 0.25 * 2, 2 + 1 - 1, 0]  # its second decision is a chunk of two steps
    torch.testing.assert_close(got, columns(cut, over, short))


def test_clip_loss_and_its_slope() -> None:
    """Clipped where it would gain: up with a good action, down with a bad one; no slope there."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantage = torch.tensor([1.0, -1, 1, -1, 2])
    log_prob = ratio.log().requires_grad_()
    loss, log_ratio = clip_loss(log_prob, torch.zeros(5), advantage, 0.2)
    torch.testing.assert_close(loss, torch.tensor([-1.2, 1.5, -0.5, 0.8, -2.2]))
    torch.testing.assert_close(log_ratio, ratio.log())
    loss.sum().backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([0.0, 1.5, -0.5, 0.0, -2.2]))
    each = clip_loss(ratio.log(), torch.zeros(5), advantage, torch.tensor([0.1, 9, 9, 0.1, 0.05]))
    torch.testing.assert_close(each[0], torch.tensor([-1.1, 1.5, -0.5, 0.9, -2.1]))


def test_normalized_looks_at_valid_ones_only() -> None:
    share = torch.tensor([[1.0, 1.0], [1.0, 0.0]]) / 3
    values = torch.tensor([[1.0, 2.0], [3.0, 100.0]])
    expected = torch.tensor([-1.0, 0.0]) * 1.5**0.5
    torch.testing.assert_close(normalized(values, share)[0], expected)
    assert variance(values, share).item() == pytest.approx(2 / 3)


def test_moments_of_pieces_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    values = 1e4 + torch.randn(100, 3).double()
    valid = torch.rand(100) < 0.7
    moments = Moments(3)
    moments.add(values, valid & False)
    assert not moments.count and not moments.variance.any()
    for part in torch.arange(100).split([1, 29, 1, 69]):
        moments.add(values[part], valid[part])
    torch.testing.assert_close(moments.mean, values[valid].mean(0))
    torch.testing.assert_close(moments.variance, values[valid].var(0, correction=0))


def test_observed_sets_the_encoder_and_goes_on_from_one_that_was_set() -> None:
    encoder = Encoder({"a": Leaf((1,)), "b": Leaf((2,))})
    seen, norm = ObservationStats(encoder), encoder.norm
    obs = {"a": torch.tensor([[1.0], [3.0], [50.0]]), "b": torch.ones(3, 2)}
    seen.follow(encoder, obs, torch.tensor([True, True, False]))
    assert not seen.given
    assert norm.mean.tolist() == [2, 1, 1] and norm.std.tolist() == [1, 1, 1]  # a constant keeps 1
    norm.std[0] = 5.0
    again = ObservationStats(encoder)
    again.follow(encoder, obs, torch.tensor([True, False, False]))
    assert again.given
    assert norm.mean[0].item() == pytest.approx(2 - 1 / 10_001, abs=1e-6)
    assert norm.std[0].item() == pytest.approx(5.0, abs=1e-3)


def test_rewards_are_scaled_by_the_deviation_of_returns() -> None:
    returns = RewardScaler(clip=1.5)
    reward = columns([1.0, 1, 2], [3, 5, 0])
    discount = columns([0.5, 0.5, 0], [0.5, 0.5, 0.5])
    ended = columns([0.0, 0, 1], [0, 1, 0]).bool()
    valid = columns([1.0, 1, 1], [1, 1, 0]).bool()
    got = returns.scale(reward, discount, ended, valid)
    seen = torch.tensor([1, 1.5, 2.75, 3, 6.5])  # r + d (return so far), per row; one is padding
    deviation = float(seen.std(correction=0))
    torch.testing.assert_close(got, (reward / deviation).clamp(-1.5, 1.5))
    assert got.max().item() == 1.5
    assert returns.running.tolist() == [0, 0]  # both episodes ended
    returns.scale(reward[:1], discount[:1], ended[:1], valid[:1])
    assert returns.running.tolist() == [0.5, 1.5]


APART = [1, 3]  # rows of the batch that are not learned from


def masked(batch: Tensors, rows: list[int]) -> Tensors:
    learn = torch.ones_like(batch["valid"])
    learn[:, rows] = False
    return batch | {"learn": learn}


@pytest.mark.parametrize(("name", "memory"), ALL)
def test_decisions_that_are_only_judged_change_nothing(name: str, memory: bool) -> None:
    """Whatever was seen, done and paid there; the others teach as they would alone."""
    after = []
    for reward in (0.0, 30.0):
        learner = make(name, memory, epochs=2, normalize=False, batch_size=24)
        start, batch = copies(learner.parameters()), masked(played(learner), APART)
        batch["reward"][:, APART] = reward
        batch["obs/state"][:, APART] += reward
        torch.manual_seed(2)
        metrics = learner.update(batch)
        assert all(torch.isfinite(value) for value in metrics.values())
        after.append(copies(learner.parameters()))
        assert any(moved(start, after[-1]))
    torch.testing.assert_close(after[0], after[1])


@pytest.mark.parametrize("memory", [False, True])
def test_the_table_is_that_of_the_learned_rows_alone(memory: bool) -> None:
    batch, tables = played(make(memory=memory, normalize=False)), []
    learned = masked(batch, APART)
    for given in (learned, batch):
        learner = make(memory=memory, normalize=False)  # the critic remembers
        tables.append(learner._table(given, carry_of(batch))[0])
    wanted = learned["learn"].any(0) if memory else learned["learn"].flatten()
    alone = take(tables[1], wanted.nonzero().flatten())
    torch.testing.assert_close(tables[0], alone)


@pytest.mark.parametrize("memory", [False, True])
def test_nothing_to_learn_from_leaves_everything_as_it_is(memory: bool) -> None:
    learner = make(memory=memory, normalize=False)
    before = copies(learner.parameters())
    metrics = learner.update(masked(played(learner), [0, 1, 2, 3]))
    assert set(metrics) == {"explained"} and torch.isfinite(metrics["explained"])
    assert not any(moved(before, learner.parameters()))
    assert not any(adam.state for adam in learner.optims.values())
    assert learner.estimates is not None and learner.estimates["value"].shape == (6, 4)
    learner.update(played(learner))
    assert any(moved(before, learner.parameters()))


@pytest.mark.parametrize("memory", [False, True])
def test_a_few_decisions_are_not_learned_from_as_if_they_were_a_minibatch(memory: bool) -> None:
    learner = make(memory=memory, normalize=False, batch_size=24)
    batch, before = masked(played(learner), [0, 1, 2]), copies(learner.parameters())
    for sixth in (False, True):  # 5 of 24, and 6
        batch["learn"][:1, 3] = sixth
        learner.update(batch)
        assert any(moved(before, learner.parameters())) == sixth


@torch.no_grad()
def test_estimates_by_hand() -> None:
    """Two steps of one row, of which the second ends: A_1 = d_1 + 0.9 0.95 A_2, A_2 = r_2 - V_2."""
    learner = make(normalize=False, batch_size=2)
    batch = {key: value[:2, :1].clone() for key, value in played(learner).items()}
    batch["ended"] = torch.tensor([[False], [True]])
    batch["discount"] = torch.tensor([[0.9], [0.0]])
    batch["reward"] = torch.tensor([[0.5], [1.0]])
    v = [learner.value({k: batch[f"obs/{k}"][t] for k in OBS}) for t in (0, 1)]
    after = learner.value({k: batch[f"next_obs/{k}"][0] for k in OBS})
    with torch.enable_grad():
        learner.update(batch)
    second = 1.0 - v[1]
    first = 0.5 + 0.9 * after - v[0] + 0.9 * 0.95 * second
    expected = {"value": torch.stack(v), "advantage": torch.stack([first, second])}
    torch.testing.assert_close(learner.estimates, expected)


def test_scaled_rewards_are_not_the_worlds_own() -> None:
    learner = make(scale_rewards=True)
    learner.update(played(learner))
    assert learner.estimates is None
