"""Checks before anything moves: one line each, and whether it passed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied.core.build import ConfigError, build, nearest
from embodied.core.checkpoint import CheckpointError, find, load_policy, read_about
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.saved_node import require_inside
from embodied.core.tensors import Tensors
from embodied.deploy.site import Site
from embodied.embodiments.controller import Controller
from embodied.embodiments.joint_position import JointPosition
from embodied.nn.normalizers import MeanStdNormalizer, MinMaxNormalizer
from embodied.policies.abilities import HasDataRanges, without_reflex
from embodied.policies.wrappers.translated import Mapped
from embodied.real_robot.assemble import (
    build_chain,
    build_driver,
    forward_kinematics,
    tool_speed,
)
from embodied.real_robot.cameras.policy_images import PolicyImages, image_sizes
from embodied.real_robot.cameras.sources import FIRST_IMAGE, CameraError
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.policy.lockdown import missing
from embodied.real_robot.policy.observer import (
    observer,
    require_actions,
    require_rate,
    with_real_time_chunking,
)
from embodied.real_robot.recorder import recorded_spec
from embodied.real_robot.safety.geometry import Geometry
from embodied.real_robot.safety.workspace import Workspace

SAME = 1e-3  # of what a policy sees and does, in simulation and here
DARK = 8  # of 255: the brightest spot of a picture with the cap on
WHOLE_TURN = 2 * np.pi * 0.99  # rad
DECISIONS = 5  # of a policy server, to see how long they take
SLACK = 0.04  # rad that limits may reach beyond a calibrated range, or data beyond limits
OVER = 0.1  # share of a hand's opening, or of [-1, 1], that data may reach beyond it


Look = Callable[[Site, Policy], tuple[bool | None, str]]


@dataclass(frozen=True)
class Line:
    """`fine` is None where that could not be looked at: no reason to stop, but to know."""

    name: str
    fine: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "?   "}[self.fine]
        return f"  {mark} {self.name:13} {self.text}"


def check(site: Site, known: Path | None, connect: bool = False) -> Iterator[Line]:
    """All lines, in order; the first ones decide whether the others can be looked at. `known` is
    the file of the last good calibration; `connect` also opens the wire (torque goes on, nothing
    moves)."""
    try:
        policy = without_reflex(load_policy(site.deployment.policy))
    except CheckpointError as error:
        yield Line("policy", False, str(error))
        return
    looks: list[tuple[str, Look]] = [
        ("policy", _checkpoint),
        ("rate", _rate),
        ("actions", _actions),
        ("observations", _observations),
        ("cameras", _cameras),
        ("normaliser", _normaliser),
        ("units", _units),
        ("parity", _parity),
        ("limits", _limits),
        ("workspace", _workspace),
        ("geometry", _geometry),
        ("force", _force),
        ("freshness", _freshness),
        ("server", _server),
        ("lock", _lock),
        ("range", _range),
        ("calibration", lambda site, policy: _calibration(site, known)),
    ]
    if connect and site.deployment.cameras:
        looks.append(("pictures", _pictures))
    if connect:
        looks.append(("arm", _arm))
    for name, look in looks:
        try:
            line = Line(name, *look(site, policy))
        except (CameraError, ConfigError, DriverError) as error:
            line = Line(name, False, " ".join(str(error).split()))
        yield line


def _checkpoint(site: Site, policy: Policy) -> tuple[bool | None, str]:
    folder = find(site.deployment.policy)
    about = read_about(folder)
    return True, f"{type(policy).__name__}, step {about.get('step', '?')}, {folder}"


def _rate(site: Site, policy: Policy) -> tuple[bool | None, str]:
    made = site.deployment
    require_rate(policy.spec, made)
    if made.step * made.hertz < 1:
        return False, f"{made.hertz:g} Hz is slower than the policy's {1 / made.step:g} Hz"
    how = (
        ""
        if with_real_time_chunking(policy, made) is policy
        else f", real-time chunking ({made.chunks})"
    )
    return True, f"{made.hertz:g} Hz, the policy decides {1 / made.step:g} times a second{how}"


def _lock(site: Site, policy: Policy) -> tuple[bool | None, str]:
    if reason := missing():
        return None, reason
    return True, "the policy process writes its actions and its log, and nothing else"


def _actions(site: Site, policy: Policy) -> tuple[bool | None, str]:
    require_actions(policy.spec, site.deployment)
    names = policy.spec.act.names
    said = ", ".join(names) if names else f"{policy.spec.act.size} numbers"
    named = names
    if isinstance(policy, Mapped):
        named = policy.mapping.action_elements or policy.base.spec.act.names
    return True, said if named else f"{said}; the policy names none: their order is trusted"


def _observations(site: Site, policy: Policy) -> tuple[bool | None, str]:
    names = [
        each for leaf in observer(policy.spec, site.deployment).names.values() for each in leaf
    ]
    from_elsewhere = [*site.deployment.given, *site.deployment.sensed]
    more = [name for name in names if name in from_elsewhere]
    return True, f"{len(names)} numbers" + (f"; not of the arm: {', '.join(more)}" if more else "")


def _cameras(site: Site, policy: Policy) -> tuple[bool | None, str]:
    images, cameras = image_sizes(policy.spec), site.deployment.cameras
    missing = [name for name in images if name not in cameras]
    task = _drawn_task(site)
    if missing and task:
        node = {"_target_": RENDERED, "fps": 15, "scene": {"_target_": SCENE, "task": task}}
        node["scene"]["camera"] = missing[0]
        word = f"robot.cameras.{missing[0]}={json.dumps(node)}"
        word = word.replace('"', "").replace(", ", ",")
        return False, f"{missing[0]} has no camera; to draw it: '{word}'"
    PolicyImages(policy.spec, cameras, site.deployment.picture)
    filmed = {name: size for name, size in site.deployment.filmed.items() if name not in images}
    if spare := [name for name in cameras if name not in {**images, **filmed}]:
        return False, (
            f"{spare[0]} is no picture that the policy sees{nearest(spare[0], images)}; "
            f"to record it: robot.filmed.{spare[0]}=[96, 96]"
        )
    said = [f"{name} ({high} x {wide})" for name, (high, wide) in images.items()]
    said += [f"{name} ({high} x {wide}, filmed)" for name, (high, wide) in filmed.items()]
    return True, ", ".join(said) if said else "the policy sees no pictures"


RENDERED = "embodied.real_robot.cameras.sources.Rendered"
SCENE = "embodied.envs.fr3.rendered_camera.RenderedCamera"


def _drawn_task(site: Site) -> str:
    """The task of a simulated FR3 whose scene can be drawn; empty for other robots."""
    simulation: Any = site.deployment.driver.get("world")
    simulated = isinstance(simulation, Mapping) and "task" in simulation
    return str(simulation["task"]) if simulated else ""


def _pictures(site: Site, policy: Policy) -> tuple[bool | None, str]:
    """One of each, as the policy would see it, or the recording."""
    spec = recorded_spec(policy.spec, site.deployment.filmed)
    with PolicyImages(spec, site.deployment.cameras, FIRST_IMAGE) as images:
        if images.scenes:
            return None, "drawn from what is measured, not taken"
        dark = [name for name, frame in images.read().items() if int(frame.max()) < DARK]
    return (None, f"{dark[0]} is black") if dark else (True, "they come")


def _normaliser(site: Site, policy: Policy) -> tuple[bool | None, str]:
    found = [
        each for each in policy.modules() if isinstance(each, MeanStdNormalizer | MinMaxNormalizer)
    ]
    unfitted = {"mean": 0.0, "middle": 0.0, "limit": float("inf")}
    fitted = [
        any(bool((b != unfitted.get(k, 1.0)).any()) for k, b in n.named_buffers()) for n in found
    ]
    finite = all(bool(b.isnan().logical_not().all()) for n in found for b in n.buffers())
    if not finite:
        return False, "it holds numbers that are none; take an earlier checkpoint"
    if any(fitted):
        return True, f"{sum(fitted)} of {len(found)} set from data"
    trained = site.trained or {}
    data = trained.get("data") or {}
    fits = data.get("normalize")
    if fits is None:  # decided by what the run knew (RunConfig.normalizes)
        fits = data.get("warmup_steps") and (not trained.get("init") or trained.get("finetune"))
    if found and (fits or trained.get("demos")):
        return False, "the run says that there is one, the checkpoint has none that was set"
    return True, "none, as trained" if site.trained else "none"


def _units(site: Site, policy: Policy) -> tuple[bool | None, str]:
    """How far the run's data reach, in the robot's names and units, against its limits."""
    if not isinstance(policy, HasDataRanges) or not (found := policy.data_ranges()):
        return None, "the policy keeps no ranges of its data in physical units"
    controller, limits = build(site.deployment.controller, Controller), site.deployment.limits
    looked = 0
    for key, ends in found.items():
        leaf = policy.spec.act if key == "action" else policy.spec.obs[key.removeprefix("obs/")]
        if key == "action" and isinstance(controller, JointPosition):
            names, ours = controller.names, _meant(controller, ends)
        elif key == "action":
            names, ours = leaf.names, ends.numpy()
        else:
            names, ours = leaf.names, _measured(site.deployment, leaf.names, ends)
        if not names:
            continue
        least, most, slack = _allowed(site.deployment, controller, key, names)
        low, high = np.sort(ours, 0)
        over = np.maximum(least - slack - low, high - most - slack)
        looked += int(np.isfinite(least).sum())
        worst = int(np.argmax(over))
        if over[worst] > 0:
            return False, (
                f"{names[worst]}: {key} of the run's data goes from {low[worst]:.2f} to "
                f"{high[worst]:.2f} here, the robot's limits from {least[worst]:.2f} to "
                f"{most[worst]:.2f}: another unit, sign or zero (mapping=FILE, robot.driver), or "
                "robot.limits"
            )
    return True, f"{looked} ranges of the run's data are within the limits of {len(limits)} joints"


def _meant(controller: JointPosition, ends: torch.Tensor) -> Floats:
    """Joints [2, n] (rad) and the hand (m) that the ends of the actions' data mean."""
    rows = ends.numpy().copy()
    n = len(controller.arm)
    hand = [controller.opening(rows[:, n:])] if rows.shape[1] > n else []
    return np.concatenate([controller.positions(rows[:, :n]), *hand], 1)


