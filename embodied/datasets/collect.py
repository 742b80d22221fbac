"""Collects demonstrations from a scripted policy, without a bias towards short episodes.

Keeping the first N episodes that end in a vector environment would prefer short ones. Episodes are
therefore numbered (k-th episode of env i: k * num_envs + i) and kept in this order. The episodes of
each parallel env depend only on the seed, so the dataset does too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.atomic_write import locked
from embodied.core.bounds import Count, CountOrZero
from embodied.core.build import ConfigError, Node, build
from embodied.core.device import forked, rng_state, set_rng_state
from embodied.core.env import RETURN_ENDS, HasInstructions, VecEnv, require_finite
from embodied.core.policy import Policy
from embodied.core.saved_node import read_saved
from embodied.core.spec import DEMONSTRATOR, Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol
from embodied.datasets.lerobot.reader import DatasetError, EpisodeWriter

Played = tuple[Tensors, str | None]  # an episode, and its instruction
HIDDEN = f"/{DEMONSTRATOR}"


@dataclass(frozen=True)
class CollectConfig:
    """Settings of a collection of demonstrations."""

    env: Node  # the environment
    demonstrator: Node  # the policy that acts
    episodes: Count  # that are kept
    out: str  # dataset folder
    num_envs: Count = 16  # parallel envs
    seed: CountOrZero = 0  # of environments and demonstrator
    success_only: bool = True  # keep only successful episodes
    steps: Count | None = None  # environment steps after which fewer episodes do (null: no limit)
    execute: Count | None = None  # steps of each action chunk to execute (null: all)
    images: Literal["mp4", "png"] = "mp4"  # how pictures are stored
    corrections: Node | None = None  # wrapper of the environment in which a person takes over


def collect(config: CollectConfig, tell: Callable[[int, int], None]) -> tuple[int, int]:
    """Write demonstrations; returns the numbers of episodes that were kept and played. `tell(kept,
    played)` is called after each episode. A folder with fewer episodes of the same settings is
    completed: its episodes are simulated again, but not written again. Raises DatasetError if the
    folder has other settings, or if hardly any episode succeeds, or none within `config.steps`."""
    env = build(config.env | {"num_envs": config.num_envs}, VecEnv)
    if config.corrections is not None:
        env = build(config.corrections, Wrapper, env=env)
    try:
        demonstrator = build(config.demonstrator, Policy, spec=env.spec).eval()
        if config.execute is not None and not 1 <= config.execute <= demonstrator.chunk:
            raise ConfigError(f"execute={config.execute} is not in 1..{demonstrator.chunk}")
        with locked(config.out):
            _require_same_settings(config)
            episodes = play(demonstrator, env, config.seed, config.execute)
            kept = played = steps = 0
            most = config.steps or math.inf
            with EpisodeWriter(config.out, stored(env.spec), images=config.images) as writer:
                there = len(writer)
                while kept < config.episodes and steps < most:
                    episode, text = next(episodes)
                    played += 1
                    steps += len(episode["action"])
                    if not config.success_only or bool(episode["success"].any()):
                        kept += 1
                        if kept > there:
                            note = {"number": played - 1, "seed": config.seed}
                            own = {k: v for k, v in episode.items() if not k.endswith(HIDDEN)}
                            writer.add(own, text, info={**note, **config.demonstrator})
                    tell(kept, played)
                    if played >= 100 and kept < played / 50:
                        raise DatasetError(
                            f"the demonstrator succeeded in {kept} of {played} episodes; "
                            "demonstrator=NAME chooses another one; success_only=false keeps all "
                            "episodes"
                        )
                if not kept:
                    raise DatasetError(f"no success in {config.steps} steps ({played} episodes)")
            return kept, played
    finally:
        env.close()


def stored(spec: Spec) -> Spec:
    """The observations that are kept: all but the one for demonstrators."""
    return replace(spec, obs={k: leaf for k, leaf in spec.obs.items() if k != DEMONSTRATOR})


def _require_same_settings(config: CollectConfig) -> None:
    """Write the settings beside the dataset; DatasetError if it was collected with others."""
    names = ["env", "demonstrator", "num_envs", "seed", "success_only"]
    optional = ("steps", "execute", "corrections")
    names += [name for name in optional if getattr(config, name) is not None]
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    file = Path(config.out) / "collect.yaml"
    if file.exists():
        if read_saved(file) != settings:
            raise DatasetError(
                f"{config.out} holds demonstrations collected with other settings ({file}); "
                "choose another folder: out=DIR"
            )
    elif (file.parent / "meta").exists():
        raise DatasetError(f"{config.out} holds another dataset; choose another folder: out=DIR")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(settings, sort_keys=False))


@torch.no_grad()
def play(policy: Policy, env: VecEnv, seed: int, execute: int | None = None) -> Iterator[Played]:
    """Infinitely many episodes in the order of their numbers, as `EpisodeWriter.add` expects them,
    each with its instruction (None: the one of the Spec). `success` [T] is always false if the
    environment does not report it. The policy's noise has a generator state of its own, so that the
    caller's random numbers do not change the episodes."""
    done: dict[int, Played] = {}
    number = 0
    for place, episode, text in _as_they_end(policy, env, seed, execute):
        done[place] = episode, text
        while number in done:
            yield done.pop(number)
            number += 1


def _as_they_end(
    policy: Policy, env: VecEnv, seed: int, execute: int | None
) -> Iterator[tuple[int, Tensors, str | None]]:
    rows, instructed = env.num_envs, find_protocol(env, HasInstructions)
    actor = Actor(policy, rows, execute)
    obs, first = env.reset(seed), torch.ones(rows, dtype=torch.bool, device=env.device)
    with forked(seed):
        random = rng_state()
    texts = _texts(instructed, rows)
    tape: list[Tensors] = []
    begin, turn = [0] * rows, [0] * rows
    dropped = 0
    while True:
        with forked():
            set_rng_state(random)
            action = actor(obs, first)
            step = env.step(action)
            random = rng_state()
        require_finite(step.reward, step.next_obs, type(env).__name__)
        frame = {
            **tt.nest(obs, "obs"),
            "action": step.log.get("executed", action),
            "reward": step.reward,
            "terminated": step.terminated,
            "truncated": step.truncated,
            "success": step.log.get("success", torch.zeros_like(step.terminated)),
            **{key: step.log[key] for key in (RETURN_ENDS, "intervened") if key in step.log},
        }
        tape.append({key: value.clone() for key, value in frame.items()})
        obs, first = step.obs, step.ended
        for row in first.nonzero().flatten().tolist():
            window = tape[begin[row] - dropped :]
            episode = tt.stack([{k: v[row] for k, v in frame.items()} for frame in window])
            last = {f"next_obs/{name}": value[row].clone() for name, value in step.next_obs.items()}
            yield turn[row] * rows + row, {**episode, **last}, texts[row]
            begin[row], turn[row] = dropped + len(tape), turn[row] + 1
        if first.any():
            texts = _texts(instructed, rows)
        old = min(begin) - dropped
        del tape[:old]
        dropped += old


def _texts(instructed: HasInstructions | None, rows: int) -> Sequence[str | None]:
    """The instruction of each row's running episode; None: that of the Spec."""
    return [None] * rows if instructed is None else instructed.instructions()
