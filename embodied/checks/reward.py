"""Checks of a reward in a small run: its numbers, its state, exact resume."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from embodied.checks.check import alike, checks_of, from_file, require, skip
from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.build import Node
from embodied.core.device import seed_everything
from embodied.core.reward import HasComponents, Reward, Stateful
from embodied.core.tensors import Tensors
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.logger import Log
from embodied.training.train import train

WHOLE, HALF = 96, 48  # environment steps of a run


@dataclass(frozen=True)
class RewardSubject:
    """`run(folder)`: the settings of a short run with this reward, whose output is `folder`."""

    run: Callable[[Path], Node]


def small_run(node: Node, folder: Path) -> Node:
    """The settings of a run, made small: a few parallel envs and steps, one evaluation episode."""
    made = {**node, "name": "x", "out": str(folder), "save_every": 0, "steps": WHOLE}
    made |= {"eval": {**node["eval"], "num_envs": 1, "episodes": 1}, "video": False}
    if made["data"]["regime"] == "off_policy":
        made["data"] = {**made["data"], "warmup_steps": 32}
    made["env"] = {**made["env"], "num_envs": min(4, made["env"].get("num_envs") or 4)}
    if made["demos"] is None:
        made["demo_episodes"] = None
    if "schedule" in made["learner"]:  # a linear one depends on the length of the run
        made["learner"] = {**made["learner"], "schedule": "constant"}
    if "synchronous" in made["reward"]:
        made["reward"] = {**made["reward"], "synchronous": True}
    return made


@contextmanager
def parts_of(subject: RewardSubject, name: str = "run") -> Iterator[tuple[RunComponents, Reward]]:
    """The components of the run in a folder of its own, and the reward in them."""
    with tempfile.TemporaryDirectory() as folder:
        seed_everything(0)
        parts = RunComponents(read_config(subject.run(Path(folder) / name)))
        loop: Any = parts.loop
        try:
            yield parts, loop.rewards.reward
        finally:
            parts.close()


def play(parts: RunComponents, steps: int = 3) -> Tensors:
    """Transitions of the first steps, as training hands them to a reward."""
    loop: Any = parts.loop
    assert parts.env is not None
    kept, count = list[Tensors](), 0
    while len(kept) < steps:
        rows, step = loop.collector.step()
        count += parts.env.num_envs
        finished = loop.collector.finished
        loop.rewards.observe_step(rows, loop.env_ids if finished is None else finished, step)
        loop.rewards.set_step(count)
        if rows:
            kept.append(tt.each(rows, torch.clone))
    return tt.cat(kept)


def it_can_be_built(subject: RewardSubject) -> None:
    """A run with it can be built; it says whether it is frozen; what policies need is stored."""
    with parts_of(subject) as (parts, reward):
        frozen = isinstance(getattr(reward, "frozen", None), bool)
        require(frozen, "it should say frozen = True (does not learn) or False")
        loop: Any = parts.loop
        assert parts.env is not None
        dropped = loop.rewards.reward_only_keys if reward.frozen else frozenset[str]()
        own = {f"{end}/{leaf}" for leaf in parts.env.spec.obs for end in ("obs", "next_obs")}
        require(not dropped & own, f"transitions would lose {sorted(dropped & own)}")


def it_answers_with_one_number_per_transition(subject: RewardSubject) -> None:
    """[N] finite float32 numbers without gradients, the same when asked again."""
    with parts_of(subject) as (parts, reward):
        rows = play(parts)
        before = tt.each(rows, torch.clone)
        given = reward(rows)
        n = len(rows["reward"])
        require(isinstance(given, torch.Tensor), f"it returns a {type(given).__name__}, no tensor")
        mend = "write .squeeze(-1)" if tuple(given.shape) == (n, 1) else "one per transition"
        require(tuple(given.shape) == (n,), f"it is {list(given.shape)}, should be [{n}]: {mend}")
        require(given.dtype == torch.float32, f"it is {given.dtype}: write .float()")
        require(torch.isfinite(given).all(), "it is not finite (NaN or infinity)")
        require(not given.requires_grad, "it has gradients: compute it in torch.no_grad()")
        require(torch.equal(given, reward(rows)), "asked again, it gives other numbers")
        for _ in range(2):
            for key, value in reward.update(rows).items():
                fine = value.ndim == 0 and not value.requires_grad and torch.isfinite(value)
                require(fine, f"metric {key} should be a finite number: .mean().detach()")
        require(alike(before, rows), "it changes the transitions that it is given")
        if isinstance(reward, HasComponents):
            for key, value in reward.components(rows).items():
                fine = value.shape == given.shape and torch.isfinite(value).all()
                require(fine, f"component {key} should be [{n}] finite numbers")


def its_state_answers_as_before(subject: RewardSubject) -> None:
    """After get_state and set_state another object gives the same rewards (with a state only)."""
    with parts_of(subject) as (parts, reward):
        if not isinstance(reward, Stateful):
            skip("it has no state (get_state, set_state)")
        rows = play(parts)
        for _ in range(2):
            reward.update(rows)
        with parts_of(subject, "other") as (_, other):
            assert isinstance(other, Stateful)
            other.set_state(from_file(reward.get_state()))
            same = torch.equal(reward(rows), other(rows))  # type: ignore[operator]
            require(same, "it gives other rewards after get_state and set_state")
            require(alike(reward.get_state(), other.get_state()), "its state is not kept")


def a_run_with_it_resumes_exactly(subject: RewardSubject) -> None:
    """A run that was interrupted and resumed ends as one that was not."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)

        def run(name: str, steps: int, resume: str | None = None) -> None:
            made = subject.run(folder / name) | {"steps": steps, "resume": resume}
            train(made, Log(folder / name))

        run("whole", WHOLE)
        whole = checkpoint.load_state(folder / "whole", "loop")
        if whole["loop"]["collector"] is None:
            skip("its environment cannot be saved")
        run("half", HALF)
        run("half", WHOLE, resume=str(folder / "half"))
        half = checkpoint.load_state(folder / "half", "loop")
        for key in whole["loop"]:
            fine = alike(whole["loop"][key], half["loop"][key])
            require(fine, f"a resumed run differs in its {key}")
        one, other = (
            load_file(checkpoint.find(folder / each) / "policy.safetensors")
            for each in ("whole", "half")
        )
        require(alike(one, other), "a resumed run ends with another policy")


CHECKS = checks_of(__name__)