def _measured(made: Deployment, names: Sequence[str], ends: torch.Tensor) -> Floats:
    """The ends [2, k] of an observation's data, in rad (m) where they are joints (a hand)."""
    rows = ends.numpy().copy()
    if made.outside is not None:
        for at, name in enumerate(names):
            if name in made.outside.names:
                which = made.outside.names.index(name)
                rows[:, at] -= made.outside.zero[which]
                rows[:, at] *= made.outside.unit[which]
    return rows


def _allowed(
    made: Deployment, controller: Controller, key: str, names: Sequence[str]
) -> tuple[Floats, Floats, Floats]:
    """Low and high limits [k] of the elements `names` (infinite: none), and what may be beyond."""
    least, most, slack = (np.full(len(names), end) for end in (-np.inf, np.inf, SLACK))
    places = {f"q{i}": i - 1 for i in range(1, made.joints + 1)}
    if made.outside is not None:
        places |= {name: i for i, name in enumerate(made.outside.names)}
    opening = None
    if isinstance(controller, JointPosition):
        opening = None if controller.arm.hand is None else controller.arm.hand.open
    if key == "action":
        joints = isinstance(controller, JointPosition)
        places = {name: i for i, name in enumerate(names)} if joints else {}
        if not joints and not controller.physical:
            one = np.ones(len(names))
            return -one, one, 2 * OVER * one
    for at, place in enumerate(places.get(name, -1) for name in names):
        if 0 <= place < made.joints:
            least[at], most[at] = made.limits.low[place], made.limits.high[place]
        elif place >= made.joints and opening is not None:
            least[at], most[at], slack[at] = 0.0, opening, OVER * opening
    return least, most, slack


