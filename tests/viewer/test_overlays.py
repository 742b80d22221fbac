"""What is known of each step besides: the critic's value, the reward's terms and picture, the noise
that was chosen, what a decision hangs on, and what the run's model imagines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import Node, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.models import dynamics
from embodied.rewards.wrappers.added_observations import CaptionVocabulary, with_captions
from embodied.viewer.export.export import charts
from embodied.viewer.launch import open_session
from embodied.viewer.panels.page import Viewer
from embodied.viewer.panels.task import coloured, grouped, noise_picture
from embodied.viewer.session.episode import EnvSnapshot, Moment
from embodied.viewer.session.overlays import (
    SCORE,
    Imagination,
    UnsupportedReward,
    heated,
    imagination_of,
    occluded,
    reward_camera,
    saliency,
)
from embodied.viewer.session.session import Session
from tests import linear_system
from tests.builders import node_of
from tests.viewer.sessions import FLOW, LIFT, REACH, advance, go, parts_of, play, run_with

ACTS = node_of("policies.gaussian.Gaussian", chunk=2, hidden=[8])
LEARNS = node_of("learners.off_policy.sac.Sac", hidden=[8], gamma=0.9)
BASE = FLOW | {"chunk": 2, "width": 8}
CLIP = node_of("rewards.vision_language.clip.Clip", prompt="the hand is touching the green ball")
INNER = node_of("policies.gaussian.Gaussian", hidden=[8])


def session_of(folder: Path, **more: object) -> Session:
    return open_session(run_with(folder, REACH, ACTS, learner=LEARNS, **more))


def test_a_decision_is_worth_what_the_least_critic_says(tmp_path: Path) -> None:
    session = play(session_of(tmp_path), 2)
    env = build(REACH, VecEnv)
    _, learner = parts_of(env, ACTS, LEARNS)
    learner.set_state(checkpoint.load_state(tmp_path, "learner"))
    moments = session.episode.moments
    for at in (0, 2, 4):
        chunk = torch.tensor([moments[at + 1].action + moments[at + 2].action])
        with torch.no_grad():
            wanted = learner.critic(moments[at].obs, chunk).amin(0).item()
        # It holds for both steps of the chunk.
        found = [after.numbers["value"] for after in moments[at + 1 : at + 3]]
        assert found == pytest.approx([wanted] * 2, abs=1e-5)
    assert [chart["title"] for chart in charts([session])] == ["reward", "value", "action"]
    session.close()
    env.close()


def test_terms_of_the_reward_are_stacked(tmp_path: Path) -> None:
    potential = {"of": "distance", "a": "tool", "b": "goal", "weight": -5.0}
    reward = node_of("rewards.handcrafted.factors.Shaping", potential=potential)
    session = session_of(tmp_path, reward=reward)
    with Viewer(session, port=0) as viewer:
        go(viewer, 4)
        numbers = session.episode.moments[-1].numbers
        terms = {name: value for name, value in numbers.items() if name.startswith("term/")}
        assert len(terms) > 1 and session.trouble == ""
        plot, members = viewer.page.value_plots.plots["reward terms, stacked"]
        assert members == sorted(terms)
        # Each on top of those before it: the last is their sum.
        assert plot.data[-1][-1] == pytest.approx(sum(terms.values()), abs=1e-6)
        assert "value" in viewer.page.value_plots.plots
        chart = charts([session])[0]
        assert chart["stacked"] and len(chart["curves"]) == len(terms)


def test_a_run_without_either_shows_nothing(tmp_path: Path) -> None:
    run_with(tmp_path, REACH, ACTS, learner=LEARNS)
    (tmp_path / "checkpoints" / "00000010" / "learner.pt").unlink()
    session = open_session(tmp_path)
    session.reset(0)
    session.advance()
    assert session.overlay is None and session.now.numbers == {}
    session.close()


def test_a_critic_of_other_actions_says_so_once(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session.choose("demonstrator")
    session.reset(0)
    session.advance()
    # The script decides one step at a time, the critic knows chunks of two.
    assert session.now.numbers == {} and session.trouble.startswith("critic not shown:")
    session.advance()
    session.close()


def steering(kind: str) -> Node:
    return node_of(f"policies.steering.{kind}", base=BASE, inner=INNER, bound=2.0)


@pytest.mark.parametrize("kind", ["dsrl.Dsrl", "dsrl_na.DsrlNa"])
def test_the_noise_that_a_steering_policy_chose_is_kept(tmp_path: Path, kind: str) -> None:
    session = open_session(run_with(tmp_path, REACH, steering(kind)))
    session.reset(1)
    advance(session, 4)
    moments, policy = session.episode.moments, session.acts.policy
    for at in (1, 3):
        # Without exploration the inner policy is its mean: w = bound * u(o).
        with torch.no_grad():
            u = policy.inner.act(moments[at - 1].obs, {}, policy.inner.sample_noise(1))[0].flatten()
        torch.testing.assert_close(moments[at].noise, 2.0 * u)
        assert torch.equal(moments[at].noise, moments[at + 1].noise)
    assert not torch.equal(moments[1].noise, moments[3].noise)
    # What the base makes of that noise is what was done.
    chunk, _ = policy.base_act(moments[2].obs, {}, moments[3].noise[None])
    torch.testing.assert_close(torch.tensor(moments[3].action), chunk[0, 0])
    session.close()


def test_chosen_noise_is_drawn_in_the_page(tmp_path: Path) -> None:
    with Viewer(open_session(run_with(tmp_path, REACH, steering("dsrl.Dsrl"))), port=0) as viewer:
        noise = viewer.page.steering.noise
        assert not noise.visible
        go(viewer, 5)
        norm = float(viewer.session.now.noise.norm())
        assert f"norm {norm:.1f} (Gaussian samples: about 2.8)" in noise.label
        assert noise.visible and noise.image.std() > 10
        viewer.choose("demonstrator")
        go(viewer)
        assert not noise.visible


def test_elements_of_the_action_are_together_and_colours_say_the_sign() -> None:
    # Two steps of three elements: a0 a1 a2 b0 b1 b2.
    assert grouped(6, 3).tolist() == [0, 3, 1, 4, 2, 5]
    assert grouped(5, 3).tolist() == [0, 1, 2, 3, 4]
    blue, white, orange = [0, 114, 178], [255] * 3, [213, 94, 0]
    assert coloured(np.array([-1.0, 0.0, 1.0])).tolist() == [blue, white, orange]
    chosen = [torch.tensor([2.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, -2.0])]
    picture = noise_picture(chosen, 1, 2.0, ("x", "y"))
    high, wide = picture.shape[:2]
    assert wide == 70 + 210 + 6 + 120
    # First decision: the first row is orange. Second: the last one is blue, and its bar goes left.
    assert picture[5, 70 + 50].tolist() == orange
    assert picture[high - 5, 70 + 160].tolist() == blue
    bars = picture[high - 20, 70 + 210 + 6 :]
    assert (bars[10:50] == blue).all() and (bars[70:110] == 255).all()


def test_the_picture_that_a_reward_scores_is_taken_and_scored(tmp_path: Path) -> None:
    world = REACH | {"drawing": "light", "portraits": ["front", "wrist"]}
    run_with(tmp_path, world, INNER | {"chunk": 1}, reward=CLIP, execute=1)
    session = open_session(tmp_path)
    session.choose("demonstrator")
    play(session, 2)
    reward, moments = session.overlay.reward, session.episode.moments
    pictures = [moment.reward_image.picture() for moment in moments]
    side = reward.model.side
    assert pictures[0].shape == (side, 2 * side, 3)
    # The last one is of the end, not of the start that the world has gone on to.
    first, before, last = (pictures[at].astype(int) for at in (0, -2, -1))
    start = session.env.render_batch(torch.tensor([0]), side)[0].numpy()
    assert np.abs(last - first).mean() > 0.1
    assert np.abs(last - before).mean() < np.abs(last - start).mean()
    scores = reward.score(torch.from_numpy(np.stack(pictures[1:])))
    kept = [moment.numbers[SCORE] for moment in moments[1:]]
    np.testing.assert_allclose(kept, scores.numpy(), atol=1e-5)
    assert max(kept) - min(kept) > 0.01 and session.trouble == ""
    session.close()
    with Viewer(open_session(tmp_path), port=0) as viewer:
        viewer.step(3)
        viewer.scrub(2)
        viewer.refresh()
        page, score = viewer.page, viewer.session.episode.moments[2].numbers[SCORE]
        assert page.steering.reward_image.visible
        label = f"image that the reward scored, step 2: {score:.3f}"
        assert page.steering.reward_image.label == label
        assert page.value_plots.plots[SCORE][0].data[1][1] == pytest.approx(score)


class Reads:
    """A reward that reads captions."""

    frozen = True

    def augment_env(self, env):
        return with_captions(env, CaptionVocabulary())


class Plain:
    frozen = True


def test_rewards_that_need_more_than_a_picture_are_left_out() -> None:
    env = build(REACH, VecEnv)
    with pytest.raises(UnsupportedReward):
        reward_camera(Reads(), env)
    assert reward_camera(Plain(), env).capture() is None
    env.close()


class Corner(Policy):
    """Acts by how bright the lower right quarter of its picture is."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    def sample_noise(self, n, explore=False):
        return torch.zeros(n, 1)

    def act(self, obs, carry, noise):
        bright = obs["front"][:, 8:, 8:].float().mean((1, 2, 3)) / 255
        return bright[:, None, None].expand(-1, 2, 1), carry


