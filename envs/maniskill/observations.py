"""ManiSkill observations as flat leaves, rendered images and text descriptions.

Nested groups are joined with `_`, as in the importer of ManiSkill files, so an imported dataset and
the environment have the same Spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from embodied.core.spec import DEPTH, POINTS, Leaf
from embodied.core.tensors import Tensors
from embodied.envs.process.worker.memory import flat_name

SKIPPED = ("sensor_param",)


def flat(observation: Any, cameras: tuple[str, ...] = ()) -> Tensors:
    """An observation [n, ...] by flat names (`flat_name`); with only these `cameras`, if named.

    Booleans and floats become float32, depth (16 bits, mm) float32 in m; clouds become `points`
    [n, P, 6] (m, world frame; red, green, blue in [0, 1]; where a camera sees nothing, all zeros).
    """
    if isinstance(observation, Tensor):
        return {"state": _plain(observation)}
    obs: Tensors = {}
    for path, value in _walk(observation, ()):
        if path[0] in SKIPPED or (path[0] == "sensor_data" and cameras and path[1] not in cameras):
            continue
        if path[0] != "pointcloud":
            depth = path[0] == "sensor_data" and path[-1] == "depth"
            obs[flat_name(("_".join(path),), "")] = value / 1000 if depth else _plain(value)
    if isinstance(observation, dict) and "pointcloud" in observation:
        parts = observation["pointcloud"]
        seen = parts["xyzw"][..., 3:] > 0
        obs["points"] = torch.cat([parts["xyzw"][..., :3], parts["rgb"] / 255], -1).float() * seen
    return obs


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(node, dict):
        for key, part in node.items():
            yield from _walk(part, (*path, key.strip("_")))
    else:
        yield path, torch.as_tensor(node)


def _plain(value: Tensor) -> Tensor:
    if value.is_floating_point() or value.dtype == torch.bool:
        return value.float()
    return value.int() if value.dtype in (torch.int16, torch.uint16) else value


def leaves(obs: Tensors, names: tuple[str, ...]) -> dict[str, Leaf]:
    """The Spec's leaves of `obs` [n, ...]; `names` are those of the elements of `state`."""
    made: dict[str, Leaf] = {}
    for key, value in obs.items():
        shape, dtype = tuple(value.shape[1:]), str(value.dtype).removeprefix("torch.")
        if key.startswith("sensor_data_") and key.endswith("_depth"):
            made[key] = Leaf(shape, dtype, low=0.0, unit=DEPTH)
            continue
        unit = POINTS if key == "points" else ""
        named = key == "state" and len(names) == value[0].numel()
        made[key] = Leaf(shape, dtype, unit=unit, names=names if named else ())
    return made


def element_names(env: Any) -> tuple[str, ...]:
    """The names of the elements of ManiSkill's flat state: `extra_tcp_pose[2]`."""
    parts = flat(env._get_obs_state_dict(env.get_info()))
    sizes = {name: value[0].numel() for name, value in parts.items()}
    return tuple(
        f"{name}[{place}]" if size > 1 else name
        for name, size in sizes.items()
        for place in range(size)
    )


def picture(env: Any, row: int, width: int, height: int) -> Tensor:
    """ManiSkill's own camera, cut to the proportions that were asked for, uint8 [H, W, 3]."""
    drawn = env.render_rgb_array()
    if drawn is None:
        raise NotImplementedError(f"{env.spec.id} has no camera to render with")
    whole = torch.as_tensor(drawn)[row].cpu()
    high, wide = whole.shape[:2]
    cut_high = min(high, wide * height // width)
    cut_wide = min(wide, high * width // height)
    top = (high - cut_high) // 2
    left = (wide - cut_wide) // 2
    part = whole[top : top + cut_high, left : left + cut_wide].permute(2, 0, 1)[None].float()
    sized = torch.nn.functional.interpolate(part, (height, width), mode="area")
    return sized[0].permute(1, 2, 0).round().to(torch.uint8)


def words(env: Any, row: int, count: int, horizon: int) -> str:
    """Text description of one env: clock, task information, robot, every movable object."""
    flags = {k: bool(v[row]) for k, v in env.get_info().items() if _is_flag(v)}
    agent = env.agent
    parts = [f"step {count} of {horizon}"]
    parts += [f"{name} = {'yes' if value else 'no'}" for name, value in flags.items()]
    robot = getattr(agent, "robot", None)
    if robot is not None:
        parts.append(f"robot joints = {_numbers(robot.qpos[row])}")
    if hasattr(agent, "tcp_pose"):
        parts.append(f"tool at {_numbers(agent.tcp_pose.p[row])} m")
    for name, actor in env.scene.actors.items():
        if actor.px_body_type != "static":
            place = _numbers(actor.pose.p[row])
            turn = _numbers(actor.pose.q[row])
            parts.append(f"{name} at {place} m, quaternion {turn}")
    return "; ".join(parts)


def _is_flag(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.ndim == 1


def _numbers(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.3f}" for value in values.flatten().tolist()) + "]"
