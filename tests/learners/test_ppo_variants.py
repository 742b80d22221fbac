"""PPO with one GRU, demonstrations, its own best episodes, an offline critic, another sampling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, each, nest, under
from embodied.learners.critics import ValueConfig
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy.hnpg import action_values
from embodied.learners.on_policy.ppo import Config, Ppo, PpoShared
from embodied.learners.on_policy.ppo_cloning import remaining
from embodied.learners.on_policy.ppo_demos import PpoDemos
from embodied.learners.on_policy.ppo_rapid import Episode, EpisodeBuffer, PpoRapid
from embodied.learners.on_policy.props import Props, sampling_error
from embodied.training.collector import Collector
from embodied.training.logger import Log
from embodied.training.on_policy import OnPolicyLoop
from embodied.training.train import train
from tests.builders import LINE, SPEC, make_learner, make_policy, transitions
from tests.contract.test_learner import segment
from tests.learners.parts import copies, moved, slopes
from tests.learners.test_ppo import MEMORY, NODES, SPECS, carry_of, played, steps
from tests.learners.test_ppo import make as make_ppo
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter
from tests.training.test_teaching import NODE, PPO


def make_variant(target: str, name: str, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    given = {"horizon": 6, "batch_size": 12, "epochs": 1, "value": {"hidden": [8]}}
    given |= {"bc_batch_size": 8, "bc_lr": 0.02, **settings}
    policy = build(NODES[name], Policy, spec=SPECS[name])
    return make_learner(f"on_policy.{target}", policy, run=RunPlan(decisions=240), **given)


def make(name: str = "categorical", seed: int = 0, **settings: Any) -> PpoRapid:
    return make_variant("ppo_rapid.PpoRapid", name, seed, **settings)


def episode(seen: str, ret: float) -> Episode:
    """One that saw these letters, and did what their places in the alphabet say."""
    numbers = torch.tensor([ord(letter) - ord("a") for letter in seen])
    return Episode({"obs/state": numbers[:, None].float(), "action": numbers}, ret)


def actions(best: EpisodeBuffer) -> str:
    return "".join(chr(ord("a") + number) for number in best.table["action"].tolist())


def test_scores_and_order_by_hand() -> None:
    """Return, share of different decisions, and mean of 1 / sqrt(times seen), of five decisions."""
    best = EpisodeBuffer(5, (1.0, 0.1, 0.001))
    aab = 0.5 + 0.1 * 2 / 3 + 0.001 * (2 / 2**0.5 + 1) / 3
    aab_again = 0.5 + 0.1 * 2 / 3 + 0.001 * (3 / 2**0.5) / 3  # b has been seen twice then
    bc = 0.1 * 1 + 0.001 * (1 / 2**0.5 + 1) / 2
    dd = 0.5 + 0.1 * 1 / 2 + 0.001 * (2 / 2**0.5) / 2
    for seen, ret, scores, kept in (
        ("aab", 0.5, [aab], "aab"),
        ("bc", 0.0, [aab_again, bc], "aabbc"),
        ("dd", 0.5, [aab_again, dd], "aabdd"),  # five are kept, and the worst has left
        ("efgh", 1.0, [1 + 0.1 + 0.001, aab_again], "efgha"),  # of the next best its beginning
    ):
        best.take([episode(seen, ret)])
        assert best.scores == pytest.approx(scores, abs=1e-12) and actions(best) == kept
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
    long = EpisodeBuffer(3, (1.0, 0.1, 0.001))
    long.take([episode("abcdef", 1.0)])
    assert actions(long) == "abc" and long.episodes[0].local == 1.0


def test_what_decides_is_what_the_policy_sees() -> None:
    """Not what only a critic does; and all of its observations together."""
    learner = make(bc_steps=0)
    batch = standing([[1.0] * 4], [[0, 0, 0, 1]])
    batch["obs/critic/truth"] = torch.randn(4, 1, 2)
    learner.update(batch)
    assert learner.best.episodes[0].local == 0.25
    assert set(learner.best.table) == {"obs/state", "action"}
    best = EpisodeBuffer(9, (1.0, 0.1, 0.001))
    rows = {"obs/a": torch.tensor([[0], [0], [1]]), "obs/b": torch.tensor([[0], [1], [0]])}
    best.take([Episode({**rows, "action": torch.zeros(3)}, 0.0)])
    assert best.episodes[0].local == 1.0


def standing(reward: list[list[float]], ended: list[list[int]], going: bool = False) -> Tensors:
    """Decisions of rows that stand still; lists are rows' times. `going`: episodes go on."""
    over = torch.tensor(ended, dtype=torch.bool).T
    first = over.roll(1, 0)
    first[0] = not going
    times, yes = over.shape, torch.ones_like(over)
    obs = {"state": torch.ones(*times, 3), "critic/truth": torch.zeros(*times, 2)}
    return {
        **nest(obs, "obs"),
        **nest(obs, "next_obs"),
        "action": torch.arange(over.numel()).view(times) % 4,
        "reward": torch.tensor(reward).T,
        "discount": 0.9 * yes,
        **{"ended": over, "first": first, "valid": yes},
    }


