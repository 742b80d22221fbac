"""M2T2: matching, mask losses, hand poses and the network's symmetries, by hand."""

import math

import torch
from torch import Tensor

from embodied.envs.grasping.env import Config as SceneConfig
from embodied.envs.grasping.env import GraspingScenes
from embodied.learners.imitation import m2t2
from embodied.learners.imitation.m2t2 import LABELS, Config, M2t2Learner
from embodied.learners.learner import RunPlan
from embodied.policies.m2t2 import Config as NetConfig
from embodied.policies.m2t2 import M2t2, clear, placed
from embodied.policies.networks.point_sets import described, normal

NET = NetConfig(width=16, layers=2, heads=2, queries=4)


def sure(mask: list[list[int]]) -> Tensor:
    return 20.0 * (2 * torch.tensor(mask).float() - 1)


def test_dice_and_hardest_points() -> None:
    logits = torch.tensor([[0.0, 0.0, 20.0, -20.0]])
    target = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    # p = 1/2, 1/2, 1, 0: 1 - (2 * 1.5 + 1) / (2 + 2 + 1)
    torch.testing.assert_close(m2t2.dice_loss(logits, target), torch.tensor([0.2]))
    torch.testing.assert_close(m2t2.hardest(logits, target, 2), torch.tensor(math.log(2)))
    torch.testing.assert_close(m2t2.hardest(logits, target, 4), torch.tensor(math.log(2) / 2))


def test_objects_find_their_queries() -> None:
    number = torch.tensor([[1.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0], [0.0, 2.0, 2.0, 0.0]])
    rows, target = m2t2.object_masks(number)
    assert rows.tolist() == [0, 0, 2]
    assert target.tolist() == [[1, 1, 0, 0], [0, 0, 0, 1], [0, 1, 1, 0]]
    mask = torch.stack(
        [
            sure([[0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]]),
            sure([[1, 1, 1, 1]] * 3),
            sure([[0, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 0]]),
        ]
    )
    score = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [-3.0, 3.0, 3.0]])
    # In the third scene two masks are right: the query that is surer of an object is taken.
    assert m2t2.matched(Config(), score, mask, rows, target).tolist() == [2, 0, 1]


def test_both_orders_of_the_jaws_are_right() -> None:
    label = torch.tensor([[1.0, 0, 1, 0, 0, 0, -1, 0.04]])
    points = torch.tensor([[0.5, -0.02, 0.03]])
    place = torch.tensor([[0.5, 0.0, 0.03]])
    turn = torch.tensor([[[-1.0, 0, 0], [0, 1, 0], [0, 0, -1]]])
    width = torch.tensor([0.04])
    assert m2t2.hand_error(place, turn, points, label) < 1e-4
    other = turn * torch.tensor([-1.0, -1.0, 1.0])
    assert m2t2.hand_error(place, other, points, label) < 1e-4
    off = m2t2.hand_error(place + torch.tensor([0.01, 0.0, 0.0]), turn, points, label)
    torch.testing.assert_close(off, torch.tensor([0.01]), atol=1e-5, rtol=0)
    assert m2t2.outline(place, turn, width).shape == (1, 5, 3)


