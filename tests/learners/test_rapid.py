"""PPO that imitates its own best episodes: scores, order and what is kept by hand, exact resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, nest
from embodied.learners.learner import Learner, RunPlan
from embodied.learners.on_policy.ppo_rapid import Episode, EpisodeBuffer, PpoRapid
from embodied.training.logger import Log
from embodied.training.train import train
from tests.builders import node_of
from tests.learners.test_ppo import BOX, CHOICE, MEMORY, NODES, OBS, played
from tests.learners.test_ppo import make as make_ppo

TARGET = "embodied.learners.on_policy.ppo_rapid.PpoRapid"


def make(name: str = "categorical", seed: int = 0, **settings: Any) -> PpoRapid:
    torch.manual_seed(seed)
    spec = Spec(OBS, BOX if name == "normal" else CHOICE, dt=0.1)
    given = {"horizon": 6, "batch_size": 12, "epochs": 1, "value": {"hidden": [8]}}
    node = {"_target_": TARGET, **given, "bc_batch_size": 8, "bc_lr": 0.02, **settings}
    return build(
        node,
        Learner,
        policy=build(NODES[name], Policy, spec=spec),
        spec=spec,
        run=RunPlan(decisions=240),
    )


def episode(seen: str, ret: float) -> Episode:
    """One that saw these letters, and did what their places in the alphabet say."""
    numbers = torch.tensor([ord(letter) - ord("a") for letter in seen])
    return Episode({"obs/state": numbers[:, None].float(), "action": numbers}, ret)


def actions(best: EpisodeBuffer) -> str:
    return "".join(chr(ord("a") + number) for number in best.table["action"].tolist())


def test_scores_and_order_by_hand() -> None:
    best = EpisodeBuffer(5, (1.0, 0.1, 0.001))
    best.take([episode("aab", 0.5)])
    # Two of three are different; a was seen twice, b once.
    first = 0.5 + 0.1 * 2 / 3 + 0.001 * (2 / 2**0.5 + 1) / 3
    assert best.scores == pytest.approx([first], abs=1e-12)
    best.take([episode("bc", 0.0)])
    # b has now been seen twice: the first episode's score falls.
    first = 0.5 + 0.1 * 2 / 3 + 0.001 * (3 / 2**0.5) / 3
    second = 0.1 * 1 + 0.001 * (1 / 2**0.5 + 1) / 2
    assert best.scores == pytest.approx([first, second], abs=1e-12)
    assert actions(best) == "aabbc" and len(best) == 5
    best.take([episode("dd", 0.5)])
    third = 0.5 + 0.1 * 1 / 2 + 0.001 * (2 / 2**0.5) / 2
    assert best.scores == pytest.approx([first, third], abs=1e-12)
    assert actions(best) == "aabdd"  # five are kept, and the worst has left
    best.take([episode("efgh", 1.0)])
    assert actions(best) == "efgha"  # of the next best one only its beginning
    assert best.scores == pytest.approx([1 + 0.1 + 0.001, first], abs=1e-12)
    assert best.metrics() == {
        "kept": 5.0,
        "kept_least": best.scores[-1],
        "kept_return": pytest.approx(0.75),
    }


def test_the_newer_of_equals_is_first_and_weights_may_be_none() -> None:
    best = EpisodeBuffer(4, (1.0, 0.0, 0.0))
    best.take([episode("ab", 1.0), episode("cc", 1.0), episode("dddd", 0.9)])
    assert actions(best) == "ccab" and best.scores == [1.0, 1.0]
    assert not best.number  # nobody asked for counts
    rare = EpisodeBuffer(4, (0.0, 0.0, 1.0))
    rare.take([episode("aa", 5.0), episode("ab", 0.0), episode("c", 0.0)])
    assert rare.scores == pytest.approx([1.0, (1 / 3**0.5 + 1) / 2, 1 / 3**0.5])
    assert actions(rare) == "caba"


def test_an_episode_longer_than_there_is_room_for() -> None:
    best = EpisodeBuffer(3, (1.0, 0.1, 0.001))
    best.take([episode("abcdef", 1.0)])
    assert actions(best) == "abc" and best.episodes[0].local == 1.0


def test_what_decides_is_what_the_policy_sees() -> None:
    """Not what only a critic does; and all of its observations together."""
    learner = make(bc_steps=0)
    batch = segment([[1.0] * 4], [[0, 0, 0, 1]])
    batch["obs/critic/truth"] = torch.randn(4, 1, 2)
    learner.update(batch)
    assert learner.best.episodes[0].local == 0.25
    assert set(learner.best.table) == {"obs/state", "action"}
    best = EpisodeBuffer(9, (1.0, 0.1, 0.001))
    rows = {"obs/a": torch.tensor([[0], [0], [1]]), "obs/b": torch.tensor([[0], [1], [0]])}
    best.take([Episode({**rows, "action": torch.zeros(3)}, 0.0)])
    assert best.episodes[0].local == 1.0


def segment(
    reward: list[list[float]], ended: list[list[int]], first: list[list[int]] | None = None
) -> Tensors:
    """Decisions of rows that stand still; lists are rows' times."""
    over = torch.tensor(ended, dtype=torch.bool).T
    began = over.roll(1, 0) if first is None else torch.tensor(first, dtype=torch.bool).T
    if first is None:
        began[0] = True
    times = over.shape
    obs = {"state": torch.ones(*times, 3), "critic/truth": torch.zeros(*times, 2)}
    return {
        **nest(obs, "obs"),
        **nest(obs, "next_obs"),
        "action": torch.arange(over.numel()).view(times) % 4,
        "reward": torch.tensor(reward).T,
        "discount": 0.9 * torch.ones(times),
        "ended": over,
        "first": began,
        "valid": torch.ones(times, dtype=torch.bool),
    }