def _parity(site: Site, policy: Policy) -> tuple[bool | None, str]:
    """A stored observation, as the simulation shows it and as the robot's side makes it."""
    from embodied.envs.mujoco.cameras import NoDisplay

    if site.trained is None:
        return None, "no run.yaml beside the checkpoint: there is nothing to compare with"
    try:
        apart = compare(site, policy)
    except NoDisplay as error:
        apart = str(error)
    if isinstance(apart, str):
        return None, apart
    seen, done = apart
    words = f"seen differs by {seen:.1e}, done by {done:.1e}, from the simulation's"
    return seen < SAME and done < 10 * SAME, words


def _limits(site: Site, policy: Policy) -> tuple[bool | None, str]:
    made = site.deployment
    build_chain(made)
    home = "no home pose" if not made.home else "home is inside"
    return True, f"set for {made.joints} joints; {home}"


def _workspace(site: Site, policy: Policy) -> tuple[bool | None, str]:
    made = site.deployment
    if made.workspace is None:
        return None, "not set: nothing keeps the tool from the table (robot.workspace.low, .high)"
    if not made.home:
        return True, "set"
    depth = Workspace(made.workspace, forward_kinematics(made)).depth(np.asarray(made.home)[None])
    return depth > 0, f"the tool at home is {abs(depth):.3f} m {'in' if depth > 0 else 'out'}side"


