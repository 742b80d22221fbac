"""Preference: sights by number, sessions of questions, rewards of now for rows of before."""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, nest
from embodied.datasets.lerobot.reader import Episodes, EpisodeWriter, read_episodes
from embodied.datasets.lerobot.schema import read_info
from embodied.nn.statistics import spearman
from embodied.rewards.intrinsic.features import Novelty
from embodied.rewards.preferences.labellers import agreement, sample_pairs, split
from embodied.rewards.preferences.preference import (
    IMAGE_INDEX,
    Config,
    ImageIndexWrapper,
    ImageStore,
    Preference,
)
from embodied.rewards.preferences.ranker import FitConfig
from embodied.rewards.wrappers.added_observations import PICTURE
from tests.builders import exit_of, node_of, require_same
from tests.llm.server import says, serving
from tests.rewards.test_labellers import COLOURS
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter, Reach

CPU = torch.device("cpu")
LABELLERS = "rewards.preferences.labellers"
SIMULATED = node_of(f"{LABELLERS}.SimulatedLabeller")
VLM = node_of(f"{LABELLERS}.VisionLanguageLabeller", goal="go to the middle", swap=False)
QUICK = FitConfig(hidden=(32,), rate=1e-2, epochs=20)


def test_sights_have_numbers_and_ends_their_own() -> None:
    """Row 0 ends (3 steps) and begins again: its successor is what it reached, not the start."""
    album = ImageStore(100)
    env = ImageIndexWrapper(Counter(CounterConfig()), album, ["state"])
    obs = env.reset(0)
    assert obs[IMAGE_INDEX].tolist() == [0, 1]
    for _ in range(2):
        env.step(torch.zeros(2, 1))
    step = env.step(torch.zeros(2, 1))
    assert step.ended.tolist() == [True, False]
    assert album.take(step.obs[IMAGE_INDEX])["state"].flatten().tolist() == [0, 103]
    assert album.take(step.next_obs[IMAGE_INDEX])["state"].flatten().tolist() == [3, 103]
    assert step.next_obs[IMAGE_INDEX][1] == step.obs[IMAGE_INDEX][1]  # one sight, kept once
    assert set(env.spec.obs) == {"state", IMAGE_INDEX}


def test_an_album_keeps_the_newest_and_all_scores() -> None:
    album, other = ImageStore(4), ImageStore(4)
    numbers = album.add({"x": torch.arange(3.0)})
    album.reward[numbers] = torch.tensor([10.0, 11.0, 12.0])
    album.scores[numbers] = torch.tensor([0.1, 0.2, 0.3])
    album.add({"x": torch.arange(3.0, 6.0)})
    other.set_state(copy.deepcopy(album.get_state()))
    for each in (album, other):
        assert each.oldest == 2
        assert each.take(torch.tensor([2, 5]))["x"].tolist() == [2, 5]
        assert each.reached().tolist() == [2]  # nothing has ended in the newer ones
        assert each.scores[:3].tolist() == pytest.approx([0.1, 0.2, 0.3])
        each.add({"x": torch.zeros(2000)})  # room for scores grows
        assert len(each.scores) >= 2006


def test_segments_are_successive_observations_of_one_episode() -> None:
    """Two envs side by side; an episode of the first ends at observation 4; 5 begins another."""
    store = ImageStore(8)
    store.add({"x": torch.arange(8.0)})
    steps = {2: 0, 3: 1, 4: 2, 6: 3, 7: 5}  # observation: the one before it
    for now, before in steps.items():
        store.before[now] = before
        store.reward[now] = float(now)
    assert store.segments(store.reached(), 1).tolist() == [[2], [3], [4], [6], [7]]
    assert store.segments(store.reached(), 2).tolist() == [[2, 4], [3, 6]]
    assert store.segments(store.reached(), 3).tolist() == []
    other = ImageStore(8)
    other.set_state(copy.deepcopy(store.get_state()))
    assert other.segments(other.reached(), 2).tolist() == [[2, 4], [3, 6]]
    store.add({"x": torch.zeros(3)})  # 0, 1 and 2 are overwritten
    assert store.segments(store.reached(), 2).tolist() == [[3, 6]]


