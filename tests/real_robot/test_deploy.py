"""`embodied deploy` and `embodied robot` as a user types them, on arms that are not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
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
from embodied.datasets.lerobot.reader import read_episodes
from embodied.deploy import site
from embodied.embodiments import fr3, so101
from embodied.envs.hardware_sim.fr3_task import Config as TaskWorldConfig
from embodied.envs.hardware_sim.fr3_task import TaskWorld
from embodied.real_robot.drivers.sim import Config as SimConfig
from embodied.real_robot.drivers.sim import Sim
from tests.builders import exit_of, make_policy, node_of, spawn
from tests.interop.limits_watch import LimitsWatch
from tests.real_robot.test_daemon import PATIENT, gone, in_mode, until
from tests.real_robot.test_decide import SPEC
from tests.tiers import only_all

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
PIPED: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
# For a machine that does much else at the same time.
PATIENTLY = ("robot.fresh={hold: 1.0, stop: 10.0, state: 5.0}",)
SLOW_WIRE = ("demonstrator=reach", "robot.driver.timeout=0.3")
FAR = "robot.given={goal_x: 0.9, goal_y: 0.0, goal_z: 0.1}"  # nobody gets there
CROWDED = "robot.driver.world.ranges={goal_x: [0.9, 0.91]}"  # nor there


def start(where: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    """`embodied deploy`, with its output in `where/out`."""
    told = (*PATIENTLY, *words, "yes=true", f"out={where / 'out'}", f"folder={folder}")
    return spawn("-m", "embodied.cli", "deploy", *told, cwd=where, env=ENV, **PIPED)


@contextmanager
def deploying(where: Path, folder: Path, *words: str) -> Generator[subprocess.Popen[str]]:
    """`start`, until the program has ended or the test."""
    deploy = start(where, folder, *words)
    try:
        yield deploy
    finally:
        deploy.kill()


def said(deploy: subprocess.Popen[str]) -> str:
    try:
        return deploy.communicate(timeout=4 * PATIENT)[0]
    finally:
        deploy.kill()


def robot(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """What `embodied robot ...` prints, and its exit code."""
    capsys.readouterr()
    code = exit_of("robot", *words)
    out = capsys.readouterr()
    return int(code), out.out + out.err


def status(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any] | None:
    code, text = robot(capsys, "status", f"folder={folder}", "--json")
    return json.loads(text) if code == 0 else None


def ends(out: Path) -> list[str]:
    """How the episodes of a session ended, of its summary in `out`."""
    return [each["end"] for each in json.loads((out / "summary.json").read_text())["episodes"]]


def all_gone(processes: dict[str, Any]) -> None:
    """Wait until those that a status names have ended."""
    for name in ("control", "policy", "recorder"):
        until(lambda name=name: gone(processes[name]["pid"]), f"{name} is gone")


def test_the_simulated_fr3_reaches_twice_and_it_is_recorded(tmp_path: Path, folder: Path) -> None:
    deploy = start(tmp_path, folder, "robot=sim", "demonstrator=reach", "episodes=2")
    text, out = said(deploy), tmp_path / "out"
    assert deploy.returncode == 0 and ends(out) == ["success"] * 2, text
    assert json.loads((out / "summary.json").read_text())["successes"] == 2
    assert "success  2 of 2" in text and "-> RUNNING" in (out / "daemon.log").read_text()
    assert json.loads((out / "deployment.json").read_text())["robot"] == "fr3"
    recorded = read_episodes(out / "recording")
    one, other = (recorded.episode(k) for k in range(len(recorded)))
    assert one["success"][-1] and other["success"][-1]
    goals = [each["obs/state"][0, 17:] for each in (one, other)]
    assert not goals[0].equal(goals[1]), "the world was laid out anew"
    assert not (folder / "daemon.sock").exists() and not (folder / "state").exists()


def test_the_servo_arm_over_its_wire(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A goal that nobody reaches; policies take over from each other while the arm goes on; a
    stranger's is refused; Ctrl-C ends it in order, and nobody is left."""
    out, here = tmp_path / "out", f"folder={folder}"
    words = ("robot=so101_sim", *SLOW_WIRE, FAR, "seconds=900")
    with deploying(tmp_path, folder, *words) as deploy:
        before = until(lambda: in_mode(folder, "RUNNING") or deploy.poll(), "it runs")
        assert deploy.poll() is None, said(deploy)
        code, text = robot(capsys, "load", str(out / "policy"), here)
        assert code == 0 and "load: done" in text
        after = status(capsys, folder)
        assert after is not None and after["policy"]["pid"] not in (0, before["policy"]["pid"])
        assert after["mode"] == "RUNNING" and not after["fault"], "the loop was never dropped"
        assert after["control"]["pid"] == before["control"]["pid"]
        other = make_policy("scripted.fr3.Scripted", SPEC, task="reach")
        stranger = save(tmp_path / "stranger", other, 0)
        code, text = robot(capsys, "load", str(stranger), here)
        assert code == 2 and "the one before goes on" in text and "q6" in text, text
        same = status(capsys, folder)
        assert same is not None and same["policy"]["pid"] == after["policy"]["pid"]
        text = robot(capsys, "status", here)[1]
        assert "so101 is RUNNING" in text and f"process {same['control']['pid']}" in text
        assert robot(capsys, "reset", here)[0] == 2, "nothing is latched"
        deploy.send_signal(signal.SIGINT)
        text = said(deploy)
    assert deploy.returncode == 0 and ends(out) == ["stopped from the keyboard"], text
    assert json.loads((out / "summary.json").read_text())["successes"] == 0
    all_gone(same)
    episodes = read_episodes(out / "recording")
    assert len(episodes) == 1 and len(episodes.steps["action"]) > 20
    sent = episodes.steps["action/sent"].numpy()
    assert np.ptp(sent, axis=0).max() > 0.05, "it moved towards where it never came"
    assert ((sent >= so101.LOWER) & (sent <= so101.UPPER)).all()


