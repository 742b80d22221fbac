"""Reads an arm from an MJCF or URDF file, once, at set-up; needs MuJoCo, which reads both.

The chain goes from a base body to a tip, which is a site or a body: every joint between the two is
a joint of the arm. Velocity limits, which MuJoCo does not keep, are read from the URDF itself.
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError, nearest, shown
from embodied.core.files import SIDE, FileError, read_text
from embodied.embodiments.kinematics.arm import ArmFile, Hand, JointLimits
from embodied.embodiments.kinematics.chain import Frame, Joint

try:
    mujoco: Any = import_module("mujoco")
except ModuleNotFoundError:  # `read_spec` says so
    mujoco = None

Array = NDArray[np.float64]
HALF_TURN = np.pi  # rad: the limit on both sides of a joint that has none in the file
KEYFRAME = "home"
MOST = {"replicate": 1e4, "composite": 1e5, "flexcomp": 1e5, "size": 1e7, "include": 1}
MOST |= {"hfield": float(SIDE**2), "texture": float(6 * SIDE**2), "mesh": 1e6}
"""What an element of MJCF may ask for: copies, points, pixels."""
SIZES = ("count", "nrow", "ncol", "width", "height", "params")
TAG = re.compile(rf"<(?P<end>/?)(?P<kind>{'|'.join(MOST)})\b")
REST = re.compile(r"(?:[^>\"']|\"[^\"]*\"|'[^']*')*+>")
WORD = re.compile(r"([\w:.-]+)\s*=\s*(\"[^\"]*\"|'[^']*')")


@dataclass(frozen=True)
class Route:
    """MuJoCo's ids: the body `base`, the `bodies` below it down to the tip's, their `joints`, and
    the tip's `site` (None: the last body itself)."""

    base: int
    bodies: tuple[int, ...]
    joints: tuple[int, ...]
    site: int | None


def read_spec(path: Path, meshes: str | None = None) -> Any:
    """The editable MuJoCo model (`MjSpec`) of `path`, whose bodies are not fused. `meshes`: the
    folder of its mesh files, where they are not where the file says. ConfigError."""
    if mujoco is None:
        raise ConfigError("reading a robot file needs MuJoCo; type: pip install 'embodied-rl[sim]'")
    if not path.is_file():
        raise ConfigError(f"{path} is not there; name an MJCF (.xml) or URDF (.urdf) file")
    _require_sizes(path, path.parent, set())
    try:
        spec = mujoco.MjSpec.from_file(str(path))
    except ValueError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    spec.compiler.fusestatic = False
    if meshes is not None:
        spec.meshdir = str(Path(meshes).resolve())
    return spec


def _require_sizes(path: Path, root: Path, seen: set[Path], copies: float = 1.0) -> None:
    """FileError where a few bytes of an MJCF file, or of one that it includes (from its folder or
    `root`), stand for too many parts: MuJoCo makes them while it reads. `copies`: how often it is
    included."""
    seen.add(path)
    text, counts = read_text(path), [copies]
    for begin in TAG.finditer(text):
        rest = REST.match(text, begin.end())
        if rest is None:
            raise FileError(f"{path} is no XML: <{begin['kind']} does not end")
        kind = begin["kind"]
        given = {key: unescape(v[1:-1]) for key, v in WORD.findall(rest[0])}
        if begin["end"]:
            counts = counts[:-1] or [copies] if kind == "replicate" else counts
            continue
        if kind == "include":
            for file in (folder / given.get("file", "") for folder in (path.parent, root)):
                if file.is_file() and file not in seen:  # MuJoCo refuses to include one twice
                    _require_sizes(file, root, seen, counts[-1])
            continue
        made = math.prod(_size(each) for key in SIZES for each in given.get(key, "").split())
        if kind == "size":
            made = max(map(_size, given.values()), default=1.0)
        if not made * counts[-1] <= MOST[kind]:
            raise FileError(
                f"{path}: <{kind}> asks for {made * counts[-1]:.3g}, which is too large"
            )
        if kind == "replicate" and not rest[0].endswith("/>"):
            counts.append(counts[-1] * made)


