"""Arrays, torch datasets and functions as demonstrations: they become a LeRobot dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from embodied.core.build import ConfigError
from embodied.core.native import Native
from embodied.core.spec import Leaf, Spec, hidden
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.writer import EpisodeWriter

NAMES = {
    **dict.fromkeys(("obs", "observation", "observations"), "obs"),
    **dict.fromkeys(("next_obs", "next_observation", "next_observations"), "next_obs"),
    **dict.fromkeys(("action", "actions"), "action"),
    **dict.fromkeys(("reward", "rewards"), "reward"),
    **dict.fromkeys(("terminated", "terminations", "terminals"), "terminated"),
    **dict.fromkeys(("truncated", "truncations", "timeouts"), "truncated"),
    **{name: name for name in ("done", "success", "episode_index")},
}
"""What arrays may be called, and what they are."""
PERIOD = 0.1  # s, of the steps of arrays without an environment
Episode = dict[str, Any]
"""Arrays [T, ...] by name; `obs` and `next_obs` may be mappings of such."""


def are_folders(demos: Any) -> bool:
    """Whether `demos` are paths or addresses of datasets."""
    if isinstance(demos, list | tuple):
        return bool(demos) and all(isinstance(each, str | Path) for each in demos)
    return isinstance(demos, str | Path)


def write_episodes(demos: Any, spec: Spec | None, out: Path, needs_reward: bool) -> Path:
    """Write `demos` below `out` as a dataset of `spec` (None: of the arrays' own names and units);
    returns its folder, which is that of an earlier call with the same numbers.

    `demos`: a mapping of arrays [N, ...] (`obs`, `action`, `reward`, `terminated`, ...), a list of
    these, one for each episode, a torch Dataset of pairs (obs, action) or of mappings, or a
    function that returns any of them. ConfigError for what does not fit.
    """
    episodes = _episodes(demos, 1 if spec is None else len(spec.act.shape))
    if needs_reward and "reward" not in episodes[0]:
        raise ConfigError('these demos have no "reward", which every learner but imitate needs')
    spec = spec or _own_spec(episodes[0])
    written = [_transitions(episode, spec) for episode in episodes]
    digest = hashlib.sha256(repr(spec).encode())
    for key, value in (pair for rows in written for pair in sorted(rows.items())):
        digest.update(key.encode() + value.contiguous().numpy().tobytes())
    folder = out / f"demos-{digest.hexdigest()[:12]}"
    if not (folder / "meta" / "info.json").exists():
        with EpisodeWriter(folder, spec, robot="python", images="png") as writer:
            for rows in written:
                writer.add(rows)
    return folder


def _episodes(demos: Any, action_dims: int) -> list[Episode]:
    """Whole episodes, of arrays by their usual names."""
    whole = isinstance(demos, list | tuple | Mapping)
    if not whole and callable(demos) and not hasattr(demos, "__getitem__"):
        return _episodes(cast(Callable[[], Any], demos)(), action_dims)
    if not whole and not (hasattr(demos, "__getitem__") and hasattr(demos, "__len__")):
        raise ConfigError(
            f"demos is a {type(demos).__name__}: give a folder, a mapping of arrays (obs, action), "
            "a list of these, or a torch Dataset"
        )
    parts: list[Any] = (
        [demos] if isinstance(demos, Mapping) else list(map(demos.__getitem__, range(len(demos))))
    )
    if not parts:
        raise ConfigError("demos is empty")
    rows = [_named(part) for part in parts]
    if not whole and rows[0]["action"].ndim <= action_dims:  # single steps
        rows = [_each(rows, np.stack)]
    return [episode for part in rows for episode in _split(part)]


def _named(part: Any) -> Episode:
    """The arrays of a mapping or of a pair (obs, action), by their usual names."""
    if isinstance(part, tuple | list) and len(part) == 2:
        part = {"obs": part[0], "action": part[1]}
    if not isinstance(part, Mapping):
        raise ConfigError(f"demos has a {type(part).__name__}: give (obs, action), or a mapping")
    made: Episode = {}
    for key, value in cast(Mapping[str, Any], part).items():
        place, _, name = str(key).replace(".", "/").partition("/")
        if place not in NAMES:
            raise ConfigError(f'demos has "{key}", which is none of {", ".join(sorted(NAMES))}')
        if name:  # "obs/state", "observation.state"
            made.setdefault(NAMES[place], {})[name] = np.asarray(value)
        elif isinstance(value, Mapping):
            made[NAMES[place]] = {str(k): np.asarray(v) for k, v in value.items()}
        else:
            made[NAMES[place]] = np.asarray(value)
    if missing := sorted({"obs", "action"} - made.keys()):
        raise ConfigError(f"demos have no {missing[0]}")
    return made


def _each(rows: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    """The same place of all `rows`, joined."""
    if isinstance(rows[0], Mapping):
        return {key: _each([row[key] for row in rows], join) for key in rows[0]}
    return join(list(rows))


def _split(part: Episode) -> list[Episode]:
    """The episodes in arrays of N steps, which end where the flags or `episode_index` say so."""
    n = len(part["action"])
    ends = np.zeros(n, bool)
    for key in ("terminated", "truncated", "done"):
        ends |= part[key].reshape(n).astype(bool) if key in part else False
    if "episode_index" in part:
        number = part.pop("episode_index").reshape(n)
        ends |= np.append(number[1:] != number[:-1], True)
    part.pop("done", None)
    places = np.flatnonzero(ends[:-1]) + 1
    bounds = [0, *places.tolist(), n]
    if len(bounds) == 2:
        return [part]
    return [_each([part], lambda found, a=a, b=b: found[0][a:b]) for a, b in pairwise(bounds)]


def _own_spec(episode: Episode) -> Spec:
    """A Spec of the arrays as they are."""
    obs = episode["obs"] if isinstance(episode["obs"], Mapping) else {"state": episode["obs"]}
    leaves = {
        name: Leaf(tuple(value.shape[1:]), "uint8" if value.dtype == np.uint8 else "float32")
        for name, value in obs.items()
    }
    return Spec(leaves, Leaf(tuple(episode["action"].shape[1:])), PERIOD)


def _transitions(episode: Episode, spec: Spec) -> Tensors:
    """An episode as `EpisodeWriter.add` takes it; actions in [-1, 1] where `spec` is of an
    environment with units of its own."""
    n, native = len(episode["action"]), Native.of(spec)
    seen = _observed(episode["obs"], spec, native)
    if "next_obs" in episode:
        last = {
            key: value[-1] for key, value in _observed(episode["next_obs"], spec, native).items()
        }
    else:  # the last of n + 1 observations, as far as there is one
        last = {key: value[-1] for key, value in seen.items()}
    rows: Tensors = {f"obs/{key}": value[:n] for key, value in seen.items()}
    rows |= {f"next_obs/{key}": value for key, value in last.items()}
    action = np.asarray(episode["action"])
    rows["action"] = torch.as_tensor(action) if native is None else native.act.unit(action)
    for key, kind in (
        ("reward", torch.float32),
        ("terminated", torch.bool),
        ("truncated", torch.bool),
    ):
        given = episode.get(key, np.zeros(n))
        rows[key] = torch.as_tensor(np.asarray(given)).reshape(n).to(kind)
    if "success" in episode:
        rows["success"] = torch.as_tensor(episode["success"]).reshape(n).bool()
    return rows


def _observed(obs: Any, spec: Spec, native: Native | None) -> Tensors:
    """Observations [n, ...] by name, as the environment of `spec` shows them."""
    names = [name for name in spec.obs if not hidden(name)]
    if native is not None:
        try:
            return native.tensors(obs, names)[0]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(f"obs of demos do not fit the environment: {error}") from error
    given = obs if isinstance(obs, Mapping) else {names[0]: obs}
    if missing := [name for name in names if name not in given]:
        raise ConfigError(f"obs of demos have no {', '.join(missing)}")
    return {name: torch.as_tensor(np.asarray(given[name])) for name in names}
