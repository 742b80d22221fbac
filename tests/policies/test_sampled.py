"""Policies that are sampled in steps, their networks and past, by hand."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, take, under
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import past_observations
from embodied.policies.denoising_mdp.noisy_diffusion import NoisyDiffusion
from embodied.policies.denoising_mdp.noisy_flow import NoisyFlow
from tests.builders import make_policy

SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def make(kind: str, **settings: Any) -> Any:
    return make_policy(f"generative.{kind}", SPEC, **{"chunk": 2, "width": 16, **settings})


def rows(n: int) -> dict[str, Tensor]:
    valid = torch.ones(n, 2, dtype=torch.bool)
    return {"obs/state": torch.zeros(n, 2), "action": torch.full((n, 2, 1), 0.4), "valid": valid}


def test_acting_is_euler_on_the_left_grid() -> None:
    policy = make("flow.Flow", steps=4)
    obs, noise = {"state": torch.randn(5, 2)}, 0.3 * policy.sample_noise(5)
    x, features = noise, policy.encoder(obs)
    for t in (0.0, 0.25, 0.5, 0.75):
        x = x + 0.25 * policy.net(x, torch.full((5,), t), features)
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions, x.clamp(-1, 1)[:, :, None])


def test_the_right_velocity_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With data at one point c, the velocity (c - x) / (1 - t) is exact."""
    policy = make("flow.Flow")

    def exact(x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        return (0.4 - x) / (1 - t[:, None])

    monkeypatch.setattr(policy.net, "forward", exact)
    assert policy.loss(rows(50)).max() < 1e-6


def test_actions_return_from_the_range_of_the_data() -> None:
    policy = make("flow.Flow")
    action = torch.tensor([[[0.1], [0.3]], [[0.2], [0.5]]])
    policy.fit({"obs/state": torch.randn(2, 2), "action": action})
    # 0.1 .. 0.5 onto -1 .. 1: middle 0.3, radius 0.2.
    torch.testing.assert_close(policy.range(action).flatten(), torch.tensor([-1, 0, -0.5, 1.0]))
    torch.testing.assert_close(policy.to_actions(policy.range(action).flatten(1)), action)
    extremes = policy.act({"state": torch.zeros(9, 2)}, {}, 50 * policy.sample_noise(9))[0]
    assert extremes.min() >= 0.1 - 1e-6 and extremes.max() <= 0.5 + 1e-6


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_acting_is_euler_told_its_step(steps: int) -> None:
    policy = make("shortcut.Shortcut", steps=steps, finest=8)
    obs, noise = {"state": torch.randn(5, 2)}, 0.3 * policy.sample_noise(5)
    x, features = noise, policy.encoder(obs)
    level = {1: 0, 2: 1, 8: 3}[steps]
    for i in range(steps):
        t, size = torch.full((5,), i / steps), torch.full((5,), level)
        x = x + policy.velocity(x, t, size, features) / steps
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions, x.clamp(-1, 1)[:, :, None], atol=1e-6, rtol=1e-5)


def test_a_long_step_is_two_of_half_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make("shortcut.Shortcut", finest=4)
    x, t, level = torch.ones(2, 2), torch.tensor([0.0, 0.5]), torch.tensor([0, 1])
    none = torch.zeros(2, 2)
    assert not policy.longer(x, t, level, none).requires_grad
    # s = x: one = 1, x' = 1 + h, two = 1 + h, mean 1 + h / 2; h is 1/2 and 1/4.
    monkeypatch.setattr(policy, "velocity", lambda x, t, level, features: x)
    assert policy.longer(x, t, level, none)[:, 0].tolist() == [1.25, 1.125]
    # s = t: (t + t + h) / 2.
    monkeypatch.setattr(policy, "velocity", lambda x, t, level, features: t[:, None])
    assert policy.longer(x, t, level, none)[:, 0].tolist() == [0.25, 0.625]
    # The halves are told that they are halves.
    monkeypatch.setattr(policy, "velocity", lambda x, t, level, features: level[:, None].float())
    assert policy.longer(x, t, level, none)[:, 0].tolist() == [1.0, 2.0]