@pytest.mark.parametrize("stop", [False, True])
def test_sums_of_segments_are_compared(stop: bool) -> None:
    """The judge sees the sums of rewards alone, and the score of one observation follows them."""
    reward, env = ready(Reach(), every=400, pairs=100, labels=400, segment=5)
    obs, tape = play(reward, env, 150)
    if stop:
        state, place = copy.deepcopy(reward.get_state()), env.get_state()
        reward, env = ready(Reach(), every=400, pairs=100, labels=400, segment=5)
        env.reset(0)
        obs = env.set_state(place)
        reward.set_state(state)
    play(reward, env, 100, obs)
    first, second, target = reward.ranker.labels
    assert first.shape == second.shape == (200, 5, 2) and len(target) == 200
    gain = -second.norm(dim=2).sum(1) + first.norm(dim=2).sum(1)
    same = (first == second).flatten(1).all(1)  # the same segment was drawn twice
    assert torch.equal(target, torch.where(same, 0.5, (gain > 0).float()))
    rows = tt.cat(tape[-40:])
    assert spearman(reward(rows), rows["reward"]) > 0.7


def ready(env: Any, **settings: Any) -> tuple[Preference, Any]:
    """A reward, and the environment that it watches; both draw the same each time."""
    torch.manual_seed(0)
    config = Config(**{"labeller": SIMULATED, "leaf": "state", "fit": QUICK} | settings)
    reward = Preference(config, env.spec, CPU, seed=0)
    return reward, reward.augment_env(env)


def play(
    reward: Preference, env: Any, steps: int, obs: Tensors | None = None
) -> tuple[Tensors, list[Tensors]]:
    """Random actions; all rows that were noted."""
    obs, tape = env.reset(0) if obs is None else obs, list[Tensors]()
    for _ in range(steps):
        action = torch.rand(env.num_envs, 2) * 2 - 1
        step = env.step(action)
        rows = {**nest(obs, "obs"), "action": action, "reward": step.reward}
        rows |= {"discount": torch.ones(env.num_envs), **nest(step.next_obs, "next_obs")}
        reward.observe_step(rows, torch.arange(env.num_envs), step)
        tape.append(rows)
        obs = step.obs
    return obs, tape


def test_old_rows_are_paid_by_the_newest_scores() -> None:
    reward, env = ready(Reach(), every=80, pairs=40, labels=200)
    obs, early = play(reward, env, 19)
    assert not reward(early[0]).any()  # nobody was asked yet: 76 steps are done
    obs, _ = play(reward, env, 1, obs)
    first = reward(early[0])
    assert first.any()
    play(reward, env, 60, obs)
    assert not reward(early[0]).equal(first)
    # -distance is what the judge knows; the order of rows follows it
    rows = tt.cat(early)
    assert spearman(reward(rows), rows["reward"]) > 0.8
    # and what is looked up is what the network says
    shown = {key: value for key, value in rows.items() if key != f"next_obs/{IMAGE_INDEX}"}
    torch.testing.assert_close(reward(rows), reward(shown))


def test_before_labels_the_distance_to_neighbours_pays() -> None:
    """On a line at 0, 1 and 3 the second neighbours are 3, 2 and 3 away: log(1 + d)."""
    novelty = Novelty({"x": Leaf((1,))}, 2, CPU)
    novelty.features = lambda rows, end: rows["next_obs/x"]  # pyright: ignore
    rows = {"next_obs/x": torch.tensor([[0.0], [1.0], [3.0]]), "reward": torch.zeros(3)}
    novelty.states = rows["next_obs/x"][:2]
    assert novelty(rows).tolist() == [0, 0, 0]  # too few
    novelty.states = rows["next_obs/x"]
    torch.testing.assert_close(novelty(rows), torch.tensor([4.0, 3.0, 4.0]).log())
    assert Novelty({"x": Leaf((1,))}, 0, CPU)(rows).tolist() == [0, 0, 0]


def test_exploration_ends_with_labels_and_the_critic_is_restarted_once() -> None:
    reward, env = ready(Reach(), explore=2, explore_steps=20, restart=100, pairs=4, every=10)
    _, (batch, *_) = play(reward, env, 4)
    assert not len(reward.ranker) and reward(batch).min() >= 0 and reward(batch).max() > 0
    assert reward.take_restart() is None
    play(reward, env, 40)
    assert len(reward.ranker)
    assert reward.take_restart() == 100 and reward.take_restart() is None
    play(reward, env, 40)
    assert reward.take_restart() is None


