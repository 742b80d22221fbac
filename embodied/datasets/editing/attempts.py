"""Failed attempts as episodes: of a success with retries, what led nowhere (GR-RL, 2025).

Recordings of people hold few failures, and a critic needs them. Where a recording marks that a new
attempt begins, the steps before are one more episode, which fails: M marks are M failures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from embodied.core import tensors as tt
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.datasets.editing.mirror import Text, rewritten
from embodied.datasets.editing.write import Copied
from embodied.datasets.transitions import INTERVENED

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
