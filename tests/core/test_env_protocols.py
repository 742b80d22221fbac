"""Optional abilities of environments are found through wrappers."""

from __future__ import annotations

import torch

from embodied.core.env import HasEventCaptions, HasHeldOutTasks
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