def _geometry(site: Site, policy: Policy) -> tuple[bool | None, str]:
    made = site.deployment
    if made.geometry is None:
        return None, "not set: nothing keeps the arm off the table and off itself (robot.geometry)"
    geometry, margin = Geometry(made.geometry, made.joints), made.geometry.margin
    if not made.home:
        return True, f"set, {len(geometry.names)} capsules"
    depth, what = geometry.nearest(np.asarray(made.home))
    return depth > 0, f"at home {what} are nearest: {depth + margin:.3f} m (margin {margin:g} m)"


def _force(site: Site, policy: Policy) -> tuple[bool | None, str]:
    made = site.deployment
    speed = f"the tool moves at {tool_speed(made):g} m/s at most"
    if isinstance(made.force, str):
        return None, f"{made.force}: nothing limits what the arm presses with; {speed}"
    return True, f"stops and lets go from {made.force:g} N on the tool; {speed}"


def _freshness(site: Site, policy: Policy) -> tuple[bool | None, str]:
    fresh, step = site.deployment.fresh, site.deployment.step
    words = f"held after {fresh.hold:g} s without news, stopped after {fresh.stop:g} s"
    if fresh.hold < 2 * step:
        return False, f"{words}: a policy with steps of {step:g} s is always late (hold >= 2 steps)"
    return True, words


def _server(site: Site, policy: Policy) -> tuple[bool | None, str]:
    """How long a policy server takes for a decision, against what counts as old."""
    if not site.deployment.served:
        return True, "none is asked: the policy runs on this machine"
    obs = {name: leaf.zeros(1) for name, leaf in policy.spec.obs.items()}
    noise, carry, took = policy.sample_noise(1), policy.initial(1), list[float]()
    for _ in range(DECISIONS):
        began = time.perf_counter()
        policy.act(obs, carry, noise)
        took.append(time.perf_counter() - began)
    hold, worst = site.deployment.fresh.hold, max(took)
    words = f"decides in {1e3 * min(took):.0f} to {1e3 * worst:.0f} ms"
    if worst > hold:
        return False, f"{words}: later than fresh.hold, {hold:g} s, so the arm would always rest"
    return True, words


def _range(site: Site, policy: Policy) -> tuple[bool | None, str]:
    driver = build(site.deployment.driver, Driver)
    reach = driver.reach()
    if reach is None:
        return None, "the driver knows of no calibrated range"
    limits = site.deployment.limits
    whole = [
        n for n, a, b in zip(driver.joints, *reach, strict=True) if WHOLE_TURN < b - a < np.inf
    ]
    if whole:
        return False, (
            f"the calibrated range of {whole[0]} is a whole turn: it was never measured, and does "
            "not limit the joint; calibrate it (embodied robot calibrate)"
        )
    over: Floats = np.maximum(reach[0] - np.asarray(limits.low), np.asarray(limits.high) - reach[1])
    joint = int(np.argmax(over))
    if over[joint] > SLACK:
        return False, (
            f"the limits of {driver.joints[joint]} go {over[joint]:.2f} rad beyond what its "
            f"calibration reaches ({reach[0][joint]:.2f} to {reach[1][joint]:.2f})"
        )
    return True, f"limits are inside of what {len(driver.joints)} calibrated joints reach"


