"""Optional abilities of environments are found through wrappers; old method names still work."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.env import HasEventCaptions, HasHeldOutTasks, Step
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol
from tests import toy_envs


class Told(toy_envs.Reach):
    held_out = torch.zeros(2, 1)

    def happened(self, before: Tensors, after: Tensors) -> list[str]:
        return ["moved"] * self.num_envs


class Old(Wrapper):
    """As a user wrote it before the methods were renamed."""

    def before_reset(self, call):  # pyright: ignore
        self.hooks = [call]
        super().before_reset(call)

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        self.leaving(torch.ones(self.num_envs, dtype=torch.bool))
        return step

    def seen(self, obs: Tensors) -> Tensors:
        return {"position": super().seen(obs)["position"] + 1}


def test_an_ability_is_found_below_wrappers_and_by_its_old_name() -> None:
    env = Told(2)
    found = find_protocol(Wrapper(Wrapper(env)), HasEventCaptions)
    assert found is not None and found.event_captions({}, {}) == ["moved", "moved"]
    held = find_protocol(Wrapper(env), HasHeldOutTasks)
    assert held is not None and held.held_out is env.held_out
    assert find_protocol(Wrapper(toy_envs.Reach(1)), HasEventCaptions) is None


def test_a_wrapper_with_methods_of_old_names_is_called_by_the_new_ones() -> None:
    env, called = Old(toy_envs.Reach(2)), []
    env.add_pre_reset_hook(called.append)
    assert len(env.hooks) == 1
    env.reset(0)
    env.step(torch.zeros(2, *env.spec.act.shape))
    assert called[-1].tolist() == [True, True]
    obs = env.env.reset(0)
    assert set(env.transform_obs({"position": next(iter(obs.values()))})) == {"position"}