def test_an_operators_stop_ends_the_session(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ("robot=so101_sim", *SLOW_WIRE, FAR, "episodes=3")
    with deploying(tmp_path, folder, *words) as deploy:
        running = until(lambda: in_mode(folder, "RUNNING"), "it runs")
        assert robot(capsys, "estop", f"folder={folder}")[0] == 0
        text = said(deploy)
    assert deploy.returncode == 2 and "an operator pressed stop" in text
    assert gone(running["control"]["pid"]), "nobody is left"
    (episode,) = json.loads((out / "summary.json").read_text())["episodes"]  # no other was begun
    (kept,) = read_episodes(out / "recording").info
    assert episode["recorded"] and kept["fault"] == "an operator pressed stop"
    line = f"safety parameters {kept['safety']}: nothing to compare with"
    assert line in text and line in (out / "daemon.log").read_text()
    assert list((out / "blackbox").glob("*.npz")), "the black box is there"


def test_who_kills_deploy_leaves_an_arm_at_rest(tmp_path: Path, folder: Path) -> None:
    words = ("robot=sim", "demonstrator=reach", "seconds=900", CROWDED)
    with deploying(tmp_path, folder, *words) as deploy:
        running = until(lambda: in_mode(folder, "RUNNING"), "it runs")
        deploy.kill()
        all_gone(running)
        until(lambda: not (folder / "daemon.sock").exists(), "the daemon is gone")
    assert len(read_episodes(tmp_path / "out" / "recording")) == 1, "what was done is kept"


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
    def check(*words: str) -> tuple[int, str]:
        return robot(capsys, "check", *words)

    run = trained(tmp_path / "run")
    # Delays, noise and another arm in training change nothing of what is seen and done.
    world = yaml.safe_load((ROOT / "configs/env/fr3_lift_deploy.yaml").read_text())
    fine = {"policy", "rate", "actions", "observations", "parity", "limits", "freshness"}
    fine |= {"workspace", "arm"}
    for each, more in ((run, ["connect=true"]), (trained(tmp_path / "wrapped", **world), [])):
        code, text = check("robot=sim", f"policy={each}", *more)
        said = [line.split()[:2] for line in text.splitlines() if line[:2] == "  "]
        ok = {name for result, name in said if result == "ok"}
        assert code == 0 and ok >= (fine if more else fine - {"arm"}), text
    its_own = trained(tmp_path / "small", _target_="embodied.envs.so101.So101", num_envs=4)
    code, text = check("robot=so101_sim", f"policy={its_own}")
    assert code == 0 and "ok   parity" in text and "not of the arm: goal_x" in text, text
    mine = ["robot=so101_sim", "demonstrator=reach"]
    joints = yaml.safe_load((ROOT / "configs/robot/so101_sim.yaml").read_text())["driver"]["joints"]
    joints[4] |= {"low": 0, "high": 4095}
    whole_turn = f"robot.driver.joints={json.dumps(joints)}".replace('"', "").replace(" ", "")
    for words, *says in (
        (["robot=sim", "robot.step=0.1"], "FAIL rate", "every 0.05 s"),
        (["robot=sim", "robot.controller.turning=yaw"], "FAIL actions"),
        (["robot=sim", "robot.driver.world=null"], "FAIL observations", "goal_x"),
        (["robot=so101_sim"], "q6"),  # another robot's policy
        (["robot=sim", "robot.fresh.hold=0.06"], "FAIL freshness"),
        ([*mine, "robot.limits.high=[1.9, 1.7, 2.4, 1.6, 2.7]"], "FAIL range", "elbow_flex"),
        ([*mine, whole_turn], "FAIL range", "calibrated range of wrist_roll is a whole turn"),
    ):
        code, text = check(*words, *([] if words[:2] == mine else [f"policy={run}"]))
        assert code == 1 and all(each in text for each in says), text
    weights = run / "checkpoints" / "00000000" / "policy.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\1\0")
    code, text = check("robot=sim", f"policy={run}")
    assert code == 1 and "FAIL policy" in text and "is not what was saved" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("robot=sim", "policy=RUN"),
        ("demonstrator=reach", "robot is not given"),
        ("robot=sim demonstrator=reach policy=x", "not both"),
        ("robot=sim demonstrator=random", "task of the simulated robot"),
        ("robot=sim demonstrator=reach robot.limits.jerk=null", "limits.jerk"),
        ("robot=sim demonstrator=reach robot.hertzz=3", "hertzz"),
        ("robot=so101_sim demonstrator=reach robot.home=[9,0,0,0,0]", "home: joint 1"),
    ],
)
def test_mistakes_are_one_line(words: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = robot(capsys, "check", *words.split())
    assert code == 2 and reason in text and len(text.strip().splitlines()) == 1, text


def test_robots_are_listed_and_nobody_moves_one_without_a_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["list", "robots"])
    text = capsys.readouterr().out
    assert "sim " in text and "so101_sim" in text and "that is not there" in text
    assert exit_of("deploy", "robot=so101_sim", "demonstrator=reach") == 2
    assert "yes=true" in capsys.readouterr().err
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
    data.qpos[at : at + 3] = fr3.forward(data.qpos[None, :7])[0][0]
    seen = dict(zip(world.names, world.sense(data), strict=True))
    assert seen["success"] == 1, "high, and in the hand"
    assert [seen[f"cube_from_tool_{axis}"] for axis in "xyz"] == pytest.approx([0, 0, 0], abs=1e-9)


