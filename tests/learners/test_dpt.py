"""DPT: its loss by hand, whose actions it is taught, and that it samples the posterior."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import BEST_ACTION, Spec
from embodied.core.tensors import nest, under
from embodied.envs.toy import bandit, darkroom
from embodied.envs.wrappers import trials
from embodied.envs.wrappers.trials import Trials
from embodied.learners.imitation.dpt import Config, Dpt
from embodied.policies.random import Random
from embodied.policies.scripted.in_context import Lopsided, Thompson
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop
from tests.builders import make_policy, node_of

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
    return Dpt(Config(behaviour=RANDOM, horizon=horizon, **settings), policy, env.spec)


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
def test_the_loss_is_what_the_policy_says_step_by_step(kind: str) -> None:
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


def test_what_cannot_learn_in_context_is_refused() -> None:
    spec = bandits(pulls=4).spec
    flat = make_policy("categorical.Categorical", spec)
    with pytest.raises(ConfigError, match="memory"):
        Dpt(Config(behaviour=RANDOM), flat, spec)
    blind = Spec({k: v for k, v in spec.obs.items() if k != BEST_ACTION}, spec.act, spec.dt)
    with pytest.raises(ConfigError, match=BEST_ACTION):
        Dpt(Config(behaviour=RANDOM), learner(bandits(pulls=4), 4).policy, blind)


def test_it_becomes_the_posterior() -> None:
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
    obs = env.reset(seed=0)
    pulled = obs | {"last_action": torch.eye(5)[[2]].expand(256, 5)}
    pulled["last_reward"] = torch.full((256, 1), 2.0)
    _, carry = thompson.act(pulled, thompson.initial(256), torch.zeros(256, 5))
    precision = 12 + 1 / 0.09
    mean = (6 + 2.0 / 0.09) / precision
    assert mean > 0.5 and torch.equal(carry["sums"][:, 2], torch.full((256,), 2.0))
    draw = torch.zeros(256, 5)
    draw[:, 0] = (mean - 0.5) * math.sqrt(12) + 1e-3  # just above the pulled arm's mean
    assert (thompson.act(pulled, thompson.initial(256), draw)[0] == 0).all()
    draw[:, 0] -= 2e-3
    assert (thompson.act(pulled, thompson.initial(256), draw)[0] == 2).all()
    carry, regret = thompson.initial(256), 0.0
    for _ in range(100):
        action, carry = thompson.act(obs, carry, thompson.sample_noise(256))
        step = env.step(action[:, 0])
        obs, regret = step.obs, regret + float(step.log["regret"].mean())
    # The best of five uniform means is 5/6, chance has 1/2: 33 in 100 pulls.
    assert regret < 12


def test_lopsided_odds_last_for_a_lifetime() -> None:
    spec = bandits(pulls=4, arms=4).spec
    policy = Lopsided(spec)
    torch.manual_seed(0)
    n = 20_000
    action, carry = policy.act({}, policy.initial(n), policy.sample_noise(n))
    again = policy.act({}, carry, policy.sample_noise(n))[1]
    assert torch.equal(carry["odds"], again["odds"])
    torch.testing.assert_close(carry["odds"].sum(1), torch.ones(n))
    counts = action[:, 0].bincount(minlength=4) / n
    torch.testing.assert_close(counts, torch.full((4,), 0.25), atol=0.02, rtol=0)
    # w e_i + (1 - w) p: the largest of the odds is above w, which is uniform.
    assert float(carry["odds"].amax(1).mean()) > 0.6


def test_a_room_says_the_shortest_way_and_holds_goals_back() -> None:
    room = rooms(n=64, start="any")
    obs = room.reset(seed=3)
    cells = {int(c) for c in room.levels.decode(room.task.double().numpy())}
    held = {int(c) for c in room.levels.decode(room.held_out.double().numpy())}
    assert len(held) == 7 and not cells & held
    distance = (room.place - room.goal).abs().sum(1)
    for _ in range(10):
        step = room.step(obs[BEST_ACTION][:, 0])
        now = (room.place - room.goal).abs().sum(1)
        assert torch.equal(now, (distance - 1).clamp(min=0))
        assert torch.equal(step.reward, (now == 0).float())
        obs, distance = step.obs, now
    assert (distance == 0).all()


def test_a_room_takes_given_goals_and_keeps_its_state() -> None:
    room = rooms(n=7, horizon=3)
    obs = room.reset(task=room.held_out)
    assert (obs["place"] == 0).all() and torch.equal(room.task, room.held_out)
    state = room.get_state()
    after = [room.step(torch.full((7,), at)) for at in (0, 1, 1)]
    assert after[-1].truncated.all() and not after[-1].terminated.any()
    room.set_state(state)
    for step, at in zip(after, (0, 1, 1), strict=True):
        again = room.step(torch.full((7,), at))
        assert torch.equal(again.next_obs["place"], step.next_obs["place"])
        assert torch.equal(again.obs["place"], step.obs["place"])
    with pytest.raises(ValueError, match="from 0 to 4"):
        room.step(torch.full((7,), 5))
    with pytest.raises(ValueError, match="expected"):
        room.reset(task=torch.zeros(7, 2))