def test_flow_rows_and_the_finest_halves_share_one_step_size() -> None:
    policy = make("shortcut.Shortcut", finest=8, bootstrap=4)
    calls: list[tuple[Tensor, Tensor]] = []
    velocity = policy.velocity

    def seen(x: Tensor, t: Tensor, level: Tensor, features: Tensor) -> Tensor:
        calls.append((t.clone(), level.clone()))
        return velocity(x, t, level, features)

    policy.velocity = seen  # pyright: ignore[reportAttributeAccessIssue]
    policy.loss(rows(4000))
    (t, half), (later, again), (times, level) = calls
    flow = level == 3
    assert (~flow).sum() == 1000 and torch.equal(half, again)
    assert set((half - 1).tolist()) == {0, 1, 2}
    pairs = zip((level[~flow], half - 1), (times[~flow], t), strict=True)
    one, other = (torch.stack([a.float(), b], 1).unique(dim=0) for a, b in pairs)
    assert torch.equal(one, other)
    # A step of 2^-level begins on its own grid, and its second half ends by 1.
    assert torch.equal((t * 2.0 ** (half - 1)) % 1, torch.zeros(1000))
    torch.testing.assert_close(later, t + 2.0 ** -half.float())
    assert (later + 2.0 ** -half.float()).max() <= 1
    assert times[flow].unique().numel() > 1000  # flow matching is for all times


def test_the_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """s = 3 level + 1 everywhere: a bootstrapped row is off by 3, a flow row by 7 - (a - x_0)."""
    policy = make("shortcut.Shortcut", finest=4, bootstrap=2)
    monkeypatch.setattr(
        policy, "velocity", lambda x, t, level, f: (3.0 * level + 1)[:, None].expand(-1, 2)
    )
    batch = rows(6)
    torch.manual_seed(5)
    loss = policy.loss(batch)
    torch.manual_seed(5)
    x0 = torch.randn(6, 2)
    flow = (7 - (0.4 - x0)).square().mean(1)
    longer = (loss - 9).abs() < 1e-4
    assert longer.sum() == 3
    torch.testing.assert_close(loss[~longer], flow[~longer])


def test_both_sources_of_a_mixed_batch_train_longer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture alternates between replay and demonstrations."""
    policy = make("shortcut.Shortcut", bootstrap=4)
    longer = policy.longer
    found: list[Tensor] = []

    def seen(x: Tensor, t: Tensor, level: Tensor, features: Tensor) -> Tensor:
        found.append(features[:, 0])
        return longer(x, t, level, features)

    monkeypatch.setattr(policy, "longer", seen)
    source = torch.arange(256) % 2
    policy.loss({**rows(256), "obs/state": source[:, None].expand(-1, 2).float()})
    assert len(found[0]) == 64 and len(found[0].unique()) == 2


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("shortcut.Shortcut", {"steps": 3}, "steps=3 must be a power of two"),
        ("shortcut.Shortcut", {"finest": 12}, "finest=12 must be a power of two"),
        ("shortcut.Shortcut", {"steps": 8, "finest": 4}, "steps=8 must be at most finest=4"),
        ("consistency.Consistency", {"steps": 9, "levels": 8}, "steps=9 must be at most levels=8"),
        ("diffusion.Diffusion", {"steps": 7}, "steps=7 must divide train_steps=100"),
    ],
)
def test_steps_that_do_not_fit_are_refused(kind: str, settings: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(kind, **settings)


def test_one_step_is_noise_plus_network_and_the_data_its_own_image() -> None:
    policy = make("consistency.Consistency")
    obs, noise = {"state": torch.randn(5, 2)}, 0.3 * policy.sample_noise(5)
    x = noise + policy.net(noise, torch.zeros(5), policy.encoder(obs))
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions, x.clamp(-1, 1)[:, :, None], atol=1e-6, rtol=1e-5)
    assert torch.equal(policy.clean(x, torch.ones(5), torch.zeros(5, 2)), x)


def test_further_steps_noise_again() -> None:
    policy = make("consistency.Consistency", steps=2)
    obs, noise = {"state": torch.randn(5, 2)}, policy.sample_noise(5)
    assert noise.shape == (5, 4)
    z, fresh = noise.split(2, 1)
    features = policy.encoder(obs)
    x = policy.clean(z, torch.zeros(5), features).clamp(-1, 1)
    x = policy.clean(0.5 * fresh + 0.5 * x, torch.full((5,), 0.5), features).clamp(-1, 1)
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions[:, :, 0], x, atol=1e-6, rtol=1e-5)


def test_consistency_the_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """net = b: f_t - f_s = (x_1 - z) (t - s) + b (s - t) = (b - (x_1 - z)) / N."""
    policy = make("consistency.Consistency", levels=5)
    monkeypatch.setattr(policy.net, "forward", lambda x, t, features: torch.full_like(x, 2.0))
    torch.manual_seed(5)
    loss = policy.loss(rows(50))
    torch.manual_seed(5)
    z, level = torch.randn(50, 2), torch.randint(5, (50,))
    assert set(level.tolist()) == {0, 1, 2, 3, 4}
    error = ((2 - (0.4 - z)) / 5).square().mean(1)
    torch.testing.assert_close(loss, error / (1.05 - level / 5))


def test_only_the_noisier_side_learns() -> None:
    """Over one level, f(x_s, s) is the data itself and the gradient that of plain regression."""
    policy = make("consistency.Consistency")
    policy.levels = 1
    batch = rows(8)
    torch.manual_seed(1)
    policy.loss(batch).sum().backward()
    found = [p.grad.clone() for p in policy.net.parameters() if p.grad is not None]
    policy.zero_grad()
    torch.manual_seed(1)
    z = torch.randn(8, 2)
    f = z + policy.net(z, torch.zeros(8), policy.encoder({"state": batch["obs/state"]}))
    ((f - 0.4).square().mean(1) / 1.05).sum().backward()
    expected = [p.grad for p in policy.net.parameters() if p.grad is not None]
    torch.testing.assert_close(found, expected)


def test_the_action_is_two_predictions_from_nothing() -> None:
    policy = make("minimal_iterative.MinimalIterative", time=0.8)
    obs, z = {"state": torch.randn(5, 2)}, 0.3 * policy.sample_noise(5, explore=True)
    assert not policy.sample_noise(5).any()
    features, start = policy.encoder(obs), torch.zeros(5)
    once = policy.net(torch.zeros(5, 2), start, features)
    for noise in (torch.zeros(5, 2), z):
        twice = policy.net(0.8 * once + 0.2 * noise, start + 0.8, features)
        found = policy.act(obs, {}, noise)[0][:, :, 0]
        torch.testing.assert_close(found, twice.clamp(-1, 1), atol=1e-6, rtol=1e-5)


def test_both_regressions_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network answers x + t, so the errors are 0 + 0 - a and t* a + (1 - t*) z + t* - a."""
    policy = make("minimal_iterative.MinimalIterative", time=0.75)
    times = torch.tensor([[0.0], [0.75]])
    monkeypatch.setattr(policy, "embedded", lambda: times)
    monkeypatch.setattr(policy.net, "at", lambda x, time, features: x + time)
    torch.manual_seed(5)
    loss = policy.loss(rows(50))
    torch.manual_seed(5)
    z = torch.randn(50, 2)
    error = 0.4**2 + (0.75 * 0.4 + 0.25 * z + 0.75 - 0.4).square()
    torch.testing.assert_close(loss, error.mean(1))


