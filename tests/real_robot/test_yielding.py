"""A latched stop lets go: contact forces after it, on a simulated FR3 that presses on a plate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.cli import main
from embodied.core.build import allow
from embodied.embodiments import fr3
from embodied.real_robot.control.homing import Homing
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.crazyflie.driver import Crazyflie
from embodied.real_robot.drivers.driver import DryRunDriver
from embodied.real_robot.drivers.replay import Replay
from embodied.real_robot.drivers.sim import Sim
from embodied.real_robot.kernel.arm_state import ArmState
from embodied.real_robot.kernel.checks import Torque, TorqueRate, Tracking
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.messages import Command, Mode
from embodied.real_robot.kernel.yielding import Yielding
from embodied.real_robot.safety.workspace import Config as WorkspaceConfig
from embodied.real_robot.safety.workspace import Workspace
from tests.real_robot.plate import FRANKA_DAMPING, FRANKA_STIFFNESS
from tests.real_robot.test_control import DOWN, DT, LIMITS, Bench, within
from tests.real_robot.test_daemon import Bridge, bridging, deployment
from tests.tiers import usually

GAINS: dict[str, dict[str, Any]] = {
    "sim": {},
    "franka": {"stiffness": list(FRANKA_STIFFNESS), "damping": list(FRANKA_DAMPING)},
}
MOST = 15.0  # N, from 1 s after a latched stop on
PAYLOAD_BOUND = 25.0  # N, the same with 0.5 kg in the hand that nobody said
SECOND = round(1 / DT)


GAINED = usually(["sim"], GAINS)
BOTH = pytest.mark.parametrize("gains", GAINED)


@pytest.fixture(params=GAINED)
def pressing(tmp_path: Path, request: pytest.FixtureRequest) -> Pressing:
    """An arm that presses on a plate."""
    bench = Pressing(tmp_path, request.param)
    bench.press()
    return bench


class Pressing(Bench):
    """An arm above a plate at `height`; `force` [ticks] is what it presses with, N."""

    def __init__(
        self, folder: Path, gains: str = "sim", height: float = 0.45, **wire: float
    ) -> None:
        allow("tests")
        world = {"_target_": "tests.real_robot.plate.Plate", "height": height} | GAINS[gains]
        super().__init__(folder, world=world, **wire)  # pyright: ignore[reportArgumentType]
        self.force: list[float] = []
        self.tool: list[np.ndarray] = []

    def run(self, turns: int) -> None:
        for _ in range(turns):
            super().run(1)
            self.force.append(float(self.driver.sense()[0]))
            self.tool.append(fr3.forward(self.driver.data.qpos[None, :7])[0][0])

    def press(self) -> None:
        """Until it presses with more than a person should feel."""
        self.moving()
        self.run(SECOND)
        assert self.force[-1] > 4 * MOST, self.force[-1]

    def stage(self, kind: type) -> Any:
        return next(each for each in self.control.chain.stages if isinstance(each, kind))

    def add(self, stage: Any, at: int = 99) -> None:
        stage.begin(self.driver.read())
        self.control.chain.stages.insert(at, stage)


def blind(bench: Pressing) -> None:
    """Every measurement from now on is not a number."""
    read = bench.driver.read

    def lie() -> ArmState:
        arm = read()
        return ArmState(arm.q * np.nan, arm.dq, arm.tau, arm.t)

    bench.driver.read = lie


def frozen(bench: Pressing) -> None:
    """The newest measurement for ever; at some time it is too old."""
    last = bench.driver.read()
    bench.driver.read = lambda: last


STOPS: dict[str, Callable[[Pressing], object]] = {
    "estop": lambda bench: bench.ask(Command.ESTOP),
    "torque": lambda bench: setattr(bench.stage(Torque), "most", np.full(7, 2.0)),
    "torque rate": lambda bench: bench.add(TorqueRate((1e-3,) * 7, DT)),
    "tracking": lambda bench: setattr(bench.stage(Tracking), "most", np.full(7, 0.01)),
    "silent": lambda bench: setattr(bench, "action", None),
    "not a number": lambda bench: setattr(bench, "action", DOWN * np.nan),
    "blind": blind,
    "frozen": frozen,
}


@pytest.mark.parametrize("stop", STOPS)
def test_a_latched_stop_lets_go_of_what_the_arm_presses_on(pressing: Pressing, stop: str) -> None:
    STOPS[stop](pressing)
    for _ in range(2 * SECOND):
        if pressing.mode == Mode.ESTOP:
            break
        pressing.run(1)
    assert pressing.mode == Mode.ESTOP and pressing.fault
    latched = len(pressing.force)
    pressing.run(6 * SECOND)
    assert max(pressing.force[latched + SECOND :]) < MOST, pressing.fault
    within(pressing.sent)


def unsaid_payload(folder: Path, gains: str) -> float:
    """Press on the plate with 0.5 kg at the hand that no gravity compensation carries, and stop:
    the largest force (N) from 1 s after the stop on."""
    bench = Pressing(folder, gains)
    model = bench.driver.model
    hand = model.body("hand").id
    mass = float(model.body_mass[hand])
    model.body_mass[hand] = mass + 0.5
    model.body_gravcomp[hand] = mass / (mass + 0.5)
    bench.press()
    bench.ask(Command.ESTOP)
    latched = len(bench.force)
    bench.run(4 * SECOND)
    return max(bench.force[latched + SECOND :])


@pytest.mark.parametrize("gains", usually(["franka"], GAINS))
def test_a_payload_that_nobody_said_presses_little_after_a_stop(tmp_path: Path, gains: str) -> None:
    assert unsaid_payload(tmp_path, gains) < PAYLOAD_BOUND


def test_what_comes_after_the_stop_presses_no_more_either(pressing: Pressing) -> None:
    pressing.ask(Command.ESTOP)
    pressing.run(SECOND)
    for wish, mode in ((Command.RESET, Mode.IDLE), (Command.ARM, Mode.ARMED)):
        before = len(pressing.force)
        assert pressing.ask(wish) == mode
        pressing.run(3 * SECOND)
        assert max(pressing.force[before:]) < MOST, wish
    within(pressing.sent)


def test_the_way_home_begins_where_the_arm_presses_on_nothing(pressing: Pressing) -> None:
    """A plain stop is no fault; the set-point of an arm at rest lets go all the same."""
    pressing.control.homing = Homing(fr3.HOME, LIMITS)
    pressing.ask(Command.STOP)
    pressing.run(2 * SECOND)
    assert pressing.mode == Mode.IDLE and max(pressing.force[-SECOND // 2 :]) < MOST
    assert pressing.ask(Command.ARM) == Mode.ARMED
    pressing.run(SECOND)
    assert max(pressing.force[-SECOND // 2 :]) < MOST
    pressing.ask(Command.STOP)
    pressing.run(SECOND)
    push(pressing, 60.0)  # somebody leans on it
    pressing.run(20)
    before = len(pressing.force)
    assert pressing.ask(Command.HOME) == Mode.HOMING
    push(pressing, 0.0)
    pressing.run(4 * SECOND)
    assert pressing.mode == Mode.IDLE and max(pressing.force[before:]) < 60.0 + MOST
    assert np.abs(pressing.sent[-1] - fr3.HOME).max() < 0.01, "up to what friction holds"
    within(pressing.sent)


def push(bench: Pressing, down: float) -> None:
    """A force on the hand, N, until the next one."""
    bench.driver.data.xfrc_applied[bench.driver.model.body("hand").id, 2] = -down


@BOTH
@pytest.mark.parametrize("noise", usually([1e-3], [0.0, 1e-4, 1e-3]))
def test_an_arm_that_hangs_in_the_air_stays_where_it_is(
    tmp_path: Path, gains: str, noise: float
) -> None:
    bench = Pressing(tmp_path, gains, height=0.1, noise=noise)
    bench.run(SECOND)
    here = bench.tool[-1]
    for _ in range(3):  # pressed again and again
        bench.ask(Command.ESTOP)
        bench.run(20 * SECOND)
        assert max(np.linalg.norm(each - here) for each in bench.tool) < 1e-3 + noise
        assert bench.ask(Command.RESET) == Mode.IDLE
    within(bench.sent)


@BOTH
def test_a_stopped_motion_ends_where_the_arm_is_and_does_not_go_back(
    tmp_path: Path, gains: str
) -> None:
    bench = Pressing(tmp_path, gains, height=0.1, noise=1e-4)
    bench.moving()
    bench.ask(Command.ESTOP)
    at = bench.tool[-1][2]
    bench.run(2 * SECOND)
    down = at - np.array(bench.tool)[-2 * SECOND :, 2]
    assert 0 < down.max() < 0.03, "it goes on by no more than its inertia takes it"
    assert down.max() - down[-1] < 2e-3, "nor back"
    rest = bench.tool[-1]
    bench.run(20 * SECOND)
    assert max(np.linalg.norm(each - rest) for each in bench.tool[-20 * SECOND :]) < 1e-3
    within(bench.sent)


def test_an_arm_that_was_last_seen_in_motion_is_not_led_back() -> None:
    """The wire breaks while it moves: nothing newer comes."""
    yielding = Yielding(LIMITS, np.zeros_like)
    for step in range(8):
        yielding.see(ArmState(np.full(7, 0.02 * step), np.ones(7), np.zeros(7), 0.02 * step))
    last = yielding.pose.copy()
    yielding.begin(last + 0.05, 0.16, moving=True)
    for now in np.arange(0.16, 4.0, 0.02):
        assert yielding(last.copy(), True, now) == pytest.approx(last)


def still(at: float, speed: float = 0.0) -> ArmState:
    """A measurement: all seven joints at `at` (rad), with the velocity `speed` (rad/s)."""
    return ArmState(np.full(7, at), np.full(7, speed), np.zeros(7), 0.0)


def test_an_arm_that_was_not_stopped_is_not_led() -> None:
    yielding = Yielding(LIMITS, np.zeros_like)
    yielding.see(still(0.5))
    assert yielding.settled and (yielding(np.zeros(7), True, 99.0) == 0).all()


def test_the_aim_at_rest_is_the_mean_of_four_measurements_with_the_droop() -> None:
    yielding = Yielding(LIMITS, lambda pose: np.full_like(pose, 0.25))
    for at in (9.0, 0.1, 0.2, 0.3, 0.4):
        yielding.see(still(at))
    yielding.see(still(np.nan))
    assert (yielding.pose == 0.4).all()
    yielding.begin(np.zeros(7), 10.0, moving=False)
    assert yielding(np.zeros(7), True, 10.0) == pytest.approx(np.full(7, 0.25 + 0.25))


def test_the_first_measurement_stands_for_those_before_it() -> None:
    yielding = Yielding(LIMITS, np.zeros_like)
    yielding.see(still(0.5))
    yielding.begin(np.zeros(7), 10.0, moving=False)
    assert yielding(np.zeros(7), True, 10.0) == pytest.approx(np.full(7, 0.5))


@pytest.mark.parametrize("faster", [False, True])
def test_an_arm_rests_below_a_speed_and_is_waited_for_above_it(faster: bool) -> None:
    """It would need 0.3 s to move by its band; a set-point waits 1 s for a faster one."""
    yielding = Yielding(LIMITS, np.zeros_like)
    assert yielding.band == pytest.approx(0.01 * np.asarray(LIMITS.tracking))
    speed = yielding.band / 0.3
    for at in (0.1, 0.2, 0.3, 0.5):
        state = ArmState(np.full(7, at), speed * (1 + 1e-9 * faster), np.zeros(7), 0.0)
        yielding.see(state)
    yielding.begin(np.zeros(7), 10.0, moving=False)
    if not faster:
        assert yielding(np.zeros(7), True, 10.0) == pytest.approx(np.full(7, 0.275))
        return
    assert (yielding(np.zeros(7), True, 10.999) == 0).all()
    assert (yielding(np.zeros(7), True, 11.0) == 0.5).all(), "the newest one, not the mean"


def test_a_set_point_near_enough_stays() -> None:
    """Nearer than the band and half of the droop, on both sides; it may still aim three times."""
    droop = 0.08
    yielding = Yielding(LIMITS, lambda pose: np.full_like(pose, -droop))
    yielding.see(still(1.0))
    free = 1.0 - droop
    near = yielding.band + 0.5 * droop
    for side in (1, -1):
        q = free + side * 0.999 * near
        yielding.begin(q, 10.0, moving=False)
        for now in (10.0, 11.0, 12.0, 13.0):
            assert (yielding(q, True, now) == q).all()
        q = free + side * 1.001 * near
        q[1:] = free
        assert yielding(q, True, 14.0) == pytest.approx(np.full(7, free))


def test_an_aim_changes_three_times_at_rest_and_after_a_while_each() -> None:
    yielding = Yielding(LIMITS, np.zeros_like)
    yielding.see(still(0.0))
    yielding.begin(np.zeros(7), 10.0, moving=False)
    aims: list[tuple[float, float]] = []
    for tick in range(200):
        now = 10 + tick / 100
        for _ in range(4):
            yielding.see(still(now))
        before = yielding.aim.copy()
        after = yielding(np.zeros(7), True, now)
        if (after != before).any():
            aims.append((now, after[0]))
    assert aims == [(at, pytest.approx(at)) for at in (10.0, 10.15, 10.3)]


def test_a_set_point_in_motion_is_not_led_before_it_rests_for_a_while() -> None:
    yielding = Yielding(LIMITS, np.zeros_like)
    yielding.see(still(0.5))
    yielding.begin(np.zeros(7), 10.0, moving=False)
    assert (yielding(np.zeros(7), False, 12.0) == 0).all()
    assert (yielding(np.zeros(7), False, 11.0) == 0).all(), "a clock that goes back"
    assert (yielding(np.zeros(7), True, 12.149) == 0).all()
    assert (yielding(np.zeros(7), True, 12.151) == 0.5).all()
    yielding.wait(13.0)
    yielding.begin(np.zeros(7), 20.0, moving=False)
    yielding.wait(20.0)
    assert (yielding(np.zeros(7), True, 20.149) == 0).all()
    assert (yielding(np.zeros(7), True, 20.151) == 0.5).all()


def test_a_moving_arm_is_followed_after_the_pause_for_half_a_second() -> None:
    yielding = Yielding(LIMITS, lambda pose: np.full_like(pose, 0.125))
    yielding.see(still(0.5, speed=1.0))
    yielding.begin(np.zeros(7), 10.0, moving=True, pause=0.25)
    assert not yielding.settled
    assert (yielding(np.zeros(7), True, 10.249) == 0).all()
    assert (yielding(np.zeros(7), True, 10.25) == 0.625).all()
    yielding.see(still(0.75, speed=1.0))
    assert (yielding(np.zeros(7), True, 10.749) == 0.875).all() and not yielding.settled
    assert (yielding(np.zeros(7), True, 10.75) == 0.875).all() and yielding.settled
    for _ in range(4):
        yielding.see(still(1.0))
    assert (yielding(np.zeros(7), True, 10.899) == 0.875).all(), "it settles first"
    assert (yielding(np.zeros(7), True, 10.901) == 1.125).all()


def test_an_arm_that_rests_where_its_set_point_is_is_followed_no_more() -> None:
    yielding = Yielding(LIMITS, np.zeros_like)
    for at in (0.5, 0.5, 0.5, 0.501):
        yielding.see(still(at))
    yielding.begin(np.zeros(7), 10.0, moving=True)
    away = yielding.pose + 1.001 * yielding.band
    assert (yielding(away, True, 10.0) == 0.501).all() and not yielding.settled
    yielding.see(still(0.501, speed=1.0))
    assert (yielding(yielding.pose, True, 10.1) == 0.501).all() and not yielding.settled
    yielding.see(still(0.501))
    at_band = yielding.pose - 0.999 * yielding.band
    assert yielding(at_band, True, 10.2) == pytest.approx(np.full(7, 0.50075))
    assert yielding.settled


def test_just_at_the_band_is_near_enough() -> None:
    """In motion every joint has to be near, and at rest one that is not is led."""
    yielding = Yielding(LIMITS, np.zeros_like)
    yielding.see(still(0.0))
    yielding.begin(yielding.band, 10.0, moving=True)
    one_away = yielding.band.copy()
    one_away[3] *= 1.001
    yielding(one_away, True, 10.0)
    assert not yielding.settled
    yielding(yielding.band, True, 10.1)
    assert yielding.settled
    yielding.begin(yielding.band, 20.0, moving=False)
    assert (yielding(yielding.band, True, 20.0) == yielding.band).all()
    assert (yielding(one_away, True, 21.0) == 0).all()


@BOTH
def test_an_unknown_load_sinks_by_a_bounded_way_and_then_is_held(
    tmp_path: Path, gains: str
) -> None:
    bench = Pressing(tmp_path, gains, height=0.1)
    push(bench, 10.0)
    bench.run(SECOND)
    high = bench.tool[-1][2]
    bench.ask(Command.ESTOP)
    bench.run(3 * SECOND)
    held = bench.sent[-1]
    bench.run(20 * SECOND)
    assert (bench.sent[-1] == held).all(), "for good"
    assert high - bench.tool[-1][2] < {"sim": 0.03, "franka": 0.06}[gains]


def test_a_push_moves_a_stopped_arm_a_few_times_only(tmp_path: Path) -> None:
    bench = Pressing(tmp_path, height=0.1)
    bench.ask(Command.ESTOP)
    bench.run(2 * SECOND)
    push(bench, 100.0)
    moved = []
    for _ in range(30):
        before = bench.sent[-1]
        bench.run(SECOND)
        moved.append(bool((bench.sent[-1] != before).any()))
    assert any(moved[:5]) and not any(moved[10:])
    within(bench.sent)


def test_the_workspace_does_not_keep_a_stopped_arm_pressed(tmp_path: Path) -> None:
    """The set-point may follow an arm that something pushed out of the workspace."""
    bench = Pressing(tmp_path, "franka", height=0.1)
    place = fr3.forward(fr3.HOME[None])[0][0]
    box = WorkspaceConfig(tuple(place - 0.02), tuple(place + 0.3))
    workspace = Workspace(box, lambda q: fr3.forward(q)[0])
    bench.control.chain.limiter.guards = [workspace.depths]
    bench.add(workspace, 3)
    push(bench, 120.0)
    bench.run(SECOND)
    assert bench.tool[-1][2] < place[2] - 0.025, "pushed out"
    bench.ask(Command.ESTOP)
    bench.run(2 * SECOND)
    sent = fr3.forward(bench.sent[-1][None])[0][0, 2]
    assert sent < place[2] - 0.025, "the set-point is with the arm"
    within(bench.sent)


@pytest.mark.parametrize("seed", usually([0, 1], range(4)))
def test_no_sequence_of_commands_and_contacts_leads_out_of_the_limits(
    tmp_path: Path, seed: int
) -> None:
    random = np.random.default_rng(seed)
    bench = Pressing(tmp_path, ["sim", "franka"][seed % 2], noise=1e-4)
    bench.control.homing = Homing(fr3.HOME, LIMITS)
    released = (Command.RELEASE, Command.RELEASE_SUPPORTED)  # a person moves it then
    wishes = [w for w in Command if w not in (Command.QUIT, *released)]
    for _ in range(80):
        bench.action = np.append(random.uniform(-1, 1, 3), 1.0)
        bench.ask(wishes[random.integers(len(wishes))])
        push(bench, random.uniform(-60, 60) if random.random() < 0.3 else 0.0)
        bench.run(int(random.integers(1, 60)))
    sent = np.stack(bench.sent)
    low, high = bench.control.chain.limiter.low, bench.control.chain.limiter.high
    assert (sent >= low - 1e-9).all() and (sent <= high + 1e-9).all()
    within(bench.sent)


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


@pytest.mark.parametrize("seen", [True, False])
def test_a_stop_holds_a_released_arm_where_it_is(bench: Pressing, seen: bool) -> None:
    """An operator's, and one because it is not seen any more."""
    bench.ask(Command.RELEASE)
    q = guided(bench)
    if not seen:
        blind(bench)
        bench.run(2)
        assert "finite" in bench.fault
    assert bench.ask(Command.ESTOP) == Mode.ESTOP
    held(bench, q)
    assert not seen or bench.ask(Command.RESET) == Mode.IDLE


def test_what_cannot_be_released_says_why(bench: Pressing, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, why in ((Crazyflie, "would fall"), (Replay, "no arm"), (DryRunDriver, "dry run")):
        with pytest.raises(DriverError, match=why):
            object.__new__(kind).release()
    with monkeypatch.context() as patch:
        patch.setattr(Sim, "falls_when_released", True)
        assert bench.ask(Command.RELEASE) == Mode.IDLE and bench.refused
        assert bench.ask(Command.RELEASE_SUPPORTED) == Mode.RELEASED, "with a support"
        assert bench.ask(Command.RESET) == Mode.IDLE
    bench.control.driver = dry = DryRunDriver(bench.driver)
    dry.connect()
    assert bench.ask(Command.RELEASE) == Mode.IDLE
    assert bench.driver.read().q == pytest.approx(fr3.HOME, abs=1e-3)
