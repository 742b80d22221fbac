"""Arrays and torch datasets as demonstrations: they become a LeRobot dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied.core.build import ConfigError
from embodied.core.native import Native, picture_axes
from embodied.core.spec import Leaf, Spec, hidden
from embodied.core.tensors import Tensors, under
from embodied.datasets.lerobot.writer import EpisodeWriter

FLAGS = ("terminated", "truncated", "done")
KNOWN = ("obs", "next_obs", "action", "reward", *FLAGS, "success")
PERIOD = 0.1  # s, of the steps of arrays without an environment
Arrays = dict[str, Any]


def write_episodes(demos: Any, spec: Spec | None, out: Path, needs_reward: bool) -> Path:
    """Write `demos` below `out` as a dataset of `spec` (None: of the arrays' own names and units);
    returns its folder, the same one for the same numbers.

    `demos`: arrays [N, ...] by the names KNOWN (`obs` may be a mapping), a list of such mappings,
    one for each episode, a torch Dataset of steps (mappings, or pairs of obs and action), or a
    function that returns one of these. ConfigError.
    """
    episodes = _episodes(demos)
    if needs_reward and "reward" not in episodes[0]:
        raise ConfigError('these demos have no "reward", which every learner but imitate needs')
    if spec is None:
        leaves = {name: _leaf(name, each) for name, each in under(episodes[0], "obs").items()}
        spec = Spec(leaves, Leaf(episodes[0]["action"].shape[1:]), PERIOD)
    written = [_transitions(episode, spec) for episode in episodes]
    digest = hashlib.sha256(repr(spec).encode())
    for key, value in (pair for rows in written for pair in rows.items()):
        digest.update(key.encode() + value.numpy().tobytes())
    folder = out / f"demos-{digest.hexdigest()[:12]}"
    if not (folder / "meta" / "info.json").exists():
        with EpisodeWriter(folder, spec, robot="python", images="png") as writer:
            for rows in written:
                writer.add(rows)
    return folder


def _leaf(name: str, values: Any) -> Leaf:
    """What arrays [N, ...] are; ConfigError for pictures with other axes, or from 0 to 1."""
    unit = values.dtype.kind == "f" and values.min() >= 0 and values.max() <= 1
    axes = None if values.ndim < 4 else picture_axes(values.shape[1:], values.dtype, unit)
    if axes is not None and (unit or axes != (0, 1, 2)):
        raise ConfigError(
            f"obs/{name} {values.dtype}{list(values.shape)} seems to be pictures, which are uint8 "
            "[N, height, width, channels] from 0 to 255 in demos"
        )
    return Leaf(values.shape[1:], "uint8" if values.dtype == np.uint8 else "float32")


def _episodes(demos: Any) -> list[Arrays]:
    """Whole episodes of arrays by name."""
    if callable(demos) and not hasattr(demos, "__getitem__"):
        return _episodes(demos())
    if isinstance(demos, Mapping | list | tuple):
        parts = [_named(part) for part in (demos if isinstance(demos, list) else [demos])]
    elif hasattr(demos, "__getitem__") and hasattr(demos, "__len__"):
        rows: Any = demos
        steps = [_named(rows[i]) for i in range(len(rows))]
        parts = [{key: np.stack([step[key] for step in steps]) for key in steps[0]}]
    else:
        line = "give a folder, a mapping of arrays (obs, action), a list of these, or a Dataset"
        raise ConfigError(f"demos is a {type(demos).__name__}: {line}")
    return [episode for part in parts for episode in _split(part)]


def _named(part: Any) -> Arrays:
    """The arrays of a mapping or of a pair (obs, action) by name; a single obs is `obs/state`."""
    part = part if isinstance(part, Mapping) else dict(zip(("obs", "action"), part, strict=True))
    flat: Arrays = {}
    for key, value in part.items():
        place, _, name = str(key).replace("observation", "obs").replace(".", "/").partition("/")
        if place not in KNOWN:
            raise ConfigError(f'demos has "{key}", which is none of {", ".join(KNOWN)}')
        name = name or ("state" if place.endswith("obs") else "")
        each = value if isinstance(value, Mapping) else {name: value}
        flat |= {f"{place}/{k}".strip("/"): np.asarray(v) for k, v in each.items()}
    if "action" not in flat or not under(flat, "obs"):
        raise ConfigError("demos need obs and action")
    return flat


def _split(part: Arrays) -> list[Arrays]:
    """The episodes in arrays of N steps, which end where FLAGS say so."""
    ends = np.zeros(len(part["action"]), bool)
    for flag in FLAGS:
        ends |= np.reshape(part.get(flag, ends), -1).astype(bool)
    bounds = [0, *(np.flatnonzero(ends[:-1]) + 1).tolist(), len(ends)]
    if len(bounds) == 2:  # perhaps with one more observation
        return [part]
    return [{key: value[a:b] for key, value in part.items()} for a, b in pairwise(bounds)]


def _transitions(episode: Arrays, spec: Spec) -> Tensors:
    """An episode as `EpisodeWriter.add` takes it, in the units of `spec`. Without `next_obs` the
    last observation is the final one."""
    n, native, action = len(episode["action"]), Native.of(spec), episode["action"]
    seen = _observed(under(episode, "obs"), spec, native)
    last = _observed(under(episode, "next_obs") or under(episode, "obs"), spec, native)
    rows: Tensors = {f"obs/{key}": value[:n] for key, value in seen.items()}
    rows |= {f"next_obs/{key}": value[-1] for key, value in last.items()}
    rows["action"] = torch.as_tensor(action) if native is None else native.act.unit(action)
    usual = {key: np.zeros(n) for key in ("reward", "terminated", "truncated")}
    numbers = {key: value for key, value in episode.items() if key in (*usual, "success")}
    if "done" in episode and "terminated" not in episode:
        done, late = (np.reshape(episode.get(k, False), -1) for k in ("done", "truncated"))
        numbers["terminated"] = done.astype(bool) & ~late.astype(bool)
    return rows | {key: torch.as_tensor(v).reshape(n) for key, v in (usual | numbers).items()}


def _observed(obs: Arrays, spec: Spec, native: Native | None) -> Tensors:
    """Observations [n, ...] as the environment of `spec` shows them."""
    names = [name for name in spec.obs if not hidden(name)]
    try:
        if native is None:
            return {name: torch.as_tensor(obs[name]) for name in names}
        plain = len(native.obs) == 1 and not native.obs[0].path
        return native.tensors(obs["state"] if plain else obs, names)[0]
    except (KeyError, IndexError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"obs of demos do not fit {', '.join(names)}: {error}") from error
