"""Training an encoder: what is positive, resuming, a ladder from scratch; what annotation saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.annotate import HELPFUL, agreement, saved, taught
from benchmarks.simclip.__main__ import settings
from benchmarks.simclip.corpus import Corpus, Plan, blank_images
from benchmarks.simclip.evaluate import evaluate, save
from benchmarks.simclip.scenes import collect
from benchmarks.simclip.train import normalise, rung_weights, train
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.rewards.language.annotate import Classification
from embodied.rewards.language.rule_reader import Config, RuleReader
from embodied.vision.image_text import views_of
from embodied.vision.simclip import ImageTower, Shape, SimClip, Towers, load
from tests.builders import node_of
from tests.tiers import only_all


def test_a_caption_is_positive_where_every_fact_holds() -> None:
    scenes = collect("two_gap", 40, 32, 0)
    corpus, every = Corpus([scenes]), torch.arange(len(scenes))
    facts = corpus.facts(0, every)
    ladder, before = scenes.words.ladders[0], scenes.words.plain[0]
    near, plain = ladder.rungs[-1].phrases[0], before.phrases[0]
    true = corpus.hold([[near], [plain], [near, plain]], facts)
    assert true[:, 0].tolist() == scenes.facts[:, 6].tolist()
    assert true[:, 1].tolist() == scenes.facts[:, 7].tolist()
    assert not true[:, 2].any()  # the goal is behind the wall
    told = corpus.caption(0, every, torch.Generator().manual_seed(0))
    assert bool(corpus.hold(told, facts).diagonal().all())


def test_weights_between_rungs_are_by_hand() -> None:
    weights = rung_weights(torch.tensor([0.0, 0.25, 2.0]), 4)
    expected = [[0.0, 1.0, 0.0, 0.0], [0.0, 0.75, 0.25, 0.0], [0.0, 0.0, 0.0, 1.0]]
    torch.testing.assert_close(weights, torch.tensor(expected))


@only_all
def test_a_ladder_is_learned_from_scratch_and_kept(tmp_path: Path) -> None:
    shape, plan = Shape(), Plan(steps=80, batch=64, polish=500, save_every=40)
    scenes = collect("two_gap", 300, shape.side, 0)
    towers = train([scenes], plan, shape, tmp_path / "training.pt")
    save(tmp_path, towers, {})
    model = load(tmp_path)
    near, far = collect("two_gap", 120, shape.side, 1), collect("two_gap", 99, 96, 2, 2)
    card = evaluate(model, near, far)
    assert card["ladder"] > 0.85 and card["auc"] > 0.85
    fresh = evaluate(SimClip(Towers(shape), {}, "cpu"), near, far)
    assert fresh["auc"] < 0.75
    again = train([scenes], plan, shape, tmp_path / "training.pt")  # goes on from the end
    for key, value in again.state_dict().items():
        torch.testing.assert_close(value, towers.state_dict()[key])


def test_views_stand_side_by_side() -> None:
    """Two views are both looked at, one is enough, and what is missing counts as the mean."""
    look = ImageTower(Shape(views=2))
    left, right = torch.rand(2, 5, 3, 96, 96)
    both, single = look.moments(torch.cat([left, right], 3)), look.moments(left)
    half = look.each.size
    torch.testing.assert_close(both, torch.cat([look.each(left), look.each(right)], 1))
    assert single.shape == both.shape and bool(single[:, half:].isnan().all())
    normalise(look, torch.cat([both, single]))
    torch.testing.assert_close(look.mean[half:], both[:, half:].mean(0))
    torch.testing.assert_close(look.deviation[half:], both[:, half:].std(0).clamp(min=0.02))
    filled = single.clone()
    filled[:, half:] = look.mean[half:]
    torch.testing.assert_close(look.of(single), look.of(filled))


ROWS = torch.tensor([1, 0])


def test_the_robot_is_photographed_from_the_front_and_the_wrist() -> None:
    reach = node_of("envs.fr3.env.Fr3", task="reach", num_envs=2, drawing="light")
    env, alone = (build(reach | more, VecEnv) for more in ({"portraits": ["front", "wrist"]}, {}))
    for each in (env, alone):
        each.reset(0)
    shots, single = (each.render_batch(ROWS, 24) for each in (env, alone))
    assert env.num_views == 2 and shots.shape == (2, 24, 48, 3) and views_of(shots) == 2
    assert torch.equal(single, shots[:, :, :24])
    assert not torch.equal(shots[:, :, :24], shots[:, :, 24:])
    with pytest.raises(ConfigError, match=r"camera 'wrst'.*wrist"):
        build({**reach, "portraits": ["wrst"]}, VecEnv)


def test_nothing_is_seen_in_a_blank() -> None:
    model = load()
    ladder = model.ladder("the hand is touching the green ball")
    assert ladder is not None
    rungs = torch.stack([model.texts(each).mean(0) for each in ladder])
    seen = model.images(blank_images(12, 96, 2, torch.Generator().manual_seed(3)))
    assert bool(((seen @ rungs.T).argmax(1) == 0).all())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no output folder"),
        (["out=x", "step=3"], 'did you mean "steps"'),
        (["out=x", "envs=fr3_rech"], 'did you mean "fr3_reach"'),
        (["out=x", "steps=many"], "must be an integer"),
        (["out=x", "pictures=3"], "at least 50"),
    ],
)
def test_wrong_settings_are_one_clear_line(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(words)


def test_each_caption_once_and_every_fourth_step_lose_little() -> None:
    row = saved("events", stride=4, steps=300)
    assert row.ratio_median >= 5 and row.notes["rank_correlation"] >= 0.95


def test_the_network_agrees_with_its_teacher_where_it_was_not_told() -> None:
    assert taught(100)[1] >= 0.9
    judge, model = RuleReader(Config(HELPFUL)), Classification(1, 1e-3, 4, 0.5, seed=0)
    texts = ["you picked up the red key", "you face the red key"]
    score = model.scores(texts)
    assert agreement(model, judge.worth, texts) == float(score[0] > score[1])
