"""Adversaries against the whole chain, with an arm that has mass; more of them: `long_run.py`."""

from __future__ import annotations

import numpy as np
import pytest

from real_robot.safety.chain import Chain
from tests.real_robot import long_run
from tests.real_robot.long_run import LIES, World, run


def test_no_sequence_leads_out_of_a_limit() -> None:
    world = run(1500, seed=3)
    assert world.chain.counts[world.chain.names.index("energy")] > 0, "the tank had to say no"
    assert world.chain.counts[-1] > 5000, "the limits had to say no"
    assert 0.1 * LIES * 1500 < sum(world.faults.values()) < 3 * LIES * 1500
    named = " ".join(world.faults)
    for reason in ("a command", "shape", "last observation", "the policy's observation", "joint"):
        assert reason in named


def test_it_finds_what_a_chain_without_limits_lets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def through(self: Chain, wish: object, *rest: object) -> object:
        if np.shape(wish) == (2,) and np.isfinite(wish).all():  # pyright: ignore
            self.limiter.q[:] = np.clip(wish, self.limiter.low, self.limiter.high)  # pyright: ignore
        return self.limiter.q

    monkeypatch.setattr(Chain, "__call__", through)
    with pytest.raises(AssertionError):
        run(50)


def test_a_torque_above_its_limit_has_to_latch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_run, "STIFFNESS", 5e4)
    monkeypatch.setattr(long_run, "MASS", 500.0)
    monkeypatch.setattr(long_run.Torque, "__call__", lambda self, tick: None)
    with pytest.raises(AssertionError, match="a torque above its limit"):
        world = World(0)
        sent: list[np.ndarray] = []
        for _ in range(300):
            world.sequence(sent)
