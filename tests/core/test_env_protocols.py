"""Optional abilities of environments are found through wrappers; old method names still work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embodied.core.env import HasEventCaptions, HasHeldOutTasks, Step
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol
from tests import toy_envs


class Captioned(toy_envs.Reach):
    held_out = torch.zeros(2, 1)

    def event_captions(self, before: Tensors, after: Tensors) -> list[str]:
        return ["moved"] * self.num_envs


def test_a_protocol_is_found_inside_wrappers() -> None:
    env = Captioned(2)
    found = find_protocol(Wrapper(Wrapper(env)), HasEventCaptions)
    assert found is not None and found.event_captions({}, {}) == ["moved", "moved"]
    held = find_protocol(Wrapper(env), HasHeldOutTasks)
    assert held is not None and held.held_out is env.held_out
    assert find_protocol(Wrapper(toy_envs.Reach(1)), HasEventCaptions) is None


@pytest.mark.filterwarnings("ignore::embodied.moved.MovedWarning")
def test_subclasses_with_methods_of_old_names_still_work() -> None:
    class Told(toy_envs.Reach):
        def happened(self, before: Tensors, after: Tensors) -> list[str]:
            return ["moved"] * self.num_envs

    class Old(Wrapper):
        def before_reset(self, call):  # pyright: ignore
            self.hooks = [call]
            super().before_reset(call)

        def step(self, action: Tensor) -> Step:
            step = super().step(action)
            self.leaving(torch.ones(self.num_envs, dtype=torch.bool))
            return step

        def seen(self, obs: Tensors) -> Tensors:
            return {"state": super().seen(obs)["state"] + 1}

    source = find_protocol(Old(Told(2)), HasEventCaptions)
    assert source is not None and source.event_captions({}, {}) == ["moved", "moved"]
    env, called = Old(toy_envs.Reach(2)), []
    env.add_pre_reset_hook(called.append)
    assert len(env.hooks) == 1
    env.reset(0)
    env.step(torch.zeros(2, *env.spec.act.shape))
    assert called[-1].tolist() == [True, True]
    assert env.transform_obs({"state": torch.zeros(1)})["state"].tolist() == [1]
