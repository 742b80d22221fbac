"""No deployment file, whatever is in it, ends a process otherwise than in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodied.core.build import ConfigError
from embodied.real_robot.deployment import FILE, Deployment
from embodied.real_robot.kernel.checks import FreshConfig
from embodied.real_robot.safety.energy import Config as EnergyConfig
from embodied.real_robot.safety.workspace import Config as WorkspaceConfig
from tests.real_robot.deployment_fuzz import WHOLE, bases, fuzz
from tests.real_robot.test_control import LIMITS

NAN, INF = float("nan"), float("inf")


def test_files_of_all_kinds_are_accepted_or_refused_in_a_line() -> None:
    for settings in bases():  # what is not changed is accepted
        assert Deployment.parse(settings).joints == len(settings["limits"]["low"])
    found = fuzz(500, seed=20)
    assert found.total() == 500 and min(found["accepted"], found["refused"]) > 10


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e300])
@pytest.mark.parametrize(
    "part",
    [
        {"fresh": {"hold": 0.2, "stop": 1.0, "state": None}},
        {"fresh": {"hold": 0.2, "stop": 1.0, "state": 0.2, "pause": None}},
        {"fresh": {"hold": 0.2, "stop": None, "state": 0.2}},
        {"workspace": {"low": [-1, -1, 0], "high": [1, 1, 1], "planes": [[0, 0, 1, None]]}},
        {"workspace": {"low": [-1, -1, None], "high": [1, 1, 1]}},
        {"energy": {**WHOLE["energy"], "power": None}},
        {"energy": {**WHOLE["energy"], "damping": [None] * 7}},
        {"energy": {**WHOLE["energy"], "most": None}},
        {"given": {"goal_x": None}},
        {"home_width": None},
        {"goal_within": None},
        {"torque_rate": [None] * 7},
        {"step": None},
        {"picture": None},
        {"driver": {"_target_": "embodied.real_robot.drivers.sim.Sim", "noise": None}},
    ],
)
def test_what_is_not_a_number_is_refused(part: dict[str, Any], value: float) -> None:
    """Also where it passes a comparison: NaN <= 0 is false, and infinity is above 0."""
    whole = bases()[0]
    with pytest.raises(ConfigError) as refused:
        Deployment.parse({**whole, **filled(part, value)})
    assert len(str(refused.value).splitlines()) == 1


def filled(part: Any, value: float) -> Any:
    if isinstance(part, dict):
        return {key: filled(each, value) for key, each in part.items()}
    if isinstance(part, list):
        return [filled(each, value) for each in part]
    return value if part is None else part


@pytest.mark.parametrize(
    "data",
    [b"", b"[", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe\x00", b"3", b"null", b"\x80\x04K"],
)
def test_bytes_that_are_no_deployment(tmp_path: Path, data: bytes) -> None:
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(ConfigError, match=FILE):
        Deployment.read(tmp_path)


def test_configs_refuse_what_is_not_a_number_by_themselves() -> None:
    energy: dict[str, Any] = {"start": 2.0, "most": 4.0, "least": 0.5, "power": 20.0}
    springs: dict[str, Any] = {"stiffness": (1.0,), "damping": (1.0,)}
    EnergyConfig(**energy, **springs)
    wrong = [{**energy, name: NAN, **springs} for name in energy]
    wrong += [{**energy, **springs, name: (no,)} for name in springs for no in (NAN, -1.0, INF)]
    tried: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (FreshConfig, {"hold": 0.2, "stop": 1.0, "state": NAN}),
        (FreshConfig, {"hold": 0.2, "stop": 1.0, "state": 0.2, "pause": NAN}),
        (FreshConfig, {"hold": 0.2, "stop": INF, "state": 0.2}),
        (WorkspaceConfig, {"low": (0, 0, 0), "high": (1, 1, 1), "planes": ((0, 0, 1, NAN),)}),
        (WorkspaceConfig, {"low": (0, 0, 0), "high": (1, NAN, 1)}),
    ]
    for kind, settings in [*tried, *((EnergyConfig, each) for each in wrong)]:
        with pytest.raises(ConfigError):
            kind(**settings)
    for name, value in (("velocity", 1e-12), ("jerk", 1e11), ("acceleration", 1e-9)):
        with pytest.raises(ConfigError, match="from 1e-07 to 1000 s"):
            replace(LIMITS, **{name: (value,) * 7})  # nobody can plan with them
