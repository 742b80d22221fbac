"""`embodied deploy` and `embodied robot` as a user types them, on arms that are not there."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import yaml

from embodied.cli import main
from embodied.core.build import build
from embodied.core.checkpoint import save
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.datasets.lerobot.reader import read_episodes
from embodied.deploy import site
from embodied.deploy.session import Session
from embodied.embodiments import fr3, so101
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.envs.hardware_sim.fr3_task import Config as TaskWorldConfig
from embodied.envs.hardware_sim.fr3_task import TaskWorld
from embodied.real_robot.assemble import open_flight_recorder
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.sim import Config as SimConfig
from embodied.real_robot.drivers.sim import Sim
from embodied.real_robot.kernel.arm_state import Limits
from embodied.real_robot.kernel.mailbox import MailboxError
from tests.builders import exit_of, make_policy, node_of
from tests.real_robot.test_daemon import PATIENT, gone, until
from tests.tiers import only_all

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
# For a machine that does much else at the same time.
PATIENTLY = ("robot.fresh={hold: 1.0, stop: 10.0, state: 5.0}",)
SLOW_WIRE = ("demonstrator=reach", "robot.driver.timeout=0.3")
FAR = "robot.given={goal_x: 0.9, goal_y: 0.0, goal_z: 0.1}"  # nobody gets there
CROWDED = "robot.driver.world.ranges={goal_x: [0.9, 0.91]}"  # nor there


def start(where: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    """`embodied deploy`, with its output in `where/out`."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "embodied.cli", "deploy", *PATIENTLY, *words),
            *("yes=true", f"out={where / 'out'}", f"folder={folder}"),
        ],
        cwd=where,
        env=ENV,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def said(deploy: subprocess.Popen[str]) -> str:
    try:
        return deploy.communicate(timeout=4 * PATIENT)[0]
    finally:
        deploy.kill()