def _calibration(site: Site, known: Path | None) -> tuple[bool | None, str]:
    """Signs, zeros and ranges against those of the last deployment that went well."""
    if known is None or not known.exists():
        return None, "no last good one; look at signs and zeros by hand"
    good, now = json.loads(known.read_text()), calibration(site)
    odd = [k for k in sorted({*good, *now}) if good.get(k) != now.get(k)]
    if odd:
        return False, (
            f"{odd[0]} is {now.get(odd[0])}, it was {good.get(odd[0])} in the last good "
            f"deployment; if that is meant, remove {known}"
        )
    return True, "as in the last good deployment"


def calibration(site: Site) -> dict[str, Any]:
    """What of a driver's settings says where its joints are, flat."""
    joints = site.deployment.driver.get("joints")
    rows = joints if isinstance(joints, list) else []
    kept = ("id", "sign", "zero", "low", "high", "ratio")
    return {
        f"{row.get('name') or row['key']}.{what}": row[what]  # LeRobot's joints have a key
        for row in rows
        for what in kept
        if what in row
    }


def _arm(site: Site, policy: Policy) -> tuple[bool | None, str]:
    with build_driver(site.deployment) as arm:
        q = arm.read().q
    limits = site.deployment.limits
    out = np.maximum(np.asarray(limits.low) - q, q - np.asarray(limits.high))
    where = ", ".join(f"{each:.2f}" for each in q)
    if out.max() > 0:
        name = arm.joints[int(np.argmax(out))]
        return False, f"{name} is {out.max():.2f} rad outside of its limits ({where})"
    return True, f"answers, at {where}"


SEED = 7


def compare(site: Site, policy: Policy) -> tuple[float, float] | str:
    """The largest differences of observations (in their units) and of actions, or why not."""
    assert site.trained is not None
    try:
        require_inside(site.trained["env"], "its run.yaml")
    except ConfigError as error:
        return str(error)
    env = build(site.trained["env"] | {"num_envs": 1}, VecEnv)
    try:
        obs: Tensors = env.reset(SEED)
    finally:
        env.close()
    pairs = ((leaf.names, obs[name][0]) for name, leaf in policy.spec.obs.items() if leaf.names)
    shown = {n: float(v) for names, row in pairs for n, v in zip(names, row.tolist(), strict=True)}
    joints = site.deployment.joints
    needed = [f"{kind}{i}" for kind in ("q", "dq") for i in range(1, joints + 1)]
    if missing := [name for name in (*needed, *_axes("tool"), *_axes("lead")) if name not in shown]:
        return f"the run's world does not show {missing[0]}: it is another robot's, or its task's"
    here = _through(site, policy, shown)
    there = {name: obs[name] for name in here}
    apart = max(float((here[k] - there[k]).abs().max()) for k in here)
    pictures = {name: obs[name] for name in image_sizes(policy.spec)}  # the same for both
    return apart, _acts_apart(policy, here | pictures, there | pictures)


def _axes(name: str) -> list[str]:
    return [f"{name}_{axis}" for axis in "xyz"]


def _through(site: Site, policy: Policy, shown: dict[str, float]) -> Tensors:
    """The same numbers, from joints and what is given and sensed."""
    made = site.deployment
    watch = observer(policy.spec, made)
    q = np.array([shown[f"q{i}"] for i in range(1, made.joints + 1)])
    dq = np.array([shown[f"dq{i}"] for i in range(1, made.joints + 1)])
    target = np.array(
        [shown[t] + shown[a] for t, a in zip(_axes("tool"), _axes("lead"), strict=True)]
    )
    watch.given |= {name: shown[name] for name in made.given if name in shown}
    sensed = np.array([shown.get(name, 0.0) for name in made.sensed])
    leaves = watch(q, dq, target, shown.get("width", 0.0), sensed)
    return {name: torch.as_tensor(value)[None] for name, value in leaves.items()}


@torch.inference_mode()
def _acts_apart(policy: Policy, here: Tensors, there: Tensors) -> float:
    noise = policy.sample_noise(1)
    said: list[torch.Tensor] = []
    for obs in (here, there):
        seen, carry = policy.observe(obs, policy.initial(1), noise)
        said.append(policy.act(seen, carry, noise)[0])
    return float((said[0] - said[1]).abs().max())
