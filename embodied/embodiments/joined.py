"""Joined: the action spaces of several arms as one; actions and joint vectors are concatenated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_type_hints

from embodied.core.bounds import Positive
from embodied.core.build import ConfigError, Node, build, kind_of
from embodied.embodiments.arrays import Floats, namespace
from embodied.embodiments.controller import Controller, Reference
from embodied.embodiments.kinematics.arm import read_arms_file


@dataclass(frozen=True)
class Config:
    """Settings of several arms as one robot."""

    arms: str  # file that places the arms (embodiments.kinematics.arm)
    controllers: dict[str, Node]  # node of each arm's controller, by its prefix
    dt: Positive = 0.05  # control period of all controllers, s


class Joined(Controller):
    """Each arm's actions with its prefix ("left_elbow_flex.pos"). Joint targets have the hand's
    opening (m) after each arm's joints; the width of the whole robot stays 0."""

    def __init__(self, config: Config) -> None:
        table = read_arms_file(config.arms)
        if table is None:
            raise ConfigError(f"arms={config.arms} is no file of several arms")
        if list(config.controllers) != list(table.arms):
            raise ConfigError(
                f"controllers needs {', '.join(table.arms)}, in this order; it has "
                f"{', '.join(config.controllers)}"
            )
        self.arms = table.arms
        self.config = config
        for name, node in config.controllers.items():
            if node.get("dt") in (None, config.dt):
                continue
            kind = kind_of(node, Controller)
            usual = get_type_hints(kind.__init__)["config"].dt  # with it, none was named
            if node["dt"] != usual:
                raise ConfigError(f"controllers.{name}.dt={node['dt']} should be dt={config.dt:g}")
        nodes = config.controllers.items()
        self.parts = {name: build({**node, "dt": config.dt}, Controller) for name, node in nodes}
        self.names = tuple(f"{k}_{name}" for k, part in self.parts.items() for name in part.names)
        if len({part.physical for part in self.parts.values()}) > 1:
            raise ConfigError("controllers: one takes physical units, another [-1, 1]")
        self.physical = next(iter(self.parts.values())).physical

    def begin(self, q: Floats, width: Floats) -> Reference:
        """The reference of robots that stand at `q` [B, n], hands included; `width` [B] is not
        used."""
        reference: Reference = {"width": namespace(width).asarray(width, copy=True)}
        for name, (joints, hand) in self._split(q).items():
            begun = self.parts[name].begin(joints, hand)
            reference |= {f"{name}/{key}": value for key, value in begun.items()}
        return reference

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        """Joint targets [B, n] of all arms (rad, m; hands included), the width as it was and the
        moved reference, for `action` [B, A] and measured positions `q` [B, n]."""
        targets: list[Floats] = []
        moved = {"width": reference["width"]}
        at = 0
        for name, (joints, _) in self._split(q).items():
            part = self.parts[name]
            own = {k.partition("/")[2]: v for k, v in reference.items() if k.startswith(f"{name}/")}
            target, hand, own = part(action[:, at : at + len(part.names)], joints, own)
            at += len(part.names)
            targets += [target, hand[:, None]] if self.arms[name].hand else [target]
            moved |= {f"{name}/{key}": value for key, value in own.items()}
        return namespace(q).concatenate(targets, 1), reference["width"], moved

    def _split(self, q: Floats) -> dict[str, tuple[Floats, Floats]]:
        """Joints [B, m] and the hand's opening [B] of each arm."""
        found: dict[str, tuple[Floats, Floats]] = {}
        at = 0
        for name, placed in self.arms.items():
            n = placed.joints - placed.hand
            hand = q[:, at + n] if placed.hand else namespace(q).zeros_like(q[:, 0])
            found[name] = q[:, at : at + n], hand
            at += placed.joints
        return found
