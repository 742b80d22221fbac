"""A released arm: a person moves it by hand, and it is held again where it was left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from embodied.cli import main
from embodied.embodiments import fr3
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.crazyflie.driver import Crazyflie
from embodied.real_robot.drivers.driver import DriverError
from embodied.real_robot.drivers.dry_run import DryRunDriver
from embodied.real_robot.drivers.replay import Replay
from embodied.real_robot.drivers.sim import Sim
from embodied.real_robot.ipc.messages import Command, Mode
from tests.real_robot.test_control import within
from tests.real_robot.test_daemon import Bridge, bridging, deployment
from tests.real_robot.test_yielding import SECOND, Pressing, blind, push

__all__ = ["deployment"]


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory, deployment: Deployment) -> Iterator[Bridge]:
    with bridging(tmp_path_factory.mktemp("daemon"), deployment) as made:
        yield made


def test_an_operator_releases_and_resets_an_arm(
    bridge: Bridge, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.idle()
    folder = f"folder={bridge.folder}"
    with pytest.raises(SystemExit) as ended:
        main(["robot", "release", folder])
    assert ended.value.code == 0
    assert "release: done" in capsys.readouterr().out
    assert bridge.status["mode"] == "RELEASED"
    refused = bridge.ask(Verb.RELEASE)
    assert not refused.ok and "at rest" in refused.reason and "supported=true" in refused.reason
    assert bridge.ask(Verb.RESET).ok and bridge.mode("IDLE")
    # On a terminal it asks first.
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda text: said.append(text) or "no")
    said: list[str] = []
    with pytest.raises(SystemExit):
        main(["robot", "release", "supported=true", folder])
    assert "it will fall" in said[0] and "not released" in capsys.readouterr().err
    assert bridge.status["mode"] == "IDLE"
    with pytest.raises(SystemExit):
        main(["robot", "release", "supported=perhaps", folder])
    assert "true or false" in capsys.readouterr().err


@pytest.fixture
def bench(tmp_path: Path) -> Pressing:
    made = Pressing(tmp_path, height=0.1)
    made.run(10)
    return made


def guided(bench: Pressing) -> np.ndarray:
    """Somebody pushes it down by hand; where the joints are then."""
    start = bench.tool[-1]
    push(bench, 10.0)
    bench.run(SECOND)
    push(bench, 0.0)
    bench.run(SECOND)
    assert start[2] - bench.tool[-1][2] > 0.05, "ten newtons move it"
    return bench.driver.data.qpos[:7].copy()


def held(bench: Pressing, q: np.ndarray) -> None:
    bench.run(SECOND)
    assert bench.driver.data.qpos[:7] == pytest.approx(q, abs=0.01)
    push(bench, 10.0)
    bench.run(SECOND)
    assert bench.driver.data.qpos[:7] == pytest.approx(q, abs=0.02), "its springs are back"


def test_released_from_idle_guided_and_held_where_it_was_left(bench: Pressing) -> None:
    assert bench.ask(Command.RELEASE) == Mode.RELEASED
    start = bench.tool[-1]
    bench.run(3 * SECOND)
    assert np.linalg.norm(bench.tool[-1] - start) < 5e-3, "it carries its own weight"
    q = guided(bench)
    assert bench.sent[-1] == pytest.approx(q, abs=1e-3), "what is sent follows the arm"
    for wish in (Command.ARM, Command.START, Command.HOME, Command.STOP, Command.QUIT):
        assert bench.ask(wish) == Mode.RELEASED and not bench.control.quit
    assert bench.ask(Command.RESET) == Mode.IDLE and not bench.fault
    held(bench, q)
    before = len(bench.sent)
    bench.moving()
    assert bench.mode == Mode.RUNNING, bench.fault
    within(bench.sent[before:])


def test_released_from_a_latched_stop_at_rest_only(bench: Pressing) -> None:
    bench.moving()
    assert bench.ask(Command.RELEASE) == Mode.RUNNING, "not while it moves"
    bench.ask(Command.ESTOP)
    assert bench.ask(Command.RELEASE) == Mode.ESTOP, "not yet at rest"
    bench.run(2 * SECOND)
    assert bench.ask(Command.RELEASE) == Mode.RELEASED and not bench.fault
    q = guided(bench)
    assert bench.ask(Command.RESET) == Mode.IDLE
    held(bench, q)


def test_a_stop_holds_a_released_arm_where_it_is(bench: Pressing) -> None:
    bench.ask(Command.RELEASE)
    q = guided(bench)
    assert bench.ask(Command.ESTOP) == Mode.ESTOP
    held(bench, q)
    assert bench.ask(Command.RESET) == Mode.IDLE


def test_an_arm_that_is_not_seen_any_more_is_held(bench: Pressing) -> None:
    bench.ask(Command.RELEASE)
    q = guided(bench)
    blind(bench)
    bench.run(2)
    assert bench.mode == Mode.ESTOP and "finite" in bench.fault
    held(bench, q)


def test_an_arm_that_falls_is_released_only_with_a_support(
    bench: Pressing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sim, "falls_when_released", True)
    assert bench.ask(Command.RELEASE) == Mode.IDLE and bench.refused
    assert bench.ask(Command.RELEASE_SUPPORTED) == Mode.RELEASED


def test_what_cannot_be_released_says_why(bench: Pressing) -> None:
    for kind, why in ((Crazyflie, "would fall"), (Replay, "no arm"), (DryRunDriver, "dry run")):
        with pytest.raises(DriverError, match=why):
            object.__new__(kind).release()
    bench.control.driver = dry = DryRunDriver(bench.driver)
    dry.connect()
    assert bench.ask(Command.RELEASE) == Mode.IDLE
    assert bench.driver.read().q == pytest.approx(fr3.HOME, abs=1e-3)