def test_episodes_go_on_over_batches() -> None:
    """Row 0 ends two episodes; row 1 begins one, which ends in the next batch."""
    learner = make(bc_steps=0)
    learner.update(segment([[1, 2, 4, 8], [1, 1, 1, 1.0]], [[0, 1, 1, 0], [0, 0, 0, 0]]))
    assert sorted(each.ret for each in learner.best.episodes) == [3, 4]
    assert [len(each) for each in learner.open] == [1, 4]
    going = [[0] * 4, [0, 0, 1, 0]]
    learner.update(segment([[1, 1, 1, 1], [1, 2, 3, 4.0]], [[0] * 4, [0, 1, 0, 0]], going))
    assert [each.ret for each in learner.best.episodes] == [7, 4, 3]
    # Actions are numbered in the order of time: 1 3 5 7 of the first batch, 1 3 of the second.
    assert learner.best.table["action"].tolist() == [1, 3, 1, 3, 1, 3, 0, 0, 2]
    assert [each.ret for each in learner.open] == [12, 7] and len(learner.open[0]) == 5
    again = [[1, 0, 0, 0], [0, 0, 0, 0]]  # row 0 was broken off
    learner.update(segment([[1, 0, 0, 0], [0, 0, 0, 0.0]], [[1, 0, 0, 0], [0] * 4], again))
    assert sorted(each.ret for each in learner.best.episodes) == [1, 3, 4, 7]


def test_padding_and_what_is_not_to_be_learned_from_is_left_out() -> None:
    learner = make(bc_steps=0)
    batch = segment([[1, 2, 4, 8], [1, 1, 1, 1.0]], [[0, 0, 1, 1], [0, 0, 0, 1]])
    batch["valid"][3, 0] = False
    batch["learn"] = torch.tensor([[True, False]]).expand(4, 2)
    learner.update(batch)
    assert [each.ret for each in learner.best.episodes] == [7] and len(learner.best) == 3


@pytest.mark.parametrize("name", ["categorical", "normal"])
def test_what_was_best_becomes_likelier(name: str) -> None:
    learner = make(name, bc_steps=0)
    batch = played(learner)
    learner.update(batch)
    table = learner.best.table
    with torch.no_grad():
        before = learner._evaluate_actions(table)[0].mean()
    loss = learner._imitate(30)
    with torch.no_grad():
        assert learner._evaluate_actions(table)[0].mean() > before + 0.1
    assert torch.isfinite(loss)


def test_imitating_nothing_it_is_ppo() -> None:
    learner, plain = make(bc_steps=0), make_ppo("categorical")
    for _ in range(3):
        batch = played(plain)
        for each in (plain, learner):
            torch.manual_seed(5)
            each.update(batch)
    for one, other in zip(learner.policy.parameters(), plain.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_fades() -> None:
    learner, steps = make(bc_decay=0.5, bc_steps=4), []
    imitate = learner._imitate
    learner._imitate = lambda count: (steps.append(count), imitate(count))[1]  # type: ignore
    for _ in range(6):  # each batch is 24 of 240 decisions
        learner.update(played(learner))
    assert steps == [3, 2, 2, 1]  # round(4 (1 - 24 k / 120))


def test_it_goes_on_exactly() -> None:
    """With episodes in the air, as a checkpoint keeps it, into a learner of another seed."""
    learner, other = make(), make(seed=3)
    batches = [played(make()) for _ in range(4)]
    learner.update(batches[0])
    assert any(map(len, learner.open)) and len(learner.best)
    other.set_state(copy.deepcopy(learner.get_state()))
    for each in (learner, other):
        for seed, batch in enumerate(batches[1:]):
            torch.manual_seed(seed)
            each.update(batch)
    mine, theirs = learner.state_dict(), other.state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert learner.best.scores == other.best.scores and learner.best.number == other.best.number
    assert str(learner.get_state()["best"]) == str(other.get_state()["best"])


def test_a_run_is_resumed_exactly(tmp_path: Path) -> None:
    """In MiniGrid, between two batches and in the middle of episodes."""
    world = node_of("envs.minigrid.env.MiniGrid", id="MiniGrid-Empty-5x5-v0", num_envs=4)
    node = {
        "name": "rapid",
        "env": {**world, "backend": "gymnasium", "threads": 1},
        "policy": {**NODES["categorical"], "hidden": [8]},
        "learner": {"_target_": TARGET, "horizon": 20, "batch_size": 40, "epochs": 1, "size": 90},
        "steps": 720,
        "eval": {"episodes": 2, "num_envs": 2},
        "video": False,
    }

    def run(folder: Path, **changes: Any) -> dict[str, Any]:
        train({**node, "out": str(folder), **changes}, Log(folder, silent=True))
        return checkpoint.load_state(folder, "learner")

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", steps=360)
    again = run(tmp_path / "parts", resume=str(tmp_path / "parts"))
    assert len(whole["best"]["scores"]) > 1 and str(again) == str(whole)


def test_what_it_does_not_take() -> None:
    spec = Spec(OBS, BOX, dt=0.1)
    policy = build({**MEMORY, "inner": NODES["normal"]}, Policy, spec=spec)
    with pytest.raises(ConfigError, match="without memory"):
        build({"_target_": TARGET}, Learner, policy=policy, spec=spec)
    with pytest.raises(ConfigError, match="length of the run"):
        build(
            {"_target_": TARGET, "bc_decay": 0.5},
            Learner,
            policy=build(NODES["normal"], Policy, spec=spec),
            spec=spec,
        )