def test_episodes_go_on_over_batches() -> None:
    """Row 0 ends two episodes; row 1 begins one, which ends in the next batch."""
    learner = make(bc_steps=0)
    learner.update(standing([[1, 2, 4, 8], [1, 1, 1, 1.0]], [[0, 1, 1, 0], [0, 0, 0, 0]]))
    assert sorted(each.ret for each in learner.best.episodes) == [3, 4]
    assert [len(each) for each in learner.open] == [1, 4]
    learner.update(standing([[1, 1, 1, 1], [1, 2, 3, 4.0]], [[0] * 4, [0, 1, 0, 0]], going=True))
    assert [each.ret for each in learner.best.episodes] == [7, 4, 3]
    # Actions are numbered in the order of time: 1 3 5 7 of the first batch, 1 3 of the second.
    assert learner.best.table["action"].tolist() == [1, 3, 1, 3, 1, 3, 0, 0, 2]
    assert [each.ret for each in learner.open] == [12, 7] and len(learner.open[0]) == 5
    broken = standing([[1, 0, 0, 0], [0, 0, 0, 0.0]], [[1, 0, 0, 0], [0] * 4], going=True)
    broken["first"][0, 0] = True  # row 0 was broken off
    learner.update(broken)
    assert sorted(each.ret for each in learner.best.episodes) == [1, 3, 4, 7]


def test_padding_and_what_is_not_to_be_learned_from_is_left_out() -> None:
    learner = make(bc_steps=0)
    batch = standing([[1, 2, 4, 8], [1, 1, 1, 1.0]], [[0, 0, 1, 1], [0, 0, 0, 1]])
    batch["valid"][3, 0] = False
    batch["learn"] = torch.tensor([[True, False]]).expand(4, 2)
    learner.update(batch)
    assert [each.ret for each in learner.best.episodes] == [7] and len(learner.best) == 3


@torch.no_grad()
@pytest.mark.parametrize("name", ["categorical", "normal"])
def test_what_was_best_becomes_likelier(name: str) -> None:
    learner = make(name, bc_steps=0)
    with torch.enable_grad():
        learner.update(played(learner))
    table = learner.best.table
    before = learner._evaluate_actions(table)[0].mean()
    with torch.enable_grad():
        loss = learner._clone(30)
    assert learner._evaluate_actions(table)[0].mean() > before + 0.1 and torch.isfinite(loss)


@pytest.mark.parametrize("kind", ["rapid", "demos"])
def test_imitating_nothing_it_is_ppo(kind: str) -> None:
    learner = make(bc_steps=0) if kind == "rapid" else make_shown(rows=0)
    plain = make_ppo("categorical")
    for _ in range(3):
        batch = played(plain)
        for one in (plain, learner):
            torch.manual_seed(5)
            one.update(batch)
    assert not any(moved(plain.policy.parameters(), learner.policy.parameters()))


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


@pytest.mark.parametrize("target", ["ppo_rapid.PpoRapid", "ppo_demos.PpoDemos"])
def test_what_it_does_not_take(target: str) -> None:
    spec = SPECS["normal"]
    with pytest.raises(ConfigError, match="without memory"):
        policy = build({**MEMORY, "inner": NODES["normal"]}, Policy, spec=spec)
        make_learner(f"on_policy.{target}", policy)
    with pytest.raises(ConfigError, match="length of the run"):
        make_learner(f"on_policy.{target}", build(NODES["normal"], Policy, spec=spec), bc_decay=0.5)


def make_shown(name: str = "categorical", rows: int = 40, **settings: Any) -> PpoDemos:
    clone = {"bc_pretrain_steps": 30, "critic_warmup": 1, "bc_steps": 2, **settings}
    learner: PpoDemos = make_variant("ppo_demos.PpoDemos", name, **clone)
    if rows:
        learner.set_demonstrations(demos(name, rows))
    return learner


