"""An arm as an environment: steps, stops, pictures that follow it, and practice without resets."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.compose import compose
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, allow, build
from embodied.core.env import Step, VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec, require_same
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.video import encode_png
from embodied.deploy.external_main import Config as ExternalConfig
from embodied.deploy.external_main import External
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.envs.fr3.rendered_camera import Config as PosedConfig
from embodied.envs.fr3.rendered_camera import RenderedCamera
from embodied.real_robot.assemble import open_channels, open_flight_recorder
from embodied.real_robot.cameras.sources import CameraError, Source
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.emulators.process import SharedEmulator
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.policy.observer import Observer
from embodied.real_robot.rl.reset_free import Config as ShuttleConfig
from embodied.real_robot.rl.reset_free import lasting
from embodied.real_robot.rl.robot_env import Config, RealEnv
from embodied.real_robot.rl.session import RobotSessionError
from embodied.rewards.wrappers.added_observations import PICTURE, with_pictures
from tests.builders import make_policy, node_of, rendered, wait_until
from tests.real_robot.trouble import Trouble
from tests.tiers import only_all

PATIENT = 90.0  # s
WORLD = node_of("envs.fr3.env.Fr3", task="reach")
PUSH, STAY = torch.tensor([[0.0, 1.0, 0.0, 1.0]]), torch.zeros(1, 4)
SIZE = 32


def robot() -> dict[str, Any]:
    node = yaml.safe_load(Path("configs/robot/sim.yaml").read_text())
    # Of a busy machine that also runs tests: its policy is late, and then a lift presses on the
    # table with up to 110 N (60 N where it is on time).
    return node | {"fresh": {"hold": 2.0, "stop": 6.0, "state": 4.0}, "force": 300}


def script(task: str) -> dict[str, Any]:
    return node_of("policies.scripted.fr3.Scripted", task=task, quality=1.0)


@contextmanager
def arm(world: dict[str, Any] = WORLD, **settings: Any) -> Generator[RealEnv]:
    """The simulated arm as the environment `world`, whose processes end in order."""
    how: dict[str, Any] = {"robot": robot(), "patience": PATIENT, **settings}
    made = RealEnv(Config(world=world, **how))
    try:
        yield made
    finally:
        made.close()
    assert made.session.daemon.returncode == 0 and not made.session.folder.exists()


def steps(env: VecEnv, policy: Policy, most: int) -> Iterator[Step]:
    """What comes of the actions of `policy`, from a reset on."""
    torch.manual_seed(0)
    actor, obs, first = Actor(policy, 1), env.reset(), torch.tensor([True])
    for _ in range(most):
        step = env.step(actor(obs, first))
        obs, first = step.obs, step.ended
        yield step


@pytest.fixture(scope="module")
def env() -> Iterator[RealEnv]:
    with arm(horizon=60) as made:
        yield made


@only_all
def test_an_emulated_robot_is_started_and_shared() -> None:
    """A Franka behind libfranka's protocol: one emulator for training and evaluation."""
    pytest.importorskip("franky")
    node = yaml.safe_load(Path("configs/robot/franka_sim.yaml").read_text())
    # The emulated arm's time goes slower than the clock of its set-points.
    node["limits"]["tracking"] = [2.0] * 7
    node |= {"fresh": robot()["fresh"], "tool_speed": 3.0}
    with arm(robot=node) as one:
        with closing(RealEnv(one.config)) as other:
            assert one.session is other.session and one.emulator is other.emulator
        before = one.reset()["state"]
        for _ in range(5):
            step = one.step(PUSH)
        assert not step.log["stopped"].item() and (step.next_obs["state"] - before).abs().max() > 0
        assert one.emulator is not None and SharedEmulator.known
    assert not SharedEmulator.known


def test_a_scripted_policy_reaches_as_in_simulation_and_episodes_follow(env: RealEnv) -> None:
    require_same(Fr3(Fr3Config(task="reach", num_envs=1)).spec, env.spec, "simulation", "arm")
    ends: list[Step] = []
    left: list[torch.Tensor] = []
    env.add_pre_reset_hook(left.append)
    for step in steps(env, build(script("reach"), Policy, spec=env.spec), 200):
        assert step.reward.item() == step.terminated.item() == step.log["success"].item()
        assert not step.log["stopped"].item()
        if step.ended.item():
            assert not torch.equal(step.obs["state"], step.next_obs["state"])
            ends.append(step)
        if len(ends) == 2:
            break
    one, other = (end.next_obs["state"][0, -3:] for end in ends)
    assert not one.equal(other), "another goal in each episode"
    assert all(end.terminated.item() for end in ends) and len(left) == 2


