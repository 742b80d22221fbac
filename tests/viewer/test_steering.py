"""What is behind a decision: the noise that was chosen, the picture that was scored, what it hangs
on in what it saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.rewards.wrappers.added_observations import CaptionVocabulary, with_captions
from embodied.viewer.app import Viewer
from embodied.viewer.launch import open_session
from embodied.viewer.session.episode import EnvSnapshot, Moment
from embodied.viewer.session.overlays import (
    SCORE,
    UnsupportedReward,
    heated,
    occluded,
    reward_camera,
    saliency,
)
from embodied.viewer.session.player import coloured, grouped, noise_picture
from tests.builders import node_of
from tests.viewer.sessions import FLOW, LIFT, REACH, run_with

BASE = FLOW | {"chunk": 2, "width": 8}
CLIP = node_of("rewards.vision_language.clip.Clip", prompt="the hand is touching the green ball")
INNER = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]}


@pytest.mark.parametrize("kind", ["dsrl.Dsrl", "dsrl_na.DsrlNa"])
def test_the_noise_that_a_steering_policy_chose_is_kept(tmp_path: Path, kind: str) -> None:
    session = open_session(run_with(tmp_path, REACH, steering(kind)))
    session.reset(1)
    for _ in range(4):
        session.advance()
    moments = session.episode.moments
    policy = session.acts.policy
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


def steering(kind: str) -> dict[str, object]:
    target = f"embodied.policies.steering.{kind}"
    return {"_target_": target, "base": BASE, "inner": INNER, "bound": 2.0}


def test_chosen_noise_is_drawn_in_the_page(tmp_path: Path) -> None:
    with Viewer(open_session(run_with(tmp_path, REACH, steering("dsrl.Dsrl"))), port=0) as viewer:
        mind = viewer.page.steering
        assert not mind.noise.visible
        viewer.step(5)
        viewer.refresh()
        assert mind.noise.visible
        noise = viewer.session.now.noise
        assert f"norm {float(noise.norm()):.1f} (Gaussian samples: about 2.8)" in mind.noise.label
        assert mind.noise.image.std() > 10
        viewer.choose("demonstrator")
        viewer.step()
        viewer.refresh()
        assert not mind.noise.visible


def test_elements_of_the_action_are_together_and_colours_say_the_sign() -> None:
    # Two steps of three elements: a0 a1 a2 b0 b1 b2.
    assert grouped(6, 3).tolist() == [0, 3, 1, 4, 2, 5]
    assert grouped(5, 3).tolist() == [0, 1, 2, 3, 4]
    blue, white, orange = coloured(np.array([-1.0, 0.0, 1.0]))
    assert blue.tolist() == [0, 114, 178] and white.tolist() == [255] * 3
    assert orange.tolist() == [213, 94, 0]
    chosen = [torch.tensor([2.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, -2.0])]
    picture = noise_picture(chosen, 1, 2.0, ("x", "y"))
    high, wide = picture.shape[:2]
    # First decision: the first row is orange. Second: the last one is blue, and its bar goes left.
    assert picture[5, 70 + 50].tolist() == [213, 94, 0]
    assert picture[high - 5, 70 + 160].tolist() == [0, 114, 178]
    bars = picture[high - 20, 70 + 210 + 6 :]
    assert (bars[10:50] == (0, 114, 178)).all() and (bars[70:110] == 255).all()
    assert wide == 70 + 210 + 6 + 120


def test_the_picture_that_a_reward_scores_is_taken_and_scored(tmp_path: Path) -> None:
    world = REACH | {"drawing": "light", "portraits": ["front", "wrist"]}
    folder = run_with(tmp_path, world, {**INNER, "chunk": 1}, reward=CLIP, execute=1)
    session = open_session(folder)
    assert session.overlay is not None
    reward = session.overlay.reward
    session.reset(2)
    session.choose("demonstrator")
    while not session.over:
        session.advance()
    moments = session.episode.moments
    pictures = [moment.reward_image.picture() for moment in moments]
    side = reward.model.side
    assert pictures[0].shape == (side, 2 * side, 3)
    # The last one is of the end, not of the start that the world has gone on to.
    assert np.abs(pictures[-1].astype(int) - pictures[0]).mean() > 0.1
    start = session.env.render_batch(torch.tensor([0]), side)[0].numpy()
    last = pictures[-1].astype(int)
    assert np.abs(last - pictures[-2]).mean() < np.abs(last - start).mean()
    scores = reward.score(torch.from_numpy(np.stack(pictures[1:])))
    kept = [moment.numbers[SCORE] for moment in moments[1:]]
    np.testing.assert_allclose(kept, scores.numpy(), atol=1e-5)
    assert max(kept) - min(kept) > 0.01 and session.trouble == ""
    session.close()


def test_the_scored_picture_is_in_the_page(tmp_path: Path) -> None:
    world = REACH | {"drawing": "light"}
    folder = run_with(tmp_path, world, {**INNER, "chunk": 1}, reward=CLIP, execute=1)
    with Viewer(open_session(folder), port=0) as viewer:
        viewer.step(3)
        viewer.scrub(2)
        viewer.refresh()
        page, now = viewer.page, viewer.session.episode.moments[2]
        assert page.steering.reward_image.visible
        label = f"image that the reward scored, step 2: {now.numbers[SCORE]:.3f}"
        assert page.steering.reward_image.label == label
        assert page.value_plots.plots[SCORE][0].data[1][1] == pytest.approx(now.numbers[SCORE])


class Reads:
    """A reward that reads captions."""

    frozen = True

    def augment_env(self, env):
        return with_captions(env, CaptionVocabulary())


class Plain:
    """A reward that looks at nothing."""

    frozen = True


def test_rewards_that_need_more_than_a_picture_are_left_out() -> None:
    env = build(REACH, VecEnv)
    with pytest.raises(UnsupportedReward):
        reward_camera(Reads(), env)
    assert reward_camera(Plain(), env).capture() is None
    env.close()


class Corner(Policy):
    """ActionSource by how bright the lower right quarter of its picture is."""

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
        viewer.step(2)
        viewer.refresh()
        assert heat.switch.visible and not heat.images["front"].visible
        heat.switch.value = True
        viewer.press(viewer.page.changed)
        viewer.refresh()
        assert heat.images["front"].visible and "a grey patch moves the action" in (
            heat.images["front"].label
        )
        picture = heat.images["front"].image.astype(int)
        # Somewhere it is orange, somewhere grey.
        warmth = picture[..., 0] - picture[..., 2]
        assert warmth.max() > 150 and warmth.min() < 60
        viewer.choose("zero")
        viewer.step()
        viewer.refresh()
        assert not heat.switch.visible and not heat.images["front"].visible