def test_labels_are_the_budget_and_it_ends() -> None:
    """30, 30 and 10."""
    reward, env = ready(Reach(), every=40, pairs=30, labels=70)
    play(reward, env, 60)
    counts = len(reward.ranker), reward.labeller.counts.asked, float(reward.update({})["asked"])
    assert counts == (70, 70, 70)


def test_ties_end_the_asking(caplog: pytest.LogCaptureFixture) -> None:
    judge = {**SIMULATED, "tie": 100.0}
    reward, env = ready(Reach(), every=40, pairs=10, labeller=judge)
    play(reward, env, 40)
    assert reward.labeller.counts.asked == 10
    assert reward.ranker.labels[2].tolist() == [0.5] * 10  # they count half
    assert "100% of the last pairs were ties" in caplog.text


def test_a_judge_that_cannot_say_leaves_the_reward_as_it_is() -> None:
    reward, env = ready(Reach(), every=40, pairs=10, labeller={**SIMULATED, "unsure": 1.0})
    _, tape = play(reward, env, 20)
    assert len(reward.ranker) == 0 and reward.labeller.counts.abstained == 20
    assert not reward(tape[-1]).any()


@pytest.mark.parametrize(("zero", "of"), [("mean", torch.mean), ("highest", torch.max)])
def test_zero_is_the_mean_or_the_highest(zero: str, of: Any) -> None:
    reward, env = ready(Reach(), every=80, pairs=40, zero=zero)
    play(reward, env, 20)
    scores = reward.store.scores[reward.store.reached()]
    paid = (scores - reward.zero) / reward.scale
    assert float(paid.std()) == pytest.approx(1, abs=1e-3)
    assert float(of(paid)) == pytest.approx(0, abs=1e-4)


def test_a_run_that_was_stopped_goes_on_the_same() -> None:
    reward, env = ready(Reach(), every=80, pairs=20)
    obs, _ = play(reward, env, 25)
    saved = io.BytesIO()
    torch.save(reward.get_state(), saved)
    saved.seek(0)
    other, _ = ready(Reach(), every=80, pairs=20)
    other.set_state(torch.load(saved, weights_only=True))
    for action in torch.rand(20, 4, 2) * 2 - 1:
        step = env.step(action)
        rows = {**nest(obs, "obs"), "reward": step.reward, **nest(step.next_obs, "next_obs")}
        obs = step.obs
        newest = torch.arange(other.store.count, reward.store.count)
        other.store.add({"state": reward.store.take(newest)["state"]})
        for each in (reward, other):
            each.observe_step(rows, torch.arange(4), step)
    assert len(other.ranker) == len(reward.ranker) == 40
    assert other(rows).equal(reward(rows))


class Drawn(Reach):
    """The point as a white square."""

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        picture = torch.zeros(height, width, 3, dtype=torch.uint8)
        x, y = ((self.place[row] + 2) / 4 * width).long().clamp(2, width - 3).tolist()
        picture[y - 2 : y + 3, x - 2 : x + 3] = 255
        return picture


def test_pictures_are_seen_by_the_reward_alone() -> None:
    fit = FitConfig(epochs=2)
    reward, env = ready(Drawn(), leaf=None, size=32, every=60, pairs=20, fit=fit)
    _, tape = play(reward, env, 15)
    assert set(env.spec.obs) == {"state", IMAGE_INDEX}
    seen = reward.store.take(tape[0][f"obs/{IMAGE_INDEX}"])
    assert seen[PICTURE].shape == (4, 32, 32, 3)
    assert len(reward.ranker) == 20 and reward(tape[0]).any()


def test_a_run_goes_on_without_a_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(says('{"nearer": "first"}')) as server:
        chat = server.node(cache=str(tmp_path / "cache.jsonl"), limits={"calls": 9})
        settings = {"every": 20, "pairs": 20, "ties": 1.0, "synchronous": True}
        reward, env = ready(Drawn(), size=32, labeller=VLM | {"chat": chat}, **settings)
        with caplog.at_level(logging.WARNING):
            _, tape = play(reward, env, 15)
    assert reward.done == "the budget of 9 calls of m is spent"
    assert len(server.asked) == 9 and len(reward.ranker) > 0
    assert reward(tape[-1]).isfinite().all()
    assert sum("is spent" in record.message for record in caplog.records) == 1  # one clear line


