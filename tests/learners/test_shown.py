"""PPO that is shown demonstrations: what moves when, how often, and an exact resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner, RunPlan
from embodied.learners.on_policy.ppo_demos import PpoDemos, remaining
from embodied.training.logger import Log
from embodied.training.train import train
from tests.builders import make_learner
from tests.learners.test_ppo import BOX, CHOICE, MEMORY, NODES, OBS, played
from tests.learners.test_ppo import make as make_ppo
from tests.training.test_teaching import NODE, PPO

CLONE = {
    "bc_pretrain_steps": 30,
    "critic_warmup": 1,
    "bc_steps": 2,
    "bc_batch_size": 8,
    "bc_lr": 0.02,
}


def make(name: str = "categorical", rows: int = 40, **settings: Any) -> PpoDemos:
    torch.manual_seed(0)
    spec = Spec(OBS, BOX if name == "normal" else CHOICE, dt=0.1)
    given = {"horizon": 6, "batch_size": 12, "epochs": 1, "value": {"hidden": [8]}, **CLONE}
    node = {"_target_": "embodied.learners.on_policy.ppo_demos.PpoDemos", **given, **settings}
    learner: PpoDemos = build(
        node,
        PpoDemos,
        policy=build(NODES[name], Policy, spec=spec),
        spec=spec,
        run=RunPlan(decisions=240),
    )
    if rows:
        learner.set_demonstrations(demos(name, rows))
    return learner


def demos(name: str, rows: int) -> Tensors:
    """Who shows does what the sign of the first number says."""
    random = torch.Generator().manual_seed(3)
    state = torch.randn(rows, 3, generator=random)
    sign = state[:, :1] > 0
    action = (
        sign.long() if name == "categorical" else (sign.float() - 0.5)[:, None].expand(-1, 1, 2)
    )
    valid = torch.ones(rows, 1, dtype=torch.bool)
    truth = torch.zeros(rows, 2)
    shown = {"obs/state": state, "obs/critic/truth": truth, "action": action, "valid": valid}
    return {**shown, "episode": torch.zeros(rows, dtype=torch.int64)}


def moved(learner: PpoDemos, batch: Tensors) -> tuple[bool, bool]:
    """Whether the policy's and the critic's weights move in an update."""
    parts = (learner.policy, learner.value)
    before = [[p.clone() for p in part.parameters()] for part in parts]
    learner.update(batch)
    policy, value = (
        any(not torch.equal(p, q) for p, q in zip(part.parameters(), old, strict=True))
        for part, old in zip(parts, before, strict=True)
    )
    return policy, value


@pytest.mark.parametrize("name", ["categorical", "normal"])
def test_first_it_clones_then_values_learn_then_all(name: str) -> None:
    learner = make(name)
    shown = demos(name, 40)
    with torch.no_grad():
        before = learner.policy.loss(shown).mean()  # type: ignore[attr-defined]
    assert moved(learner, played(learner)) == (True, False)
    with torch.no_grad():
        assert learner.policy.loss(shown).mean() < before - 0.1  # type: ignore[attr-defined]
    assert moved(learner, played(learner)) == (False, True)  # warm
    assert moved(learner, played(learner)) == (True, True)


def test_cloning_fades() -> None:
    learner = make(bc_decay=0.5, bc_steps=4, bc_pretrain_steps=0, critic_warmup=0)
    steps = []
    clone = learner._clone

    def counted(count: int) -> torch.Tensor:
        steps.append(count)
        return clone(count)

    learner._clone = counted  # type: ignore[method-assign]
    for _ in range(6):  # each batch is 24 of 240 decisions
        learner.update(played(learner))
    assert steps == [3, 2, 2, 1]  # round(4 (1 - 24 k / 120)): 3.2, 2.4, 1.6, 0.8, and none
    assert remaining(100, fade=0.0, total=0) == 1


def test_shown_nothing_it_is_ppo() -> None:
    learner, plain = make(rows=0), make_ppo("categorical")
    for _ in range(3):
        batch = played(plain)
        torch.manual_seed(5)
        plain.update(batch)
        torch.manual_seed(5)
        learner.update(batch)
    for one, other in zip(learner.policy.parameters(), plain.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_goes_on_exactly() -> None:
    """From a state in the middle of its warm-up, which another learner takes over."""
    learner, other = make(), make()
    batches = [played(make()) for _ in range(4)]
    learner.update(batches[0])
    other.set_state(copy.deepcopy(learner.get_state()))
    for each in (learner, other):
        for seed, batch in enumerate(batches[1:]):
            torch.manual_seed(seed)
            each.update(batch)
    assert learner.updates == other.updates == 4
    mine, theirs = learner.state_dict(), other.state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_what_it_does_not_take() -> None:
    spec = Spec(OBS, BOX, dt=0.1)
    policy = build({**MEMORY, "inner": NODES["normal"]}, Policy, spec=spec)
    with pytest.raises(ConfigError, match="without memory"):
        make_learner("on_policy.ppo_demos.PpoDemos", policy)
    with pytest.raises(ConfigError, match="length of the run"):
        node = {"_target_": "embodied.learners.on_policy.ppo_demos.PpoDemos", "bc_decay": 0.5}
        build(node, Learner, policy=build(NODES["normal"], Policy, spec=spec), spec=spec)


def test_a_run_says_what_is_missing_or_too_much(tmp_path: Path) -> None:
    node = {**NODE, **PPO, "teacher": None, "out": str(tmp_path / "run")}
    shown = {**PPO["learner"], "_target_": "embodied.learners.on_policy.ppo_demos.PpoDemos"}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="demos=DIR"):
        train({**node, "learner": shown}, Log(tmp_path, silent=True))
