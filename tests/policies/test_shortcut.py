"""Shortcuts: steps of every size, their targets and the loss, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.policies.generative.shortcut import Config, Shortcut

SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def make(**settings: Any) -> Shortcut:
    torch.manual_seed(0)
    return Shortcut(Config(**{"chunk": 2, "width": 16, **settings}), SPEC)


def rows(n: int) -> dict[str, Tensor]:
    valid = torch.ones(n, 2, dtype=torch.bool)
    return {"obs/state": torch.zeros(n, 2), "action": torch.full((n, 2, 1), 0.4), "valid": valid}


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_acting_is_euler_told_its_step(steps: int) -> None:
    policy = make(steps=steps, finest=8)
    obs, noise = {"state": torch.randn(5, 2)}, 0.3 * policy.sample_noise(5)
    x, features = noise, policy.encoder(obs)
    level = {1: 0, 2: 1, 8: 3}[steps]
    for i in range(steps):
        t, size = torch.full((5,), i / steps), torch.full((5,), level)
        x = x + policy.velocity(x, t, size, features) / steps
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions, x.clamp(-1, 1)[:, :, None], atol=1e-6, rtol=1e-5)


def test_a_long_step_is_two_of_half_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make(finest=4)
    x, t, level = torch.ones(2, 2), torch.tensor([0.0, 0.5]), torch.tensor([0, 1])
    none = torch.zeros(2, 2)
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
    policy = make(finest=8, bootstrap=4)
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
    policy = make(finest=4, bootstrap=2)
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
    policy = make(bootstrap=4)
    longer = policy.longer
    found: list[Tensor] = []

    def seen(x: Tensor, t: Tensor, level: Tensor, features: Tensor) -> Tensor:
        found.append(features[:, 0])
        return longer(x, t, level, features)

    monkeypatch.setattr(policy, "longer", seen)
    source = torch.arange(256) % 2
    policy.loss({**rows(256), "obs/state": source[:, None].expand(-1, 2).float()})
    assert len(found[0]) == 64 and len(found[0].unique()) == 2


def test_the_right_velocity_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With data at one point all paths are straight: a step of any size has the same velocity."""
    policy = make()
    monkeypatch.setattr(
        policy, "velocity", lambda x, t, level, f: (0.4 - x) / (1 - t).clamp(min=1e-6)[:, None]
    )
    assert policy.loss(rows(400)).max() < 1e-5


def test_targets_have_no_gradient() -> None:
    policy = make()
    target = policy.longer(
        torch.ones(2, 2), torch.zeros(2), torch.zeros(2).long(), torch.ones(2, 2)
    )
    assert not target.requires_grad


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 3}, "steps=3 must be a power of two"),
        ({"finest": 12}, "finest=12 must be a power of two"),
        ({"steps": 8, "finest": 4}, "steps=8 must be at most finest=4"),
    ],
)
def test_steps_that_do_not_fit_are_refused(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(
            {"_target_": "embodied.policies.generative.shortcut.Shortcut", **settings},
            Policy,
            spec=SPEC,
        )
