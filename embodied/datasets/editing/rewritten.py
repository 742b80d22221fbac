"""Other episodes made of the recorded ones: their reflections, their failed attempts.

Mirror a dataset: every episode as its reflection to the other side of the robot.

GR-RL (ByteDance Seed, 2025) doubles its recordings so. A table of the robot says what becomes of an
element x of a vector, by its name or a pattern: it stays (`keep`), changes its sign (`negate`), or
is reflected about a value c (`about`), x -> 2 c - x. What has "left" in its name and what has
"right" change places: elements, cameras, words of the instruction. Pictures are flipped, and points
negate their y. Everything else (rewards, ends, who acted) stays.

Failed attempts are what led nowhere in a success with retries (GR-RL too). Recordings of people
hold few failures, and a critic needs them. Where a recording marks that a new attempt begins, the
steps before are one more episode, which fails: M marks are M failures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.bounds import Number
from embodied.core.build import parse
from embodied.core.saved_node import read_saved
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, under
from embodied.datasets.editing.edit import new_folder, scratch_of
from embodied.datasets.editing.write import Copied
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import DatasetError, EpisodeWriter, read_episodes
from embodied.datasets.transitions import INTERVENED

SIDES = {"left": "right", "right": "left", "Left": "Right", "Right": "Left"}
WORD = re.compile(rf"(?<![a-zA-Z])({'|'.join(SIDES)})(?![a-zA-Z])")
Text = str | Sequence[str] | None
# What becomes of an episode, as `Episodes.episode` gives it with pictures decoded, of a dataset's
# Spec, and of its task in words, as `EpisodeWriter.add` takes them: any number of episodes.
Change = Callable[[Tensors, Spec, Text], Iterator[tuple[Tensors, Text]]]


@dataclass(frozen=True)
class Table:
    """What a reflection makes of the elements of a robot's vectors, by name or pattern (`*_y`)."""

    keep: tuple[str, ...] = ()  # elements that stay
    negate: tuple[str, ...] = ()  # elements that change their sign
    about: Mapping[str, Number] = field(default_factory=dict)  # elements reflected about a value

    def reflection(self, names: Sequence[str], what: str) -> tuple[list[int], Tensor, Tensor]:
        """`order`, `sign`, `shift` [n] of the elements `names` [n]: v -> sign v[order] + shift.
        DatasetError, which names `what`, for an element that the table does not have, and where two
        reflections would not give back what was there."""
        found = [self._of(name, what) for name in names]
        sign, shift = torch.tensor(found, dtype=torch.float64).view(-1, 2).unbind(1)
        partners = [other_side(name) for name in names]
        if missing := [name for name in partners if name not in names]:
            raise DatasetError(
                f"{what} has no {missing[0]} that changes places with its other side"
            )
        order = [names.index(name) for name in partners]
        back = sign * shift[order] + shift
        if not bool((sign == sign[order]).all()) or float(back.abs().max()) > 1e-6:
            raise DatasetError(f"{what}: the table has not the same for left and right")
        return order, sign, shift

    def _of(self, name: str, what: str) -> tuple[float, float]:
        """The sign and the shift of an element."""
        rules = [(pattern, 1.0, 0.0) for pattern in self.keep]
        rules += [(pattern, -1.0, 0.0) for pattern in self.negate]
        rules += [(pattern, -1.0, 2 * value) for pattern, value in self.about.items()]
        found = [(sign, shift) for pattern, sign, shift in rules if fnmatchcase(name, pattern)]
        if len(found) != 1:
            raise DatasetError(
                f"{what}: the table says {len(found)} things of {name}, not one: table=FILE with "
                "keep, negate or about for it"
            )
        return found[0]


def read_table(file: Path | str) -> Table:
    return parse(Table, dict(read_saved(Path(file))), "table")


def other_side(text: str) -> str:
    return WORD.sub(lambda found: SIDES[found[0]], text)


def mirrored(episode: Tensors, spec: Spec, table: Table) -> Tensors:
    """The reflection of an episode as `Episodes.episode` gives it, pictures decoded. DatasetError
    for what has no reflection: symbols, text, vectors without names."""
    made = dict(episode)
    if "task" in episode:
        raise DatasetError("a task vector has no reflection: record without it")
    made["action"] = reflected(episode["action"], spec.act, table, "action")
    for name, leaf in spec.obs.items():
        to = other_side(name)
        if to not in spec.obs or spec.obs[to].shape != leaf.shape:
            raise DatasetError(f"{name} has no {to} of its size to change places with")
        for key in ("obs", "next_obs"):
            made[f"{key}/{to}"] = reflected(episode[f"{key}/{name}"], leaf, table, name)
    return made


