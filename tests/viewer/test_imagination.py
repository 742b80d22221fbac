"""The viewer shows what a run's model imagines beside what is observed."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from embodied.models import dynamics
from embodied.viewer.session.episode import Moment
from embodied.viewer.session.overlays import Imagination, imagination_of
from tests.linear_system import SPEC, roughly_fitted

FRAME = cast(Any, None)  # nothing is drawn


def moments(states: list[list[float]]) -> list[Moment]:
    made = [{"state": torch.tensor([state])} for state in states]
    action = [None, *([0.5] for _ in states[1:])]
    return [Moment(n, FRAME, obs, obs, action=action[n]) for n, obs in enumerate(made)]


def test_imagined_from_the_start_with_the_executed_actions() -> None:
    model = dynamics.load(roughly_fitted()["model"])
    shown = Imagination(model)
    first, second, third = moments([[0.1, 0.2], [0.5, 0.6], [0.7, 0.8]])
    action, noise = torch.tensor([[0.5]]), torch.zeros(1, model.noise_size)
    once = model.step(first.obs, action, noise).next_obs
    twice = model.step(once, action, noise).next_obs
    for after, before, imagined in ((second, first, once), (third, second, twice)):
        found = shown.numbers(before, after)
        x, v = imagined["state"][0].tolist()
        real = after.next_obs["state"][0].tolist()
        assert found == pytest.approx(
            {
                "imagined/x, imagined": x,
                "imagined/x, real": real[0],
                "imagined/v, imagined": v,
                "imagined/v, real": real[1],
            }
        )
    shown.reset()
    again = model.step(second.obs, action, noise).next_obs["state"][0, 0]
    assert shown.numbers(second, third)["imagined/x, imagined"] == pytest.approx(float(again))


def test_only_of_a_run_in_a_model_of_this_environment() -> None:
    node = {"_target_": "embodied.envs.imagined.Imagined", **roughly_fitted()}
    assert imagination_of(node, SPEC) is not None
    assert imagination_of(node, SPEC.with_obs(state=SPEC.act)) is None
    assert imagination_of({"_target_": "embodied.envs.toy.two_gap.TwoGap"}, SPEC) is None
    assert imagination_of(None, SPEC) is None