def demos(name: str, rows: int) -> Tensors:
    """Who shows does what the sign of the first number says."""
    state = torch.randn(rows, 3, generator=torch.Generator().manual_seed(3))
    sign = state[:, :1] > 0
    normal = (sign.float() - 0.5)[:, None].expand(-1, 1, 2)
    return {
        **{"obs/state": state, "obs/critic/truth": torch.zeros(rows, 2)},
        "action": sign.long() if name == "categorical" else normal,
        "valid": torch.ones(rows, 1, dtype=torch.bool),
        "episode": torch.zeros(rows, dtype=torch.int64),
    }


def parts_moved(learner: PpoDemos, batch: Tensors) -> tuple[bool, bool]:
    """Whether the policy's and the critic's weights move in an update."""
    parts = (learner.policy, learner.value)
    before = [copies(part.parameters()) for part in parts]
    learner.update(batch)
    policy, value = (
        any(moved(old, part.parameters())) for part, old in zip(parts, before, strict=True)
    )
    return policy, value


@pytest.mark.parametrize("name", ["categorical", "normal"])
def test_first_it_clones_then_values_learn_then_all(name: str) -> None:
    learner, shown = make_shown(name), demos(name, 40)
    policy: Any = learner.policy
    before = policy.loss(shown).mean().item()
    assert parts_moved(learner, played(learner)) == (True, False)
    assert policy.loss(shown).mean().item() < before - 0.1
    assert parts_moved(learner, played(learner)) == (False, True)  # warm
    assert parts_moved(learner, played(learner)) == (True, True)


def test_an_adaptive_rate_waits_for_a_policy_that_waits() -> None:
    """As its divergence is 0, the rate rose by 1.5 in each step of the values, up to 0.01."""
    learner = make_shown(critic_warmup=2, schedule="adaptive", lr=1e-4, epochs=20)
    for _ in range(3):
        learner.update(played(learner))
        assert learner.lr.lr_scale == 1
    learner.update(played(learner))
    assert learner.lr.lr_scale != 1


def test_a_run_says_what_is_missing(tmp_path: Path) -> None:
    shown = {**PPO["learner"], "_target_": "embodied.learners.on_policy.ppo_demos.PpoDemos"}  # type: ignore[dict-item]
    node = {**NODE, **PPO, "learner": shown, "teacher": None, "out": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match="demos=DIR"):
        train(node, Log(tmp_path, silent=True))


SETTINGS: dict[str, Any] = {"normalize": False, "batch_size": 24}


def shared(other: Ppo, **settings: Any) -> PpoShared:
    """A learner of the policy of `other` whose critic has the policy's GRU."""
    config = Config(**SETTINGS, horizon=6, value=ValueConfig(hidden=(8,), **settings))
    return PpoShared(config, other.policy, other.policy.spec, RunPlan())


def test_tables_losses_and_gradients_are_those_of_a_copied_gru() -> None:
    """The one GRU has the gradients of both losses."""
    other: Any = make_ppo(memory=True, value={"hidden": [8], "obs": ["state"]}, **SETTINGS)
    learner: Any = shared(other)
    other.value.memory.load_state_dict(other.policy.memory.state_dict())
    other.value.net.load_state_dict(learner.value.net.state_dict())
    assert len({id(p) for p in learner.parameters()}) == len(list(learner.parameters()))
    batch = played(other)
    carry = carry_of(batch)
    kept = {key: value for key, value in batch.items() if not key.startswith("carry/")}
    other.memory = carry["h"]  # the hidden state of its critic
    theirs, ours = other._table(kept, carry)[0], learner._table(kept, carry)[0]
    assert set(theirs) - set(ours) == {"memory"}
    torch.testing.assert_close(ours, {key: theirs[key] for key in ours})
    two, heard = other._loss(theirs)
    two.backward()
    memories = (other.policy.memory.parameters(), other.value.memory.parameters())
    summed = [sum(p.grad for p in both) for both in zip(*memories, strict=True)]
    other.policy.zero_grad()
    one, said = learner._loss(ours)
    torch.testing.assert_close((one, said), (two, {key: heard[key] for key in said}))
    one.backward()
    found = [parameter.grad for parameter in learner.policy.memory.parameters()]
    torch.testing.assert_close(found, summed, atol=1e-6, rtol=1e-4)
    assert learner.state_values({"state": torch.zeros(3, 3)}).shape == (3,)


def test_what_does_not_fit_is_one_line() -> None:
    with pytest.raises(ConfigError, match="needs a recurrent policy"):
        shared(make_ppo(memory=False, **SETTINGS))
    with pytest.raises(ConfigError, match=r"value\.obs has no effect"):
        shared(make_ppo(memory=True, **SETTINGS), obs=("state",))
    with pytest.raises(ConfigError, match="single actions"):
        make_hnpg(chunk=2)
    with pytest.raises(ConfigError, match="no effect"):
        make_hnpg(value_weight=1.0)


