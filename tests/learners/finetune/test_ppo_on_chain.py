"""DPPO and ReinFlow: ratios, losses, schedules by hand; what must not change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, each, nest, take
from embodied.learners.finetune import dppo
from embodied.learners.finetune.dppo import clip_schedule
from embodied.learners.finetune.reinflow import fallen
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy.ppo import EPS
from embodied.policies.denoising_mdp.partial_finetune import PartialFinetune
from embodied.training.logger import Log
from embodied.training.train import train
from tests.builders import make_learner, node_of

ACT = Leaf((2,), low=-1.0, high=1.0)
SPECS = {
    "state": Spec({"state": Leaf((3,))}, ACT, dt=0.1),
    "camera": Spec({"state": Leaf((3,)), "front": Leaf((12, 12, 3), "uint8")}, ACT, dt=0.1),
}
FLOW: dict[str, Any] = node_of("policies.generative.flow.Flow", chunk=3, steps=4, width=16)
DIFFUSION: dict[str, Any] = node_of(
    "policies.generative.diffusion.Diffusion", chunk=3, steps=5, width=16
)
POLICIES: dict[str, dict[str, Any]] = {
    "dppo": node_of(
        "policies.denoising_mdp.noisy_diffusion.NoisyDiffusion", base=DIFFUSION, last=3
    ),
    "reinflow": node_of("policies.denoising_mdp.noisy_flow.NoisyFlow", base=FLOW),
}
LEARNERS = {"dppo": "finetune.dppo.Dppo", "reinflow": "finetune.reinflow.Reinflow"}


def make(
    name: str, kind: str = "state", execute: int | None = None, **settings: Any
) -> tuple[Any, Any]:
    """Learner and policy; a policy's own settings are given as `policy`."""
    torch.manual_seed(0)
    policy = build({**POLICIES[name], **settings.pop("policy", {})}, Policy, spec=SPECS[kind])
    given = {"batch_size": 16, "warm_up": 0, "epochs": 2, **settings}
    run = RunPlan(decisions=1000, execute=execute)
    learner = make_learner(LEARNERS[name], policy, run, **given)
    assert [adam.param_groups[0]["eps"] for adam in learner.optims.values()] == [EPS, EPS]
    return learner, policy


def test_an_entropy_bonus_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="entropy has no effect"):
        make("dppo", entropy=0.01)


def batch_of(policy: Any, times: int = 5, rows: int = 4) -> Tensors:
    """Decisions of the policy itself, two of the last row's missing."""
    n, spec = times * rows, policy.spec
    seen = [
        {
            key: torch.randint(256, (n, *leaf.shape)).to(torch.uint8)
            if leaf.is_image
            else torch.randn(n, *leaf.shape)
            for key, leaf in spec.obs.items()
        }
        for _ in range(2)
    ]
    with torch.no_grad():
        _, carry = policy.act(seen[0], {}, policy.sample_noise(n, explore=True))
    flat = {
        **nest(seen[0], "obs"),
        **nest(seen[1], "next_obs"),
        "action": carry["row/action"],
        "reward": torch.randn(n),
        "discount": torch.full((n,), 0.9),
        "ended": torch.rand(n) < 0.2,
        "first": torch.rand(n) < 0.2,
        "valid": torch.ones(n, dtype=torch.bool),
    }
    batch = each(flat, lambda leaf: leaf.unflatten(0, (times, rows)))
    for key in batch:
        batch[key][-2:, -1] = 0
    return batch


def state_of(module: torch.nn.Module) -> Tensors:
    return {key: value.clone() for key, value in module.state_dict().items()}


def changed(before: Tensors, module: torch.nn.Module) -> set[str]:
    """The names of what is not as it was in a module's state."""
    now = module.state_dict()
    return {key for key in before if not torch.equal(before[key], now[key])}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("execute", [None, 2])
