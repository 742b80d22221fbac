"""The settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from embodied.core.build import Node


@dataclass(frozen=True)
class EvalConfig:
    """Held-out starts: `episodes` from `seed`, in `num_envs` rows. With a `grid`, one episode of
    each of its tasks instead: so many values of every task parameter. In a world that keeps tasks
    for evaluation: one of each of the first `episodes` of those."""

    episodes: int = 200
    num_envs: int = 50
    seed: int = 10_000
    grid: int = 0


@dataclass(frozen=True)
class RunConfig:
    """One run. `steps` are environment steps, or updates where the learner is offline.

    `init`: a run or checkpoint to start from; with `finetune`, the frozen base; with a policy made
    of others, the one that it is made of. `demos`: a dataset
    folder or several, `demo_episodes` of each (None: all); a learner with replay takes
    `demo_fraction` of every batch from them (None: they are the first rows of the one replay).
    `replay`: the kind of memory of `replay_size` rows (None: all alike); `success_fraction` of
    every batch come from episodes that succeeded, once there are any.
    `weighting`: how often each of their trajectories is drawn (None: in proportion to its length).
    `data`: feed the learner so instead of its own way. `pretrain`: updates from the demonstrations
    before the first environment step; a run's clock counts them, then its `steps`.

    `teacher` chooses the tasks of training episodes (None: each row draws its own); evaluation
    starts are never its choice.

    `start`: warm-up steps; `ratio`: updates per stored row; `execute`: steps of a chunk to play
    before deciding again (None: all); `shift`: pictures of a batch are shifted by up to so many
    pixels at random. Intervals of 0 mean: at the end only.
    """

    env: Node
    policy: Node | None
    learner: Node
    name: str
    output: str
    steps: int
    finetune: Node | None = None
    reward: Node | None = None
    teacher: Node | None = None
    init: str | None = None
    demos: str | tuple[str, ...] | None = None
    demo_episodes: int | None = None
    demo_fraction: float | None = 0.5
    weighting: Node | None = None
    data: Literal["offline", "replay"] | None = None
    pretrain: int = 0
    seed: int = 0
    device: str = "auto"
    threads: int = 1
    start: int = 0
    ratio: float = 1.0
    normalize: bool = False
    shift: int = 0
    execute: int | None = None
    replay_size: int = 1_000_000
    replay: Node | None = None
    success_fraction: float = 0.0
    log_every: int = 1_000
    save_every: int = 0
    eval_every: int = 0
    eval: EvalConfig = field(default_factory=EvalConfig)
    wandb: bool = False
    video: bool = True
    resume: str | None = None