def make_hnpg(spec: Spec = SPEC, chunk: int = 1, mean: float = 0.0, **settings: Any) -> Any:
    policy = make_policy(
        "diagonal_gaussian.DiagonalGaussian", spec, hidden=[16], log_std=-3.0, chunk=chunk
    )
    policy.net[-1].bias.data.fill_(mean)
    given = {"horizon": 6, "batch_size": 8, "lr": 3e-3, "normalize": False, **settings}
    return make_learner("on_policy.hnpg.Hnpg", policy, **given)


def test_the_target_follows_the_current_policy() -> None:
    """f' = 2 a: r + 2 d E a', a' of the policy, whatever action the data have."""
    learner = make_hnpg(LINE, mean=0.3, value={"hidden": []}, samples=50)
    slopes(learner.target, [2.0, 2.0])
    batch = transitions(8, LINE)
    batch["discount"][-1] = 0.0
    mean = learner.policy({"state": batch["next_obs/state"]})[:, 0]
    expected = batch["reward"] + 2 * batch["discount"] * mean
    torch.testing.assert_close(learner._backup(batch), expected, atol=0.05, rtol=0)


def chain(n: int) -> Tensors:
    """The first state leads to the second, whose reward is the action; all actions equally."""
    state, action = torch.randint(2, (n, 1)).float(), torch.rand(n, 1) * 2 - 1
    return {
        "obs/state": state,
        "action": action,
        "reward": (state * action)[:, 0],
        "discount": 0.9 * (1 - state[:, 0]),
        "next_obs/state": torch.ones(n, 1),
    }


def test_demonstrations_of_any_actions_value_the_policy() -> None:
    """Not the best action of the data, as in Q-learning: 0.9 * 0.5, and f(s', a) = a."""
    torch.manual_seed(0)
    learner = make_hnpg(LINE, mean=0.5, critic_steps=400, tau=0.1)
    learner.set_demonstrations(chain(2000))
    online = chain(64)
    online["target"] = online["reward"]
    kept = online["obs/state"][:, 0] == 1  # returns where the episode ends are known
    learner._fit_critic(each(online, lambda leaf: leaf[kept]))
    state, action = torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([[0.0], [-0.8], [0.8]])
    found = action_values(learner.critic, {"state": state}, action).tolist()
    assert found == pytest.approx([0.45, -0.8, 0.8], abs=0.12)


def test_states_of_demonstrations_join_the_batch() -> None:
    learner = make_hnpg(offline_states=0.5)
    shown = transitions(40, SPEC)
    learner.set_demonstrations(shown)
    batch = segment(learner, torch.Generator().manual_seed(0))
    table, metrics = learner._table(batch, {})
    assert len(table["old"]) == 24 + 12 and metrics["critic_loss"] > 0
    rows = each(table, lambda leaf: leaf[24:])
    obs = {"state": rows["obs/state"]}
    assert (rows["obs/state"][:, None] == shown["obs/state"]).all(2).any(1).all()
    log_prob, _ = learner.policy.evaluate_actions(obs, rows["action"])
    torch.testing.assert_close(rows["old"], log_prob)  # new actions: the ratio starts at 1
    q = action_values(learner.critic, obs, rows["action"])
    torch.testing.assert_close(rows["advantage"], q - rows["value"])


@pytest.mark.parametrize("settings", [{"scale_rewards": True}, {"advantage": "batch"}])
def test_demonstrations_are_in_the_units_of_the_batch(settings: dict[str, Any]) -> None:
    """Rewards are divided by the same deviation, and advantages of both have that of 1."""
    learner = make_hnpg(**settings)
    shown = transitions(40, SPEC)
    learner.set_demonstrations(shown)
    batch = segment(learner, torch.Generator().manual_seed(0))
    table, _ = learner._table(batch | {"reward": 100 * batch["reward"]}, {})
    torch.manual_seed(0)
    backup = learner._backup(shown)
    torch.manual_seed(0)
    later = shown["discount"] * learner.value(under(shown, "next_obs"), learner.target)
    if "advantage" in settings:
        assert table["advantage"][-24:].std(correction=0) == pytest.approx(1.0, abs=1e-4)
    else:
        deviation = (learner.returns.variance + 1e-8).sqrt().item()
        assert deviation > 10
        torch.testing.assert_close(backup - later, shown["reward"] / deviation)


