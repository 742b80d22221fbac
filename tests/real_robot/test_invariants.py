"""Modes of every simulated robot's control loop, and adversaries against its complete chain."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.real_robot.long_run import CONFIGS, run
from tests.real_robot.modes import OPERATIONS, Modes, walk
from tests.tiers import only_all, usually

SEQUENCES = 100_000  # of `--all`, over all configurations


class AnyOrder(RuleBasedStateMachine):
    """Every operation, in orders that hypothesis looks for and shortens."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = Modes("so101_sim")

    @rule(operation=st.sampled_from(sorted(set(OPERATIONS))), size=st.integers(0, 5))
    def do(self, operation: str, size: int) -> None:
        self.modes.do(operation, size)

    def teardown(self) -> None:
        self.modes.close()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("config", CONFIGS)
def test_nothing_but_a_reset_leads_on_and_nothing_leaves_the_limits(config: str) -> None:
    seen = walk(config, 100, seed=1).seen
    assert {"RUNNING", "ESTOP", "IDLE", "ARMED"} <= seen.keys(), "too little of it was tried"


@only_all
@pytest.mark.parametrize("config", CONFIGS)
def test_many_sequences(config: str) -> None:
    run(config, SEQUENCES // len(CONFIGS), seed=11)
    walk(config, 1_000, seed=11)


# Each kind of arm and chain; the walks above are of the others too.
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
