"""A policy with names and units of its own, as a checkpoint for a robot, by a mapping file."""

from __future__ import annotations

from pathlib import Path

from embodied.core import checkpoint
from embodied.core.build import ConfigError, Node, build
from embodied.core.spec import Leaf, Spec, hidden
from embodied.datasets.mapping import Mapping
from embodied.embodiments.controller import Controller
from embodied.policies.wrappers.mapped import Mapped


def mapped_checkpoint(policy: Path, file: str, robot: Node, output: Path) -> str:
    """Write the policy of the run `policy`, mapped by `file` to the settings `robot`, below
    `output`; returns the checkpoint's folder. ConfigError where they do not fit, in one line."""
    mapping = Mapping.load(file)
    base = checkpoint.load_policy(policy)
    spec = robot_spec(base.spec, mapping, robot, file)
    mapped = Mapped.of(base, spec, mapping)
    return str(checkpoint.save(output / "policy" / "checkpoints" / "00000000", mapped, 0))


def robot_spec(there: Spec, mapping: Mapping, robot: Node, file: str) -> Spec:
    """What the policy of `there` needs of a robot, in the robot's names and at its rate."""
    controller = build(robot["controller"], Controller)
    names = tuple(controller.names)
    here = {source.name: name for name, source in mapping.obs.items()}
    obs: dict[str, Leaf] = {}
    for name, leaf in there.obs.items():
        if hidden(name):
            continue
        ours = here.get(name, name)
        if leaf.is_image:
            obs[ours] = Leaf(leaf.shape, "uint8")
            continue
        elements = mapping.source(ours).elements or leaf.names
        if len(elements) != leaf.size:
            raise ConfigError(
                f"{file}: obs.{ours} needs the robot's names of its {leaf.size} elements "
                f"({', '.join(leaf.names) or name}): {{name: {name}, elements: [q1, ...]}}"
            )
        obs[ours] = Leaf(leaf.shape, names=tuple(elements))
    act = Leaf((len(names),), low=-1.0, high=1.0, names=names)
    return Spec(obs, act, dt=robot["step"], text=there.text)
