"""What is known of each step besides: the critic's value of a decision, the terms of the reward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.viewer.export.export import charts
from embodied.viewer.launch import open_session
from embodied.viewer.panels.page import Viewer
from tests.viewer.sessions import REACH, parts_of, play, run_with

ACTS = {"_target_": "embodied.policies.gaussian.Gaussian", "chunk": 2, "hidden": [8]}
LEARNS = {"_target_": "embodied.learners.off_policy.sac.Sac", "hidden": [8], "gamma": 0.9}


def made(folder: Path, **more: object) -> Path:
    return run_with(folder, REACH, ACTS, learner=LEARNS, **more)


def test_a_decision_is_worth_what_the_least_critic_says(tmp_path: Path) -> None:
    session = play(open_session(made(tmp_path)), 2)
    env = build(REACH, VecEnv)
    _, learner = parts_of(env, ACTS, LEARNS)
    learner.set_state(checkpoint.load_state(tmp_path, "learner"))
    moments = session.episode.moments
    for at in (0, 2, 4):
        chunk = torch.tensor([moments[at + 1].action + moments[at + 2].action])
        with torch.no_grad():
            wanted = learner.critic(moments[at].obs, chunk).amin(0).item()
        # It holds for both steps of the chunk.
        for after in moments[at + 1 : at + 3]:
            assert after.numbers["value"] == pytest.approx(wanted, abs=1e-5)
    found = charts([session])
    assert [chart["title"] for chart in found] == ["reward", "value", "action"]
    session.close()
    env.close()


def test_terms_of_the_reward_are_stacked(tmp_path: Path) -> None:
    potential = {"of": "distance", "a": "tool", "b": "goal", "weight": -5.0}
    reward = {"_target_": "embodied.rewards.handcrafted.factors.Shaping", "potential": potential}
    session = open_session(made(tmp_path, reward=reward))
    with Viewer(session, port=0) as viewer:
        viewer.step(4)
        viewer.refresh()
        numbers = session.episode.moments[-1].numbers
        terms = {name: value for name, value in numbers.items() if name.startswith("term/")}
        assert len(terms) > 1 and session.trouble == ""
        plot, members = viewer.page.value_plots.plots["reward terms, stacked"]
        assert members == sorted(terms)
        heights = [curve[-1] for curve in plot.data[1:]]
        # Each on top of those before it: the last is their sum.
        assert heights[-1] == pytest.approx(sum(terms.values()), abs=1e-6)
        assert "value" in viewer.page.value_plots.plots
        chart = charts([session])[0]
        assert chart["stacked"] and len(chart["curves"]) == len(terms)


def test_a_run_without_either_shows_nothing(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "checkpoints" / "00000010" / "learner.pt").unlink()
    session = open_session(folder)
    session.reset(0)
    session.advance()
    assert session.overlay is None and session.now.numbers == {}
    session.close()


def test_a_critic_of_other_actions_says_so_once(tmp_path: Path) -> None:
    session = open_session(made(tmp_path))
    session.choose("demonstrator")
    session.reset(0)
    session.advance()
    # The script decides one step at a time, the critic knows chunks of two.
    assert session.now.numbers == {} and session.trouble.startswith("critic not shown:")
    session.advance()
    session.close()
