"""Fits capsules to an arm: `python -m embodied.real_robot.safety.fit_capsules ARM.xml MODEL.yaml`.

ARM.xml is an MJCF (needs MuJoCo), or a name from this repository: fr3, so101, ur5e. Each body is
cut, across one axis, into at most three slices where that saves volume, and every slice gets the
smallest capsule that a seeded search finds around it: around all vertices of its meshes and the
corners of its other shapes, so that their surfaces are inside. Joints beyond the first `--joints`
(fingers) are swept through their range: their bodies are fitted in all positions at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from embodied.core.build import ConfigError
from embodied.real_robot.safety.capsules import Body, Model
from embodied.real_robot.safety.mjcf_arm import Arm, compile_mjcf, fit_body

POSES = 3000  # random ones, to find pairs that come near each other


def fit_model(
    mj: Any, joints: int | Sequence[int] | None = None, base: int = 0, poses: int = POSES
) -> Model:
    """`mj`: a compiled MuJoCo model. The first `joints` joints, or those with these numbers, are
    the arm's (None: all that turn), which stands on body `base` (0: the world). `poses`: how many
    random ones are looked at to find pairs that come near each other. ConfigError where there is no
    shape that collides."""
    arm = Arm(mj, joints, base)
    bodies = [
        Body(
            mj.body(b).name or f"body{b}",
            arm.moves_with[b],
            tuple(arm.rods(b) or fit_body(triangles)),
        )
        for b, triangles in sorted(arm.surfaces().items())
    ]
    if not bodies:
        raise ConfigError(
            "geometry: the file has no collision shapes of the arm (URDF: <collision>, MJCF: geoms "
            "with contype or conaffinity)"
        )
    made = Model(tuple(arm.joints()), tuple(bodies), ())
    return Model(made.joints, made.bodies, tuple(arm.near_pairs(made, poses)))


def shapes(model: Model) -> dict[str, Any]:
    """Bodies with their capsules, and pairs, as YAML has them."""
    bodies = [
        {
            "name": body.name,
            "joint": body.joint,
            "capsules": [
                {"start": list(c.start), "end": list(c.end), "radius": c.radius}
                for c in body.capsules
            ],
        }
        for body in model.bodies
    ]
    return {"bodies": bodies, "pairs": [list(pair) for pair in model.pairs]}


def write(model: Model, path: Path, source: str) -> None:
    """Write `model` as YAML that `read_model` reads."""
    joints: list[dict[str, Any]] = [
        {k: json.loads(json.dumps(v)) for k, v in vars(joint).items()} for joint in model.joints
    ]
    node: dict[str, Any] = {"joints": joints, **shapes(model)}
    head = f"# Capsules of {source}: python -m embodied.real_robot.safety.fit_capsules {source}\n"
    path.write_text(head + yaml.safe_dump(node, sort_keys=False, default_flow_style=None, width=99))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m embodied.real_robot.safety.fit_capsules")
    parser.add_argument("arm", help="an MJCF (ARM.xml), or fr3, so101, ur5e")
    parser.add_argument("model", type=Path, help="the YAML to write")
    parser.add_argument("--joints", type=int, help="how many joints the arm has (all that turn)")
    asked = parser.parse_args()
    model = fit_model(compile_mjcf(asked.arm), asked.joints)
    write(model, asked.model, Path(asked.arm).name)
    count = sum(len(body.capsules) for body in model.bodies)
    print(
        f"{asked.model}: {count} capsules of {len(model.bodies)} bodies, {len(model.pairs)} pairs"
    )


if __name__ == "__main__":
    main()