def test_training_does_not_wait_for_labels() -> None:
    """While the model thinks, steps are taken and no second session begins; a stopped run submits
    the pairs again; the labels are learned at the first step after all have arrived."""
    slow = replace(says('{"nearer": "first"}'), event=threading.Event())
    with serving(slow) as server:
        judge = VLM | {"chat": server.node(), "parallel": 4}
        settings = {"every": 20, "pairs": 6, "labels": 6, "ties": 1.0}
        reward, env = ready(Drawn(), size=32, labeller=judge, **settings)
        obs, tape = play(reward, env, 12)
        assert len(reward.ranker) == 0 and len(reward.pairs) == 6
        assert not reward(tape[0]).any()
        other, _ = ready(Drawn(), size=32, labeller=judge, **settings)
        other.set_state(reward.get_state())
        assert len(other.pairs) == other.labeller.pool.pending == 6
        slow.event.set()
        assert reward.labeller.pool.drain(20)
        play(reward, env, 1, obs)
    assert len(reward.ranker) == 6 and reward.labeller.counts.asked == 6
    assert reward(tape[0]).isfinite().all() and reward(tape[0]).any()


def test_only_what_was_named_counts() -> None:
    env = Reach()
    env.spec = Spec({"state": Leaf((2,), names=("x", "y"))}, env.spec.act, dt=0.1)
    reward, watched = ready(env, every=40, pairs=20, only=("y",))
    _, tape = play(reward, watched, 10)
    state = tape[0]["next_obs/state"]
    paid, of_x, of_y = (
        reward({"reward": tape[0]["reward"], "next_obs/state": state * torch.tensor(factors)})
        for factors in ([1.0, 1.0], [-3.0, 1.0], [1.0, -3.0])
    )
    assert of_x.equal(paid) and not of_y.equal(paid)
    with pytest.raises(ConfigError, match=r"state has no element z \(known: x, y\)"):
        ready(env, only=("z",))


def recording(episodes: int = 80, steps: int = 12) -> Episodes:
    """Points that walk towards the origin, some faster; the reward is minus the distance."""
    random = torch.Generator().manual_seed(0)
    starts = torch.rand(episodes, 1, 2, generator=random) * 2 - 1
    speed = torch.rand(episodes, 1, 1, generator=random)
    path = starts * (1 - speed * torch.linspace(0, 1, steps + 1)[:, None])
    count = torch.arange(episodes * steps)
    rows = {
        "obs/state": path[:, :-1].flatten(0, 1),
        "action": torch.zeros(episodes * steps, 2),
        "reward": -path[:, 1:].norm(dim=2).flatten(),
        "terminated": count < 0,
        "truncated": count % steps == steps - 1,
    }
    length = torch.full((episodes,), steps)
    final = {"state": path[:, -1]}
    return Episodes(Reach().spec, rows, count[::steps], length, final, ("",) * episodes)


def test_a_recording_teaches_and_is_checked_on_what_was_held_out() -> None:
    """300 labels, and 60 to check with."""
    episodes, judge = recording(), {**SIMULATED, "error": 0.1}
    config = Config(labeller=judge, leaf="state", labels=300, pairs=50, fit=QUICK)
    reward = Preference(config, episodes.spec, CPU)
    report = reward.fit_from(episodes)
    assert report["labels"] == 300 and reward.labeller.counts.asked == 360
    assert report["pairs"] > 0.85 and report["returns"] > 0.8 and 0.7 < report["accuracy"] < 1


def test_a_judge_looks_at_the_pictures_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """The redder, the better, says the encoder; recorded rewards are all zero and never asked."""
    monkeypatch.setattr("embodied.core.build.ALLOWED", ["tests.", "embodied."])
    plain = recording(episodes=20)
    red = torch.rand(260, generator=torch.Generator().manual_seed(0))
    pictures = torch.zeros(260, 8, 8, 3)
    pictures[..., 0], pictures[..., 2] = red[:, None, None], 1 - red[:, None, None]
    pictures = (250 * pictures).to(torch.uint8)
    spec = plain.spec.with_obs(front=Leaf((8, 8, 3), "uint8", 0, 255))
    steps = {**plain.steps, "obs/front": pictures[:240], "reward": torch.zeros(240)}
    final = {**plain.final, "front": pictures[240:]}
    episodes = Episodes(spec, steps, plain.start, plain.length, final, plain.texts)
    judge = node_of(f"{LABELLERS}.EmbeddingLabeller", goal="red", model=COLOURS)
    fit = FitConfig(epochs=30, rate=3e-3)
    config = Config(labeller=judge, leaf="front", picture="front", labels=150, fit=fit)
    reward = Preference(config, spec, CPU)
    report = reward.fit_from(episodes)
    assert report["accuracy"] > 0.9
    assert math.isnan(report["pairs"])  # there is no recorded reward to compare with
    shades = (250 * torch.eye(3)[[0, 2]]).byte()[:, None, None].expand(-1, 8, 8, -1)
    paid = reward({"reward": torch.zeros(2), "next_obs/front": shades})
    assert paid[0] > paid[1] + 1


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match=r'no observation staet \(did you mean "state"\?\)'):
        ready(Reach(), leaf="staet")
    episodes, silent = recording(), {**SIMULATED, "unsure": 1.0}
    for config, message in (
        (Config(labeller=SIMULATED), "the dataset has no privileged/picture"),
        (Config(labeller=silent, leaf="state"), "the labeller gave no label"),
    ):
        with pytest.raises(ConfigError, match=message):
            Preference(config, episodes.spec, CPU).fit_from(episodes)