def test_a_decision_hangs_on_what_it_is_made_of() -> None:
    leaf = Leaf((16, 16, 3), "uint8", 0, 255)
    spec = Spec({"front": leaf}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
    picture = torch.zeros(1, 16, 16, 3, dtype=torch.uint8)
    picture[:, 8:, 8:] = 200
    before, after = (Moment(i, EnvSnapshot(), {}, {"front": picture}) for i in range(2))
    change = saliency(Corner(spec), before, after, grid=4)["front"]
    # The mean colour is 50: a patch, a quarter of what counts, darkens that by a quarter of 150.
    wanted = torch.zeros(4, 4)
    wanted[2:, 2:] = 150 / 4 / 255
    torch.testing.assert_close(change, wanted, atol=1e-6, rtol=0)
    hot = heated(picture[0], leaf, change, float(change.max()))
    assert hot[-1, -1].tolist() == [213, 94, 0] and hot[0, 0].tolist() == [104] * 3


def test_patches_cover_a_picture_once() -> None:
    picture = torch.randint(0, 255, (10, 14, 3), dtype=torch.uint8)
    covered = occluded(picture, 3)
    assert torch.equal(covered[0], picture)
    differs = (covered[1:] != picture).any(-1)
    assert (differs.sum(0) <= 1).all() and differs.any(0).float().mean() > 0.95


def test_saliency_is_drawn_where_the_policy_sees_pictures(tmp_path: Path) -> None:
    pictures = {"cameras": ["front"], "image_size": 16, "drawing": "light"}
    world = LIFT | {"horizon": 6, "objects": "privileged", **pictures}
    node = BASE | {"images": {"channels": [4], "features": 8}}
    with Viewer(open_session(run_with(tmp_path, world, node)), port=0) as viewer:
        heat = viewer.page.observations.saliency_panel
        image = heat.images["front"]
        go(viewer, 2)
        assert heat.switch.visible and not image.visible
        heat.switch.value = True
        viewer.press(viewer.page.changed)
        viewer.refresh()
        assert image.visible and "a grey patch moves the action" in image.label
        # Somewhere it is orange, somewhere grey.
        warmth = image.image[..., 0].astype(int) - image.image[..., 2]
        assert warmth.max() > 150 and warmth.min() < 60
        viewer.choose("zero")
        go(viewer)
        assert not heat.switch.visible and not image.visible


FRAME = cast(Any, None)  # nothing is drawn


def test_imagined_from_the_start_with_the_executed_actions() -> None:
    model = dynamics.load(linear_system.roughly_fitted()["model"])
    shown = Imagination(model)
    seen = [{"state": torch.tensor([state])} for state in ([0.1, 0.2], [0.5, 0.6], [0.7, 0.8])]
    first, second, third = (
        Moment(n, FRAME, obs, obs, action=[0.5] if n else None) for n, obs in enumerate(seen)
    )

    def after(obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return model.step(obs, torch.tensor([[0.5]]), torch.zeros(1, model.noise_size)).next_obs

    def numbers(imagined: dict[str, torch.Tensor], moment: Moment) -> Any:
        (x, v), (real_x, real_v) = (each["state"][0].tolist() for each in (imagined, moment.obs))
        plotted = {"x, imagined": x, "x, real": real_x, "v, imagined": v, "v, real": real_v}
        return pytest.approx({f"imagined/{name}": value for name, value in plotted.items()})

    once = after(first.obs)
    assert shown.numbers(first, second) == numbers(once, second)
    assert shown.numbers(second, third) == numbers(after(once), third)
    shown.reset()
    assert shown.numbers(second, third) == numbers(after(second.obs), third)


def test_only_of_a_run_in_a_model_of_this_environment() -> None:
    node, spec = (
        node_of("envs.imagined.Imagined", **linear_system.roughly_fitted()),
        linear_system.SPEC,
    )
    assert imagination_of(node, spec) is not None
    assert imagination_of(node, spec.with_obs(state=spec.act)) is None
    assert imagination_of(node_of("envs.toy.two_gap.TwoGap"), spec) is None
    assert imagination_of(None, spec) is None
