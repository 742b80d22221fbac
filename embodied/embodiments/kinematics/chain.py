"""Chain: forward kinematics and Jacobian of a serial arm, from a table of its joints.

    T_0 = I,   T_i = T_{i-1} F_i M_i(q_i),   tip = T_n F_tip

F_i is the fixed frame of joint i in the frame of the joint before, M_i(q) the turn by q about the
joint's axis (Rodrigues' formula) or the shift along it. The table holds numbers only, so a robot's
control process needs NumPy and nothing else. Arrays may be numpy arrays or torch tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Bound, Number
from embodied.core.build import ConfigError
from embodied.embodiments.arrays import Floats, constant, namespace

Array = NDArray[np.float64]
Point = tuple[Number, Number, Number]


@dataclass(frozen=True)
class Joint:
    """A joint; its frame at position 0 is in the frame of joint `parent`."""

    name: str  # of the joint
    parent: Annotated[int, Bound(-1)]  # number of the joint before (-1: the base)
    place: Point  # of its frame, m
    turn: tuple[Number, ...]  # rotation matrix of its frame, row by row
    axis: Point  # in its own frame; a sliding joint moves along it
    slides: bool = False  # a sliding joint

    def __post_init__(self) -> None:
        numbers = np.array([*self.place, *self.turn, *self.axis])
        if len(self.turn) != 9 or not np.isfinite(numbers).all() or not any(self.axis):
            raise ConfigError(
                f"geometry: joint {self.name} needs a finite place, 9 numbers of turn and an axis"
            )


@dataclass(frozen=True)
class Frame:
    """A fixed frame."""

    place: Point  # m
    turn: tuple[Number, ...]  # rotation matrix, row by row

    def __post_init__(self) -> None:
        if len(self.turn) != 9 or not np.isfinite([*self.place, *self.turn]).all():
            raise ConfigError("a frame needs a finite place and 9 finite numbers of turn")


class Chain:
    """The joints from the base to the `tip`, each the parent of the next.

    Call it with joint positions [B, n] (rad; m for sliding joints): the tip's position [B, 3] (m),
    its rotation [B, 3, 3] and its Jacobian [B, 6, n] (linear, then angular velocity), all in the
    base frame. ConfigError where the joints are no chain.
    """

    def __init__(self, joints: tuple[Joint, ...], tip: Frame) -> None:
        if not joints:
            raise ConfigError("an arm needs at least one joint between its base and its tip")
        if broken := [j.name for i, j in enumerate(joints) if j.parent != i - 1]:
            raise ConfigError(f"joint {broken[0]} does not follow the one before: no serial arm")
        self.joints = joints
        self.tip = tip
        self._places = np.array([each.place for each in joints])
        self._parts = np.stack([_parts(each) for each in joints], 1)
        self._axes = np.array([np.asarray(j.axis) / np.linalg.norm(j.axis) for j in joints])
        self._tip_place = np.array(tip.place)
        self._tip_turn = np.reshape(tip.turn, (3, 3))

    def __len__(self) -> int:
        return len(self.joints)

    def __call__(self, q: Floats) -> tuple[Floats, Floats, Floats]:
        turns, places, axes = self._frames(q)
        place = places[-1] + turns[-1] @ constant(self._tip_place, q)
        columns = [self._column(i, axes[i], places[i], place) for i in range(len(self))]
        return place, turns[-1] @ constant(self._tip_turn, q), namespace(q).stack(columns, 2)

    def frames(self, q: Floats) -> tuple[Floats, Floats]:
        """Rotations [B, n, 3, 3] and places [B, n, 3] (m) of the joints' frames, in the base frame,
        at `q` [B, n]."""
        turns, places, _ = self._frames(q)
        xp = namespace(q)
        return xp.stack(turns, 1), xp.stack(places, 1)

    def _frames(self, q: Floats) -> tuple[list[Floats], list[Floats], list[Floats]]:
        xp = namespace(q)
        still, with_cos, with_sin = constant(self._parts, q)
        cos, sin = xp.cos(q)[:, :, None, None], xp.sin(q)[:, :, None, None]
        local = still + cos * with_cos + sin * with_sin
        offsets = constant(self._places, q)
        own = constant(self._axes, q)
        turn = xp.broadcast_to(constant(np.eye(3), q), (len(q), 3, 3))
        place = xp.broadcast_to(constant(np.zeros(3), q), (len(q), 3))
        turns = []
        places = []
        axes = []
        for i, joint in enumerate(self.joints):
            place = place + turn @ offsets[i]
            turn = turn @ local[:, i]
            axis = turn @ own[i]
            if joint.slides:
                place = place + q[:, i : i + 1] * axis
            turns.append(turn)
            places.append(place)
            axes.append(axis)
        return turns, places, axes

    def _column(self, i: int, axis: Floats, origin: Floats, place: Floats) -> Floats:
        """The tip's velocity [B, 6] per unit of joint i's."""
        xp = namespace(place)
        if self.joints[i].slides:
            return xp.concatenate([axis, xp.zeros_like(axis)], 1)
        return xp.concatenate([xp.linalg.cross(axis, place - origin, axis=1), axis], 1)


def _parts(joint: Joint) -> Array:
    """[3, 3, 3]: the parts of F M(q) that stay, and that go with cos q and with sin q."""
    frame = np.reshape(joint.turn, (3, 3))
    if joint.slides:
        return np.stack([frame, np.zeros((3, 3)), np.zeros((3, 3))])
    axis = np.asarray(joint.axis) / np.linalg.norm(joint.axis)
    cross = np.array([[0, -axis[2], axis[1]], [axis[2], 0, -axis[0]], [-axis[1], axis[0], 0]])
    along = np.outer(axis, axis)
    return np.stack([frame @ along, frame @ (np.eye(3) - along), frame @ cross])