def reflected(values: Tensor, leaf: Leaf, table: Table, what: str) -> Tensor:
    """Values [..., *shape] of `leaf`, reflected."""
    if leaf.is_picture:
        return values.flip(-2)
    if leaf.is_points:
        sign = values.new_ones(leaf.shape[-1])
        sign[1] = -1
        return values * sign
    if leaf.dtype != "float32" or len(leaf.names) != leaf.size or len(leaf.shape) != 1:
        raise DatasetError(f"{what} has no reflection: it is no picture and no vector with names")
    order, sign, shift = table.reflection(leaf.names, what)
    return (values[..., order].double() * sign + shift).to(values.dtype)


def mirror(path: Path | str, out: Path | str, table: Table) -> Copied:
    """Write the reflection of every episode of the dataset at `path` to the new folder `out`."""

    def change(episode: Tensors, spec: Spec, text: Text) -> Iterator[tuple[Tensors, Text]]:
        words = [text] if isinstance(text, str) else text or ()
        other = [other_side(one) for one in words]
        yield mirrored(episode, spec, table), other[0] if isinstance(text, str) else other or None

    return rewritten(path, out, change, "it has no episodes")


def rewritten(path: Path | str, out: Path | str, change: Change, empty: str) -> Copied:
    """Write what `change` makes of each episode of the dataset at `path` to the new folder `out`;
    DatasetError, with the reason `empty`, if that is nothing."""
    episodes, made = read_episodes(path), Copied()
    spec = episodes.spec
    with new_folder(out) as partial, scratch_of(partial) as scratch:
        whole = scratch / "whole"
        with EpisodeWriter.like(path, whole, spec) as writer:
            for number in range(len(episodes)):
                known = episodes.info[number] if episodes.info else None
                episode = load(episodes.episode(number))
                for steps, text in change(episode, spec, episodes.text(number)):
                    writer.add(steps, text, known)
                    made.episodes += 1
                    made.steps += len(steps["action"])
        if not made.episodes:
            raise DatasetError(f"{path}: {empty}")
        for one in whole.iterdir():
            one.rename(partial / one.name)
    return made


RETRY = "retry"  # column (bool): a new attempt begins with this step


def retries(path: Path | str, out: Path | str) -> Copied:
    """Write every failed attempt in the dataset at `path` as an episode to the new folder `out`.
    DatasetError if no attempt is marked."""

    def change(episode: Tensors, spec: Spec, text: Text) -> Iterator[tuple[Tensors, Text]]:
        for end in attempts(episode):
            words = text if text is None or isinstance(text, str) else text[:end]
            yield failed_attempt(episode, end), words

    empty = "no new attempt is marked: no column retry, and no person takes over from a policy"
    return rewritten(path, out, change, empty)


def attempts(episode: Tensors) -> list[int]:
    """The steps from 1 on at which a new attempt begins: those that `retry` [T] (bool) marks, and
    those at which a person took over (`intervened` [T] becomes true)."""
    begins = torch.zeros(len(episode["action"]), dtype=torch.bool)
    if RETRY in episode:
        begins |= episode[RETRY].flatten().bool()
    if INTERVENED in episode:
        human = episode[INTERVENED].flatten().bool()
        begins[1:] |= human[1:] & ~human[:-1]
    return (begins[1:].nonzero().flatten() + 1).tolist()


def failed_attempt(episode: Tensors, end: int) -> Tensors:
    """The steps before `end` as an episode that terminates without reward and success."""
    whole = {key: value for key, value in episode.items() if not key.startswith("next_obs/")}
    steps = tt.each(whole, lambda value: value[:end])
    gone = ("reward", "success", "truncated")
    steps |= {key: torch.zeros_like(steps[key]) for key in gone if key in steps}
    steps["terminated"] = torch.arange(end) == end - 1
    return steps | tt.nest({k: v[end] for k, v in under(whole, "obs").items()}, "next_obs")