def test_a_new_critic_needs_an_off_policy_learner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "train env=two_gap reward=preference reward.leaf=state reward.restart=5 learner=ppo"
    assert exit_of(*words.split(), "policy=diagonal_gaussian", "steps=64", f"out={tmp_path}")
    assert "reward.restart needs an off-policy actor-critic" in capsys.readouterr().err


def test_pairs_are_within_and_across_trajectories() -> None:
    random = torch.Generator().manual_seed(0)
    kept, apart = (set(part.tolist()) for part in split(80, 0.2, random))
    assert (len(kept), len(apart)) == (64, 16) and not kept & apart
    sides = sample_pairs(recording(), torch.tensor(sorted(kept)), 1000, random) // 12
    assert set(sides.flatten().tolist()) == kept
    same = sides[0] == sides[1]
    assert same[::2].all()
    assert float(same[1::2].float().mean()) < 0.06  # one in 64 by chance


def test_agreement_by_hand() -> None:
    score, episode = torch.tensor([0.0, 1, 2, 3]), torch.tensor([0, 0, 1, 1])
    assert agreement(score, -score, episode) == {"pairs": 0.0, "returns": pytest.approx(-1.0)}


WORDS = ["reward=preference", "reward.leaf=state", "reward.labels=100", "reward.fit.epochs=3"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    episodes, folder = recording(episodes=12), tmp_path_factory.mktemp("recorded") / "data"
    spec = episodes.spec.with_obs(eye=Leaf((7, 7, 3), "uint8"))
    eye = {f"{w}obs/eye": torch.randint(256, (12, 7, 7, 3)).byte() for w in ("", "next_")}
    with EpisodeWriter(folder, spec, "ur5", "png") as writer:
        for number in range(len(episodes)):
            writer.add(episodes.episode(number) | eye, info={"number": number})
    return folder


def test_a_copy_is_paid_by_what_was_learned(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "paid"
    words = [dataset, *WORDS, "reward.zero=highest", f"out={out}"]
    assert exit_of("reward", "preferences", *words) == 0
    assert "learned from 100 labels" in capsys.readouterr().out
    old, new = read_episodes(dataset), read_episodes(out)
    paid = new.steps.pop("reward")
    old.steps["env_reward"] = old.steps.pop("reward")
    require_same(old.steps, new.steps)
    require_same(old.final, new.final)
    assert float(paid.max()) == pytest.approx(0, abs=1e-5)
    assert float(paid.std()) == pytest.approx(1, abs=1e-3)
    assert new.info[3]["number"] == 3 and read_info(out)["robot_type"] == "ur5"
    facts = json.loads((out / "preferences.json").read_text())
    assert facts["labels"] == 100
    assert facts["reward"]["labeller"]["_target_"].endswith("SimulatedLabeller")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["reward=scaled"], "cannot be fitted to pairs"),
        ([*WORDS, "held_out=1.5"], "held_out=1.5 must be"),
        ([*WORDS, "reward.labeller.eror=0.1"], "eror"),
    ],
)
def test_mistakes_are_one_line(
    dataset: Path, tmp_path: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_of("reward", "preferences", dataset, *words, f"out={tmp_path / 'paid'}")
    said = capsys.readouterr().err
    assert why in said and "Traceback" not in said
    assert not (tmp_path / "paid" / "meta").exists()
