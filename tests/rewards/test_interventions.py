"""Somebody takes over: when, whose step it was, what is stored, what it costs, who learns what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.policies.scripted.intervener import Config as WatcherConfig
from embodied.policies.scripted.intervener import Intervener, ProgressIntervener
from embodied.rewards.success.interventions import Config, Interventions, InterventionWrapper
from embodied.training.collector import Collector
from tests.builders import make_policy, node_of
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter

NAMES = ("d_x", "d_y", "d_z")
FAR = Spec({"state": Leaf((3,), names=NAMES)}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
HAND = node_of("policies.random.Random")
FIRST = torch.tensor([True, True])


def watcher(**settings: Any) -> ProgressIntervener:
    return ProgressIntervener(WatcherConfig(HAND, distance="d", **settings), FAR, 2)


def seen(*far: float) -> Tensors:
    return {"state": torch.tensor([[value, 0.0, 0.0] for value in far])}


def test_it_takes_over_where_nothing_gets_better_and_lets_go_again() -> None:
    made = watcher(patience=3, better=0.05, hold=2)
    # Row 0 gets nearer all the time; row 1 by a centimetre a step, which is too little.
    asked = [(1.0 - 0.1 * k, 1.0 - 0.01 * k) for k in range(9)]
    over = [made.over(seen(*far), FIRST if k == 0 else ~FIRST) for k, far in enumerate(asked)]
    assert not any(rows[0] for rows in over)
    # Three steps without 5 cm, two in hand, and then three more.
    assert [bool(rows[1]) for rows in over] == [*[False] * 3, True, True, *[False] * 2, True, True]
    assert made.over(seen(0.5, 0.5), torch.tensor([False, True])).tolist() == [False, False]


def test_it_blunders_as_often_as_it_is_told() -> None:
    made = watcher(patience=10**6, blunder=0.1, hold=1)
    rows = [made.over(seen(1.0, 1.0), ~FIRST) for _ in range(2000)]
    assert torch.stack(rows).float().mean().item() == pytest.approx(0.1, abs=0.02)
    with pytest.raises(ConfigError, match="e_x is not an element of"):
        ProgressIntervener(WatcherConfig(HAND, distance="e"), FAR, 2)


class Scripted(Intervener):
    """Has rows in hand when it is said so, and does 0.5."""

    def __init__(self, over: list[list[bool]]) -> None:
        self.plan, self.seen = iter(over), list[Tensor]()

    def executed(self, action: Tensor) -> None:
        self.seen.append(action)

    def over(self, obs: Tensors, first: Tensor) -> Tensor:
        return torch.tensor(next(self.plan))

    def act(self, obs: Tensors, first: Tensor) -> Tensor:
        return torch.full((len(first), 1), 0.5)


def test_the_step_before_pays_and_what_was_done_is_stored() -> None:
    plan = [[False, False], [False, True], [True, True], [True, False], [True, False]]
    scripted = Scripted(plan)
    env = InterventionWrapper(Counter(CounterConfig(ends=(3, 100))), scripted, True)
    rollout = Collector(env, make_policy("random.Random", env.spec), 0.9)
    stored, steps = zip(*(rollout.step() for _ in range(4)), strict=True)
    # Row 1 is taken in the second step: the first one pays. Row 0 in the third: the second does.
    # Row 0's episode ends with its third step: who has the next in hand took nothing over.
    paid = torch.stack([rows["reward"] for rows in stored])
    assert paid.tolist() == [[0, -1], [-1, 0], [0, 0], [0, 0]]
    theirs = torch.stack([rows["intervened"] for rows in stored])
    assert theirs.tolist() == plan[:4]
    action = torch.stack([rows["action"] for rows in stored])
    assert torch.equal(action, torch.stack([step.log["executed"] for step in steps]))
    assert torch.equal(action, torch.stack(scripted.seen))
    assert torch.equal((action == 0.5)[..., 0], theirs)
    assert not rollout.savable


def test_chunks_cannot_be_taken_over_from() -> None:
    env = InterventionWrapper(Counter(CounterConfig()), Scripted([[True, True]] * 5), False)
    policy = make_policy("random.Random", env.spec, chunk=2)
    with pytest.raises(ConfigError, match="execute=1"):
        Collector(env, policy, 0.9).step()


def test_a_demonstration_is_nobodys_complaint() -> None:
    node = node_of("policies.scripted.intervener.ProgressIntervener", hand=HAND, distance="d")
    rows = {"reward": torch.tensor([1.0, 0.0, -1.0])}
    assert Interventions(Config(node), 2, 0)(rows).tolist() == [0.0, 0.0, -1.0]
    assert Interventions(Config(node, pay="env"), 2, 0)(rows).tolist() == [1.0, 0.0, -1.0]
