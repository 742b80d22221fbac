"""Classifier: calibration by hand, labels out of episodes, versions, mistakes that are noticed;
episodes that end at its successes, or that somebody takes over."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import ConfigError, build
from embodied.core.env import Step
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.datasets.collect import CollectConfig, collect
from embodied.envs.toy.two_gap import Config as PlanarConfig
from embodied.envs.toy.two_gap import TwoGap
from embodied.policies.scripted.intervener import Config as WatcherConfig
from embodied.policies.scripted.intervener import Intervener, ProgressIntervener
from embodied.rewards.success.classifier import Classifier, RecentBuffer
from embodied.rewards.success.interventions import Config, Interventions, InterventionWrapper
from embodied.rewards.success.model import (
    Training,
    best_temperature,
    calibrate,
    load_labelled,
    reliability,
    split,
    threshold_for,
)
from embodied.rewards.wrappers.added_observations import PICTURE
from embodied.rewards.wrappers.success_detector import SuccessDetector
from embodied.training.collector import Collector
from tests.builders import exit_of, make_policy, make_reward, node_of
from tests.rewards.rows import write_episodes
from tests.rewards.test_progress import SPEC as WALKS
from tests.rewards.test_progress import corridor
from tests.rewards.test_progress import record as record_walks
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter

SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)

TRAINING = {"hidden": [16], "updates": 200, "lr": 0.01}
NODE = node_of("rewards.success.classifier.Classifier", training=TRAINING, refit_every=0)


def record(path: Path, count: int, won: bool) -> str:
    """Walks of 10 steps along x: from 0 past 1, which is success, or to 0.5."""
    x = torch.linspace(0, 1.05 if won else 0.5, 11)
    random = torch.Generator().manual_seed(int(not won))
    noise = [torch.randn(11, generator=random) for _ in range(count)]
    return write_episodes(path, SPEC, [{"state": torch.stack([x, y], 1)} for y in noise], won)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    return [record(folder / "won", 12, won=True), record(folder / "lost", 4, won=False)]


def made(folder: Path, **settings: Any) -> Classifier:
    return make_reward(NODE | settings, SPEC, folder)


def rows(x: list[float], discount: list[float], y: float = 0.0) -> Tensors:
    state = torch.stack([torch.tensor(x), torch.full((len(x),), y)], 1)
    paid = {"reward": torch.zeros(len(x)), "discount": torch.tensor(discount)}
    return {"obs/state": state, "next_obs/state": state, **paid}


def noted(reward: Classifier, batch: Tensors, won: str, over: str = "") -> dict[str, Tensor]:
    """The reward sees a step in which rows end, with success where `won` is "1" or in failure where
    `over` is, and is updated."""
    success = torch.tensor([letter == "1" for letter in won])
    lost = torch.tensor([letter == "1" for letter in over or won]) & ~success
    step = Step({}, {}, torch.zeros(len(won)), success, lost, {"success": success})
    reward.observe_step(batch, torch.arange(len(won)), step)
    return reward.update(batch)


def test_labels_are_last_moments_of_successes(data: list[str]) -> None:
    """11 moments an episode: of a success the last is 1, the one before is left out; of a failure
    all are 0."""
    whole, leaves = load_labelled(data, Training(), seed=0)
    assert list(leaves) == ["state"]
    assert (whole.moments["state"][whole.label > 0, 0] > 1).all() and whole.label.sum() == 12
    assert torch.bincount(whole.episode).tolist() == [10] * 12 + [11] * 4
    two, _ = load_labelled(data[:1], Training(last=2, margin=3), seed=0)
    assert len(two.label) == 12 * 8 and two.label.sum() == 24


def test_held_out_are_whole_episodes_of_both_kinds(data: list[str]) -> None:
    whole, _ = load_labelled(data, Training(), seed=0)
    rest, held = split(whole, 0.25, seed=0)
    mine, others = set(held.episode.tolist()), set(rest.episode.tolist())
    assert not mine & others and len(mine | others) == 16
    assert held.label.sum() == 3 and len(mine) == 4


def test_the_threshold_lets_a_stated_share_pass() -> None:
    """Of 10 others, 20% may pass: the third largest is the lowest threshold that only two exceed;
    never below even odds."""
    p = torch.tensor([0.05, 0.1, 0.2, 0.3, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
    found = [threshold_for(p, share) for share in (0.2, 0.0, 0.9)]
    assert found == pytest.approx([0.9, 0.99, 0.5])
    assert int((p > threshold_for(p, 0.2)).sum()) == 2
    assert threshold_for(torch.tensor([]), 0.1) == 0.5


def test_reliability_by_hand() -> None:
    """Bin [0.2, 0.3): two of p 0.25, one success: |0.5 - 1| / 4; bin [0.9, 1]: p 0.9 and 1.0, both
    successes: |1.9 - 2| / 4."""
    p = torch.tensor([0.25, 0.25, 0.9, 1.0])
    label = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert reliability(p, label) == pytest.approx(0.5 / 4 + 0.1 / 4)


def test_the_temperature_undoes_a_factor() -> None:
    """Logits three times too sure: successes come with sigma(z / 3)."""
    true = torch.linspace(-3, 3, 7).double()
    logits = (3 * true).repeat_interleave(1000)
    label = torch.cat([torch.arange(1000) < 1000 * p for p in true.sigmoid().tolist()]).double()
    assert best_temperature(logits, label) == pytest.approx(3, rel=0.02)


def test_the_share_of_successes_moves_the_odds() -> None:
    """An even logit, learned from balanced batches, where one in ten succeeds: p = 0.1, and that
    is what happens."""
    label = (torch.arange(1000) < 100).float()
    c = calibrate(torch.zeros(1000), label, math.log(0.1 / 0.9), rate=0.01)
    assert c.error_before == pytest.approx(0, abs=1e-6)
    assert c.temperature == pytest.approx(1, rel=0.01)
    assert c.loss_before == pytest.approx(-0.1 * math.log(0.1) - 0.9 * math.log(0.9), rel=1e-6)
    assert (c.threshold, c.found, c.mistaken) == (0.5, 0.0, 0.0)
    assert (c.successes, c.others) == (100, 900)


def test_it_pays_a_true_end_once_a_lasting_success_as_much(tmp_path: Path, data: list[str]) -> None:
    """Ended: 1; going on: 1 - gamma, which for ever is 1 too; no success: nothing. It looks at the
    end, and not at the next start."""
    reward = made(tmp_path, data=data)
    paid = reward(rows([1.05, 1.05, 0.4, 0.4], [0.0, 0.9, 0.0, 0.9]))
    torch.testing.assert_close(paid, torch.tensor([1.0, 0.1, 0.0, 0.0]))
    assert sum(0.9**t * float(paid[1]) for t in range(500)) == pytest.approx(1)
    for start, end, worth in ((0.0, 1.05, 1), (1.05, 0.0, 0)):
        step = rows([start], [0.0]) | {"next_obs/state": torch.tensor([[end, 0.0]])}
        assert reward(step) == worth


def test_it_is_trained_once_a_folder(tmp_path: Path, data: list[str]) -> None:
    first = made(tmp_path, data=data)
    card = tmp_path / "v1" / "card.json"
    written = card.stat().st_mtime_ns
    again = made(tmp_path, data=data)
    assert card.stat().st_mtime_ns == written and again.version == 1
    x = {"state": torch.randn(8, 2)}
    assert torch.equal(first.probability(x), again.probability(x))
    from_folder = made(tmp_path / "other", trained=str(tmp_path / "v1"))
    assert torch.equal(first.probability(x), from_folder.probability(x))
    made(tmp_path, data=data[:1])
    assert card.stat().st_mtime_ns != written


def test_the_policys_own_moments_become_negatives(tmp_path: Path, data: list[str]) -> None:
    """Far off what episodes show the network believes in success; after the policy was there and
    the world went on, the next version does not. True successes stay what they are."""
    reward = made(tmp_path, data=data, refit_every=4, refit_updates=200, recent_size=64)
    fooled = rows([3.0] * 16, [0.9] * 16, y=5.0)
    assert (reward(fooled) > 0).all()
    for _ in range(4):
        metrics = noted(reward, fooled, "0" * 16)
    assert reward.version == 2 and float(metrics["version"]) == 2
    assert (tmp_path / "newest" / "card.json").exists()
    assert not reward(fooled).any()
    assert reward(rows([1.05], [0.0])) == 1


def test_what_ends_the_world_is_no_negative(tmp_path: Path, data: list[str]) -> None:
    reward = made(tmp_path, data=data, refit_every=9, recent_size=8)
    noted(reward, rows([1.05, 0.3], [0.0, 0.9]), "10")
    assert reward.recent.kept()["state"][:, 0].tolist() == pytest.approx([0.3])
    assert reward.recent_successes.seen == 0


def test_marked_successes_are_learned(tmp_path: Path, data: list[str]) -> None:
    """A success that looks like none in the datasets pays once it was marked a few times."""
    reward = made(tmp_path, data=data, refit_every=1, refit_updates=300, marked=True)
    odd = rows([-2.0] * 20, [0.0] * 20)
    assert not reward(odd).any()
    noted(reward, odd, "1" * 20)
    assert (reward(odd) == 1).all() and not reward(rows([0.4], [0.0])).any()


def test_the_newest_moments_stay() -> None:
    ring = RecentBuffer(4)
    assert ring.kept() == {}
    for start, end, kept in ((0, 9, [5, 6, 7, 8]), (10, 20, [16, 17, 18, 19])):
        for part in torch.arange(start, end).split(3 if end == 9 else 10):
            ring.push({"x": part})
        assert sorted(ring.kept()["x"].tolist()) == kept


def test_mistakes_at_ends_are_counted_and_warned_of(
    tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Four failures: two of them look like success. One true success, one row that goes on."""
    batch = rows([3.0, 3.0, 0.2, 0.1, 1.05, 3.0], [0.9] * 4 + [0.0, 0.9])
    strict, patient = (made(tmp_path, data=data, watch=4, limit=limit) for limit in (0.4, 0.6))
    capsys.readouterr()
    metrics = noted(strict, batch, "000010", "111110")
    assert float(metrics["false_positives"]) == 0.5
    assert "version 1 takes 50% of the last 4" in capsys.readouterr().out
    noted(strict, batch, "000010", "111110")  # once a version
    noted(patient, batch, "000010", "111110")
    assert not capsys.readouterr().out