def test_things_fall_and_the_arm_does_not() -> None:
    now = 10.0
    world = node_of("envs.hardware_sim.fr3_task.TaskWorld", task="lift")
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
    world = {"task": "reach", "ranges": {"goal_x": [0, 1], "goal_y": [0, 0.5]}}
    merged = {"task": "reach", "ranges": {"goal_x": [0.9, 0.91], "goal_y": [0, 0.5]}}
    wrapped = node_of("envs.wrappers.stack.Wrapped", env=world)
    on_robot = node_of("real_robot.rl.robot_env.RealEnv", world=world)
    for env in (world, wrapped, on_robot):
        assert site.as_trained(robot, {"env": env})["driver"]["world"] == merged


LONGEST = 600.0  # s, on a machine that does much else: its arm's time goes slower than the clock
VERY_PATIENTLY = (
    "robot.fresh={hold: 5.0, stop: 20.0, state: 10.0}",
    *("robot.driver.silence=10.0", "robot.driver.patience=60.0"),
    *("robot.limits.tracking=[2, 2, 2, 2, 2, 2, 2]", "robot.tool_speed=3.0", "robot.force=300"),
)


@only_all  # its driver: test_franka.py
def test_the_cube_is_lifted_over_the_wire(tmp_path: Path, folder: Path) -> None:
    """The script that is cloned, through the real driver; no command is outside of a limit."""
    pytest.importorskip("franky", reason="franky-control is not installed")
    pytest.importorskip("franky_sim", reason="franky-sim is not installed")
    out = tmp_path / "out"
    words = ("robot=franka_sim", "demonstrator=fr3_lift_deploy", f"seconds={LONGEST}")
    with LimitsWatch(folder, reset=False) as watch:
        deploy = start(tmp_path, folder, *words, *VERY_PATIENTLY)
        text = said(deploy)
    assert deploy.returncode == 0 and ends(out) == ["success"], text
    assert watch.ticks > 100
    watch.require()
    episodes = read_episodes(out / "recording")
    steps, names = episodes.episode(0), episodes.spec.obs["state"].names
    cube, half = (steps["obs/state"][:, names.index(name)] for name in ("cube_z", "cube_half"))
    assert cube[0] - half[0] < 0.005 and cube[-1] - half[-1] > 0.08, "it lay on the table, and rose"
    assert bool(steps["success"][-1])
