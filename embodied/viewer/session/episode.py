"""Episode: one episode with every step stored, so that any step can be displayed and continued
from."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.tensors import Tensors
from embodied.reports.run_report import intervals_of
from embodied.training.logger import read_metrics
from embodied.viewer.scene.detect import detect_scene
from embodied.viewer.scene.types import (
    Array,
    DecimatedScene,
    NoScene,
    Picture,
    SceneModel,
    Shape,
    TrackedBody,
    picture_of,
)

LARGE, SMALL = (640, 480), (384, 288)
"""Width and height of rendered images, in pixels."""


@dataclass(frozen=True, slots=True)
class CompressedImage:
    """An image of `shape`, compressed fast (zlib level 1), as one is stored for every step."""

    data: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, picture: Picture) -> CompressedImage:
        return cls(zlib.compress(picture.tobytes(), 1), picture.shape)

    def picture(self) -> Picture:
        return np.frombuffer(zlib.decompress(self.data), np.uint8).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class EnvSnapshot:
    """What the environment looked like at one step.

    `places` [N, 3] (m) and `turns` [N, 4] (quaternion w, x, y, z) are the poses of all bodies;
    without a 3D scene there is a `picture` instead, if the environment has one. `words` is the
    environment's description. `film` is the camera's image of an environment with a 3D scene, if
    `filming`.
    """

    places: Array | None = None
    turns: Array | None = None
    picture: CompressedImage | None = None
    words: str = ""
    film: CompressedImage | None = None


class SnapshotRecorder:
    """Records snapshots of parallel env 0 of `env`.

    `scene` is its 3D scene; None if it has none, and `no_scene_reason` says why. Then the snapshot
    has the image of the environment's camera, else the largest image observation. `render_error`
    says why the camera gives no image. While `filming`, the camera is rendered for every
    environment.

    Environments reset themselves inside the step that ends an episode; a hook records the final
    snapshot just before.
    """

    def __init__(self, env: VecEnv) -> None:
        self.env, self.no_scene_reason, self.render_error, self.filming = env, "", "", False
        self.scene: SceneModel | None = None
        self.described = True
        self._last: EnvSnapshot | None = None
        try:
            found = detect_scene(env)
            self.scene = None if found is None else DecimatedScene(found)
        except NoScene as error:
            self.no_scene_reason = f"No 3D scene: {error}"
        env.add_pre_reset_hook(self._before_reset)

    def capture(self, shown: Tensors) -> EnvSnapshot:
        """The snapshot of the current state; `shown` are its observations, used if there is no
        camera."""
        if self.scene is not None:
            places, turns = self.scene.poses()
            shot = self._rendered() if self.filming else None
            film = None if shot is None else CompressedImage.of(shot)
            return EnvSnapshot(places, turns, None, self._words(), film)
        picture = self._rendered()
        picture = self._image(shown) if picture is None else picture
        packed = None if picture is None else CompressedImage.of(picture)
        return EnvSnapshot(None, None, packed, self._words())

    def shapes(self) -> list[Shape]:
        """All shapes with their meshes made: later the environment may have changed their sizes."""
        shapes = [] if self.scene is None else list(self.scene.shapes())
        return [shape for shape in shapes if shape.mesh() is not None]

    def after_step(self, shown: Tensors, ended: bool, before: EnvSnapshot) -> EnvSnapshot:
        """The snapshot after a step. If the episode ended and the environment (in another process)
        cannot be observed before its reset, the last snapshot `before` is used."""
        last, self._last = self._last, None
        if not ended:
            return self.capture(shown)
        last = before if last is None else last
        if self.scene is None and (self.render_error or last.picture is None):
            picture = self._image(shown)
            last = replace(last, picture=None if picture is None else CompressedImage.of(picture))
        return last

    def camera(self, size: tuple[int, int] = SMALL) -> Picture | None:
        """The image of the environment's camera, [height, width, 3]; None if it cannot be rendered,
        and `render_error` says why."""
        try:
            picture = self.env.render(0, *size).cpu().numpy()
        except (NotImplementedError, RuntimeError, ImportError) as error:
            # No camera, or no way to draw on this machine: the rest of the page goes on.
            self.render_error = f"No image: {error}"
            return None
        self.render_error = ""
        return picture

    def _before_reset(self, rows: Tensor) -> None:
        if bool(rows[0]):
            self._last = self.capture({})

    def _words(self) -> str:
        if not self.described:
            return ""
        try:
            return self.env.describe(0)
        except NotImplementedError:
            self.described = False
            return ""

    def _rendered(self) -> Picture | None:
        return None if self.render_error else self.camera(LARGE)

    def _image(self, shown: Tensors) -> Picture | None:
        leaves = self.env.spec.obs
        images = [name for name, leaf in leaves.items() if leaf.is_image and name in shown]
        if not images:
            return None
        name = max(images, key=lambda name: leaves[name].size)
        return picture_of(shown[name][0], leaves[name])


MEASURES = ("eval/success", "eval/return", "train/success", "train/return")


@dataclass(frozen=True)
class History:
    """A metric over training: `values` [K] after `steps` [K], with 95% intervals `low` and `high`
    [K] (equal to the values where there is no interval)."""

    measure: str
    steps: Sequence[int]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    def at(self, step: int) -> float:
        """The value at training step `step`, interpolated between measurements."""
        return float(np.interp(step, self.steps, self.values))


def history_of(folder: Path) -> History | None:
    """The history in a run folder's metrics.jsonl: evaluated success, else the next best metric;
    None if nothing was logged."""
    rows = read_metrics(folder)
    for name in MEASURES:
        found = [row for row in rows if name in row and np.isfinite(row[name])]
        if found:
            steps = [int(row["step"]) for row in found]
            values = [float(row[name]) for row in found]
            bands = np.array(intervals_of(name, found) or np.stack([values, values], 1))
            return History(name, steps, values, *bands.T.tolist())
    return None


CURVES = 8
"""How many elements of an action or observation are plotted."""
TERM = "term/"
"""Prefix of the names of reward components."""
SAFETY = "safety/"
"""Prefix of the names of safety stages: in how many control ticks of a step each changed the
target."""
MOVED = "moved/"
IMAGINED = "imagined/"
"""Prefix of the names of target changes: how far a joint target was moved between two stages."""
LONGEST = 20_000
"""Steps that are stored; of a longer episode the oldest tenth is discarded."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The state of policy `name` after a step: its actor's state (chunk, memory) and torch's RNG
    state."""

    name: str
    actor: Tensors
    rng_state: Tensor


@dataclass(frozen=True, slots=True)
class Moment:
    """The state after `step` control steps, and the `action` that led to it (None: the initial
    state).

    `next_obs` are the observations that the step led to, `obs` the ones that the next action is
    computed from (of the next episode if this one ended). `plan` [H, A] is the action chunk of
    which the action is one; `is_decision` says whether the chunk was computed for
    this step. `state` is the saved environment state to continue from (None: it cannot be saved),
    `policy_state` that of the policy. `numbers` are further quantities of the step by name,
    `reward_image` is the image that the reward was computed from, and `noise` [D] the latent noise
    that a steering policy chose for the running chunk.
    """

    step: int
    frame: EnvSnapshot
    next_obs: Tensors
    obs: Tensors
    state: Tensors | None = None
    action: list[float] | None = None
    reward: float = 0.0
    success: bool | None = None
    plan: Tensor | None = None
    is_decision: bool = False
    end: str = ""
    policy_state: PolicyState | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    reward_image: CompressedImage | None = None
    noise: Tensor | None = None


@dataclass(slots=True)
class Episode:
    """The steps since the initial state of `seed`, the initial state first.

    `policy_name` is the policy that acted, `shapes` are the shapes of the scene.
    """

    seed: int
    moments: list[Moment] = field(default_factory=list)
    policy_name: str = ""
    shapes: list[Shape] = field(default_factory=list)

    def add(self, moment: Moment) -> int:
        """Store one more step; returns how many of the oldest were discarded for it."""
        self.moments.append(moment)
        over = LONGEST // 10 if len(self.moments) > LONGEST else 0
        del self.moments[:over]
        return over

    @property
    def steps(self) -> int:
        return self.moments[-1].step if self.moments else 0

    @property
    def end(self) -> str:
        """How the episode ended; empty while it runs."""
        return self.moments[-1].end if self.moments else ""

    @property
    def actions_taken(self) -> list[Moment]:
        """The stored steps without the initial state."""
        return [moment for moment in self.moments if moment.action is not None]

    @property
    def rewards(self) -> list[float]:
        return [moment.reward for moment in self.actions_taken]

    @property
    def actions(self) -> list[list[float]]:
        return [moment.action for moment in self.moments if moment.action is not None]

    @property
    def success(self) -> bool | None:
        """Whether the task succeeded at any step; None if success is not reported."""
        return success_by(self.moments)

    @property
    def success_steps(self) -> list[int]:
        """The steps at which success began."""
        flags = [(moment.step, bool(moment.success)) for moment in self.moments]
        return [
            step for i, (step, won) in enumerate(flags) if won and (i == 0 or not flags[i - 1][1])
        ]

    @property
    def number_names(self) -> list[str]:
        """The names of all `numbers`, without safety stages that never acted."""
        said = [moment.numbers for moment in self.moments]
        return [
            name
            for name in sorted({name for numbers in said for name in numbers})
            if not name.startswith(SAFETY) or any(numbers.get(name) for numbers in said)
        ]

    @property
    def interventions(self) -> list[tuple[int, str]]:
        """The steps at which a safety stage began to act, with its name."""
        began: list[tuple[int, str]] = []
        before: set[str] = set()
        for moment in self.actions_taken:
            acted = {
                name.removeprefix(SAFETY)
                for name, ticks in moment.numbers.items()
                if name.startswith(SAFETY) and ticks
            }
            began += [(moment.step, name) for name in sorted(acted - before)]
            before = acted
        return began

    def obs_curve(self, name: str) -> list[list[float]]:
        """The first elements of one observation after each action."""
        return [firsts(moment.next_obs[name]) for moment in self.actions_taken]


def success_by(moments: list[Moment]) -> bool | None:
    """Whether one of `moments` is a success; None if success is not reported."""
    known = [moment.success for moment in moments if moment.success is not None]
    return any(known) if known else None


def firsts(value: Tensor) -> list[float]:
    """The first elements of parallel env 0."""
    return value[0].reshape(-1)[:CURVES].float().tolist()


def thinned(moments: Sequence[Moment], most: int) -> tuple[Sequence[Moment], int]:
    """Every `stride`-th step, at most about `most` of them, and `stride`."""
    stride = max(1, -(-len(moments) // most))
    return moments[::stride], stride


def poses_of(moments: Sequence[Moment]) -> Array:
    """Position and quaternion of every body, [T, N, 7]."""
    return np.stack([np.concatenate([m.frame.places, m.frame.turns], 1) for m in moments])  # pyright: ignore


def moving(moments: Sequence[Moment], followed: TrackedBody | None) -> Array | None:
    """Positions [K, 3] of everything that moves, relative to the tracked body; of all bodies if
    nothing moves; None without a scene."""
    if moments[0].frame.places is None:
        return None
    places = poses_of(thinned(moments, 100)[0])[..., :3]
    if followed is not None:
        places = places - (places[:, followed.body] - places[0, followed.body])[:, None] * (
            np.array(followed.along)
        )
        return places[0]
    moves = np.ptp(places, axis=0).max(1) > 1e-3
    return places[:, moves if moves.any() else slice(1, None)].reshape(-1, 3)