def test_nobody_steps_and_the_arm_rests_and_goes_on(env: RealEnv) -> None:
    env.reset()
    env.step(PUSH)

    def rests() -> bool:  # while somebody updates a network
        env.session.update()
        assert env.session.mode != Mode.ESTOP
        return env.session.mode == Mode.IDLE

    wait_until(rests, "the arm is idle", PATIENT, 0.05)
    before = env.session.state["sent"].copy()
    for _ in range(8):
        step = env.step(PUSH)
    assert env.session.mode == Mode.RUNNING and not step.ended.item()
    assert abs(env.session.state["sent"] - before).max() > 0.01


def test_an_arm_that_goes_on_keeps_what_its_hand_holds(env: RealEnv) -> None:
    """It opened the hand by half, since that is what the action 0 of a hand means."""
    close = torch.tensor([[0.0, 0.0, 0.0, -1.0]])
    env.reset()
    for _ in range(12):
        env.step(close)
    ring = open_flight_recorder(env.deployment, env.session.folder)
    with env.session.lock:
        env.session.rest()
    count = ring.count
    for _ in range(2):
        env.step(close)
    ticks = ring.since(count)[0]
    ring.close()
    assert {*ticks["mode"].tolist()} >= {Mode.IDLE, Mode.RUNNING}
    assert ticks["sent_width"].max() < 0.002 and (np.ptp(ticks["sent"], axis=0) < 0.005).all()


