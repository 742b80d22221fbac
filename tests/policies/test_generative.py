"""Policies that are sampled in steps, their networks and past, and ACT: by hand; they keep the
shares of two modes."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, take, under
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import past_observations
from embodied.improvement.ways import with_steps
from embodied.learners.imitation.behavior_cloning import BehaviorCloning
from embodied.learners.imitation.behavior_cloning import Config as ModesConfig
from embodied.learners.learner import RunPlan
from embodied.policies.denoising_mdp.noisy_diffusion import NoisyDiffusion
from embodied.policies.denoising_mdp.noisy_flow import NoisyFlow
from embodied.policies.generative.act import Act, Config, ensembled, kl
from embodied.policies.generative.chunk_sampler import Film, Modulated, Timed, UNetConfig
from embodied.policies.networks.blocks import Attention
from tests.builders import make_policy, node_of
from tests.tiers import usually

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
    for velocity, expected in (
        # s = x: one = 1, x' = 1 + h, two = 1 + h, mean 1 + h / 2; h is 1/2 and 1/4.
        (lambda x, t, level, features: x, [1.25, 1.125]),
        # s = t: (t + t + h) / 2.
        (lambda x, t, level, features: t[:, None], [0.25, 0.625]),
        # The halves are told that they are halves.
        (lambda x, t, level, features: level[:, None].float(), [1.0, 2.0]),
    ):
        monkeypatch.setattr(policy, "velocity", velocity)
        assert policy.longer(x, t, level, none)[:, 0].tolist() == expected


def test_flow_rows_and_the_finest_halves_share_one_step_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And both sources of a mixture, which alternates between them, train longer steps."""
    policy = make("shortcut.Shortcut", finest=8, bootstrap=4)
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    velocity = policy.velocity

    def seen(x: Tensor, t: Tensor, level: Tensor, features: Tensor) -> Tensor:
        calls.append((t.clone(), level.clone(), features[:, 0]))
        return velocity(x, t, level, features)

    monkeypatch.setattr(policy, "velocity", seen)
    source = (torch.arange(4000) % 2)[:, None].expand(-1, 2).float()
    policy.loss({**rows(4000), "obs/state": source})
    (t, half, sources), (later, again, _), (times, level, _) = calls
    flow = level == 3
    assert len(sources.unique()) == 2
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


def test_the_loss_of_shortcut_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """s = 3 level + 1 everywhere: a bootstrapped row is off by 3, a flow row by 7 - (a - x_0)."""
    policy = make("shortcut.Shortcut", finest=4, bootstrap=2)
    monkeypatch.setattr(
        policy, "velocity", lambda x, t, level, f: (3.0 * level + 1)[:, None].expand(-1, 2)
    )
    torch.manual_seed(5)
    loss = policy.loss(rows(6))
    torch.manual_seed(5)
    flow = (7 - (0.4 - torch.randn(6, 2))).square().mean(1)
    longer = (loss - 9).abs() < 1e-4
    assert longer.sum() == 3
    torch.testing.assert_close(loss[~longer], flow[~longer])


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


def test_consistency_steps_begin_at_noise_and_noise_again() -> None:
    """One step is noise plus the network; the data are their own image."""
    policy = make("consistency.Consistency", steps=2)
    obs, noise = {"state": torch.randn(5, 2)}, 0.3 * policy.sample_noise(5)
    assert noise.shape == (5, 4)
    z, fresh = noise.split(2, 1)
    features = policy.encoder(obs)
    x = z + policy.net(z, torch.zeros(5), features)
    one = with_steps(policy, 1).act(obs, {}, z)[0]
    torch.testing.assert_close(one[:, :, 0], x.clamp(-1, 1), atol=1e-6, rtol=1e-5)
    assert torch.equal(policy.clean(x, torch.ones(5), features), x)
    x = policy.clean(0.5 * fresh + 0.5 * x.clamp(-1, 1), torch.full((5,), 0.5), features)
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions[:, :, 0], x.clamp(-1, 1), atol=1e-6, rtol=1e-5)


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