def _size(word: str) -> float:
    """A number, at least 1; 1 for words, which MuJoCo judges."""
    try:
        return max(1.0, abs(float(word)))
    except ValueError:
        return 1.0


def compile_spec(spec: Any, path: Path) -> Any:
    """The model of `spec`, which `path` was read into. ConfigError."""
    try:
        return spec.compile()
    except ValueError as error:
        said = " ".join(str(error).split())
        hint = "; meshes=DIR names the folder of its meshes" if "file" in said.lower() else ""
        raise ConfigError(f"{path}: {said}{hint}") from error


def find_route(mj: Any, base: str | None = None, tip: str | None = None) -> Route:
    """Find the route from `base` (None: what the first joint is mounted on) to `tip` (None: the end
    of the arm, where there is only one). ConfigError says what to type."""
    end, site = _tip(mj, tip)
    up = [end]
    while up[-1]:
        up.append(int(mj.body_parentid[up[-1]]))
    jointed = [b for b in up if mj.body_jntnum[b]]
    if not jointed:
        raise ConfigError(f"there is no joint above {mj.body(end).name}; name another tip=")
    if base is None:
        top = int(mj.body_parentid[jointed[-1]])
    else:
        top = _named(mj, mujoco.mjtObj.mjOBJ_BODY, base, "base")
        if top not in up:
            raise ConfigError(f"base={base} is not above the tip {mj.body(end).name}")
    bodies = tuple(reversed(up[: up.index(top)]))
    joints = tuple(
        j for b in bodies for j in range(mj.body_jntadr[b], mj.body_jntadr[b] + mj.body_jntnum[b])
    )
    if not joints:
        raise ConfigError(f"there is no joint between base={base} and {mj.body(end).name}")
    return Route(top, bodies, joints, site)


def read_arm(
    path: Path,
    mj: Any,
    route: Route,
    home: Sequence[float] | None = None,
    velocity: Sequence[float] | None = None,
    hand: Hand | None = None,
) -> ArmFile:
    """The arm on `route` of a model that was compiled from `path`.

    `home` [n] (None: the keyframe "home", else zero or the middle of a range without it).
    `velocity` [n] or [1] (rad/s, m/s; None: what the URDF says). ConfigError says what to type.
    """
    joints, tool = read_joints(mj, route)
    names = [joint.name for joint in joints]
    known = couplings(path, mj)
    if coupled := [name for name in names if name in known]:
        raise ConfigError(
            f"joint {coupled[0]} is coupled to {known[coupled[0]]} in {path.name}, and an arm's "
            "joints move on their own: end the chain before it, tip=NAME, or take the coupling out"
        )
    low, high = _ranges(mj, route, names)
    limits = JointLimits(
        _numbers(low),
        _numbers(high),
        _velocity(path, names, velocity),
        tuple(_effort(mj, j) for j in route.joints),
    )
    pose = _home(mj, route, low, high) if home is None else np.asarray(home, float)
    tip = mj.body(route.bodies[-1]).name if route.site is None else mj.site(route.site).name
    base = mj.body(route.base).name
    return ArmFile(path.stem, path.name, base, tip, joints, tool, limits, _numbers(pose), hand)


def read_joints(mj: Any, route: Route) -> tuple[tuple[Joint, ...], Frame]:
    place = np.zeros(3)
    turn = np.eye(3)
    joints: list[Joint] = []
    for b in route.bodies:
        place = place + turn @ mj.body_pos[b]
        turn = turn @ _matrix(mj.body_quat[b])
        for j in range(mj.body_jntadr[b], mj.body_jntadr[b] + mj.body_jntnum[b]):
            joints.append(_joint(mj, j, len(joints), place, turn))
            place = -mj.jnt_pos[j]
            turn = np.eye(3)
    if route.site is not None:
        place = place + turn @ mj.site_pos[route.site]
        turn = turn @ _matrix(mj.site_quat[route.site])
    return tuple(joints), Frame(_point(place), _numbers(turn.ravel()))


