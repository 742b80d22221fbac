"""Training data from recorded episodes: transitions for RL, action chunks for imitation.

The transition of a decision at step t that lasts k = min(H, remaining steps) steps is

    reward = sum_{i<k} gamma^i r_{t+i},   discount = gamma^k (0 if the env terminated in it),
    next_obs = the true observation after those k steps.

There is one transition per step of every episode (Q-chunking, Li et al. 2025). With n-step returns
k = min(n H, remaining steps), and the action is still that of the first H steps. In steps whose
column `return_ends` is true (play, whose episodes go on at a goal) returns end as at a termination.

Recordings in which people took over from a policy have the column `intervened`. Their chunks to
imitate are a person's; without the column, all steps are (`human_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.env import REAL, RETURN_ENDS
from embodied.core.errors import ConfigError
from embodied.core.reward import OFFLINE_COLUMNS
from embodied.core.spec import Leaf, Spec, SpecMismatch, require_same
from embodied.core.tensors import HISTORY, Tensors
from embodied.datasets.hub import local_folder
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.datasets.mapping import order_of, permuted

INTERVENED = "intervened"  # column (bool): the step's action was a person's
SOURCE, EPISODE, CORRECTION, PLACE = OFFLINE_COLUMNS


@dataclass(frozen=True)
class _Windows:
    """For every step [N]: its episode, and the indices [N, H] of the H steps from it.

    Past the end of the episode its last step is repeated and `valid` is false.
    """

    episode: Tensor
    rows: Tensor
    valid: Tensor


def transitions(episodes: Episodes, gamma: float, chunk: int = 1, n_step: int = 1) -> Tensors:
    """One transition for each of the N steps of `episodes`.

    `obs/*`, `next_obs/*` [N, ...]; `action` [N, A], or with `chunk` = H > 1 the actions of H steps,
    concatenated, [N, H * A] (past the end of the episode the last action is repeated); `reward`
    and `discount` [N] over `n_step` decisions; `episode` [N] (int64), with `chunk` > 1
    `executed_steps` [N] (int64), how many steps of the chunk were before the episode's end.
    """
    if chunk < 1 or n_step < 1:
        raise ValueError(f"chunk={chunk} and n_step={n_step} should be at least 1")
    steps, windows = episodes.steps, _windows(episodes, chunk * n_step)
    rows, valid = windows.rows, windows.valid
    weight = gamma ** torch.arange(rows.shape[1], dtype=torch.float32)
    ends = return_ends(episodes)[rows] & valid
    counted = valid & (ends.cumsum(1) - ends.long() == 0)  # none before it in the window
    action = steps["action"][rows[:, :chunk]] if chunk > 1 else steps["action"]
    return {
        **tt.nest(tt.under(steps, "obs"), "obs"),
        "action": action.flatten(1) if chunk > 1 else action,
        "reward": (steps["reward"][rows] * counted * weight).sum(1),
        "discount": torch.where(ends.any(1), 0.0, gamma ** valid.sum(1).float()),
        **tt.nest(_successors(episodes, windows), "next_obs"),
        "episode": windows.episode,
        **({"executed_steps": valid[:, :chunk].sum(1)} if chunk > 1 else {}),
    }


def chunks(episodes: Episodes, chunk: int) -> Tensors:
    """One imitation sample for each of the N steps: `obs/*` [N, ...], the next H actions `action`
    [N, H, A] (past the end: the last one again), `valid` [N, H] (bool), `episode` [N] (int64). A
    person's chunk ends where they let go. Of a policy's own step nothing is `valid`."""
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    windows = _windows(episodes, chunk)
    rows = windows.rows
    valid = (windows.valid & human_steps(episodes)[rows]).cumprod(1).bool()
    last = rows[:, :1] + valid.sum(1, keepdim=True).clamp(min=1) - 1
    return {
        **tt.nest(tt.under(episodes.steps, "obs"), "obs"),
        "action": episodes.steps["action"][torch.minimum(rows, last)],
        "valid": valid,
        "episode": windows.episode,
    }


def return_ends(episodes: Episodes) -> Tensor:
    """The steps with which returns end, [N] (bool): terminations, and the column `return_ends`."""
    found = episodes.steps.get(RETURN_ENDS)
    terminated = episodes.steps["terminated"]
    return terminated if found is None else terminated | found.flatten().bool()


def human_steps(episodes: Episodes) -> Tensor:
    """Whether the action of each step was a person's, [N] (bool): `intervened`, or true if the
    recordings have no such column."""
    return _flag(episodes, INTERVENED)


def flags(episodes: Episodes, names: Sequence[str], chunk: int = 1) -> Tensors:
    """Columns `names` [N] (bool) of the decision at each step: whether the recorded column is true
    in all of its `chunk` steps. A demonstration without them is a person's, of the real system;
    ConfigError for another column that is not there. Those of OFFLINE_COLUMNS are of the step
    itself."""
    missing = {*names} - {*OFFLINE_COLUMNS, INTERVENED, REAL, *episodes.steps}
    if missing:
        raise ConfigError(
            f"the recordings have no column {min(missing)}, which is needed of each step: leave "
            "out demos"
        )
    windows = _windows(episodes, chunk)
    found: Tensors = {SOURCE: source_numbers(episodes)} if SOURCE in names else {}
    found |= {EPISODE: windows.episode} if EPISODE in names else {}
    found |= {CORRECTION: corrections(episodes)} if CORRECTION in names else {}
    found |= {PLACE: windows.rows[:, 0]} if PLACE in names else {}
    for name in (name for name in names if name not in OFFLINE_COLUMNS):
        found[name] = (_flag(episodes, name)[windows.rows] | ~windows.valid).all(1)
    return found


def corrections(episodes: Episodes) -> Tensor:
    """Whether each step is a person's in an episode in which a policy acted too, [N] (bool)."""
    human = human_steps(episodes)
    episode = torch.repeat_interleave(torch.arange(len(episodes)), episodes.length)
    policy_steps = torch.zeros(len(episodes)).index_add(0, episode, (~human).float())
    return human & (policy_steps > 0)[episode]


