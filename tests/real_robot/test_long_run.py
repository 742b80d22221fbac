"""Adversaries against each robot's complete chain, with an arm that has mass; more of them:
`long_run.py`."""

from __future__ import annotations

import pytest

from tests.real_robot.long_run import CONFIGS, run
from tests.tiers import usually

# Each kind of arm and chain; test_invariants.py walks through the others too.
USUAL = ("crazyflie_sim", "sim", "sim_impedance", "so101_sim", "two_so101_sim")


@pytest.mark.parametrize("config", usually(USUAL, CONFIGS))
def test_no_sequence_leads_out_of_a_limit(config: str) -> None:
    world = run(config, 300, seed=4)
    names = world.chain.names
    for stage in ("workspace", "reflex", "energy", "limits"):
        assert world.chain.counts[names.index(stage)] > 0, f"{stage} had nothing to do"
    assert ("geometry" in names) == (world.made.geometry is not None)
    assert {"finite", "fresh", "heartbeat", "hold_to_run", "torque", "torque_rate", "tracking"} < {
        *names
    }
    assert {"overspeed", "outside"} < {*names}
