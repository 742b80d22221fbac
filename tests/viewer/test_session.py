"""Every step is kept: seen again, gone on from, disturbed; recorded episodes are played alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.build import build
from embodied.core.env import NotSavable, VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.datasets.collect import CollectConfig, collect
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes
from embodied.viewer import ViewerError
from embodied.viewer.export.export import charts
from embodied.viewer.launch import open_session
from embodied.viewer.panels.main_view import poses_at
from embodied.viewer.panels.page import Viewer
from embodied.viewer.session import episode as kept
from embodied.viewer.session.disturbances import Pushes
from embodied.viewer.session.episode import EnvSnapshot, Episode, Moment
from embodied.viewer.session.session import Session
from tests import toy_envs
from tests.builders import node_of, recorded
from tests.viewer.sessions import HOPPER, LIFT, advance, alone, body, go, physics, play


@pytest.fixture(scope="module")
def opened() -> Iterator[Session]:
    session = alone(LIFT)
    yield session
    session.close()


@pytest.fixture
def session(opened: Session) -> Session:
    opened.choose("demonstrator")
    opened.reset(3)
    return opened


def test_every_moment_is_kept_as_it_was(session: Session) -> None:
    places = []
    for _ in range(8):
        places.append(session.recorder.scene.poses()[0])
        session.advance()
    moments = session.episode.moments
    assert [moment.step for moment in moments] == list(range(9))
    for moment, place in zip(moments, places, strict=False):
        seen = moment.frame.places
        np.testing.assert_allclose(seen, place, atol=1e-12)
        again = physics(session.env, moment.state).xpos
        np.testing.assert_allclose(again[1:], seen[1:], atol=2e-6)
    session.seek(2)
    assert session.now is moments[2] and not session.live
    advance(session, 6)
    # What was kept is walked through again; nothing new has happened.
    assert session.live and session.episode.moments == moments
    session.seek(-4)
    assert session.at == 0


def test_going_on_from_an_earlier_moment_forgets_what_came_later(session: Session) -> None:
    advance(session, 12)
    before = session.episode.moments[:]
    session.seek(6)
    session.branch()
    assert session.live and session.episode.steps == 6
    # The same policy does the same again.
    advance(session, 6)
    again = session.episode.moments
    np.testing.assert_array_equal(again[-1].frame.places, before[-1].frame.places)
    assert torch.equal(again[-1].state["physics"], before[-1].state["physics"])
    session.seek(6)
    session.choose("zero")
    session.branch()
    advance(session, 6)
    assert np.abs(session.now.frame.places - before[12].frame.places).max() > 0.01


def test_the_last_moment_is_the_one_that_ended_it(session: Session) -> None:
    play(session, 3)
    last, before = session.episode.moments[-1], session.episode.moments[-2]
    assert session.episode.success and session.episode.success_steps == [last.step]
    assert last.state is None and before.state is not None
    cube = body(session, "cube")
    rise = last.frame.places[cube, 2] - before.frame.places[cube, 2]
    # Lifted further, not back on the table, where the next episode has it.
    assert 0 < rise < 0.05 and last.frame.places[cube, 2] > 0.1
    assert "z 1" in last.frame.words.partition("cube")[2]
    # The world is at its next start: an earlier moment can still be gone on from.
    session.seek(len(session.episode.moments) - 4)
    session.branch()
    advance(session, 3)
    assert session.episode.end and session.episode.steps == last.step


def test_the_demonstrator_of_the_configuration_may_act() -> None:
    session = alone(node_of("envs.toy.two_gap.TwoGap", num_envs=1))
    session.choose("demonstrator")
    assert play(session, 2).episode.success


def test_a_world_that_cannot_be_saved_says_so() -> None:
    env = toy_envs.Reach(1)
    env.get_state = lambda: (_ for _ in ()).throw(NotSavable("no"))
    session = alone(env)
    session.reset(0)
    advance(session, 2)
    session.seek(1)
    with pytest.raises(ViewerError, match="cannot continue from an earlier step"):
        session.branch()


def test_a_very_long_episode_forgets_its_oldest_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LONGEST", 20)
    episode = Episode(0)
    forgotten = [episode.add(Moment(i, EnvSnapshot(), {}, {}, action=[0.0])) for i in range(30)]
    # The 21st is one too many: 2 go; so it goes on at every second.
    assert forgotten.count(2) == 5 and sum(forgotten) == 10
    assert (episode.moments[0].step, episode.steps, len(episode.moments)) == (10, 29, 20)


def test_successes_count_once_while_they_last() -> None:
    flags = [None, False, True, True, False, True]
    moments = [Moment(i, EnvSnapshot(), {}, {}, success=flag) for i, flag in enumerate(flags)]
    assert Episode(0, moments).success_steps == [2, 5]
    assert [Episode(0, moments[:n]).success for n in (1, 2, 6)] == [None, False, True]


def test_half_way_is_half_the_place_and_half_the_turn() -> None:
    def at(step: int, x: float, turn: list[float]) -> Moment:
        sight = EnvSnapshot(np.array([[x, 0.0, 1.0]]), np.array([turn]))
        return Moment(step, sight, {}, {}, action=[0.0])

    session, half = alone(toy_envs.Reach(1)), 0.5**0.5
    # A quarter turn about z, given as the other quaternion that means the same.
    moments = [at(0, 0.0, [1.0, 0, 0, 0]), at(1, 2.0, [-half, 0, 0, -half])]
    session.episode, session.at = Episode(0, moments), 1
    places, turns = poses_at(session, 0.5)
    assert places.tolist() == [[1.0, 0.0, 1.0]]
    eighth = [np.cos(np.pi / 8), 0.0, 0.0, np.sin(np.pi / 8)]
    np.testing.assert_allclose(turns[0], eighth, atol=1e-12)
    places, turns = poses_at(session, 1.0)
    assert places[0, 0] == 2.0 and turns is session.now.frame.turns
    # Nothing is between at the start, and after the end, where a rival's episode goes on.
    for step, place in ((0, 0.0), (5, 2.0)):
        session.at = step
        assert poses_at(session, 0.3)[0][0, 0] == place


def test_gymnasiums_worlds_can_be_pushed_others_not() -> None:
    hopper = build(HOPPER, VecEnv)
    hopper.reset(0)
    pushes = Pushes(hopper)
    assert pushes.names == ["robot"] and pushes.links() == ["torso", "thigh", "leg", "foot"]
    inner = hopper.envs[0].unwrapped.data
    before = inner.qvel.copy()
    pushes.push("robot", 3.0, 1)
    assert np.linalg.norm(inner.qvel - before) == pytest.approx(3.0)
    hopper.close()
    other = Pushes(toy_envs.Reach(1))
    assert other.names == other.links() == []


def test_delay_and_darkness_reach_who_acts_and_nobody_else() -> None:
    seen: list[torch.Tensor] = []

    def act(obs, first):
        seen.append(obs["state"].clone())
        return torch.full((1, 2), 0.5)

    act.explore = False
    session = Session(toy_envs.Reach(1), {"watched": lambda: act}, "watched")
    session.reset(1)
    session.disturbance.late = 2
    advance(session, 5)
    shown = [moment.obs["state"] for moment in session.episode.moments]
    assert torch.equal(torch.cat(seen), torch.cat([shown[at] for at in (0, 0, 0, 1, 2)]))
    session.disturbance.late, session.disturbance.off = 0, {"state"}
    session.advance()
    assert not seen[-1].any() and session.now.next_obs["state"].any()
    assert session.trial == "state is off"
    session.close()


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demos") / "lift"
    script = node_of("policies.scripted.fr3.Scripted", task="lift", quality=0.3)
    collect(CollectConfig(LIFT, script, 3, str(out), num_envs=2), lambda kept, played: None)
    return out


@pytest.fixture(scope="module")
def recording(demos: Path) -> Iterator[Session]:
    session = open_session(demos)
    yield session
    session.close()


def test_the_steps_are_those_that_were_recorded(recording: Session, demos: Path) -> None:
    episodes = read_episodes(demos)
    play(recording, 1)
    wanted, episode = episodes.episode(1), recording.episode
    assert episode.steps == int(episodes.length[1]) and recording.counts == "episode"
    torch.testing.assert_close(torch.tensor(episode.actions), wanted["action"])
    torch.testing.assert_close(torch.tensor(episode.rewards), wanted["reward"])
    states = torch.cat([moment.next_obs["state"] for moment in episode.moments])
    torch.testing.assert_close(states[:-1], wanted["obs/state"])
    torch.testing.assert_close(states[-1], wanted["next_obs/state"])
    assert episode.success_steps == [episode.steps] and episode.end == "ended"
    assert "episode 1" in episode.moments[3].frame.words
    recording.advance()
    assert recording.episode.seed == 2
    with pytest.raises(ViewerError, match=r"has 3 episodes, from episode=0"):
        recording.reset(7)
    with pytest.raises(ViewerError, match="cannot be compared"):
        open_session(demos, None, "zero")


def test_the_arm_stands_where_it_was_observed(recording: Session) -> None:
    play(recording, 0)
    hand, cube = body(recording, "hand"), body(recording, "cube")
    names = recording.spec.obs["state"].names

    def observed(moment: Moment, what: str) -> np.ndarray:
        state = moment.next_obs["state"][0].double().numpy()
        return state[[names.index(f"{what}_{axis}") for axis in "xyz"]]

    for moment in recording.episode.moments[::6]:
        places = moment.frame.places
        np.testing.assert_allclose(places[cube], observed(moment, "cube"), atol=1e-6)
        # The tool is between the finger tips, 10.34 cm from the hand's own frame along its z.
        w, x, y, z = moment.frame.turns[hand]
        out = np.array([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)])
        tool = observed(moment, "tool")
        np.testing.assert_allclose(places[hand] + 0.1034 * out, tool, atol=2e-3)
    last = recording.episode.moments[-1]
    np.testing.assert_allclose(recording.trail()[-1], observed(last, "tool"))


def test_in_the_page_its_number_is_an_episode(demos: Path) -> None:
    with Viewer(open_session(demos), port=0, seed=2) as viewer:
        go(viewer, 4)
        page = viewer.page
        assert page.seed.label == "Episode" and page.seed.value == 2
        assert page.scene is not None and page.sliders == []
        assert not page.explore.visible and not page.onward.visible  # nothing can change it
        seen = page.main_view.cameras.eye.seen
        places = viewer.session.episode.moments[-1].frame.places
        assert all((np.abs(seen - place).sum(1) < 1e-6).any() for place in places[-2:])
        with pytest.raises(ViewerError, match="has 3 episodes"):
            viewer.next()


def test_another_worlds_robot_is_not_put_there(demos: Path) -> None:
    session = open_session(demos, node_of("envs.mujoco.locomotion.Locomotion", id="Hopper-v5"))
    assert session.recorder.scene is None
    session.close()


def test_without_a_world_pictures_and_numbers_are_shown(tmp_path: Path) -> None:
    obs = {"rgb": Leaf((16, 16, 3), "uint8", 0, 255), "state": Leaf((2,))}
    spec = Spec(obs, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
    shades = torch.tensor([0, 9, 18, 27, 36, 200], dtype=torch.uint8)
    shown = {"rgb": shades[:, None, None, None].expand(6, 16, 16, 3), "state": torch.rand(6, 2)}
    with EpisodeWriter(tmp_path / "own", spec, images="png") as writer:
        writer.add(recorded(shown, torch.zeros(5, 2)), "hold still")
    # And as LeRobot writes it: without our own note of what the columns are.
    theirs = Path(shutil.copytree(tmp_path / "own", tmp_path / "theirs"))
    info = json.loads((theirs / "meta" / "info.json").read_text())
    del info["embodied"]
    (theirs / "meta" / "info.json").write_text(json.dumps(info))
    for folder in (tmp_path / "own", theirs):
        session = open_session(folder)
        session.reset(0)
        assert session.at == 0 and session.length == 6, "all of it is on the time line at once"
        for step, shade in ((2, 18), (5, 200)):
            session.seek(step)
            assert session.now.frame.places is None
            assert set(session.now.frame.picture.picture().ravel()) == {shade}
        assert session.episode.end == "out of time" and session.episode.success is None
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
        go(viewer, 6)
        episode, plots = viewer.session.episode, viewer.page.value_plots.plots
        # Where each began to act; step t led to moment t + 1.
        assert episode.interventions == [(2, "workspace"), (3, "speed"), (6, "speed")]
        marks = [(mark.value, mark.label) for mark in viewer.page.timeline.slider._marks]
        assert marks == episode.interventions
        title = "safety: ticks changed per step, stacked"
        plot, members = plots[title]
        assert members == ["safety/speed", "safety/workspace"]
        assert plot.data[2].tolist() == [0, 4, 7, 1, 0, 3]
        moved, _ = plots["target change, largest joint (rad)"]
        np.testing.assert_allclose(moved.data[2], [0, 0.02, 0, 0, 0, 0])
        np.testing.assert_allclose(moved.data[1], [0, 0, 0.005, 0, 0, 0])
        assert title in [chart["title"] for chart in charts([viewer.session])]
