"""BC: its step and average; RECAP: labels and guidance; DPT: its loss, and the posterior."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import BEST_ACTION, Leaf, Spec
from embodied.core.tensors import Tensors, nest, under
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import flags, with_steps
from embodied.envs.toy import bandit, darkroom
from embodied.envs.wrappers import trials
from embodied.envs.wrappers.trials import Trials
from embodied.learners.critics import Support
from embodied.learners.imitation.behavior_cloning import BehaviorCloning, Config, cosine
from embodied.learners.imitation.dpt import Config as DptConfig
from embodied.learners.imitation.dpt import Dpt
from embodied.learners.imitation.recap import Recap
from embodied.learners.learner import RunPlan
from embodied.policies.random import Random
from embodied.policies.scripted.in_context import Lopsided, Thompson
from embodied.policies.wrappers.advantage_conditioned import (
    LABEL,
    NEGATIVE,
    NONE,
    POSITIVE,
    AdvantageConditioned,
)
from embodied.policies.wrappers.real_time_chunking import sample
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop
from tests.builders import LINE, make_learner, make_policy, node_of, still
from tests.learners.parts import constant, copies, moved

SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def make(kind: str = "gaussian.Gaussian", steps: int = 100, **settings: float) -> BehaviorCloning:
    torch.manual_seed(0)
    node = {"_target_": f"embodied.policies.{kind}", "chunk": 2}
    return BehaviorCloning(Config(**settings), build(node, Policy, spec=SPEC), run=RunPlan(steps))


def batches(count: int, n: int = 32) -> list[Tensors]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(count, n, 2, generator=generator)
    action = torch.tanh(states[..., :1] - states[..., 1:]).expand(-1, n, 2)[..., None]
    valid = torch.ones(n, 2, dtype=torch.bool)
    return [
        {"obs/state": state, "action": a.contiguous(), "valid": valid}
        for state, a in zip(states, action, strict=True)
    ]


def flat(policy: Policy) -> Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def test_the_average_is_the_one_of_the_formula_or_none() -> None:
    learner = make(ema=0.6)
    average = flat(learner.policy).double()
    assert torch.equal(average.float(), flat(learner.online))
    for step, batch in enumerate(batches(8), start=1):
        learner.update(batch)
        ema = min(0.6, (1 + step) / (10 + step))
        average = ema * average + (1 - ema) * flat(learner.online).double()
    torch.testing.assert_close(flat(learner.policy).double(), average, atol=1e-6, rtol=1e-5)
    assert not torch.equal(flat(learner.policy), flat(learner.online))
    learner = make(ema=0.0)
    learner.update(batches(1)[0])
    torch.testing.assert_close(flat(learner.policy), flat(learner.online))


def test_batch_statistics_are_those_of_the_policy_that_acts() -> None:
    """They are buffers, not weights; of the average they stayed at mean 0 and variance 1."""
    learner = make("block_gaussian.BlockGaussian", ema=0.0)
    for batch in batches(3):
        learner.update(batch)
    acting, trained = dict(learner.policy.named_buffers()), dict(learner.online.named_buffers())
    torch.testing.assert_close(acting, trained, rtol=0, atol=0)
    assert any(bool((v != 1).any()) for key, v in acting.items() if key.endswith(".var"))


def test_the_rate_falls_to_a_tenth_and_stays() -> None:
    assert [cosine(2.0, p) for p in (0.0, 0.25, 0.5, 1.0, 3.0)] == pytest.approx(
        [2.0, 2 * (0.55 + 0.45 * math.sqrt(0.5)), 1.1, 0.2, 0.2]
    )
    learner = make(steps=4, lr=0.5)
    for batch in batches(4):
        learner.update(batch)
    assert learner.optims["adam"].param_groups[0]["lr"] == cosine(0.5, 0.75)


def test_one_step_is_adams() -> None:
    learner = make(weight_decay=0.0, lr=0.01)
    before, batch = flat(learner.online), batches(1)[0]
    reference = copy.deepcopy(learner.online)
    reference.loss(batch).mean().backward()
    slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
    gradient = torch.cat([slope.flatten() for slope in slopes])
    metrics = learner.update(batch)
    # The first step of Adam is lr * g / (|g| + eps).
    expected = before - 0.01 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(flat(learner.online), expected, atol=1e-6, rtol=1e-5)
    assert metrics["grad_norm"].item() == pytest.approx(gradient.norm().item(), rel=1e-5)


def test_fitting_sets_the_normalisers_of_both() -> None:
    learner, rows = make("generative.flow.Flow"), batches(1)[0]
    rows = {**rows, "obs/state": 5 * rows["obs/state"] + 3, "action": 0.5 * rows["action"]}
    learner.fit(rows)
    acting, trained = dict(learner.policy.named_buffers()), dict(learner.online.named_buffers())
    torch.testing.assert_close(acting, trained, rtol=0, atol=0)
    torch.testing.assert_close(acting["encoder.norm.mean"], rows["obs/state"].mean(0))


FLOW = node_of("policies.generative.flow.Flow", width=32, depth=1)


def conditioned(spec: Spec = LINE, **settings: object) -> AdvantageConditioned:
    given = {"base": FLOW, "chunk": 2, **settings}
    return make_policy("wrappers.advantage_conditioned.AdvantageConditioned", spec, **given)


def make_recap(policy: AdvantageConditioned | None = None, **settings: object) -> Recap:
    given = {"hidden": [16], "batch_size": 4, "folds": 2, **settings}
    return make_learner("imitation.recap.Recap", policy or conditioned(), run=RunPlan(100), **given)


def batch_of_recap() -> Tensors:
    return {
        "obs/state": torch.linspace(-1, 1, 4)[:, None],
        "next_obs/state": torch.linspace(0, 1, 4)[:, None],
        "action": torch.linspace(-0.8, 0.8, 8).view(4, 2),
        "reward": torch.tensor([0.0, 0.5, 0.0, 1.0]),
        "discount": torch.tensor([0.9, 0.9, 0.9, 0.0]),
        "returns": torch.tensor([0.25, 0.5, 0.0, 1.0]),
        "executed_steps": torch.tensor([2, 2, 2, 1]),
        "episode": torch.arange(4),
        "correction": torch.tensor([False, False, True, False]),
    }


def test_values_advantages_and_labels_by_hand() -> None:
    """Atoms 0, 1/2, 1. Fold 0 says 1/2 surely, fold 1 says 1/4 (half 0, half 1/2)."""
    learner = make_recap(atoms=3, positive=0.25)
    constant(learner.value.net, torch.tensor([[-99.0, 0.0, -99.0], [0.0, 0.0, -99.0]]))
    batch = batch_of_recap()
    advantage = learner.advantages(batch)
    # r + d V - V: of fold 0 0.9 / 2 - 1/2 and again; of fold 1 1/2 + 0.9 / 4 - 1/4, and 1 - 1/4.
    torch.testing.assert_close(advantage, torch.tensor([-0.05, 0.475, -0.05, 0.75]))
    learner.follow(advantage)
    assert learner.threshold.item() == pytest.approx(advantage.quantile(0.75).item())
    label = learner.labels(advantage, batch["correction"])
    assert label.tolist() == [NEGATIVE, NEGATIVE, POSITIVE, POSITIVE], "the third is a correction"
    before = learner.threshold.item()
    learner.follow(advantage + 1)
    assert learner.threshold.item() == pytest.approx(before + 0.02)


def test_the_value_loss_by_hand() -> None:
    """Returns 1/4, 1/2, 0, 1 lie half on 0 and half on 1/2, then on one atom each. Fold k learns
    from the episodes that are not k modulo 2: fold 0 from rows 1 and 3, fold 1 from 0 and 2; as
    published, there is one function of all episodes."""
    logits = torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.0, -0.3]])
    p = logits.log_softmax(-1)
    two = p[0, 1] + p[0, 2] + (p[1, 0] + p[1, 1]) / 2 + p[1, 0]
    one = (p[0, 0] + p[0, 1]) / 2 + p[0, 1] + p[0, 0] + p[0, 2]
    for folds, expected in ((2, two), (1, one)):
        learner = make_recap(atoms=3, folds=folds)
        constant(learner.value.net, logits[:folds])
        torch.testing.assert_close(learner.value_loss(batch_of_recap()), -expected / 4)


def test_the_atoms_tell_the_returns_apart() -> None:
    """Those of a cost of each step lay all on the atom 0, and an advantage was the reward."""
    rows = {**batch_of_recap(), "returns": torch.tensor([-40.0, 0.0, -10.0, -1.0])}
    learner, given = make_recap(), make_recap(values=[-5.0, 0.0])
    for each in (learner, given):
        each.fit(rows)
    assert learner.support == Support(-40.0, 0.0, 101) and given.support == Support(-5.0, 0.0, 101)
    learner.fit({**rows, "returns": torch.ones(4)})
    assert learner.support.low == 1.0


def test_the_value_learns_in_the_first_updates_only() -> None:
    learner = make_recap(value_updates=2)
    for update in range(4):
        before = copies(learner.value.net.parameters())
        found = learner.update(batch_of_recap())
        learned = any(moved(before, learner.value.net.parameters()))
        assert ("value_loss" in found) == learned == (update < 2)


@torch.no_grad()
def test_guidance_by_hand() -> None:
    """w = 1 is the base with the label POSITIVE, 0 with NONE; between and beyond, the velocity is
    that of NONE moved by w times the difference."""
    base = {**FLOW, "steps": 1}
    policy = conditioned(base=base)
    obs, noise = {"state": torch.randn(5, 1)}, policy.sample_noise(5)
    chunks: dict[float, Tensor] = {}
    for w in (0.0, 1.0, 2.5):
        other = conditioned(base=base, guidance=w)
        other.load_state_dict(policy.state_dict())
        chunks[w] = sample(*other.strides(obs, noise))
        torch.testing.assert_close(other.act(obs, {}, noise)[0], other.to_actions(chunks[w]))
    for w, label in ((0.0, NONE), (1.0, POSITIVE)):
        expected = policy.base.act({**obs, LABEL: torch.full((5,), label)}, {}, noise)[0]
        torch.testing.assert_close(policy.to_actions(chunks[w]), expected)
    free, wanted = chunks[0.0], chunks[1.0]
    torch.testing.assert_close(chunks[2.5], free + 2.5 * (wanted - free))
    for refused, says in (
        (node_of("policies.gaussian.Gaussian"), "sampler can be guided"),
        ({**FLOW, "obs_steps": 2}, "obs_steps=1"),
    ):
        with pytest.raises(ConfigError, match=says):
            conditioned(base=refused)


def test_labels_are_dropped_and_otherwise_seen() -> None:
    seen: list[Tensor] = []
    policy = conditioned(drop=0.3)
    loss = policy.base.loss
    policy.base.loss = lambda batch: seen.append(batch[f"obs/{LABEL}"]) or loss(batch)
    n = 2000
    batch = {"obs/state": torch.zeros(n, 1), "action": torch.zeros(n, 2, 1)}
    batch |= {"valid": torch.ones(n, 2, dtype=torch.bool), LABEL: torch.full((n,), NEGATIVE)}
    assert policy.loss(batch).shape == (n,)
    del batch[LABEL]
    policy.loss(batch)
    for labels, whole in zip(seen, (NEGATIVE, POSITIVE), strict=True):
        assert set(labels.tolist()) == {NONE, whole}
        assert (labels == NONE).float().mean().item() == pytest.approx(0.3, abs=0.05)


def test_corrections_are_a_persons_steps_among_a_policys() -> None:
    length, names = torch.tensor([2, 3]), ("episode", "correction")
    steps = {"terminated": torch.zeros(5, dtype=torch.bool)}
    recorded = Episodes(LINE, steps, length.cumsum(0) - length, length, {}, (), ())
    found = flags(recorded, names)
    assert found["episode"].tolist() == [0, 0, 1, 1, 1]
    assert not found["correction"].any(), "demonstrations are not corrections"
    human = torch.tensor([True, True, False, True, False])
    found = flags(with_steps(recorded, {"intervened": human}), names, chunk=2)
    assert found["correction"].tolist() == [False, False, False, True, False]


def test_acts_as_the_better_half_of_the_data() -> None:
    """One state; three times in four the action is -0.5 and the episode fails, else 0.5 and it
    succeeds. Imitation of all acts like the bad one mostly, guided or not the conditioned policy
    like the good one. Advantages need no more than the last reward here."""
    torch.manual_seed(0)
    policy = conditioned(chunk=1)
    learner = make_recap(policy, lr=3e-3, positive=0.25, value_updates=100, batch_size=64)
    for _ in range(400):
        good = (torch.rand(64) < 0.25).float()
        action = (good - 0.5)[:, None] + 0.02 * torch.randn(64, 1)
        more = {"episode": torch.randint(100, (64,)), "correction": torch.zeros(64) > 0}
        batch = still(torch.zeros(64, 1), action, good) | {"returns": good, **more}
        metrics = learner.update(batch)
    assert metrics["positive"].item() == pytest.approx(0.25, abs=0.2)
    obs, noise = {"state": torch.zeros(200, 1)}, policy.sample_noise(200)
    for w, low, high in ((1.0, 0.9, 1.0), (1.5, 0.9, 1.0), (0.0, 0.1, 0.45)):
        acting = conditioned(chunk=1, guidance=w)
        acting.load_state_dict(learner.policy.state_dict())
        share = (acting.act(obs, {}, noise)[0] > 0).float().mean().item()
        assert low <= share <= high, (w, share)


RANDOM = node_of("policies.random.Random")


def bandits(pulls: int, n: int = 64, arms: int = 2, noise: float = 0.0) -> Trials:
    made = bandit.Bandit(bandit.Config(arms=arms, noise=noise, num_envs=n))
    return Trials(trials.Config(episodes=pulls), made)


def rooms(n: int = 8, **settings: Any) -> darkroom.Darkroom:
    return darkroom.Darkroom(darkroom.Config(num_envs=n, **settings))


def learner(env: Trials, horizon: int, kind: str = "transformer", **settings: Any) -> Dpt:
    inner = node_of("policies.categorical.Categorical", hidden=[], sampled=True)
    made: dict[str, Any] = {"width": 16, "inner": inner}
    made |= {"heads": 1, "window": horizon} if kind == "transformer" else {}
    policy = make_policy(f"{kind}.{kind.capitalize()}", env.spec, **made)
    return Dpt(DptConfig(behaviour=RANDOM, horizon=horizon, **settings), policy, env.spec)


def batch_of(env: Trials, actions: torch.Tensor) -> dict[str, torch.Tensor]:
    """The lifetimes of `actions` [T, B], as a batch."""
    obs, seen, first = env.reset(seed=0), [], []
    fresh = torch.ones(env.num_envs, dtype=torch.bool)
    for action in actions:
        seen.append(obs)
        first.append(fresh)
        step = env.step(action)
        obs, fresh = step.obs, step.ended
    stacked = {key: torch.stack([each[key] for each in seen]) for key in obs}
    valid = torch.ones(actions.shape, dtype=torch.bool)
    return {**nest(stacked, "obs"), "first": torch.stack(first), "valid": valid}


@pytest.mark.parametrize("kind", ["transformer", "recurrent"])
def test_the_loss_of_dpt_is_what_the_policy_says_step_by_step(kind: str) -> None:
    """-log pi(a*|context) of the policy as it acts, with its cached past."""
    env = bandits(pulls=5, n=3)
    dpt = learner(env, 5, kind)
    batch = batch_of(env, torch.randint(2, (10, 3), generator=torch.Generator().manual_seed(1)))
    obs = under(batch, "obs")
    data = {**batch, "label": dpt.labels(obs)}
    policy: Any = dpt.policy
    carry, seen = policy.initial(3), []
    for t in range(10):
        here = {key: leaf[t] for key, leaf in obs.items()}
        if batch["first"][t].any():  # all at once, as lifetimes are equally long
            carry = policy.initial(3)
        seen.append(-odds(policy, here, carry).gather(1, here[BEST_ACTION])[:, 0])
        carry = policy.act(here, carry, policy.sample_noise(3))[1]
    losses = torch.stack(seen)
    assert dpt.loss(data).item() == pytest.approx(losses.mean().item(), abs=1e-5)
    data["valid"] = torch.zeros_like(data["valid"])
    data["valid"][0, 0] = True
    assert dpt.loss(data).item() == pytest.approx(losses[0, 0].item(), abs=1e-5)


def odds(policy: Any, obs: dict[str, torch.Tensor], carry: dict[str, torch.Tensor]) -> Any:
    """log pi [n, 2] of one decision."""
    seen = {key: leaf[None] for key, leaf in obs.items()}
    first = torch.zeros(1, len(carry["h"] if "h" in carry else carry["keys"]), dtype=torch.bool)
    arms = [torch.full(first.shape, arm) for arm in (0, 1)]
    with torch.no_grad():
        found = [policy.evaluate_sequence(seen, arm, carry, first)[0][0] for arm in arms]
    return torch.stack(found, 1)


def test_labels_are_the_best_action_or_an_experts() -> None:
    env = bandits(pulls=4, n=5, arms=3)
    batch = batch_of(env, torch.zeros(4, 5, dtype=torch.int64))
    obs = under(batch, "obs")
    assert torch.equal(learner(env, 4).labels(obs), obs[BEST_ACTION][..., 0])
    taught = learner(env, 4, expert=RANDOM)
    expert: Any = taught.expert
    assert isinstance(expert, Random)
    expert.act = lambda obs, carry, noise: (torch.ones(len(noise), 1, dtype=torch.int64), carry)
    assert torch.equal(taught.labels(obs), torch.ones(4, 5, dtype=torch.int64))


def test_dpt_refuses_what_cannot_learn_in_context() -> None:
    spec = bandits(pulls=4).spec
    flat = make_policy("categorical.Categorical", spec)
    with pytest.raises(ConfigError, match="memory"):
        Dpt(DptConfig(behaviour=RANDOM), flat, spec)
    blind = Spec({k: v for k, v in spec.obs.items() if k != BEST_ACTION}, spec.act, spec.dt)
    with pytest.raises(ConfigError, match=BEST_ACTION):
        Dpt(DptConfig(behaviour=RANDOM), learner(bandits(pulls=4), 4).policy, blind)


def test_dpt_becomes_the_posterior() -> None:
    """Two arms of means u, v ~ U[0, 1] without noise. After one pull of arm 0 that paid r, arm 0 is
    the best one with probability r: the policy says r, within what 150 updates leave open."""
    env = bandits(pulls=2, n=256)
    dpt = learner(env, 2, lr=5e-3, batch_size=256)
    loop = OnPolicyLoop(Collector(env, dpt.behaviour_policy(), dpt.gamma, seed=0), dpt)
    for _ in range(2 * 150):
        loop.advance()
    policy: Any = dpt.policy
    pays, n = torch.linspace(0.1, 0.9, 5), 5
    start = {"time": torch.zeros(n, 1), BEST_ACTION: torch.zeros(n, 1, dtype=torch.int64)}
    start |= {"last_action": torch.zeros(n, 2), "last_reward": torch.zeros(n, 1)}
    start["first"] = torch.ones(n, 1)
    _, carry = policy.act(start, policy.initial(n), policy.sample_noise(n))
    pulled = torch.tensor([[1.0, 0.0]]).expand(n, 2)
    after = start | {"last_action": pulled, "last_reward": pays[:, None]}
    torch.testing.assert_close(odds(policy, after, carry)[:, 0].exp(), pays, atol=0.1, rtol=0)
    assert odds(policy, start, policy.initial(n))[0, 0].exp() == pytest.approx(0.5, abs=0.06)


def test_thompson_sampling_finds_the_best_arm() -> None:
    """The posterior by hand after one pull, and less regret than half of what chance has."""
    env = bandits(pulls=100, n=256, arms=5, noise=0.3)
    thompson = Thompson(env.spec, noise=0.3)
    obs, begun = env.reset(seed=0), thompson.initial(256)
    pulled = obs | {"last_action": torch.eye(5)[[2]].expand(256, 5)}
    pulled["last_reward"] = torch.full((256, 1), 2.0)
    mean = (6 + 2.0 / 0.09) / (12 + 1 / 0.09)
    assert mean > 0.5
    for above, chosen in ((1e-3, 0), (-1e-3, 2)):  # the first arm just above the pulled one
        draw = torch.zeros(256, 5)
        draw[:, 0] = (mean - 0.5) * math.sqrt(12) + above
        action, carry = thompson.act(pulled, begun, draw)
        assert (action == chosen).all() and (carry["sums"][:, 2] == 2.0).all()
    carry, regret = begun, 0.0
    for _ in range(100):
        action, carry = thompson.act(obs, carry, thompson.sample_noise(256))
        step = env.step(action[:, 0])
        obs, regret = step.obs, regret + float(step.log["regret"].mean())
    # The best of five uniform means is 5/6, chance has 1/2: 33 in 100 pulls.
    assert regret < 12


def test_lopsided_odds_last_for_a_lifetime() -> None:
    """w e_i + (1 - w) p: the largest of the odds is above w, which is uniform."""
    policy, n = Lopsided(bandits(pulls=4, arms=4).spec), 20_000
    torch.manual_seed(0)
    action, carry = policy.act({}, policy.initial(n), policy.sample_noise(n))
    again = policy.act({}, carry, policy.sample_noise(n))[1]
    assert torch.equal(carry["odds"], again["odds"])
    torch.testing.assert_close(carry["odds"].sum(1), torch.ones(n))
    counts = action[:, 0].bincount(minlength=4) / n
    torch.testing.assert_close(counts, torch.full((4,), 0.25), atol=0.02, rtol=0)
    assert float(carry["odds"].amax(1).mean()) > 0.6


def test_a_room_says_the_shortest_way_and_holds_goals_back() -> None:
    room = rooms(n=64, start="any")
    obs = room.reset(seed=3)
    cells, held = (
        {int(c) for c in room.levels.decode(goals.double().numpy())}
        for goals in (room.task, room.held_out)
    )
    assert len(held) == 7 and not cells & held
    distance = (room.place - room.goal).abs().sum(1)
    for _ in range(10):
        step = room.step(obs[BEST_ACTION][:, 0])
        obs, distance = step.obs, (distance - 1).clamp(min=0)
        assert torch.equal((room.place - room.goal).abs().sum(1), distance)
        assert torch.equal(step.reward, (distance == 0).float())
    assert (distance == 0).all()


def test_a_room_takes_given_goals_and_keeps_its_state() -> None:
    room = rooms(n=7, horizon=3)
    obs = room.reset(task=room.held_out)
    assert (obs["place"] == 0).all() and torch.equal(room.task, room.held_out)
    state, played = room.get_state(), []
    for _ in range(2):
        room.set_state(state)
        played.append([room.step(torch.full((7,), at)) for at in (0, 1, 1)])
    assert played[0][-1].truncated.all() and not played[0][-1].terminated.any()
    for step, again in zip(*played, strict=True):
        assert torch.equal(again.next_obs["place"], step.next_obs["place"])
        assert torch.equal(again.obs["place"], step.obs["place"])
    with pytest.raises(ValueError, match="from 0 to 4"):
        room.step(torch.full((7,), 5))
    with pytest.raises(ValueError, match="expected"):
        room.reset(task=torch.zeros(7, 2))