@pytest.mark.parametrize("execute", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_a_dataset_have_the_same_past(kind: str, execute: int) -> None:
    policy, states = make(kind, obs_steps=STEPS), torch.randn(6, 2)
    actor, seen = Actor(policy, 1, execute), dict[int, Tensors]()
    for step in range(6):
        actor({"state": states[step][None]}, torch.tensor([step == 0]))
        if bool(actor.decided):
            seen[step] = actor.decision_obs
    steps: Tensors = {"obs/state": states, "action": torch.zeros(6, 1), "reward": torch.zeros(6)}
    ends = {"state": torch.zeros(1, 2)}
    recorded = Episodes(SPEC, steps, torch.tensor([0]), torch.tensor([6]), ends)
    past = under(past_observations(recorded, {"state": STEPS - 1}), "obs")["history/state"]
    assert list(seen) == list(range(0, 6, execute))
    for step, obs in seen.items():
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


NETS: list[dict[str, Any]] = [
    node_of("policies.generative.chunk_sampler.Transformer", width=16, depth=2, heads=2),
    node_of("policies.generative.chunk_sampler.UNet", channels=[8, 16, 24], groups=2, width=16),
]


def network(net: dict[str, Any], chunk: int = 4) -> Timed:
    torch.manual_seed(0)
    return build(net, Timed, chunk=chunk, action=3, features=5)


@pytest.mark.parametrize("net", NETS, ids=["transformer", "unet"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8])
def test_one_time_for_all_rows_is_that_time_for_each(net: dict[str, Any], chunk: int) -> None:
    made = network(net, chunk)
    x, t, features = torch.randn(6, chunk * 3), torch.rand(1), torch.randn(6, 5)
    out = made(x, t.expand(6), features)
    assert out.shape == (6, chunk * 3)
    torch.testing.assert_close(made.at(x, made.embed(t)[0], features), out)


@pytest.mark.parametrize("net", NETS, ids=["transformer", "unet"])
def test_every_step_sees_the_whole_chunk_the_time_and_the_features(net: dict[str, Any]) -> None:
    made = network(net)
    x = torch.randn(1, 12, requires_grad=True)
    t, features = torch.rand(1, requires_grad=True), torch.randn(1, 5, requires_grad=True)
    out = made(x, t, features).view(4, 3)
    for step in out.sum(1):
        seen = torch.autograd.grad(step, (x, t, features), retain_graph=True)
        assert all(grad.abs().min() > 0 for grad in seen)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in made.parameters())


def conditioned(kind: type[nn.Module], bias: list[float], *settings: Any) -> Any:
    """A layer of 8 channels that every condition modulates by `bias`, once for each channel."""
    torch.manual_seed(0)
    layer: Any = kind(*settings)
    torch.nn.init.zeros_(layer.modulate.weight)
    layer.modulate.bias.data = torch.tensor(bias).repeat_interleave(8)
    return layer


def test_film_by_hand() -> None:
    """scale 1 and shift 3 for every channel: 2 mish(norm(conv)) + 3 goes on."""
    block, h = conditioned(Film, [1.0, 3.0], 4, 8, UNetConfig(width=2)), torch.randn(2, 4, 5)
    inner = 2 * functional.mish(block.norm(block.one(h))) + 3
    expected = block.short(h) + functional.mish(block.last(block.two(inner)))
    torch.testing.assert_close(block(h, torch.randn(2, 2)), expected)


def test_a_condition_scales_and_shifts_what_a_layer_sees() -> None:
    layer, h = conditioned(Modulated, [1.0, 2.0, 3.0, 4.0], 8, 2), torch.randn(2, 3, 8)
    own = 2 * functional.layer_norm(h, (8,)) + 2
    middle = h + layer.own(own, own)
    expected = middle + layer.each(4 * functional.layer_norm(middle, (8,)) + 4)
    torch.testing.assert_close(layer(h, torch.randn(2, 8)), expected)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("UNet", {"kernel": 4}, "odd kernel"),
        ("UNet", {"channels": [12]}, "multiple of groups=8"),
        ("UNet", {"time_dim": 3}, "must be even"),
        ("Transformer", {"heads": 5}, "multiple of heads=5"),
        ("Transformer", {"layers": 5}, 'no setting "layers"'),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    kind: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        network(node_of(f"policies.generative.chunk_sampler.{kind}", **settings))


def make_act(**settings: Any) -> Act:
    torch.manual_seed(0)
    return Act(Config(**{"chunk": 3, "width": 16, "heads": 2, "style": 2, **settings}), SPEC)


def test_divergence_by_hand() -> None:
    """N(1, 1) is 1/2 away from N(0, 1); N(0, 4) is (4 - 1 - 2 log 2) / 2."""
    mean, log_std = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, math.log(2)]])
    assert kl(mean, log_std).item() == pytest.approx(0.5 + 1.5 - math.log(2))
    assert kl(torch.zeros(3, 4), torch.zeros(3, 4)).tolist() == [0, 0, 0]