def couplings(path: Path, mj: Any) -> dict[str, str]:
    """The joint that each coupled joint follows: `mimic` of a URDF, which MuJoCo drops, and joint
    equalities of an MJCF."""
    robot = _urdf(path)
    found: dict[str, str] = {}
    for joint in () if robot is None else robot.findall("joint"):
        mimic = joint.find("mimic")
        if mimic is not None:
            found[joint.attrib["name"]] = mimic.attrib["joint"]
    for e in range(mj.neq):
        if mj.eq_type[e] == mujoco.mjtEq.mjEQ_JOINT and mj.eq_obj2id[e] >= 0:
            found[mj.joint(mj.eq_obj1id[e]).name] = mj.joint(mj.eq_obj2id[e]).name
    return found


def read_hand(
    path: Path, mj: Any, names: Sequence[str], opening: float | None, speed: float = 0.1
) -> Hand:
    """A gripper that the joints `names` move, and those that are coupled to them; closed where
    their ranges begin. `opening` (m) may be left out where all of them slide. ConfigError."""
    known = couplings(path, mj)
    leaders = {known.get(name, name) for name in names}
    others = [follower for follower, leader in known.items() if leader in leaders]
    names = list(dict.fromkeys([*names, *sorted(leaders), *others]))
    ids = [_named(mj, mujoco.mjtObj.mjOBJ_JOINT, name, "hand") for name in names]
    ranges = [tuple(float(x) for x in mj.jnt_range[j]) for j in ids]
    if not all(mj.jnt_limited[j] for j in ids):
        raise ConfigError(f"hand={list(names)}: its joints need a range in the file")
    if opening is None:
        if any(mj.jnt_type[j] != mujoco.mjtJoint.mjJNT_SLIDE for j in ids):
            raise ConfigError(f"hand={list(names)} turns: say how far it opens, open=0.08 (m)")
        opening = sum(high - low for low, high in ranges)
    closed, opened = (tuple(each[side] for each in ranges) for side in (0, 1))
    return Hand(opening, speed, tuple(names), closed, opened)


def _tip(mj: Any, name: str | None) -> tuple[int, int | None]:
    if name is not None:
        site = mujoco.mj_name2id(mj, mujoco.mjtObj.mjOBJ_SITE, name)
        if site >= 0:
            return int(mj.site_bodyid[site]), site
        return _named(mj, mujoco.mjtObj.mjOBJ_BODY, name, "tip"), None
    parents = {int(mj.body_parentid[b]) for b in range(1, mj.nbody)}
    ends = [b for b in range(1, mj.nbody) if b not in parents and mj.body_weldid[b]]
    if len(ends) != 1:
        found = [mj.body(b).name for b in ends] + [mj.site(s).name for s in range(mj.nsite)]
        raise ConfigError(f"name the tip of the arm: tip=NAME; the file has {', '.join(found)}")
    sites = [s for s in range(mj.nsite) if mj.site_bodyid[s] == ends[0]]
    return ends[0], sites[0] if len(sites) == 1 else None


def _named(mj: Any, kind: Any, name: str, what: str) -> int:
    number = int(mujoco.mj_name2id(mj, kind, name))
    if number < 0:
        is_joint = kind == mujoco.mjtObj.mjOBJ_JOINT
        known = [mj.joint(j).name for j in range(mj.njnt)]
        known = known if is_joint else [mj.body(b).name for b in range(mj.nbody)]
        raise ConfigError(f"{what}: the file has no {name}{nearest(name, known)}")
    return number


def _joint(mj: Any, j: int, number: int, place: Array, turn: Array) -> Joint:
    """Joint j in a body whose frame, in that of the joint before, is `place` and `turn`."""
    name = mj.joint(j).name or f"joint{number + 1}"
    kinds = mujoco.mjtJoint
    slides = mj.jnt_type[j] == kinds.mjJNT_SLIDE
    if not slides and mj.jnt_type[j] != kinds.mjJNT_HINGE:
        raise ConfigError(
            f"joint {name} neither turns about an axis nor slides; name another base="
        )
    axis = mj.jnt_axis[j]
    start = float(mj.qpos0[mj.jnt_qposadr[j]])
    place = place + turn @ mj.jnt_pos[j]
    if slides:
        place = place - start * (turn @ axis)
    elif start:
        back = np.zeros(4)
        mujoco.mju_axisAngle2Quat(back, axis, -start)
        turn = turn @ _matrix(back)
    return Joint(name, number - 1, _point(place), _numbers(turn.ravel()), _point(axis), slides)


