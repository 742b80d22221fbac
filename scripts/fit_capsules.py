"""Writes the capsules of an arm: `python -m scripts.fit_capsules fr3 OUT.yaml`."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import mujoco
import yaml

from embodied.embodiments.kinematics.from_mujoco import compile_spec, read_spec
from embodied.real_robot.safety.fit_capsules import fit_model, shapes
from embodied.real_robot.safety.geometry import Model


def compile_arm(source: str) -> Any:
    """The MuJoCo model of an arm of this repository, or of an MJCF or URDF file."""
    if source.endswith((".xml", ".urdf")):
        return compile_spec(read_spec(Path(source)), Path(source))
    text = importlib.import_module(f"embodied.embodiments.{source}").mjcf()
    if isinstance(text, str):
        return mujoco.MjModel.from_xml_string(text)  # pyright: ignore[reportAttributeAccessIssue]
    spec = mujoco.MjSpec.from_file(str(text))  # pyright: ignore[reportAttributeAccessIssue]
    spec.meshdir = str(text.parent / "meshes")
    return spec.compile()


def write(model: Model, path: Path, source: str) -> None:
    """Write `model` as YAML that `read_model` reads."""
    joints = [json.loads(json.dumps(vars(joint))) for joint in model.joints]
    head = f"# Capsules of {source}: python -m scripts.fit_capsules {source}\n"
    node = {"joints": joints, **shapes(model)}
    path.write_text(head + yaml.safe_dump(node, sort_keys=False, default_flow_style=None, width=99))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.fit_capsules")
    parser.add_argument("arm", help="fr3, so101, ur5e, or an MJCF or URDF file")
    parser.add_argument("model", type=Path, help="the YAML to write")
    parser.add_argument("--joints", type=int, help="how many joints the arm has (all that turn)")
    asked = parser.parse_args()
    model = fit_model(compile_arm(asked.arm), asked.joints)
    write(model, asked.model, Path(asked.arm).name)
    capsules = sum(len(body.capsules) for body in model.bodies)
    print(f"{asked.model}: {capsules} capsules, {len(model.pairs)} pairs")


if __name__ == "__main__":
    main()