def test_the_first_ratio_is_one(name: str, kind: str, execute: int | None) -> None:
    """Whatever the order and size of the minibatch."""
    learner, policy = make(name, kind, execute)
    table, _ = learner._table(batch_of(policy), {})
    assert len(table["old"]) == 18 * (3 if name == "dppo" else 1)
    assert table["old"].std() > 1e-3
    some = take(table, torch.randperm(len(table["old"]))[:7])
    log_prob, _ = learner._evaluate_actions(some)
    assert ((log_prob - some["old"]).exp() - 1).abs().max() < 1e-5
    _, metrics = learner._loss(some)
    assert metrics["clipped"] == 0 and metrics["kl"].abs() < 1e-7


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("links", [1, 3])
def test_only_what_learns_changes(name: str, links: int) -> None:
    own = {"last": links} if name == "dppo" else {"base": FLOW | {"steps": links}}
    learner, policy = make(name, lr=1e-2, policy=own)
    before = state_of(policy)
    learner.update(batch_of(policy))
    learns = {key for key, _ in policy.named_parameters() if not key.startswith("inner.base.")}
    assert changed(before, policy) == learns
    assert any(key.endswith("norm.mean") for key in before)  # and these stayed


@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
@pytest.mark.parametrize("name", LEARNERS)
def test_the_critic_warms_up_alone(name: str, schedule: str) -> None:
    learner, policy = make(name, warm_up=1, schedule=schedule)
    before, critic = state_of(policy), state_of(learner.value)
    learner.update(batch_of(policy))
    assert not changed(before, policy) and changed(critic, learner.value)
    assert learner.lr.lr_scale == 1  # the divergence of a policy that waits says nothing
    learner.update(batch_of(policy))
    assert changed(before, policy)


def test_clips_by_hand() -> None:
    """exp(3 k / 3) - 1 over exp(3) - 1 for four steps; one step alone has the last one's clip."""
    found = clip_schedule(4, 0.001, 0.01, 3.0)
    shares = [0.0, (math.e - 1) / (math.e**3 - 1), (math.e**2 - 1) / (math.e**3 - 1), 1.0]
    torch.testing.assert_close(found, torch.tensor([0.001 + 0.009 * s for s in shares]))
    assert clip_schedule(1, 0.001, 0.01, 3.0).tolist() == pytest.approx([0.01])


def test_dppo_table_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of a decision: it has the decision's advantage, its pair and its density are those
    of its place in the chain; large batches are assessed in pieces."""
    learner, policy = make("dppo", fade=0.5, advantage="raw", scale_rewards=False)
    batch = batch_of(policy)
    table, _ = learner._table(batch, {})
    whole = each(table, lambda leaf: leaf.unflatten(0, (18, 3)))
    raw = whole["target"] - whole["value"]  # the advantage of the decision
    torch.testing.assert_close(whole["advantage"], raw)
    chain = batch["action"][0, 1]
    assert torch.equal(whole["action"][1], torch.stack([chain[:3], chain[1:4]], 1))
    obs = {"state": batch["obs/state"][0, 1:2]}
    density = policy.link_log_prob(obs, chain[1:2], chain[2:3], torch.tensor([1]))
    torch.testing.assert_close(whole["old"][1, 1], density.clamp(-5, 2).mean().detach())
    monkeypatch.setattr(dppo, "PIECE", 7)
    torch.testing.assert_close(learner._table(batch, {})[0], table)


def test_dppo_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios 1.1 and 0.5 at steps whose clips are 0.02 and 0.2; the first of three fades by 1/4."""
    learner, _ = make("dppo", first_clip=0.02, clip=0.2, value_weight=0.5, fade=0.5)
    ratio = torch.tensor([1.1, 0.5])
    monkeypatch.setattr(learner, "_evaluate_actions", lambda rows: (ratio.log(), torch.zeros(2)))
    monkeypatch.setattr(learner, "_values", lambda rows: torch.tensor([1.0, 3.0]))
    rows = {
        "old": torch.zeros(2),
        "step": torch.tensor([0, 2]),
        "advantage": torch.tensor([2.0, -1.0]),
        "value": torch.zeros(2),
        "target": torch.tensor([0.0, 1.0]),
    }
    loss, metrics = learner._loss(rows)
    policy = (-min(1.1 * 0.5, 1.02 * 0.5) - min(-0.5, -0.8)) / 2
    value = (0.5 * 1 + 0.5 * 4) / 2
    assert loss.item() == pytest.approx(policy + 0.5 * value)
    assert metrics["clipped"] == 1