def _ranges(mj: Any, route: Route, names: Sequence[str]) -> tuple[Array, Array]:
    """Lowest and highest positions [n]."""
    low, high = (mj.jnt_range[list(route.joints), side].copy() for side in (0, 1))
    for i, j in enumerate(route.joints):
        if not mj.jnt_limited[j]:
            if mj.jnt_type[j] == mujoco.mjtJoint.mjJNT_SLIDE:
                raise ConfigError(f"joint {names[i]} slides without a limit; give it a range")
            low[i] = -HALF_TURN
            high[i] = HALF_TURN
    return low, high


def _home(mj: Any, route: Route, low: Array, high: Array) -> Array:
    key = mujoco.mj_name2id(mj, mujoco.mjtObj.mjOBJ_KEY, KEYFRAME)
    if key >= 0:
        pose: Array = mj.key_qpos[key][mj.jnt_qposadr[list(route.joints)]]
        return np.clip(pose, low, high)
    return np.where((low <= 0) & (high >= 0), 0.0, (low + high) / 2)


def _effort(mj: Any, j: int) -> float:
    """The largest torque of joint j (N m, N), as joint or actuator limits say; 0: not known."""
    if mj.jnt_actfrclimited[j]:
        return float(np.abs(mj.jnt_actfrcrange[j]).max())
    for a in range(mj.nu):
        joint = mj.actuator_trntype[a] == mujoco.mjtTrn.mjTRN_JOINT and mj.actuator_trnid[a, 0] == j
        if joint and mj.actuator_forcelimited[a]:
            gear = abs(float(mj.actuator_gear[a, 0]))
            return gear * float(np.abs(mj.actuator_forcerange[a]).max())
    return 0.0


def _velocity(path: Path, names: Sequence[str], given: Sequence[float] | None) -> tuple[float, ...]:
    if given is not None:
        if len(given) not in (1, len(names)):
            raise ConfigError(f"velocity= needs one number, or one for each of {len(names)} joints")
        return _numbers(list(given) * (len(names) if len(given) == 1 else 1))
    # The velocity limits by joint; empty where the file is no URDF.
    robot = _urdf(path)
    known: dict[str, float] = {}
    for joint in () if robot is None else robot.findall("joint"):
        limit = joint.find("limit")
        if limit is not None and "velocity" in limit.attrib:
            known[joint.attrib["name"]] = _number(limit.attrib["velocity"], path)
    if missing := [name for name in names if not known.get(name)]:
        raise ConfigError(
            f"{path.name} does not say how fast {missing[0]} may turn; add velocity=1.5 (rad/s, "
            f"m/s), or one for each of {len(names)} joints: velocity=[1.5, ...]"
        )
    return tuple(known[name] for name in names)


def _number(text: str, path: Path) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"{path.name}: velocity={shown(text)} of a joint should be a number")
    return number


def _urdf(path: Path) -> ElementTree.Element | None:
    """The robot of a URDF; None where the file is no URDF."""
    text = read_text(path)
    if "<!ENTITY" in text:  # it can make a small file huge
        raise ConfigError(f"{path} declares XML entities; write them out")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:  # of an MJCF that MuJoCo's reader accepts
        return None
    return root if root.tag == "robot" else None


def _matrix(quaternion: Array) -> Array:
    found = np.zeros(9)
    mujoco.mju_quat2Mat(found, quaternion)
    return found.reshape(3, 3)


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(float(value) + 0.0 for value in values)


def _point(values: Any) -> tuple[float, float, float]:
    x, y, z = _numbers(values)
    return x, y, z