def source_numbers(episodes: Episodes) -> Tensor:
    """The number of the dataset of each step, [N] (int64); 0 for recordings that were not read
    among others."""
    found = episodes.steps.get(SOURCE)
    return torch.zeros(int(episodes.length.sum()), dtype=torch.int64) if found is None else found


def _flag(episodes: Episodes, name: str) -> Tensor:
    found = episodes.steps.get(name)
    count = int(episodes.length.sum())
    return torch.ones(count, dtype=torch.bool) if found is None else found.flatten().bool()


def past_observations(episodes: Episodes, steps: Mapping[str, int], width: int = 1) -> Tensors:
    """For every step, the observations NAME of the `steps[NAME]` = k steps before it and before the
    one `width` steps later: `obs/history/NAME`, `next_obs/history/NAME` [N, k, ...], oldest first.
    As in a policy's carry (`core.tensors`), before the start of an episode its first one is
    repeated. Pictures are decoded."""
    windows = _windows(episodes, width)
    first = episodes.start[windows.episode][:, None]
    ends = {"obs": windows.rows[:, :1], "next_obs": windows.rows[:, -1:] + 1}
    found: Tensors = {}
    for name, k in steps.items():
        for prefix, end in ends.items():
            index = (end + torch.arange(-k, 0)).maximum(first)
            values = episodes.steps[f"obs/{name}"].index_select(0, index.flatten())
            found[f"{prefix}/{HISTORY}{name}"] = values.unflatten(0, tuple(index.shape))
    return found


def joined(parts: Sequence[Episodes]) -> Episodes:
    """Concatenate recordings with the same Spec, in order; keeps the columns that all have, and
    `intervened` and `return_ends` if one has them."""
    if len(parts) == 1:
        return parts[0]
    for name, values in {INTERVENED: human_steps, RETURN_ENDS: return_ends}.items():
        if any(name in part.steps for part in parts):
            parts = [with_steps(part, {name: values(part)}) for part in parts]
    keys = [key for key in parts[0].steps if all(key in part.steps for part in parts)]
    length = torch.cat([part.length for part in parts])
    several = any(part.step_texts for part in parts)
    return Episodes(
        parts[0].spec,
        tt.cat([{key: part.steps[key] for key in keys} for part in parts]),
        length.cumsum(0) - length,
        length,
        tt.cat([part.final for part in parts]),
        sum((part.texts for part in parts), ()),
        sum((part.info for part in parts), ()),
        sum((part.words() for part in parts), ()) if several else (),
    )


def read_joined(folders: Sequence[str], limit: int | None = None) -> Episodes:
    """The first `limit` episodes (None: all) of each dataset, of one Spec, joined; SpecMismatch."""
    parts = [read_episodes(local_folder(folder), limit) for folder in folders]
    for folder, part in zip(folders[1:], parts[1:], strict=True):
        require_same(parts[0].spec, part.spec, f"dataset {folders[0]}", f"dataset {folder}")
    return joined(parts)


def element_order(here: Leaf, there: Leaf, what: str) -> tuple[int, ...]:
    """The place there of each element here, by their names; empty where they are the same, or one
    side has none. SpecMismatch, which names `what`, for other names."""
    ours, theirs = here.names, there.names
    if ours == theirs or not len(ours) == len(theirs) == here.size == there.size:
        return ()
    if set(ours) != set(theirs) or len(set(ours)) < len(ours):
        raise SpecMismatch(
            f"{what} has the elements {', '.join(theirs)}, and {', '.join(ours)} are needed"
        )
    return order_of(ours, theirs)