def test_a_resume_goes_on_exactly(tmp_path: Path, data: list[str]) -> None:
    settings = {"data": data, "refit_every": 3, "refit_updates": 5, "recent_size": 32}
    batch = rows([0.1, 0.7, 3.0], [0.9] * 3)

    def go_on(reward: Classifier) -> Tensor:
        for _ in range(4):
            noted(reward, batch, "000", "101")
        return reward.probability({"state": batch["obs/state"]})

    straight, resumed = (made(tmp_path / name, **settings) for name in "ab")
    go_on(straight)
    torch.save(straight.get_state(), tmp_path / "state.pt")
    expected = go_on(straight)
    resumed.set_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(go_on(resumed), expected)
    assert resumed.version == straight.version == 3


def test_shuffled_labels_are_as_many_and_pay_nothing(tmp_path: Path, data: list[str]) -> None:
    whole, _ = load_labelled(data, Training(), seed=0)
    dealt, _ = load_labelled(data, Training(shuffle=True), seed=0)
    assert dealt.label.sum() == 12 and not torch.equal(dealt.label, whole.label)
    reward = made(tmp_path, data=data, training=NODE["training"] | {"shuffle": True})
    assert not reward(rows([1.05, 0.4], [0.0, 0.0])).any()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    few = record(tmp_path / "few", 1, won=True)
    for settings, message in (
        ({}, "reward.data="),
        ({"trained": "nowhere"}, "has no trained classifier"),
        ({"data": few}, "1 successful episodes are too few"),
    ):
        with pytest.raises(ConfigError, match=message):
            made(tmp_path / "run", **settings)