@pytest.mark.parametrize("count", [4, 10, 100])
@torch.no_grad()
def test_steps_are_those_of_the_scheduler(count: int) -> None:
    policy = make("diffusion.Diffusion", chunk=3, steps=count)
    obs, x = {"state": torch.randn(5, 2)}, policy.sample_noise(5)
    noise, features = x, policy.encoder(obs)
    for t in policy.sampler.timesteps:
        predicted = policy.net(x, torch.full((5,), float(t) / 100), features)
        made = policy.sampler.step(predicted, t, x, eta=0.0, use_clipped_model_output=True)
        x = made.prev_sample
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions[:, :, 0], x.clamp(-1, 1), atol=1e-5, rtol=0)


def test_the_schedule_is_the_squared_cosine() -> None:
    policy = make("diffusion.Diffusion", chunk=3, train_steps=20, steps=5)

    def level(t: float) -> float:
        return math.cos((t / 20 + 0.008) / 1.008 * math.pi / 2) ** 2

    for step in policy.grid:
        # abar is a product of betas cut off at 0.999, and level(0) is not quite 1.
        assert step.keep**2 == pytest.approx(level(step.t + 1) / level(0), abs=1e-4)
    assert [step.t for step in policy.grid] == [16, 12, 8, 4, 0]
    assert policy.grid[-1].next_keep == 1.0 and policy.grid[-1].next_remain == 0.0