def test_the_actor_step_leaves_the_critic_alone() -> None:
    learner = make_hnpg()
    learner.set_demonstrations(transitions(40, SPEC))
    table, _ = learner._table(segment(learner, torch.Generator().manual_seed(0)), {})
    before = copies(learner.critic.parameters())
    learner._learn(table, 8)
    assert not any(moved(before, learner.critic.parameters()))


ARMS = Spec({"state": Leaf((3,))}, Leaf((), "int64", 0, 2), dt=0.1)


def make_props(seed: int = 0, head: float = 0.0, **settings: Any) -> Props:
    policy = make_policy("categorical.Categorical", ARMS, seed, hidden=[8], head=head)
    given = {"horizon": 8, "batch_size": 8, "normalize": False, "behaviour_lr": 0.02, **settings}
    return make_learner("on_policy.props.Props", policy, **given)


def pulled(arms: list[int]) -> Tensors:
    """A batch [1, N] of actions that were taken at one observation."""
    shape = (1, len(arms))
    action = torch.tensor(arms, dtype=torch.int64).view(shape)
    return {"obs/state": torch.ones(*shape, 3), "action": action, "valid": torch.ones(shape)}


def chances(policy: Any) -> Tensor:
    return policy({"state": torch.ones(1, 3)})[0].detach().exp().flatten()


def test_the_sampling_error_is_the_divergence_of_the_frequencies() -> None:
    """KL(frequencies || pi), for pi uniform: log 3 - H."""
    learner = make_props()
    batch = pulled([0] * 4 + [1] * 2 + [2] * 2)
    batch["valid"][0, 7] = 0  # 4, 2 and 1 of 7
    frequencies = torch.tensor([4, 2, 1]) / 7
    expected = math.log(3) + (frequencies * frequencies.log()).sum().item()
    for given, error in ((batch, expected), (pulled([0, 1, 2]), 0.0)):
        found = sampling_error(learner.policy, learner._decisions(given), 400)
        assert found.item() == pytest.approx(error, abs=1e-3)


def test_what_was_taken_too_often_is_taken_less() -> None:
    """Within the divergence, starting from pi each time; pi stays."""
    learner = make_props(behaviour_kl=0.02, behaviour_minibatches=1)
    before = chances(learner.policy)
    for often, never in ((0, 2), (2, 0)):
        learner.adapt_behaviour(pulled([often] * 6 + [1, 1]))
        now = chances(learner.behaviour)
        assert now[often] < now[1] < now[never] and now[never] > 0.36
        assert (before * (before / now).log()).sum() < 0.05
    assert torch.equal(chances(learner.policy), before)
    assert all(p.grad is None and p.requires_grad for p in learner.policy.parameters())
    learner.adapt_behaviour(pulled([]))
    assert torch.equal(chances(learner.behaviour), before)


@pytest.mark.parametrize(("ratio", "loss", "pushed"), [(1.5, 1.5, True), (0.6, 0.7, False)])
def test_the_loss_of_the_behaviour_by_hand(ratio: float, loss: float, pushed: bool) -> None:
    """-min(-g, -clip(g, 0.7, 1.3)): once g is below 0.7 it falls no further."""
    learner = make_props(behaviour_weight=0.0)
    flat = learner._decisions(pulled([0]))
    flat["old"] = chances(learner.behaviour)[:1].log() - math.log(ratio)
    found, kl = learner._behaviour_loss(flat)
    assert (found.item(), kl.item()) == pytest.approx((loss, 0.0), abs=1e-6)
    found.backward()
    slope = learner.behaviour.layers()[-1].bias.grad
    assert (slope[0] > 0.1) == pushed and (pushed or not slope.any())


def test_it_is_adapted_every_k_decisions_to_all_that_is_kept(monkeypatch: Any) -> None:
    env = Counter(CounterConfig())
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", env.spec, hidden=[4])
    given = {"horizon": 6, "batch_size": 6, "epochs": 1, "every": 2, "behaviour_epochs": 1}
    learner = make_learner("on_policy.props.Props", policy, **given)
    seen: list[int] = []

    def noting(self: Props, batch: Tensors) -> None:
        seen.append(int(batch["valid"].sum()) // env.num_envs)

    monkeypatch.setattr(Props, "adapt_behaviour", noting)
    acting = learner.behaviour_policy()
    loop = OnPolicyLoop(Collector(env, acting, learner.gamma), learner)
    steps(loop, 15 * env.num_envs)
    assert seen == [2, 4, 6, 8, 10, 6, 8]
    assert acting is learner.behaviour and acting is not learner.policy
    assert learner.done == 12 * env.num_envs  # each decision is counted once, for schedules