def robot(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """What `embodied robot ...` prints, and its exit code."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["robot", *words])
    out = capsys.readouterr()
    return int(str(left.value.code)), out.out + out.err


def status(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any] | None:
    code, text = robot(capsys, "status", f"folder={folder}", "--json")
    return json.loads(text) if code == 0 else None


def test_the_simulated_fr3_reaches_twice_and_it_is_recorded(tmp_path: Path, folder: Path) -> None:
    deploy = start(tmp_path, folder, "robot=sim", "demonstrator=reach", "episodes=2")
    text = said(deploy)
    assert deploy.returncode == 0, text
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert [each["end"] for each in summary["episodes"]] == ["success"] * 2, text
    assert summary["successes"] == 2 and "success  2 of 2" in text
    assert json.loads((out / "deployment.json").read_text())["robot"] == "fr3"
    assert "-> RUNNING" in (out / "daemon.log").read_text()
    episodes = read_episodes(out / "recording")
    assert len(episodes) == 2
    assert all(bool(episodes.episode(k)["success"][-1]) for k in range(2))
    goals = [episodes.episode(k)["obs/state"][0, 17:] for k in range(2)]
    assert not goals[0].equal(goals[1]), "the world was laid out anew"
    assert not (folder / "daemon.sock").exists() and not (folder / "state").exists()


def test_the_servo_arm_over_its_wire(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A goal that nobody reaches; policies take over from each other while the arm goes on; a
    stranger's is refused; Ctrl-C ends it in order, and nobody is left."""
    deploy = start(tmp_path, folder, "robot=so101_sim", *SLOW_WIRE, FAR, "seconds=900")
    try:

        def now() -> dict[str, Any]:
            assert deploy.poll() is None, said(deploy)
            return until(lambda: status(capsys, folder), "the daemon answers")

        until(lambda: now()["mode"] == "RUNNING", "it runs")
        before = now()
        policy = tmp_path / "out" / "policy"
        code, text = robot(capsys, "load", str(policy), f"folder={folder}")
        assert code == 0 and "load: done" in text
        after = now()
        assert after["policy"]["pid"] not in (0, before["policy"]["pid"])
        assert after["mode"] == "RUNNING" and not after["fault"], "the loop was never dropped"
        assert after["control"]["pid"] == before["control"]["pid"]
        spec = Fr3(Fr3Config(task="reach", num_envs=1)).spec
        node = {"_target_": "embodied.policies.scripted.fr3.Scripted", "task": "reach"}
        stranger = save(tmp_path / "stranger", build(node, Policy, spec=spec), 0)
        code, text = robot(capsys, "load", str(stranger), f"folder={folder}")
        assert code == 2 and "the one before goes on" in text and "q6" in text, text
        same = now()
        assert same["mode"] == "RUNNING" and same["policy"]["pid"] == after["policy"]["pid"]
        code, text = robot(capsys, "status", f"folder={folder}")
        assert "so101 is RUNNING" in text and f"process {same['control']['pid']}" in text
        assert robot(capsys, "reset", f"folder={folder}")[0] == 2, "nothing is latched"
        deploy.send_signal(signal.SIGINT)
        text = said(deploy)
        assert deploy.returncode == 0, text
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert summary["episodes"][0]["end"] == "stopped from the keyboard"
        assert summary["episodes"][0]["success"] is False and summary["successes"] == 0
        for name in ("control", "policy", "recorder"):
            until(lambda name=name: gone(same[name]["pid"]), f"{name} is gone")
        episodes = read_episodes(tmp_path / "out" / "recording")
        assert len(episodes) == 1 and len(episodes.steps["action"]) > 20
        sent = episodes.steps["action/sent"].numpy()
        assert np.ptp(sent, axis=0).max() > 0.05, "it moved towards where it never came"
        assert ((sent >= so101.LOWER) & (sent <= so101.UPPER)).all()
    finally:
        if deploy.poll() is None:
            deploy.kill()


@only_all  # the recorder says it: test_record.py
def test_a_disk_that_is_full_while_recording_is_no_success(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The arm is unaffected; one line says what was kept."""
    play = Session._play

    def played(self: Session, seconds: float | None) -> None:
        if self.episodes:  # nothing larger can be written any more
            pid = self.status["recorder"]["pid"]
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, hard))
        play(self, seconds)

    monkeypatch.setattr(Session, "_play", played)
    words = ["robot=so101_sim", "demonstrator=reach", "episodes=2", "yes=true", "seconds=2"]
    words += [*PATIENTLY, FAR, f"folder={folder}", f"out={tmp_path / 'out'}"]
    assert exit_of("deploy", *words) == 2
    said = capsys.readouterr()
    (line,) = [each for each in said.err.splitlines() if each.startswith("embodied:")]
    assert "1 of 2 episodes are not" in line and "episode 2 (could not write" in line
    assert f"1 are complete in {tmp_path / 'out' / 'recording'}" in line
    assert "episode 2: " in said.out and "time, not recorded" in said.out, "it went on"
    assert len(read_episodes(tmp_path / "out" / "recording")) == 1


def test_an_operators_stop_ends_the_session(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy = start(tmp_path, folder, "robot=so101_sim", *SLOW_WIRE, FAR, "episodes=3")
    try:
        running = until(
            lambda: s if (s := status(capsys, folder)) and s["mode"] == "RUNNING" else None,
            "it runs",
        )
        assert robot(capsys, "estop", f"folder={folder}")[0] == 0
        text = said(deploy)
        assert deploy.returncode == 2 and "an operator pressed stop" in text
        assert gone(running["control"]["pid"]), "nobody is left"
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert len(summary["episodes"]) == 1, "no episode was begun after that"
        assert summary["episodes"][0]["recorded"]
        episodes = read_episodes(tmp_path / "out" / "recording")
        assert episodes.info[0]["fault"] == "an operator pressed stop"
        line = f"safety parameters {episodes.info[0]['safety']}: nothing to compare with"
        assert line in text and line in (tmp_path / "out" / "daemon.log").read_text()
        assert list((tmp_path / "out" / "blackbox").glob("*.npz")), "the black box is there"
    finally:
        deploy.kill()


def test_who_kills_deploy_leaves_an_arm_at_rest(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy = start(tmp_path, folder, "robot=sim", "demonstrator=reach", "seconds=900", CROWDED)
    try:
        running = until(
            lambda: s if (s := status(capsys, folder)) and s["mode"] == "RUNNING" else None,
            "it runs",
        )
        deploy.kill()
        for name in ("control", "policy", "recorder"):
            until(lambda name=name: gone(running[name]["pid"]), f"{name} is gone")
        until(lambda: not (folder / "daemon.sock").exists(), "the daemon is gone")
        assert len(read_episodes(tmp_path / "out" / "recording")) == 1, "what was done is kept"
    finally:
        deploy.kill()


def trained(folder: Path, **env: Any) -> Path:
    """A run folder of a policy (for the simulated FR3), as `embodied train` leaves it."""
    world = env or node_of("envs.fr3.env.Fr3", task="reach", num_envs=4)
    spec = build({**world, "num_envs": 1}, VecEnv).spec
    policy = make_policy("generative.flow.Flow", spec, width=32, chunk=2)
    save(folder / "checkpoints" / "00000000", policy, 0)
    (folder / "run.yaml").write_text(yaml.safe_dump({"env": world, "data": {"normalize": False}}))
    return folder


def test_a_check_says_what_fits_and_what_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "run")
    code, text = robot(capsys, "check", "robot=sim", f"policy={run}", "connect=true")
    assert code == 0, text
    lines = {line.split()[1]: line.split()[0] for line in text.splitlines() if line[:2] == "  "}
    fine = ("policy", "rate", "actions", "observations", "parity", "limits", "workspace", "arm")
    assert {lines[name] for name in fine} == {"ok"}, text
    its_own = trained(tmp_path / "small", _target_="embodied.envs.so101.So101", num_envs=4)
    code, text = robot(capsys, "check", "robot=so101_sim", f"policy={its_own}")
    assert code == 0 and "ok   parity" in text and "not of the arm: goal_x" in text, text
    wide = "robot.limits.high=[1.9, 1.7, 2.4, 1.6, 2.7]"
    for words, *says in (
        (["robot=sim", "robot.step=0.1"], "FAIL rate", "every 0.05 s"),
        (["robot=sim", "robot.controller.turning=yaw"], "FAIL actions"),
        (["robot=sim", "robot.driver.world=null"], "FAIL observations", "goal_x"),
        (["robot=so101_sim"], "q6"),  # another robot's policy
        (["robot=sim", "robot.fresh.hold=0.06"], "FAIL freshness"),
        (["robot=so101_sim", "demonstrator=reach", wide], "FAIL range", "elbow_flex"),
    ):
        policy = [] if wide in words else [f"policy={run}"]
        code, text = robot(capsys, "check", *policy, *words)
        assert code == 1 and all(each in text for each in says), text
    weights = run / "checkpoints" / "00000000" / "policy.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\1\0")
    code, text = robot(capsys, "check", "robot=sim", f"policy={run}")
    assert code == 1 and "FAIL policy" in text and "is not what was saved" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["robot=sim"], "policy=RUN"),
        (["robot=nobody", "demonstrator=reach"], 'there is no robot "nobody"'),
        (["demonstrator=reach"], "robot is not given"),
        (["robot=sim", "demonstrator=reach", "policy=x"], "not both"),
        (["robot=sim", "demonstrator=random"], "task of the simulated robot"),
        (["robot=sim", "demonstrator=reach", "robot.limits.jerk=null"], "limits.jerk"),
        (["robot=sim", "demonstrator=reach", "robot.hertzz=3"], "hertzz"),
        (["robot=so101_sim", "demonstrator=reach", "robot.home=[9,0,0,0,0]"], "home: joint 1"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = robot(capsys, "check", *words)
    assert code == 2 and reason in text and len(text.strip().splitlines()) == 1, text


def test_robots_are_listed_and_nobody_moves_one_without_a_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["list", "robots"])
    text = capsys.readouterr().out
    assert "sim " in text and "so101_sim" in text and "that is not there" in text
    with pytest.raises(SystemExit) as left:
        main(["deploy", "robot=so101_sim", "demonstrator=reach"])
    assert left.value.code == 2 and "yes=true" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_the_wired_world_is_the_simulations() -> None:
    """Objects of a wired world start as the task says, and success is its predicate."""
    world = TaskWorld(TaskWorldConfig("lift"))
    model = world.compile()
    data = mujoco.MjData(model)
    data.qpos[:7] = fr3.HOME
    world.begin(model, data, np.random.default_rng(0))
    mujoco.mj_forward(model, data)
    seen = dict(zip(world.names, world.sense(data), strict=True))
    assert 0.38 <= seen["cube_x"] <= 0.62 and seen["success"] == 0
    at = world.free["cube"]
    tool = fr3.forward(data.qpos[None, :7])[0][0]
    data.qpos[at : at + 3] = tool
    seen = dict(zip(world.names, world.sense(data), strict=True))
    assert seen["success"] == 1, "high, and in the hand"
    assert [seen[f"cube_from_tool_{axis}"] for axis in "xyz"] == pytest.approx([0, 0, 0], abs=1e-9)


def test_things_fall_and_the_arm_does_not() -> None:
    now = 10.0
    world = {"_target_": "embodied.envs.hardware_sim.fr3_task.TaskWorld", "task": "lift"}
    with Sim(SimConfig(world=world), lambda: now) as arm:
        first = arm.read().q
        at = arm.model.joint("cube").qposadr[0]
        arm.data.qpos[at + 2] = 0.3
        for _ in range(100):
            now += 0.01
            held = arm.read().q
        height, half = arm.data.qpos[at + 2], arm.sense()[arm.sensed.index("cube_half")]
        assert height == pytest.approx(half, abs=2e-3), "it lies on the table"
        assert held == pytest.approx(first, abs=2e-3), "gravity is the arm's own business"


def test_ranges_that_a_robot_names_for_itself_count() -> None:
    robot = {"driver": {"world": {"task": "as_trained", "ranges": {"goal_x": [0.9, 0.91]}}}}
    trained = {"env": {"task": "reach", "ranges": {"goal_x": [0, 1], "goal_y": [0, 0.5]}}}
    world = site.as_trained(robot, trained)["driver"]["world"]
    assert world == {"task": "reach", "ranges": {"goal_x": [0.9, 0.91], "goal_y": [0, 0.5]}}
    wrapped = {"env": {"_target_": "embodied.envs.wrappers.stack.Wrapped", **trained}}
    assert site.as_trained(robot, wrapped)["driver"]["world"] == world
    on_robot = {"env": node_of("real_robot.rl.robot_env.RealEnv", world=trained["env"])}
    assert site.as_trained(robot, on_robot)["driver"]["world"] == world


pytest.importorskip("franky", reason="franky-control is not installed")
pytest.importorskip("franky_sim", reason="franky-sim is not installed")

LONGEST = 600.0  # s, on a machine that does much else: its arm's time goes slower than the clock
VERY_PATIENTLY = (
    "robot.fresh={hold: 5.0, stop: 20.0, state: 10.0}",
    "robot.driver.silence=10.0",
    "robot.driver.patience=60.0",
    "robot.limits.tracking=[2, 2, 2, 2, 2, 2, 2]",
    "robot.tool_speed=3.0",
    "robot.force=300",
)


class Watched(threading.Thread):
    """Every command of a deployment in `folder`, tick by tick, as the black box has them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.over = folder, threading.Event()
        self.sent: list[Any] = []
        self.ticks: list[Any] = []

    def run(self) -> None:
        box, count = None, 0
        while not self.over.wait(0.5):
            with suppress(OSError, MailboxError, ValueError):
                if box is None:
                    made = Deployment.read(self.folder)
                    box = open_flight_recorder(made, self.folder)
                rows, count = box.since(count)
                self.sent.append(rows["sent"].reshape(-1, 7))
                self.ticks.append(rows["tick"].ravel())


def worst(sent: np.ndarray, limits: Limits, dt: float) -> float:
    """The largest share of any limit that commands [T, n], one each `dt` s, use.

    A mean of jerk over three steps is a third difference: none is larger than what it is a mean of.
    """
    low, high = np.add(limits.low, limits.margin), np.subtract(limits.high, limits.margin)
    middle, half = (low + high) / 2, (high - low) / 2
    shares = [np.abs(sent - middle) / half]
    each = ((1, limits.velocity), (2, limits.acceleration), (3, limits.jerk))
    shares += [np.abs(np.diff(sent, k, axis=0)) / dt**k / np.asarray(most) for k, most in each]
    return max(float(share.max()) for share in shares)


def test_a_run_in_a_wrapped_world_fits_the_wire(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Delays, noise and another arm in training change nothing of what is seen and done."""
    world = yaml.safe_load((ROOT / "configs/env/fr3_lift_deploy.yaml").read_text())
    run = trained(tmp_path, **world)
    code, text = robot(capsys, "check", "robot=sim", f"policy={run}")
    assert code == 0, text
    lines = {line.split()[1]: line.split()[0] for line in text.splitlines() if line[:2] == "  "}
    fine = ("policy", "rate", "actions", "observations", "parity", "limits", "freshness")
    assert {lines[name] for name in fine} == {"ok"}, text


@only_all  # its driver: test_franka.py
def test_the_cube_is_lifted_over_the_wire(tmp_path: Path, folder: Path) -> None:
    """The script that is cloned, through the real driver; no command is outside of a limit."""
    out = tmp_path / "out"
    watched = Watched(folder)
    watched.start()
    words = ["robot=franka_sim", "demonstrator=fr3_lift_deploy", f"seconds={LONGEST}"]
    deploy = start(tmp_path, folder, *words, *VERY_PATIENTLY)
    try:
        text = deploy.communicate(timeout=2 * LONGEST)[0]
    finally:
        deploy.kill()
        watched.over.set()
        watched.join()
    assert deploy.returncode == 0, text
    summary = json.loads((out / "summary.json").read_text())
    assert [each["end"] for each in summary["episodes"]] == ["success"], text
    made = Deployment.read(out)
    sent, ticks = np.concatenate(watched.sent), np.concatenate(watched.ticks)
    assert len(sent) > 100 and (np.diff(ticks.astype(np.int64)) == 1).all()
    assert worst(sent, made.limits, 1 / made.hertz) <= 1 + 1e-6
    steps = read_episodes(out / "recording").episode(0)
    state, names = steps["obs/state"].numpy(), read_episodes(out / "recording").spec.obs["state"]
    height = state[:, names.names.index("cube_z")] - state[:, names.names.index("cube_half")]
    assert height[0] < 0.005 and height[-1] > 0.08, "it lay on the table, and rose"
    assert bool(steps["success"][-1])