def test_another_program_gets_pictures_of_the_arm_that_it_moves(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    picture = torch.full((8, 8, 3), 90, dtype=torch.uint8)
    (tmp_path / "seen" / "0.png").write_bytes(encode_png(picture))
    camera = "{_target_:embodied.real_robot.cameras.sources.Folder,path:%s}"
    words = (
        "robot=sim",
        "robot.driver.world.task=reach",
        f"robot.cameras.front={camera % (tmp_path / 'seen')}",
    )
    words += ("robot.filmed.front=[4,6]", f"folder={tmp_path / 'daemon'}")
    made = External(ExternalConfig(words, home=False, out=str(tmp_path / "out")))
    with closing(made):
        made.connect()
        numbers, images = made.observe()
        assert images["front"].shape == (4, 6, 3) and (images["front"] == 90).all()
        assert made.act(numbers).keys() == numbers.keys()


def test_a_stop_ends_the_episode_and_waits_for_the_operator(env: RealEnv) -> None:
    env.reset()
    assert env.session.request(Verb.ESTOP)
    hand = threading.Timer(
        1.0, wait_until, [lambda: env.session.request(Verb.RESET), "reset", PATIENT, 0.1]
    )
    hand.start()
    step = env.step(STAY)
    hand.join()
    assert step.log["stopped"].item() and step.truncated.item() and not step.terminated.item()
    assert not env.step(STAY).log["stopped"].item(), "and on it goes"


def test_two_may_share_an_arm_one_after_the_other(env: RealEnv) -> None:
    env.reset()
    with closing(RealEnv(env.config)) as other:
        assert other.session is env.session
        other.reset()
        assert not other.step(STAY).log["stopped"].item()
    step = env.step(STAY)
    assert step.truncated.item() and step.log["stopped"].item(), "it was not where it thinks"
    assert not env.step(STAY).ended.item()


def test_what_an_arm_cannot_be(env: RealEnv) -> None:
    with pytest.raises(ConfigError, match="one arm"):
        RealEnv(Config(robot(), WORLD, num_envs=2))
    with pytest.raises(ConfigError, match="can't be set"):
        env.reset(task=torch.zeros(1, 3))
    turned = {**robot(), "controller": {**robot()["controller"], "turning": "yaw"}}
    with pytest.raises(ConfigError, match="turning="):
        RealEnv(Config(turned, WORLD))


def test_a_daemon_that_dies_is_told_of(env: RealEnv) -> None:
    other = RealEnv(Config({**robot(), "seconds": 5.0}, WORLD))  # not the other tests' arm
    assert other.session is not env.session
    other.reset()
    os.kill(other.session.daemon.pid, signal.SIGKILL)
    with pytest.raises(RobotSessionError, match=r"gone|tells"):
        for _ in range(500):
            other.step(STAY)
    other.deadman.close()
    other.session.close()


pytest.importorskip("cv2", reason="OpenCV is not installed")
LIGHT = {"drawing": "light", "threads": 1}
SEEN_WORLD = node_of("envs.fr3.env.Fr3", task="reach", cameras=["front"], image_size=SIZE, **LIGHT)


def seeing(**cameras: Any) -> dict[str, Any]:
    return {**robot(), "cameras": cameras}


@pytest.fixture(scope="module")
def eyes() -> Iterator[RealEnv]:
    front = rendered("reach", SIZE, 30.0)
    with arm(SEEN_WORLD, robot=seeing(front=front), horizon=400, age=30.0, camera=front) as made:
        yield made


def apart(eyes: RealEnv, picture: torch.Tensor, obs: Tensors, task: str = "reach") -> float:
    """Mean difference of `picture` from a drawing of the arm at `obs`, grey levels."""
    names = eyes.spec.obs["state"].names
    values = dict(zip(names, obs["state"][0].double().tolist(), strict=True))
    with closing(RenderedCamera(PosedConfig(task, size=SIZE))) as scene:
        scene.show(np.array([values[f"q{i}"] for i in range(1, 8)]), values["width"], values)
        drawn = scene.picture().astype(int)
    return float(np.abs(picture[0].numpy().astype(int) - drawn).mean())


def test_a_camera_that_fails_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allow("tests")
    trouble = Trouble(tmp_path / "trouble", create=True)
    target = "tests.real_robot.troubled.TroubledCamera"
    node = {"_target_": target, "trouble": str(tmp_path / "trouble")}
    with arm(SEEN_WORLD, robot=seeing(front=node), age=30.0) as made:
        made.reset()
        assert not made.step(STAY).log["stopped"].item()
        trouble.dark = 1
        state = open_channels(made.deployment, made.session.folder).state

        def mend() -> None:
            while int(state.fields["mode"][0]) != Mode.IDLE:  # else this test never ends
                state.receive()
                time.sleep(0.05)
            trouble.dark = 0

        hand = threading.Thread(target=mend, daemon=True)
        hand.start()
        step = made.step(STAY)
        while not step.ended.item():  # a picture may have come before it went dark
            step = made.step(STAY)
        hand.join()
        assert step.log["stopped"].item() and step.truncated.item()
        assert "the arm is held: camera of the chaos suite gives no more" in capsys.readouterr().err
        assert not made.step(STAY).ended.item(), "and on it goes"
        made.config = replace(made.config, patience=0.0)
        trouble.dark = 1
        with pytest.raises(CameraError, match="no more pictures"):
            for _ in range(50):
                made.step(STAY)


def test_a_camera_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    node = node_of("real_robot.cameras.sources.Folder", path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"observations \(front\): name a camera .*cameras.fro"):
        RealEnv(Config(seeing(wrist=node), SEEN_WORLD))
    made = RealEnv(Config(seeing(front=node), SEEN_WORLD, patience=PATIENT))
    with closing(made), pytest.raises(ConfigError, match="no PNG or JPEG files"):
        made.reset()


@pytest.fixture(scope="module")
def lifting() -> Iterator[RealEnv]:
    world, camera = node_of("envs.fr3.env.Fr3", task="lift"), rendered("lift", SIZE, 30.0)
    with arm(world, horizon=200, camera=camera, age=30.0) as made:
        yield made


def test_the_last_picture_that_a_reward_sees_is_of_the_success(lifting: RealEnv) -> None:
    """As a run does with reward=classifier: it is taken before the arm goes home."""
    watched = with_pictures(lifting, {PICTURE: Leaf((SIZE, SIZE, 3), "uint8", 0, 255)})
    assert watched is not lifting and watched.spec.obs[PICTURE].shape == (SIZE, SIZE, 3)
    for step in steps(watched, build(script("lift"), Policy, spec=lifting.spec), 200):
        if step.ended.item():
            break
    assert step.terminated.item(), "it was lifted"
    # A busy machine stops the arm later, and so higher than any success of the simulation.
    seen = step.next_obs[PICTURE]
    there, home = (apart(lifting, seen, at, "lift") for at in (step.next_obs, step.obs))
    assert there < home, (there, home)


def test_no_camera_and_an_old_picture(lifting: RealEnv) -> None:
    lifting.reset()
    other = RealEnv(Config(lifting.config.robot, lifting.config.world))
    with closing(other), pytest.raises(NotImplementedError, match="no camera"):
        other.render()
    picture = lifting.render(0, 40, 30)
    assert picture.shape == (30, 40, 3) and picture.dtype == torch.uint8
    assert lifting.images.reward_camera is not None
    with pytest.raises(CameraError, match="nothing new"):
        lifting.images.reward_camera.newest(-1.0)
    with pytest.raises(ConfigError, match="scene"):
        build({"_target_": "embodied.real_robot.cameras.sources.Rendered", "scenes": {}}, Source)


def test_pictures_follow_the_arm_that_a_policy_moves(eyes: RealEnv) -> None:
    with closing(Fr3(Fr3Config("reach", 1, cameras=("front",), image_size=SIZE))) as inner:
        require_same(inner.spec, eyes.spec, "simulation", "arm")
    images = {"channels": [8, 16], "features": 16}
    flow = make_policy("generative.flow.Flow", eyes.spec, chunk=1, steps=2, width=32, images=images)
    moves = list(steps(eyes, flow, 10))
    assert not any(step.log["stopped"].item() or step.ended.item() for step in moves)
    first = moves[0].obs["front"]
    assert first.shape == (1, SIZE, SIZE, 3) and first.dtype == torch.uint8
    assert len({step.obs["front"].numpy().tobytes() for step in moves}) > 3, "it is seen to move"
    for action in [PUSH] * 25 + [STAY] * 8:  # what is drawn comes a little later than the rest
        moved = eyes.step(action).obs
    now, before = apart(eyes, moved["front"], moved), apart(eyes, first, moved)
    assert before > 1.0 and now < 0.3 * before, (now, before)
    again = eyes.reset()
    gone, here = apart(eyes, moved["front"], again), apart(eyes, again["front"], again)
    assert here < 0.3 * gone, "also where it went home, and its goal is another"


def test_rewards_look_through_the_same_device(eyes: RealEnv) -> None:
    eyes.reset()
    assert eyes.images.reward_camera is eyes.images.images.local_cameras[0], "opened once"
    assert eyes.render_batch(torch.tensor([0]), 16).shape == (1, 16, 16, 3)
    with closing(RealEnv(eyes.config)) as other:
        other.reset()
        assert other.images.reward_camera is eyes.images.reward_camera
    assert eyes.reset()["front"].float().std() > 10, "it is still open"
    eyes.images.images.age = -1.0
    with pytest.raises(CameraError, match="has shown nothing new"):
        eyes.images.read()
    eyes.images.images.age = 30.0


@only_all  # simulated: tests/envs/test_practice.py
def test_the_learner_pushes_there_and_a_script_pushes_back() -> None:
    node = compose("train", ["env=robot_shuttle", "policy=gaussian", "learner=sac"]).node["env"]
    node["env"] |= {"robot": robot(), "patience": PATIENT}
    node["wrappers"][0] |= {"played": {"1": script("push")}}
    shuttle: Any = build(node, VecEnv)
    with closing(shuttle):
        names = shuttle.spec.obs["state"].names
        cube, goal, between = (
            slice(at, at + 3) for at in map(names.index, ("cube_x", "goal_x", "goal_from_cube_x"))
        )
        for step in steps(shuttle, build(script("push"), Policy, spec=shuttle.spec), 600):
            seen = (step.next_obs if step.terminated.item() else step.obs)["state"][0].numpy()
            np.testing.assert_allclose(seen[goal], [0.44, -0.08, 0.025], atol=1e-6)
            # Of the goal that counts.
            np.testing.assert_allclose(seen[between], seen[goal] - seen[cube], atol=1e-6)
            assert not step.log["manual"].item() and not step.log["stopped"].item()
            if step.terminated.item():
                break
    assert step.terminated.item() and step.reward.item() == 1 and step.log["success"].item()
    there, back = (each["state"][0, cube].numpy()[:2] for each in (step.next_obs, step.obs))
    assert np.linalg.norm(there - [0.44, -0.08]) < 0.026 and step.log["aside"].item() > 0
    # 19 cm apart; on a busy machine it is pushed a little further before the arm is told to stop.
    assert np.linalg.norm(back - [0.54, 0.08]) < 0.1, "pushed back, and it stayed"
    assert step.obs["state"][0, goal].numpy()[:2] == pytest.approx([0.44, -0.08], abs=1e-6)
    assert shuttle.session.daemon.returncode == 0


def test_what_practising_needs() -> None:
    goal = {"goal_x": 0.44, "goal_y": -0.08, "goal_z": 0.025}
    for goals, match in (
        (({"goal_x": 0.4},), "two goals or more"),
        ((goal, {**goal, "more": 1.0}), "the same names"),
    ):
        with pytest.raises(ConfigError, match=match):
            ShuttleConfig(robot(), WORLD, goals=goals)
    arm = {"driver": {"world": {"task": "push"}}}
    assert lasting(arm)["driver"]["world"] == {"task": "push", "lasting": True}
    assert lasting({"driver": {"host": "x"}}) == {"driver": {"host": "x"}}


def test_what_is_given_counts_before_what_is_sensed() -> None:
    """The goal is given; how far the cube is from it is made anew."""
    names = ("goal_x", "cube_x", "goal_from_cube_x", "cube_from_tool_x")
    act = Leaf((1,), low=-1.0, high=1.0)
    spec = Spec({"state": Leaf((4,), names=names)}, act, dt=0.05)
    values = np.array([9.0, 2.0, 7.0, 5.0])
    still = np.zeros(1), np.zeros(1), np.zeros(3), 0.0
    for given, seen in (({}, values.tolist()), ({"goal_x": 3.0}, [3.0, 2.0, 1.0, 5.0])):
        observer = Observer(spec, 1, lambda q: np.zeros((len(q), 3)), given, names)
        assert observer(*still, values)["state"].tolist() == seen