def test_a_network_that_knows_the_noise_finds_the_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """With data at one point c, e = (x - keep c) / remain is exact, and acting ends at c."""
    policy = make("diffusion.Diffusion", chunk=3)
    keep = {step.t / 100: (step.keep, step.remain) for step in policy.grid}
    levels = torch.tensor([[step.t / 100] for step in policy.grid])
    monkeypatch.setattr(policy, "embedded", lambda: levels)

    def exact(x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        near = min(keep, key=lambda t: abs(t - time.item()))
        return (x - 0.4 * keep[near][0]) / keep[near][1]

    monkeypatch.setattr(policy.net, "at", exact)
    actions, _ = policy.act({"state": torch.zeros(6, 2)}, {}, policy.sample_noise(6))
    torch.testing.assert_close(actions, torch.full((6, 3, 1), 0.4), atol=1e-5, rtol=0)


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers.schedulers.scheduling_ddim", None)
    with pytest.raises(ConfigError, match=r'pip install "embodied-rl\[diffusion\]"'):
        make("diffusion.Diffusion")


KINDS = (
    "flow.Flow",
    "shortcut.Shortcut",
    "consistency.Consistency",
    "diffusion.Diffusion",
    "minimal_iterative.MinimalIterative",
)
STEPS = 3


def episode(policy: Policy, states: Tensor, execute: int) -> tuple[list[Tensors], list[int]]:
    """The observations of the decisions of one episode, and the steps of the decisions."""
    actor, seen, at = Actor(policy, 1, execute), list[Tensors](), list[int]()
    for step in range(len(states)):
        actor({"state": states[step][None]}, torch.tensor([step == 0]))
        if bool(actor.decided):
            seen.append(actor.decision_obs)
            at.append(step)
    return seen, at


@pytest.mark.parametrize("execute", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_a_dataset_have_the_same_past(kind: str, execute: int) -> None:
    policy, states = make(kind, obs_steps=STEPS), torch.randn(6, 2)
    seen, at = episode(policy, states, execute)
    steps: Tensors = {"obs/state": states, "action": torch.zeros(6, 1), "reward": torch.zeros(6)}
    ends = {"state": torch.zeros(1, 2)}
    recorded = Episodes(SPEC, steps, torch.tensor([0]), torch.tensor([6]), ends)
    past = under(past_observations(recorded, {"state": STEPS - 1}), "obs")["history/state"]
    assert at == list(range(0, 6, execute))
    for obs, step in zip(seen, at, strict=True):
        of_dataset = {"state": states[step][None], "history/state": past[step][None]}
        assert torch.equal(policy.features(obs), policy.features(of_dataset))


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_each_step_side_by_side(kind: str) -> None:
    policy, states = make(kind, obs_steps=STEPS), torch.randn(5, STEPS, 2)
    obs = {"state": states[:, -1], "history/state": states[:, :-1]}
    each = [policy.encoder({"state": states[:, i]}) for i in range(STEPS)]
    torch.testing.assert_close(policy.features(obs), torch.cat(each, 1))
    assert policy.feature_size == policy.features(obs).shape[1] == 6
    alone = policy.features({"state": states[:, -1]})
    torch.testing.assert_close(alone, torch.cat([each[-1]] * STEPS, 1))
    shown = {"obs/state": states[:, -1], "action": torch.zeros(5, 2, 1)}
    shown["valid"], losses = torch.ones(5, 2, dtype=torch.bool), list[Tensor]()
    for past in (states[:, :-1], states[:, :-1] + 1):
        torch.manual_seed(1)
        losses.append(policy.loss({**shown, "obs/history/state": past}))
    assert not torch.equal(*losses)  # what it learns depends on the past too


@pytest.mark.parametrize("kind", ["flow.Flow", "diffusion.Diffusion"])
def test_denoising_as_an_mdp_keeps_the_past(kind: str) -> None:
    base, cls = make(kind, obs_steps=STEPS), NoisyFlow if kind == "flow.Flow" else NoisyDiffusion
    policy = cls.wrap(base, {"_target_": f"{cls.__module__}.{cls.__name__}"})
    obs, noise = {"state": torch.randn(4, 2)}, policy.sample_noise(4)
    carry = policy.initial(4)
    carry = carry | {"history/state": torch.randn(4, 2, 2), "fresh": torch.zeros(4).bool()}
    seen, carry = policy.observe(obs, carry, noise)
    plain = base.act(seen, {}, noise[:, : policy.size])[0]
    assert torch.equal(policy.act(seen, carry, noise)[0], plain)
    assert policy.augments and not torch.equal(policy.features(seen), policy.features(obs))
    _, chained = policy.act(seen, carry, noise)
    assert policy.evaluate_actions(seen, chained["row/action"])[0].shape == (4,)
    assert set(policy.inference_policy().initial(2)) == {"history/state", "fresh"}


def test_one_step_needs_no_memory_and_one_observation_is_the_least() -> None:
    policy = make("flow.Flow")
    assert policy.initial(3) == {} and not policy.augments
    obs = take({"state": torch.randn(4, 2)}, torch.arange(4))
    assert torch.equal(policy.features(obs), policy.encoder(obs))
    with pytest.raises(ConfigError, match=r"flow\.obs_steps=1"):
        make_policy(
            "generative.one_step.OneStep", SPEC, flow=make("flow.Flow", obs_steps=STEPS).node
        )
