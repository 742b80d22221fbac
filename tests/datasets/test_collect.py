"""Collecting demonstrations: which episodes are kept, in what order, and going on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.commands.demos import collect as collect_words
from embodied.core import checkpoint
from embodied.core.build import allow
from embodied.core.env import RETURN_ENDS, Step
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.datasets import collect as collecting
from embodied.datasets.collect import CollectConfig, collect, play
from embodied.datasets.lerobot.reader import DatasetError, read_episodes
from embodied.datasets.transitions import return_ends
from embodied.policies.random import Config as RandomConfig
from embodied.policies.random import Random
from embodied.policies.scripted.intervener import Intervener
from tests.builders import make_policy, node_of
from tests.toy_envs import Config, Counter

allow("tests")


def gathered(
    folder: Path, told: Callable[[int, int], None] = lambda kept, played: None, **changes: Any
) -> tuple[int, int]:
    """Row 0 ends after 3 steps and succeeds, row 1 after 5 and does not."""
    env, random = {"_target_": "tests.toy_envs.Counter"}, node_of("policies.random.Random")
    config = CollectConfig(env, random, 4, str(folder), num_envs=2)
    return collect(replace(config, **changes), told)


def played(env: Counter, count: int, seed: int = 0) -> list[Tensors]:
    return [one for one, _ in islice(play(Random(RandomConfig(), env.spec), env, seed), count)]


class Reusing(Counter):
    """A world that writes every successor into the same memory, as a simulator of a user's may."""

    def step(self, action: torch.Tensor) -> Step:
        step = super().step(action)
        if not hasattr(self, "memory"):
            self.memory = step.next_obs["state"].clone()
        self.memory.copy_(step.next_obs["state"])
        return replace(step, next_obs={"state": self.memory})


def test_a_held_episode_keeps_its_own_end() -> None:
    """The third of row 0 ends at 9 but waits for row 1 to end at 10, when row 0 is at 1 again."""
    env = Reusing(Config())
    episodes = played(env, 5)
    assert env.memory.flatten().tolist() == [1, 105]
    assert [episode["next_obs/state"].item() for episode in episodes] == [3, 105, 3, 105, 3]


class Playing(Counter):
    """Its second step is at a goal; the episode goes on."""

    def step(self, action: torch.Tensor) -> Step:
        out = super().step(action)
        out.log[RETURN_ENDS] = out.next_obs["state"].flatten() % 100 == 2
        return out


def test_where_returns_end_is_recorded(tmp_path: Path) -> None:
    env = {"_target_": f"{__name__}.Playing"}
    gathered(tmp_path, env=env, episodes=2, success_only=False)
    kept = read_episodes(tmp_path)
    assert kept.length.tolist() == [3, 5]
    assert kept.steps[RETURN_ENDS].int().tolist() == [0, 1, 0, 0, 1, 0, 0, 0]
    assert return_ends(kept).int().tolist() == [0, 1, 1, 0, 1, 0, 0, 0], "or a termination"


class FromTheSecond(Intervener):
    """Takes over at the second step of each episode, and acts at random, between 0.5 and 1."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def over(self, obs: Tensors, first: torch.Tensor) -> torch.Tensor:
        return ~first

    def act(self, obs: Tensors, first: torch.Tensor) -> torch.Tensor:
        return 0.5 + 0.5 * torch.rand(len(first), *self.spec.act.shape)


def test_corrections_are_recorded_as_a_persons_steps(tmp_path: Path) -> None:
    target = "embodied.rewards.success.interventions.Corrections"
    node = {"_target_": target, "intervener": {"_target_": f"{__name__}.FromTheSecond"}}
    for name in ("one", "again"):
        gathered(tmp_path / name, corrections=node, episodes=2, success_only=False)
    kept, again = read_episodes(tmp_path / "one"), read_episodes(tmp_path / "again")
    human = kept.steps["intervened"].flatten()
    assert human.int().tolist() == [0, 1, 1, 0, 1, 1, 1, 1]
    assert (kept.steps["action"][human] >= 0.5).all(), "what was executed"
    assert torch.equal(kept.steps["action"], again.steps["action"]), "the seed decides"


def test_episodes_come_in_turns_not_as_they_end() -> None:
    """Rows of 3 and 5 steps end in the order 3 5 3 3 5 3; in turns they alternate."""
    for number, episode in enumerate(played(Counter(Config()), 6)):
        begin, length = 100.0 * (number % 2), (3, 5)[number % 2]
        expected = begin + torch.arange(length, dtype=torch.float32)
        assert torch.equal(episode["obs/state"].flatten(), expected)
        assert episode["next_obs/state"].item() == begin + length
        assert torch.equal(episode["reward"], expected)
        last = episode["terminated"] if number % 2 == 0 else episode["truncated"]
        assert last.tolist() == [False] * (length - 1) + [True]


def test_the_seed_alone_decides_whoever_else_draws_random_numbers() -> None:
    whole, env, actions = played(Counter(Config()), 4, seed=7), Counter(Config()), []
    for episode, _ in islice(play(Random(RandomConfig(), env.spec), env, 7), 4):
        actions.append(episode["action"])
        torch.rand(3)
    assert all(torch.equal(a, b["action"]) for a, b in zip(actions, whole, strict=True))


def test_all_or_only_the_successful(tmp_path: Path) -> None:
    assert gathered(tmp_path / "won") == (4, 7)
    assert read_episodes(tmp_path / "won").length.tolist() == [3, 3, 3, 3]
    assert gathered(tmp_path / "all", success_only=False) == (4, 4)
    every = read_episodes(tmp_path / "all")
    assert every.length.tolist() == [3, 5, 3, 5]
    assert [note["number"] for note in every.info] == [0, 1, 2, 3]


def test_going_on_is_the_same_as_not_stopping(tmp_path: Path) -> None:
    """Stopped after two episodes, with the process gone, then asked again for four."""

    class Gone(BaseException):
        pass

    def stop(kept: int, played: int) -> None:
        if kept == 2:
            raise Gone

    gathered(tmp_path / "whole")
    with pytest.raises(Gone):
        gathered(tmp_path / "cut", stop)
    assert len(read_episodes(tmp_path / "cut")) == 2
    gathered(tmp_path / "cut")
    whole, cut = read_episodes(tmp_path / "whole"), read_episodes(tmp_path / "cut")
    assert whole.length.tolist() == cut.length.tolist()
    assert torch.equal(whole.steps["action"], cut.steps["action"])


def test_a_demonstrator_that_never_succeeds_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, lost = Counter.step, {"success": torch.zeros(2, dtype=torch.bool)}
    monkeypatch.setattr(Counter, "step", lambda *given: replace(step(*given), log=lost))
    with pytest.raises(DatasetError, match="succeeded in 0 of 100 episodes"):
        gathered(tmp_path)


def test_a_run_demonstrates_with_as_many_steps_of_a_chunk_as_it_was_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy("random.Random", Counter(Config()).spec)
    checkpoint.save(tmp_path / "checkpoints" / "00000100", policy, 0)
    (tmp_path / "run.yaml").write_text("{format: 1, execute: 3}")
    asked: list[int | None] = []

    def noted(config: CollectConfig, tell: Any) -> tuple[int, int]:
        asked.append(config.execute)
        return 0, 0

    monkeypatch.setattr(collecting, "collect", noted)
    words = ["env=two_gap", f"policy={tmp_path}", f"out={tmp_path / 'demos'}"]
    for more in ([], ["execute=2"], ["execute=null"]):
        collect_words([*words, *more], verbose=False)
    assert asked == [3, 2, None]