def test_the_command_writes_what_training_reads(
    tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["views=[state]", "updates=100", "hidden=[16]", f"out={tmp_path / 'eyes'}"]
    assert exit_of("reward", "classifier", *data, *settings) == 0
    assert "held-out frames: 3 positive" in capsys.readouterr().out
    assert made(tmp_path / "run", trained=str(tmp_path / "eyes")).version == 1


def test_pictures_that_were_recorded_are_watched_in_training(tmp_path: Path) -> None:
    """Recorded in a world that shows the reward's picture; trained in the same world without it:
    the policy sees what it saw, the reward sees the end of an episode."""
    camera = node_of("rewards.wrappers.added_observations.AddRenderObservation", size=48)
    plain = node_of("envs.toy.two_gap.TwoGap")
    pictured = node_of("envs.wrappers.stack.Wrapped", env=plain, wrappers=[camera])
    script = yaml.safe_load(Path("configs/demonstrator/two_gap.yaml").read_text())
    config = CollectConfig(pictured, script, 8, str(tmp_path / "won"), num_envs=4, images="png")
    collect(config, lambda kept, played: None)
    env = TwoGap(PlanarConfig(num_envs=2))
    how = {"views": [PICTURE], "channels": [8, 8], "hidden": [16], "updates": 200, "lr": 0.005}
    settings = {"data": str(tmp_path / "won"), "training": how}
    reward = make_reward(NODE | settings, env.spec, tmp_path / "run")
    watched = reward.augment_env(env)
    assert set(env.spec.obs) == {"state"} and watched.spec.obs[PICTURE].shape == (48, 48, 3)
    assert reward.augment_env(watched) is watched
    watched.reset(0)
    env.place[0] = torch.tensor([0.90, 0.5])
    step = watched.step(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert step.terminated.tolist() == [True, False]
    discount = {"discount": 0.97 * (~step.terminated).float()}
    assert reward(tt.nest(step.next_obs, "next_obs") | discount).tolist() == [1.0, 0.0]
    assert reward(tt.nest(step.obs, "next_obs") | discount).tolist() == [0.0, 0.0]


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
    plan = [[False, False], [False, True], [False, True], [True, False], [True, False]]
    scripted = Scripted(plan)
    env = InterventionWrapper(Counter(CounterConfig(ends=(3, 100))), scripted, True)
    rollout = Collector(env, make_policy("random.Random", env.spec), 0.9)
    stored, steps = zip(*(rollout.step() for _ in range(4)), strict=True)
    # Row 1 is taken in the second step: the first one pays. Row 0's episode ends with its third
    # step: who has the next in hand took nothing over.
    paid = torch.stack([rows["reward"] for rows in stored])
    assert paid.tolist() == [[0, -1], [0, 0], [0, 0], [0, 0]]
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
    rows = {"reward": torch.tensor([1.0, -0.5, -1.0, 1.0, -1.0])}  # a task may pay -1 a step
    rows["intervened"] = torch.tensor([True, True, True, False, False])
    assert Interventions(Config(node), 2, 0)(rows).tolist() == [0.0, 0.0, 0.0, 0.0, -1.0]
    assert torch.equal(Interventions(Config(node, pay="env"), 2, 0)(rows), rows["reward"])


STAY = torch.zeros(2, 1)
CLASSIFIER = node_of("rewards.success.classifier.Classifier", refit_every=0)


def detector(steps: int, *states: float, ends: tuple[int, int] = (9, 9)) -> SuccessDetector:
    """Detects a Counter in these states, and has begun its first episodes."""
    detected = torch.tensor(states)

    def detect(obs: Tensors) -> Tensor:
        return torch.isin(obs["state"][:, 0], detected)

    env = SuccessDetector(Counter(CounterConfig(ends=ends)), detect, steps)
    env.reset(0)
    return env


def test_only_consecutive_detections_end_an_episode() -> None:
    """Row 0 is detected at 1 and 3, but not at 2; then at 5 and 6, which ends its episode, the
    count being saved between; row 1 goes on."""
    env, other = (detector(2, 1.0, 3.0, 5.0, 6.0, 103.0, 106.0) for _ in range(2))
    for age in range(1, 6):
        step = env.step(STAY)
        assert not step.ended.any() and not step.log["detected"].any(), age
    other.set_state(env.get_state())
    for each in (env, other):
        step = each.step(STAY)
        assert step.terminated.tolist() == step.log["detected"].tolist() == [True, False]
        assert not step.truncated.any()
        assert step.next_obs["state"].flatten().tolist() == [6, 106]
        assert step.obs["state"].flatten().tolist() == [0, 106]
        assert not step.log["success"].any()  # the environment knows success, and that is kept
    assert env.step(STAY).next_obs["state"].flatten().tolist() == [1, 107]


def test_a_detected_end_is_told_before_the_reset() -> None:
    """Whoever shows or describes final states sees them in the last moment they are there."""
    env, seen = detector(1, 2.0), []
    env.add_pre_reset_hook(lambda rows: seen.append(rows.tolist()))
    for _ in range(2):
        env.step(STAY)
    assert seen == [[True, False]]


def test_it_is_the_success_where_none_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knowing = Counter.step
    monkeypatch.setattr(Counter, "step", lambda *given: replace(knowing(*given), log={}))
    env = detector(1, 2.0, 102.0, ends=(2, 9))
    env.step(STAY)
    step = env.step(STAY)
    assert step.log["success"].tolist() == [True, True]
    # Env 0 ended by itself in the same step: a termination, not a truncation.
    assert step.terminated.tolist() == [True, True]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("classifier")
    data = record_walks(folder / "data", corridor(12, 20, seed=1))
    training = {"updates": 300, "last": 2}
    make_reward(CLASSIFIER | {"data": data, "training": training}, WALKS, folder)
    return str(folder / "v1")


class Walker(Counter):
    """State 0 moves from 0 to 1 in 20 steps, like the walks of the classifier."""

    def __init__(self, config: CounterConfig) -> None:
        super().__init__(config)
        self.spec = WALKS

    def _obs(self) -> Tensors:
        x = self.age / 20.0
        return {"state": torch.stack([x, 0 * x, torch.sin(3 * x)], 1)}


def test_a_trained_classifier_ends_episodes_in_both_places(trained: str) -> None:
    """As a wrapper in an environment's YAML (evaluation, a robot), and by the reward that learns;
    both near the end of a walk, and the transition that ends it is worth 1."""
    node = node_of("rewards.wrappers.success_detector.DetectSuccess", trained=trained, steps=2)
    alone = build(node, Wrapper, env=Walker(CounterConfig(ends=(30, 30))))
    settings = {"trained": trained, "terminate": True, "steps": 2}
    reward = make_reward(CLASSIFIER | settings, WALKS, Path("unused"))
    for env in (alone, reward.augment_env(Walker(CounterConfig(ends=(30, 30))))):
        env.reset(0)
        age, step = 1, env.step(STAY)
        while not step.ended.any():
            age, step = age + 1, env.step(STAY)
        assert 16 <= age <= 23
        assert step.terminated.all() and step.log["detected"].all()
        rows = {"next_obs/state": step.next_obs["state"], "discount": torch.zeros(2)}
        assert reward(rows).tolist() == [1, 1]
