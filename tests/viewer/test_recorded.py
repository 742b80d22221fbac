"""A dataset is looked at like a world: its steps, its end, its pictures, and a robot in 3D."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.spec import Leaf, Spec
from embodied.datasets.collect import CollectConfig, collect
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes
from embodied.viewer import ViewerError
from embodied.viewer.export.export import charts
from embodied.viewer.launch import open_session
from embodied.viewer.panels.page import Viewer
from embodied.viewer.session.session import Session
from tests.builders import node_of, recorded
from tests.viewer.sessions import LIFT, play

SCRIPT = {"_target_": "embodied.policies.scripted.fr3.Scripted", "task": "lift", "quality": 0.3}


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("demos") / "lift"
    collect(CollectConfig(LIFT, SCRIPT, 3, str(out), num_envs=2), lambda kept, played: None)
    return out


@pytest.fixture(scope="module")
def session(demos: Path) -> Iterator[Session]:
    session = open_session(demos)
    yield session
    session.close()


def test_the_steps_are_those_that_were_recorded(session: Session, demos: Path) -> None:
    episodes = read_episodes(demos)
    play(session, 1)
    wanted = episodes.episode(1)
    episode = session.episode
    assert episode.steps == int(episodes.length[1]) and session.counts == "episode"
    torch.testing.assert_close(torch.tensor(episode.actions), wanted["action"])
    torch.testing.assert_close(torch.tensor(episode.rewards), wanted["reward"])
    states = torch.cat([moment.next_obs["state"] for moment in episode.moments])
    torch.testing.assert_close(states[:-1], wanted["obs/state"])
    torch.testing.assert_close(states[-1], wanted["next_obs/state"])
    assert episode.success and episode.success_steps == [episode.steps] and episode.end == "ended"
    assert "episode 1" in episode.moments[3].frame.words
    session.advance()
    assert session.episode.seed == 2
    with pytest.raises(ViewerError, match=r"has 3 episodes, from episode=0"):
        session.reset(7)


def test_the_arm_stands_where_it_was_observed(session: Session) -> None:
    play(session, 0)
    names = [name.partition("_")[2] for name in session.recorder.scene.bodies()]
    hand, cube = names.index("hand"), names.index("cube")
    where = {name: at for at, name in enumerate(session.spec.obs["state"].names)}
    for moment in session.episode.moments[::6]:
        state = moment.next_obs["state"][0].double().numpy()
        at = [state[where[f"cube_{axis}"]] for axis in "xyz"]
        np.testing.assert_allclose(moment.frame.places[cube], at, atol=1e-6)
        # The tool is between the finger tips, 10.34 cm from the hand's own frame along its z.
        w, x, y, z = moment.frame.turns[hand]
        out = np.array([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)])
        tool = [state[where[f"tool_{axis}"]] for axis in "xyz"]
        np.testing.assert_allclose(moment.frame.places[hand] + 0.1034 * out, tool, atol=2e-3)
    last = session.episode.moments[-1].next_obs["state"][0]
    np.testing.assert_allclose(session.trail()[-1], [last[where[f"tool_{axis}"]] for axis in "xyz"])


def test_in_the_page_its_number_is_an_episode(demos: Path) -> None:
    with Viewer(open_session(demos), port=0, seed=2) as viewer:
        viewer.step(4)
        viewer.refresh()
        assert viewer.page.seed.label == "Episode" and viewer.page.seed.value == 2
        assert viewer.page.scene is not None and viewer.page.sliders == []
        with pytest.raises(ViewerError, match="has 3 episodes"):
            viewer.next()
    with pytest.raises(ViewerError, match="cannot be compared"):
        open_session(demos, None, "zero")


def test_without_a_world_pictures_and_numbers_are_shown(tmp_path: Path) -> None:
    obs = {"rgb": Leaf((16, 16, 3), "uint8", 0, 255), "state": Leaf((2,))}
    spec = Spec(obs, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
    shades = torch.tensor([0, 9, 18, 27, 36, 200], dtype=torch.uint8)
    shown = {"rgb": shades[:, None, None, None].expand(6, 16, 16, 3), "state": torch.rand(6, 2)}
    with EpisodeWriter(tmp_path / "own", spec, images="png") as writer:
        writer.add(recorded(shown, torch.zeros(5, 2)), "hold still")
    session = open_session(tmp_path / "own")
    session.reset(0)
    assert session.at == 0 and session.length == 6, "all of it is on the time line at once"
    session.advance()
    session.advance()
    assert session.now.frame.places is None
    assert set(session.now.frame.picture.picture().ravel()) == {18}
    session.seek(5)
    assert set(session.now.frame.picture.picture().ravel()) == {200}
    assert session.episode.end == "out of time" and session.episode.success is None
    session.close()
    # As LeRobot writes it: without our own note of what the columns are.
    theirs = tmp_path / "theirs"
    shutil.copytree(tmp_path / "own", theirs)
    info = json.loads((theirs / "meta" / "info.json").read_text())
    del info["embodied"]
    (theirs / "meta" / "info.json").write_text(json.dumps(info))
    session = open_session(theirs)
    session.reset(0)
    session.advance()
    assert set(session.now.frame.picture.picture().ravel()) == {9}
    session.close()


def test_another_worlds_robot_is_not_put_there(demos: Path) -> None:
    session = open_session(demos, node_of("envs.mujoco.locomotion.Locomotion", id="Hopper-v5"))
    assert session.recorder.scene is None
    session.close()


def test_what_safety_did_is_marked_and_plotted(tmp_path: Path) -> None:
    """Six steps as `embodied deploy` records them; safety acts in four of them."""
    spec = Spec({"state": Leaf((2,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
    ticks = torch.tensor([[0, 0, 0], [4, 0, 0], [5, 2, 0], [1, 0, 0], [0, 0, 0], [0, 3, 0]])
    left = torch.zeros(6, 7, dtype=torch.float64)
    left[1, 3] = -0.02
    sent = left.clone()
    sent[2, 0] = 0.005
    actions = {"action/proposed": 0 * left, "action/filtered": left, "action/sent": sent}
    with EpisodeWriter(tmp_path / "deployed", spec) as writer:
        steps = recorded({"state": torch.rand(7, 2)}, torch.zeros(6, 2), interventions=ticks)
        writer.add(steps | actions, info={"stages": ["workspace", "speed", "torque"], "fault": ""})
    with Viewer(open_session(tmp_path / "deployed"), port=0) as viewer:
        viewer.step(6)
        viewer.refresh()
        episode = viewer.session.episode
        # Where each began to act; step t led to moment t + 1.
        assert episode.interventions == [(2, "workspace"), (3, "speed"), (6, "speed")]
        marks = [(mark.value, mark.label) for mark in viewer.page.timeline.slider._marks]
        assert marks == episode.interventions
        plot, members = viewer.page.value_plots.plots["safety: ticks changed per step, stacked"]
        assert members == ["safety/speed", "safety/workspace"]
        assert plot.data[2].tolist() == [0, 4, 7, 1, 0, 3]
        moved, _ = viewer.page.value_plots.plots["target change, largest joint (rad)"]
        np.testing.assert_allclose(moved.data[2], [0, 0.02, 0, 0, 0, 0])
        np.testing.assert_allclose(moved.data[1], [0, 0, 0.005, 0, 0, 0])
        titles = [chart["title"] for chart in charts([viewer.session])]
        assert "safety: ticks changed per step, stacked" in titles
