"""Adversaries against each robot's complete chain, with an arm that has mass; more of them:
`long_run.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodied.real_robot.safety.chain import Chain, Limiter
from embodied.real_robot.safety.checks import Torque, TorqueRate
from tests.real_robot.long_run import CONFIGS, World, deployment, run


@pytest.mark.parametrize("config", CONFIGS)
def test_no_sequence_leads_out_of_a_limit(config: str) -> None:
    world = run(config, 300, seed=3)
    names = world.chain.names
    for stage in ("workspace", "reflex", "energy", "limits"):
        assert world.chain.counts[names.index(stage)] > 0, f"{stage} had nothing to do"
    assert ("geometry" in names) == (config != "crazyflie_sim")
    assert {"finite", "fresh", "heartbeat", "hold_to_run", "torque", "torque_rate", "tracking"} < {
        *names
    }


def through(self: Chain, wish: object, *rest: object) -> object:
    if np.shape(wish) == self.limiter.q.shape and np.isfinite(wish).all():  # pyright: ignore
        self.limiter.q[:] = np.clip(wish, self.limiter.low, self.limiter.high)  # pyright: ignore
    return self.limiter.q


def test_it_finds_what_a_chain_without_limits_lets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chain, "__call__", through)
    with pytest.raises(AssertionError):
        run("so101_sim", 50)


@pytest.mark.parametrize("config", ["sim", "so101_sim", "ur_sim"])
def test_it_finds_a_limiter_without_guards(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limiter, "_leaves_region", lambda self, now: False)
    with pytest.raises(AssertionError, match="out by"):
        run(config, 600)


@pytest.mark.parametrize(
    ("stage", "says"), [(Torque, "a torque above its limit"), (TorqueRate, "a blow")]
)
def test_what_is_above_its_limit_has_to_latch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: type, says: str
) -> None:
    monkeypatch.setattr(stage, "__call__", lambda self, tick: None)
    world = World(deployment("so101_sim", tmp_path), 0)
    world.push, world.hurry = 3 * world.most, 1.0 if stage is TorqueRate else 0.05
    with pytest.raises(AssertionError, match=says):
        for _ in range(300):
            world.sequence()