def unnamed(here: Spec, there: Spec) -> str:
    """The vectors of both specs whose elements have no names on one side, listed."""
    ours, theirs = {**here.obs, "action": here.act}, {**there.obs, "action": there.act}
    pairs = [(name, ours[name], theirs[name]) for name in theirs if name in ours]
    return ", ".join(
        name
        for name, one, other in pairs
        if len(one.shape) == 1 and one.size > 1 and not (one.names and other.names)
    )


def spec_in_order_of(there: Spec, here: Spec, where: str = "the other side") -> Spec:
    """`there` with the elements of observations and actions, and their ranges, in the order of
    `here`, by their names; SpecMismatch for other names."""
    obs = {
        name: _reordered(leaf, element_order(here.obs[name], leaf, f"{where}: {name}"))
        if name in here.obs
        else leaf
        for name, leaf in there.obs.items()
    }
    act = _reordered(there.act, element_order(here.act, there.act, f"{where}: action"))
    return replace(there, obs=obs, act=act)


def in_order_of(episodes: Episodes, here: Spec, where: str) -> Episodes:
    """`episodes` with the elements of observations and actions in the order of `here`, as
    `spec_in_order_of`; `where` begins the line of a SpecMismatch."""
    there = episodes.spec
    spec = spec_in_order_of(there, here, where)
    steps, final = dict(episodes.steps), dict(episodes.final)
    for name, leaf in there.obs.items():
        order = element_order(spec.obs[name], leaf, name)
        steps[f"obs/{name}"] = permuted(steps[f"obs/{name}"], order)
        final[name] = permuted(final[name], order)
    order = element_order(spec.act, there.act, "action")
    steps["action"] = permuted(steps["action"], order)
    return replace(episodes, spec=spec, steps=steps, final=final)


def _reordered(leaf: Leaf, order: tuple[int, ...]) -> Leaf:
    if not order:
        return leaf
    low, high = (
        tuple(end[place] for place in order) if isinstance(end, tuple) else end
        for end in (leaf.low, leaf.high)
    )
    names = tuple(leaf.names[place] for place in order)
    return replace(leaf, low=low, high=high, names=names)


def with_steps(episodes: Episodes, columns: Tensors) -> Episodes:
    """`episodes` with these columns [N, ...] of steps."""
    return replace(episodes, steps={**episodes.steps, **columns})


def with_observations(episodes: Episodes, added: Callable[[Tensors], Tensors]) -> Episodes:
    """`episodes` with further observations: `added(obs)` of each episode's T + 1 observations
    (leaves [T + 1, ...], the final one included)."""
    if not len(episodes):
        return episodes
    parts = [added(observations(episodes.episode(number))) for number in range(len(episodes))]
    steps = tt.cat([tt.each(part, lambda value: value[:-1]) for part in parts])
    final = tt.cat([tt.each(part, lambda value: value[-1:]) for part in parts])
    return replace(
        episodes,
        steps={**episodes.steps, **tt.nest(steps, "obs")},
        final={**episodes.final, **final},
    )


def observations(episode: Tensors) -> Tensors:
    """All T + 1 observations (leaves [T + 1, ...]) of an episode as `Episodes.episode` gives it."""
    seen, last = load(tt.under(episode, "obs")), load(tt.under(episode, "next_obs"))
    return {name: torch.cat([value, last[name][None]]) for name, value in seen.items()}


class Dataset:
    """A `Source` of a fixed set of transitions or chunks, `rows`, on a device."""

    def __init__(self, rows: Tensors, device: torch.device | str = "cpu") -> None:
        self.rows = {key: value.to(device).contiguous() for key, value in rows.items()}
        self.device = torch.device(device)
        self.length = tt.length(self.rows)
        if not self.length:
            raise ValueError("the dataset is empty: it needs at least one step")

    def __len__(self) -> int:
        return self.length

    def sample(self, n: int) -> Tensors:
        """`n` samples, uniformly and with replacement, by torch's default generator."""
        return load(tt.take(self.rows, torch.randint(self.length, (n,), device=self.device)))


def _windows(episodes: Episodes, width: int) -> _Windows:
    episode = torch.repeat_interleave(torch.arange(len(episodes.length)), episodes.length)
    last = (episodes.start + episodes.length - 1)[episode].unsqueeze(1)
    rows = torch.arange(len(episode)).unsqueeze(1) + torch.arange(width)
    return _Windows(episode, torch.minimum(rows, last), rows <= last)


def _successors(episodes: Episodes, windows: _Windows) -> Tensors:
    """The observation after the last valid step of every window."""
    last = windows.rows[:, -1]  # the last valid step, because steps past the end repeat it
    total = len(last)
    ends = (episodes.start + episodes.length - 1)[windows.episode]
    index = torch.where(last == ends, total + windows.episode, last + 1)
    steps = episodes.steps
    return {
        name: torch.cat([steps[f"obs/{name}"], final]).index_select(0, index)
        for name, final in episodes.final.items()
    }