def test_advantages_are_normalised_before_they_fade(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the authors do: -1 and 1 of a minibatch, the first of them 1/4 of that."""
    learner, _ = make("dppo", fade=0.5, advantage="minibatch", value_weight=0.0)
    given: list[Tensor] = []
    zeros = torch.zeros(2)

    def seen(log_prob: Any, old: Any, advantage: Tensor, clip: Any) -> tuple[Tensor, Tensor]:
        given.append(advantage)
        return zeros, zeros

    monkeypatch.setattr(dppo, "clip_loss", seen)
    monkeypatch.setattr(learner, "_evaluate_actions", lambda rows: (zeros, zeros))
    monkeypatch.setattr(learner, "_values", lambda rows: zeros)
    rows = {"old": zeros, "value": zeros, "target": zeros, "step": torch.tensor([0, 2])}
    learner._loss(rows | {"advantage": torch.tensor([3.0, 7.0])})
    torch.testing.assert_close(given[0], torch.tensor([-0.25, 1.0]))


def test_staying_with_the_clone_by_hand() -> None:
    learner, policy = make("reinflow", stay=2.0)
    obs, z = {"state": torch.randn(200, 3)}, policy.inner.sample_noise(200)
    assert learner.left(obs, z) == 0
    with torch.no_grad():
        plain = policy.inner.act(obs, {}, z)[0]
        policy.inner.range.middle += 0.1  # every action by 0.1, where the box does not stop it
        moved = (plain + 0.1).clamp(-1, 1) - plain
    torch.testing.assert_close(learner.left(obs, z), moved.square().mean())
    metrics = learner.update(batch_of(policy))
    assert 0 < metrics["left_clone"] < 0.02
    assert not any(p.requires_grad for p in learner.clone.parameters())


def test_the_noise_falls_at_the_end_of_an_update() -> None:
    falls = [fallen(done, 0.35) for done in (0.2, 0.35, 0.675, 2.0)]
    assert falls == pytest.approx([0, 0, 0.5, 1])
    learner, policy = make("reinflow", narrow=True, hold=0.0)
    learner.total = 40
    batch = batch_of(policy)
    for share in (0.5, 1.0):  # 20 of 40 decisions: half of 0.3 of the way from 0.16 to 0.08
        learner.update(batch)
        assert policy.high.item() == pytest.approx(0.16 - 0.3 * share * 0.08)


@pytest.mark.parametrize("name", LEARNERS)
def test_runs_resume_exactly_and_leave_a_policy_without_noise(name: str, tmp_path: Path) -> None:
    two_gap = node_of("envs.toy.two_gap.TwoGap", horizon=10)
    env = build({**two_gap, "num_envs": 1}, VecEnv)
    clone = build(POLICIES[name]["base"], Policy, spec=env.spec)
    checkpoint.save(tmp_path / "clone" / "checkpoints" / "1", clone, 1)
    node = {
        "name": "test",
        "env": {**two_gap, "num_envs": 3},
        "policy": POLICIES[name],
        "learner": node_of(f"learners.{LEARNERS[name]}", horizon=2, epochs=2, batch_size=8),
        "init": str(tmp_path / "clone"),
        "eval": {"episodes": 2, "num_envs": 2},
        "device": "cpu",
        "video": False,
        "steps": 72,
    }

    def run(folder: str, **changes: Any) -> Any:
        with Log(tmp_path / folder) as log:
            train({**node, "out": str(tmp_path / folder), **changes}, log)
        return checkpoint.load_policy(tmp_path / folder)

    left = run("whole")
    run("half", steps=36)
    assert not changed(state_of(left), run("half", resume=str(tmp_path / "half")))
    kept = state_of(clone)
    if name == "dppo":
        assert isinstance(left, PartialFinetune)
        assert not changed(kept, left.base) and changed(kept, left.tuned)
    else:
        assert type(left) is type(clone) and changed(kept, left)