def test_the_loss_of_act_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicts 0.5 always: |0.5 - a| over the valid steps, and beta times 1/2 + 2."""
    policy = make_act(beta=0.1)
    posterior = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
    monkeypatch.setattr(policy, "posterior", lambda *given: posterior)
    monkeypatch.setattr(policy, "predict", lambda seen, z: torch.full((2, 3, 1), 0.5))
    batch = {
        "obs/state": torch.zeros(2, 2),
        "action": torch.tensor([[[0.0], [1.0], [9.0]], [[1.0], [1.0], [1.0]]]),
        "valid": torch.tensor([[True, True, False], [False, False, False]]),
    }
    assert policy.loss(batch).tolist() == pytest.approx([0.5 + 0.1 * 2.5, 0.0])


def test_padding_says_nothing_about_the_style() -> None:
    policy = make_act()
    seen = policy.observed({"state": torch.randn(4, 2)})
    valid = torch.tensor([True, True, False]).expand(4, 3)
    action = torch.randn(4, 3, 1)
    styles = [
        policy.posterior(seen, torch.where(changed[..., None], 7.0, action), valid)[0]
        for changed in (valid & False, ~valid, valid)
    ]
    torch.testing.assert_close(styles[1], styles[0])
    assert not torch.allclose(styles[2], styles[0])


def test_a_style_is_drawn_only_where_asked() -> None:
    assert not make_act().sample_noise(5).any() and make_act().sample_noise(5, explore=True).all()
    assert make_act(prior=True).sample_noise(5).all()


def test_the_mean_of_all_predictions_by_hand() -> None:
    """Three decisions; weights exp(-m i), the oldest prediction of a step first."""
    w = math.exp(-0.5)
    third, fourth = 3 + 20 * w + 100 * w**2, 30 + 200 * w + 0
    carry = {key: torch.zeros(1, 3) for key in ("weight", "count")} | {"sum": torch.zeros(1, 3, 1)}
    played = []
    for predicted in ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0], [0.0] * 3):
        action, carry = ensembled(torch.tensor(predicted).view(1, 3, 1), carry, 0.5)
        played.append(action.item())
    last = [total / (1 + w + w**2) for total in (third, fourth)]
    assert played == pytest.approx([1, (2 + 10 * w) / (1 + w), *last])


def test_an_ensemble_decides_at_every_step_and_starts_over_with_its_row() -> None:
    policy = make_act(ensemble=True, decay=0.0)
    assert policy.chunk == 3  # what it learns from
    policy.eval()
    assert policy.chunk == 1
    actor = Actor(policy, 2)
    obs = torch.randn(4, 2, 2)
    starts = torch.tensor([[True, True], [False, False], [False, True], [False, False]])
    with torch.no_grad():
        said = [policy.predict(policy.observed({"state": o}), policy.sample_noise(2)) for o in obs]
        played = [actor({"state": o}, first) for o, first in zip(obs, starts, strict=True)]
    said = [x.clamp(-1, 1) for x in said]
    third = (said[0][0, 2] + said[1][0, 1] + said[2][0, 0]) / 3
    torch.testing.assert_close(played[2][0], third)
    torch.testing.assert_close(played[2][1], said[2][1, 0])
    torch.testing.assert_close(played[3][1], (said[2][1, 1] + said[3][1, 0]) / 2)
    assert policy.train().chunk == 3 and policy.initial(2) == {}


def test_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = Attention(8, 2), nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key_value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key_value.bias]))
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    x, memory = torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    seen = torch.rand(3, 5) < 0.6
    seen[:, 0] = True
    for mask in (None, seen):
        hidden = None if mask is None else ~mask
        expected, _ = theirs(x, memory, memory, key_padding_mask=hidden)
        torch.testing.assert_close(ours(x, memory, mask), expected)


MODES_SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
SHARE, ROWS = 0.3, 4096
NODES = [("flow.Flow", (8,)), ("diffusion.Diffusion", (10,))]
NODES += [("shortcut.Shortcut", (1, 8)), ("consistency.Consistency", (1,))]


@pytest.mark.parametrize(("kind", "steps"), usually(NODES[:1], NODES))
def test_both_modes_keep_their_share(kind: str, steps: tuple[int, ...]) -> None:
    """4,000 actions of a policy that was shown -0.6 (SHARE of the time) and 0.6."""
    policy = make_policy(f"generative.{kind}", MODES_SPEC, chunk=1, width=64, steps=steps[-1])
    left = torch.rand(ROWS, 1) < SHARE
    action = torch.where(left, -0.6, 0.6) + 0.05 * torch.randn(ROWS, 1)
    valid = torch.ones(ROWS, 1, dtype=torch.bool)
    rows = {"obs/state": torch.zeros(ROWS, 1), "action": action[:, None], "valid": valid}
    learner = BehaviorCloning(ModesConfig(batch_size=256, lr=2e-3), policy, run=RunPlan(1000))
    learner.fit(rows)
    for _ in range(1000):
        index = torch.randint(ROWS, (256,))
        learner.update({key: value[index] for key, value in rows.items()})
    for count in steps:
        acting = with_steps(learner.policy, count)
        with torch.no_grad():
            noise = acting.sample_noise(4000)
            played = acting.act({"state": torch.zeros(4000, 1)}, {}, noise)[0].flatten()
        assert abs((played < 0).float().mean() - left.float().mean()) < 0.05
        near = ((played.abs() - 0.6).abs() < 0.25).float().mean()
        # One step draws a line between the modes, many steps a point.
        assert near > (0.8 if count == 1 else 0.9)