def test_placements_turn_about_the_vertical() -> None:
    torch.testing.assert_close(placed(torch.zeros(1))[0], torch.tensor([1.0, -1.0, -1.0]).diag())
    turn = placed(torch.tensor([math.pi / 2]))[0]
    torch.testing.assert_close(turn[:, 0], torch.tensor([0.0, 1.0, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.linalg.det(turn), torch.tensor(1.0))


def test_hands_keep_away_from_what_is_seen() -> None:
    place = torch.tensor([[[0.5, 0.0, 0.03]]])
    turn = placed(torch.zeros(1, 1))
    width = torch.tensor([[0.03]])
    # Open by 4.6 cm, closing along -y: the pads are from 2.3 to 3.25 cm on both sides.
    for y, free in ((0.0, True), (0.016, True), (0.018, False), (0.028, False), (0.039, True)):
        point = torch.tensor([[[0.5, y, 0.03]]])
        assert clear(place, turn, width, point).tolist() == [[free]], y


def test_turned_scenes_keep_their_grasps() -> None:
    torch.manual_seed(0)
    contact = torch.tensor([[[1.0, 0, 1, 0, 0, 0, -1, 0.04]]])
    points = torch.tensor([[[0.6, 0.1, 0.03]]])
    far = points + 0.02 * contact[..., 1:4]
    both = torch.cat([points, far], 1)
    obs = {"points": both, "held": points, LABELS[0]: contact.expand(-1, 2, -1)}
    made = m2t2.turned({**obs, LABELS[1]: torch.zeros(1, 2, 8)}, jitter=0.0)
    moved = made["points"]
    torch.testing.assert_close(moved[:, 0] + 0.02 * made[LABELS[0]][:, 0, 1:4], moved[:, 1])
    torch.testing.assert_close(moved[..., 2], both[..., 2])


def test_the_axis_into_a_surface() -> None:
    # Points spread by 2 along x, by 1 along z, not along y; the object is on the side of -y.
    moments = torch.tensor([0.8, 0.0, 0.2]).diag()[None]
    side = torch.tensor([[0.3, -0.1, 0.2]])
    torch.testing.assert_close(
        normal(moments, side), torch.tensor([[0.0, -1.0, 0.0]]), atol=2e-3, rtol=0
    )
    # The corner of a box: a front at x = 0.5 and a top behind it.
    line = torch.arange(0.0, 0.04, 0.004)
    front = torch.cartesian_prod(torch.tensor([0.5]), line, line + 0.01)
    top = torch.cartesian_prod(0.496 - line, line, torch.tensor([0.05]))
    points = torch.cat([front, top, front, top])[None, :384]
    _, inward = described(points, torch.tensor([0.52, 0.0, 0.0]), 0.1)
    middle = 54  # of the front
    torch.testing.assert_close(inward[0, middle], torch.tensor([-1.0, 0.0, 0.0]), atol=0.05, rtol=0)


def test_the_order_of_far_points_does_not_matter() -> None:
    torch.manual_seed(1)
    env = GraspingScenes(SceneConfig(num_envs=1))
    net = M2t2(NET, env.spec)
    obs = env.reset(seed=1)
    points = obs["points"]
    order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(383)])
    order = torch.cat([order, 384 + torch.randperm(128)])
    plain = net(points, obs["held"])
    mixed = net(points[:, order], obs["held"])
    # Queries begin at points in the order of these: the same ones, in another order. Neighbours
    # that are equally far may be others.
    one, other = mixed.mask[0], plain.mask[0][:, :, order]
    parts = ((one[:, :4].sort(1).values, other[:, :4].sort(1).values), (one[:, 4:], other[:, 4:]))
    for given, wanted in parts:
        near = torch.isclose(given, wanted, atol=1e-2, rtol=1e-2)
        assert near.float().mean() > 0.99


def test_it_learns_one_batch() -> None:
    torch.manual_seed(0)
    env = GraspingScenes(SceneConfig(num_envs=2, objects=2, placing=0.5))
    net = M2t2(NET, env.spec)
    learner = M2t2Learner(Config(batch_size=2), net, env.spec, RunPlan(updates=26))
    batch = {f"obs/{key}": leaf for key, leaf in env.reset(seed=0).items()}
    first = learner.update(batch)
    for _ in range(25):
        last = learner.update(batch)
    assert last["loss"] < 0.9 * first["loss"]


def test_a_resumed_learner_goes_on_the_same() -> None:
    torch.manual_seed(0)
    env = GraspingScenes(SceneConfig(num_envs=2, objects=2))
    batch = {f"obs/{key}": leaf for key, leaf in env.reset(seed=0).items()}
    nets = [M2t2(NET, env.spec) for _ in range(2)]
    learner, other = (M2t2Learner(Config(), net, env.spec, RunPlan(updates=2)) for net in nets)
    learner.update(batch)
    other.set_state(learner.get_state())
    torch.manual_seed(1)
    wanted = learner.update(batch)
    torch.manual_seed(1)
    assert other.update(batch)["loss"] == wanted["loss"]
    for one, two in zip(learner.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
