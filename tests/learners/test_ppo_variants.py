"""PPO with one GRU, with demonstrations, and that imitates its own best episodes (RAPID)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, nest
from embodied.learners.critics import ValueConfig
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy.ppo import Ppo
from embodied.learners.on_policy.ppo_cloning import (
    Episode,
    EpisodeBuffer,
    PpoDemos,
    PpoRapid,
    remaining,
)
from embodied.learners.on_policy.ppo_shared import Config, PpoShared
from embodied.training.logger import Log
from embodied.training.train import train
from tests.builders import make_learner
from tests.learners.test_ppo import MEMORY, NODES, SPECS, carry_of, played
from tests.learners.test_ppo import make as make_ppo
from tests.training.test_teaching import NODE, PPO


def make_variant(target: str, name: str, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    policy = build(NODES[name], Policy, spec=SPECS[name])
    given = {"horizon": 6, "batch_size": 12, "epochs": 1, "value": {"hidden": [8]}}
    given |= {"bc_batch_size": 8, "bc_lr": 0.02, **settings}
    return make_learner(f"on_policy.{target}", policy, run=RunPlan(decisions=240), **given)


def make(name: str = "categorical", seed: int = 0, **settings: Any) -> PpoRapid:
    return make_variant("ppo_cloning.PpoRapid", name, seed, **settings)


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
    least = best.scores[-1]
    assert best.metrics() == {"kept": 5, "kept_least": least, "kept_return": pytest.approx(0.75)}


def test_newer_ones_first_no_weight_and_an_episode_that_is_too_long() -> None:
    best = EpisodeBuffer(4, (1.0, 0.0, 0.0))
    best.take([episode("ab", 1.0), episode("cc", 1.0), episode("dddd", 0.9)])
    assert actions(best) == "ccab" and best.scores == [1.0, 1.0]
    assert not best.number  # nobody asked for counts
    rare = EpisodeBuffer(4, (0.0, 0.0, 1.0))
    rare.take([episode("aa", 5.0), episode("ab", 0.0), episode("c", 0.0)])
    assert rare.scores == pytest.approx([1.0, (1 / 3**0.5 + 1) / 2, 1 / 3**0.5])
    assert actions(rare) == "caba"
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
    loss = learner._clone(30)
    with torch.no_grad():
        assert learner._evaluate_actions(table)[0].mean() > before + 0.1
    assert torch.isfinite(loss)


@pytest.mark.parametrize("kind", ["rapid", "demos"])
def test_imitating_nothing_it_is_ppo(kind: str) -> None:
    learner = make(bc_steps=0) if kind == "rapid" else make_shown(rows=0)
    plain = make_ppo("categorical")
    for _ in range(3):
        batch = played(plain)
        for each in (plain, learner):
            torch.manual_seed(5)
            each.update(batch)
    for one, other in zip(learner.policy.parameters(), plain.policy.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["rapid", "demos"])
def test_cloning_fades(kind: str) -> None:
    fading: dict[str, Any] = {"bc_decay": 0.5, "bc_steps": 4}
    at_once: dict[str, Any] = {"bc_pretrain_steps": 0, "critic_warmup": 0}
    learner: Any = make(**fading) if kind == "rapid" else make_shown(**fading, **at_once)
    steps, clone = [], learner._clone
    learner._clone = lambda count: (steps.append(count), clone(count))[1]
    for _ in range(6):  # each batch is 24 of 240 decisions
        learner.update(played(learner))
    assert steps == [3, 2, 2, 1]  # round(4 (1 - 24 k / 120)): 3.2, 2.4, 1.6, 0.8, and none
    assert remaining(100, fade=0.0, total=0) == 1


@pytest.mark.parametrize("target", ["ppo_cloning.PpoRapid", "ppo_cloning.PpoDemos"])
def test_what_it_does_not_take(target: str) -> None:
    spec = SPECS["normal"]
    with pytest.raises(ConfigError, match="without memory"):
        policy = build({**MEMORY, "inner": NODES["normal"]}, Policy, spec=spec)
        make_learner(f"on_policy.{target}", policy)
    with pytest.raises(ConfigError, match="length of the run"):
        make_learner(f"on_policy.{target}", build(NODES["normal"], Policy, spec=spec), bc_decay=0.5)


def make_shown(name: str = "categorical", rows: int = 40, **settings: Any) -> PpoDemos:
    clone = {"bc_pretrain_steps": 30, "critic_warmup": 1, "bc_steps": 2, **settings}
    learner: PpoDemos = make_variant("ppo_cloning.PpoDemos", name, **clone)
    if rows:
        learner.set_demonstrations(demos(name, rows))
    return learner


def demos(name: str, rows: int) -> Tensors:
    """Who shows does what the sign of the first number says."""
    random = torch.Generator().manual_seed(3)
    state = torch.randn(rows, 3, generator=random)
    sign = state[:, :1] > 0
    action = (
        sign.long() if name == "categorical" else (sign.float() - 0.5)[:, None].expand(-1, 1, 2)
    )
    valid = torch.ones(rows, 1, dtype=torch.bool)
    truth = torch.zeros(rows, 2)
    shown = {"obs/state": state, "obs/critic/truth": truth, "action": action, "valid": valid}
    return {**shown, "episode": torch.zeros(rows, dtype=torch.int64)}


def moved(learner: PpoDemos, batch: Tensors) -> tuple[bool, bool]:
    """Whether the policy's and the critic's weights move in an update."""
    parts = (learner.policy, learner.value)
    before = [[p.clone() for p in part.parameters()] for part in parts]
    learner.update(batch)
    policy, value = (
        any(not torch.equal(p, q) for p, q in zip(part.parameters(), old, strict=True))
        for part, old in zip(parts, before, strict=True)
    )
    return policy, value


@pytest.mark.parametrize("name", ["categorical", "normal"])
def test_first_it_clones_then_values_learn_then_all(name: str) -> None:
    learner = make_shown(name)
    shown = demos(name, 40)
    with torch.no_grad():
        before = learner.policy.loss(shown).mean()  # type: ignore[attr-defined]
    assert moved(learner, played(learner)) == (True, False)
    with torch.no_grad():
        assert learner.policy.loss(shown).mean() < before - 0.1  # type: ignore[attr-defined]
    assert moved(learner, played(learner)) == (False, True)  # warm
    assert moved(learner, played(learner)) == (True, True)


def test_a_run_says_what_is_missing(tmp_path: Path) -> None:
    shown = {**PPO["learner"], "_target_": "embodied.learners.on_policy.ppo_cloning.PpoDemos"}  # type: ignore[dict-item]
    node = {**NODE, **PPO, "learner": shown, "teacher": None, "out": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match="demos=DIR"):
        train(node, Log(tmp_path, silent=True))


SETTINGS: dict[str, Any] = {"normalize": False, "batch_size": 24}


def pair() -> tuple[Ppo, PpoShared]:
    """The same policy; the other's critic has a copy of the policy's GRU and the same MLP."""
    other = make_ppo(memory=True, value={"hidden": [8], "obs": ["state"]}, **SETTINGS)
    config = Config(**SETTINGS, horizon=other.horizon, value=ValueConfig(hidden=(8,)))
    learner = PpoShared(config, other.policy, other.policy.spec, RunPlan())
    other.value.memory.load_state_dict(other.policy.memory.state_dict())  # type: ignore[operator,union-attr]
    other.value.net.load_state_dict(learner.value.net.state_dict())
    return other, learner


def test_tables_losses_and_gradients_are_those_of_a_copied_gru() -> None:
    """The one GRU has the gradients of both losses."""
    other, learner = pair()
    batch = played(other)
    carry = carry_of(batch)
    kept = {key: value for key, value in batch.items() if not key.startswith("carry/")}
    other.memory = carry["h"]  # the hidden state of its critic
    theirs, ours = other._table(kept, carry)[0], learner._table(kept, carry)[0]
    assert set(theirs) - set(ours) == {"memory"}
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], msg=key)
    two, heard = other._loss(theirs)
    two.backward()
    memories = (other.policy.memory.parameters(), other.value.memory.parameters())  # type: ignore[union-attr]
    summed = [sum(p.grad for p in both) for both in zip(*memories, strict=True)]
    other.policy.zero_grad()
    one, said = learner._loss(ours)
    torch.testing.assert_close(one, two)
    for key in said:
        torch.testing.assert_close(said[key], heard[key], msg=key)
    one.backward()
    for gradient, parameter in zip(summed, learner.policy.memory.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-4)


def test_an_update_moves_all_and_nothing_is_there_twice() -> None:
    _, learner = pair()
    parameters = list(learner.parameters())
    assert len({id(p) for p in parameters}) == len(parameters)
    before = [p.clone() for p in parameters]
    metrics = learner.update(played(learner))
    assert all(torch.isfinite(value) for value in metrics.values())
    assert all(not torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    values = learner.state_values({"state": torch.zeros(3, 3)})
    assert values.shape == (3,)


def test_what_does_not_fit_is_one_line() -> None:
    with pytest.raises(ConfigError, match="needs a recurrent policy"):
        flat = make_ppo(memory=False, **SETTINGS)
        PpoShared(Config(), flat.policy, flat.policy.spec, RunPlan())
    _, learner = pair()
    with pytest.raises(ConfigError, match=r"value\.obs has no effect"):
        config = Config(value=ValueConfig(obs=("state",)))
        PpoShared(config, learner.policy, learner.policy.spec, RunPlan())
