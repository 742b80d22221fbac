"""Kinematics and the controller say the same on numpy arrays and on torch tensors."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from embodied.embodiments import fr3
from embodied.embodiments.arrays import constant, namespace, solve
from embodied.embodiments.cartesian_delta import CartesianDelta, Config


def test_each_kind_has_its_library() -> None:
    array, tensor = np.zeros(2), torch.zeros(2, dtype=torch.float64)
    assert namespace(array) is np and namespace(tensor) is torch
    assert constant((1.0, 2.0), array).tolist() == constant((1.0, 2.0), tensor).tolist() == [1, 2]
    assert constant((1.0, 2.0), tensor) is constant([1.0, 2.0], tensor), "the tensor is not kept"
    assert constant((1.0, 2.0), tensor) is not constant([[1.0, 2.0]], tensor)
    right = np.array([[[3.0], [8.0]]])
    for kind in (np.asarray, torch.from_numpy):
        assert solve(kind(np.diag([1.0, 2.0])[None]), kind(right))[0, :, 0].tolist() == [3, 4]


@pytest.mark.parametrize("turning", ["none", "yaw", "full"])
def test_controllers_agree_over_many_steps(turning: Literal["none", "yaw", "full"]) -> None:
    controller, random = CartesianDelta(Config(turning=turning)), np.random.default_rng(1)
    place = random.uniform([0.4, -0.2, 0.1], [0.6, 0.2, 0.3], (6, 3))
    q = controller.reach(place)
    np.testing.assert_allclose(q, controller.reach(torch.from_numpy(place)).numpy(), atol=1e-9)
    for one, other in zip(fr3.forward(q), fr3.forward(torch.from_numpy(q)), strict=True):
        np.testing.assert_allclose(one, other.numpy(), atol=1e-12)
    ours = controller.begin(q, np.full(6, 0.08))
    theirs = controller.begin(torch.from_numpy(q), torch.full((6,), 0.08, dtype=torch.float64))
    for _ in range(30):
        action = random.uniform(-1, 1, (6, len(controller.names)))
        q, width, ours = controller(action, q, ours)
        after = controller(torch.from_numpy(action), theirs["q"], theirs)
        np.testing.assert_allclose(q, after[0].numpy(), atol=1e-9)
        np.testing.assert_allclose(width, after[1].numpy(), atol=1e-12)
        theirs = after[2]
