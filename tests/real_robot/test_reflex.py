"""The reflex on a robot: the trained policy's numbers, in the chain, without torch."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.policies.wrappers.reflex_override import ReflexOverride
from embodied.real_robot.kernel.arm_state import ArmState, Limits
from embodied.real_robot.kernel.chain import Chain, Tick
from embodied.real_robot.kernel.checks import Finite
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.safety.learned_reflex import Config, Reflex
from tests.builders import make_policy, node_of

DT = 0.02
SPEC = Spec({"state": Leaf((8,))}, Leaf((3,), low=-1.0, high=1.0), dt=DT)
LIMITS = Limits(*((value,) * 2 for value in (-1.0, 1.0, 0.0, 2.0, 9.0, 90.0, 9.0, 9.0)))
STRIDE = (0.01, 0.02)
FITS: dict[str, Any] = {"stride": STRIDE, "stiffness": (0.4,), "springs": (50.0, 20.0)}


def policy(armed: bool = True) -> ReflexOverride:
    steps = {"decision_steps": 1, "min_duration_steps": 1, "threshold": 0.5, "release_ratio": 0.9}
    base = node_of("policies.gaussian.Gaussian", hidden=[8])
    about: dict[str, Any] = {**steps, "base": base, "hidden": [16, 16]}
    made: ReflexOverride = make_policy("wrappers.reflex_override.ReflexOverride", SPEC, 2, **about)
    made.fit({"obs/state": torch.randn(500, 8) * torch.linspace(0.1, 2, 8) + 0.3})
    for weight in [*made.risks.parameters(), *made.recovery.parameters()]:
        weight.data.mul_(2)
    made.risks.biases[-1].data.fill_(-0.9)  # so that some, not all, are above the threshold
    made.armed.fill_(armed)
    return made


def saved(made: ReflexOverride, folder: Path) -> str:
    checkpoint.save(folder / "checkpoints" / "00000000", made, 0)
    return str(folder)


def stage(folder: Path, made: ReflexOverride | None = None, **settings: Any) -> Reflex:
    run = saved(made or policy(), folder)
    return Reflex(Config(**(FITS | {"run": run} | settings)), 2, DT)


def tick(random: np.random.Generator) -> Tick:
    last, step = random.uniform(-0.5, 0.5, 2), random.uniform(-2, 2, 2) * STRIDE
    q = last + random.normal(0, 0.1, 2)
    arm = ArmState(q, random.normal(0, 1, 2), random.normal(0, 2, 2), 0.0)
    return Tick(last + step, last, arm, 0.0, 0.0)


@torch.no_grad()
def test_it_does_what_the_policy_does(tmp_path: Path) -> None:
    made, random = policy(), np.random.default_rng(0)
    reflex, acted = stage(tmp_path, made), 0
    for _ in range(300):
        now = tick(random)
        arm, wanted = now.arm, now.q.copy()
        state = np.concatenate([arm.q, arm.dq, arm.tau, now.last - arm.q])
        obs = {"state": torch.tensor(state, dtype=torch.float32)[None]}
        step = np.append(np.clip((wanted - now.last) / STRIDE, -1, 1), 0.4)
        risk = made.risk(obs, torch.tensor(step, dtype=torch.float32)[None]).item()
        reflex.begin(arm)
        reflex(now)
        assert reflex.risk == pytest.approx(risk, abs=1e-5)
        if abs(risk - 0.5) < 1e-4:
            continue
        assert reflex.acting == (risk > 0.5)
        recovery = made.recover(made.encoder(obs))[0].numpy()
        expected = now.last + recovery[:2] * STRIDE if reflex.acting else wanted
        np.testing.assert_allclose(now.q, expected, atol=1e-6)
        assert reflex.stiffness[0] == pytest.approx(recovery[2] if reflex.acting else 0.4, abs=1e-5)
        acted += reflex.acting
    assert 30 < acted < 270, "both cases were seen"


def test_the_chain_counts_it_and_the_limits_come_after_it(tmp_path: Path) -> None:
    made = policy()
    with torch.no_grad():
        for parameter in [*made.risks.biases, made.recovery[-1].bias]:
            parameter.fill_(9.0)  # always in danger, and away is up
    chain = Chain([stage(tmp_path, made), Finite()], Limiter(LIMITS, DT))
    assert chain.names == ("finite", "reflex", "limits")
    q = np.zeros(2)
    arm = ArmState(q, q, q, 0.0)
    chain.begin(arm)
    sent = chain(np.array([-0.5, -0.5]), 0.0, arm, 0.0)
    assert (sent > 0).all() and (sent <= np.array(STRIDE)).all()
    assert chain.counts[1] == 1


def test_a_state_that_is_no_number_is_a_fault_and_nothing_is_made_of_it(tmp_path: Path) -> None:
    reflex, now = stage(tmp_path), tick(np.random.default_rng(1))
    wanted = now.q.copy()
    now.arm.tau[1] = math.nan
    reflex(now)
    assert "risk is not a finite number" in now.fault
    np.testing.assert_array_equal(now.q, wanted)


def test_ticks_keep_no_memory(tmp_path: Path) -> None:
    reflex, random = stage(tmp_path), np.random.default_rng(3)
    now = tick(random)
    wanted = now.q.copy()
    for _ in range(50):
        reflex(now)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(200):
        np.copyto(now.q, wanted)
        reflex(now)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 500, "bytes: a few Python numbers, no arrays"


@pytest.mark.parametrize(
    ("settings", "dt", "line"),
    [
        ({"stride": (0.01,)}, DT, "stride needs 2 numbers"),
        ({}, 0.01, "learned at 50 Hz, the control loop runs at 100"),
        ({"stiffness": (), "springs": ()}, DT, r"make 8 and \[2\]"),
        ({"springs": ()}, DT, "needs springs"),
        ({"springs": (50.0,)}, DT, "springs needs 2 numbers"),
        ({"stiffness": (1.5,)}, DT, "from -1 to 1"),
        ({"run": "/nowhere"}, DT, "/nowhere cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, settings: dict[str, Any], dt: float, line: str
) -> None:
    node = FITS | {"run": saved(policy(), tmp_path)} | settings
    with pytest.raises(ConfigError, match=line) as caught:
        Reflex(Config(**node), 2, dt)
    assert "\n" not in str(caught.value)


def test_a_reflex_that_never_learned_is_refused(tmp_path: Path) -> None:
    plain = make_policy("gaussian.Gaussian", SPEC, hidden=[8])
    for made, match in ((policy(armed=False), "was never armed"), (plain, "has no reflex")):
        with pytest.raises(ConfigError, match=match):
            stage(tmp_path / match, made)
