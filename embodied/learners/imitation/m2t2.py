"""M2T2: grasps and placements learned as sets of masks from labels (Yuan, Murali et al., 2023).

Queries are matched with objects by the Hungarian method,

    min_match  sum_(q, o)  -2 log p_q + 5 BCE(mask_q, M_o) + 5 dice(mask_q, M_o)

and trained by the same terms (`score`: BCE in which unmatched queries count 0.1; BCE on the
hardest points only), in every decoder layer, each matched anew; placement queries have a turn each
and need no matching. At the points of a grasp: the mean distance of the hand's five points from
those of the labelled hand, for the nearer order of the jaws (ADD-S, which takes the nearest point
for each, has hardly a gradient where a direction is quite wrong), and cross entropy on the width's
bin. Labels are the observations `privileged/contact` and `privileged/placement`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional

from embodied.core.bounds import Count, NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.imitation import behavior_cloning
from embodied.learners.imitation.behavior_cloning import BehaviorCloning
from embodied.learners.learner import RunPlan
from embodied.policies.m2t2 import BIN, BINS, MIDDLE, M2t2, tool_poses

LABELS = ("privileged/contact", "privileged/placement")
TURN = 0.3  # rad: scenes are turned by up to so much; the camera stays on its side of the table,
# which tells the outside of a surface from its inside
JAWS = [0, 2, 1, 4, 3]  # the hand's points in the other order of the jaws
FINGER = 0.05  # m: from the tool point to where the hand's points lie along the approach


@dataclass(frozen=True)
class Config(behavior_cloning.Config):
    """Settings of M2T2's training. `hard`: points of a mask that BCE counts, of 512."""

    batch_size: Count = 16  # scenes of a gradient step
    weight_decay: NonNegative = 0.01  # of AdamW
    grad_clip: Positive = 1.0  # largest norm of the gradient
    hard: Count = 128  # points with the largest error that count in a mask's cross entropy
    score: NonNegative = 2.0  # weight of whether a query is an object
    unmatched: NonNegative = 0.1  # weight of queries without an object therein
    bce: NonNegative = 5.0  # weight of a mask's cross entropy
    dice: NonNegative = 5.0  # weight of a mask's dice loss
    pose: NonNegative = 50.0  # weight of the hand's distance, 1/m
    width: NonNegative = 0.5  # weight of the width's cross entropy
    jitter: NonNegative = 0.001  # std of noise on the points, m


class M2t2Learner(BehaviorCloning):
    """Behaviour cloning of the labels of scenes, each turned at random about the vertical."""

    data = "off_policy"
    rows = "decisions"
    usual_policy = "m2t2"
    gamma = 1.0

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        if not isinstance(policy, M2t2):
            raise ConfigError("learner=m2t2 trains policy=m2t2")
        if missing := [name for name in LABELS if name not in spec.obs]:
            raise ConfigError(f"learner=m2t2 needs the labels {missing}: env=grasping")
        super().__init__(config, policy, run)

    def loss(self, batch: Tensors) -> Tensor:
        terms = self.terms(turned(under(batch, "obs"), self.config.jitter))
        return torch.stack(list(terms.values())).sum()

    def terms(self, obs: Tensors) -> Tensors:
        """The weighted terms, 0-d each, of scenes with labels."""
        config = self.config
        points = obs["points"]
        contact, placement = (obs[name] for name in LABELS)
        answers = self.online(points, obs["held"])
        rows, target = object_masks(contact[..., 0])
        queries = self.online.queries
        holds = (obs["held"] != 0).flatten(1).any(1)
        score = bce = dice = points.new_zeros(())
        for logit, mask in zip(answers.score, answers.mask, strict=True):
            query = matched(config, logit, mask[:, :queries], rows, target)
            found = torch.zeros_like(logit)
            found[rows, query] = 1.0
            weight = torch.where(found > 0, 1.0, config.unmatched) * ~holds[:, None]
            entropy = functional.binary_cross_entropy_with_logits(logit, found, weight)
            score = score + entropy
            own = torch.cat([mask[rows, query], mask[holds, queries:].flatten(0, 1)])
            wanted = torch.cat([target, placement[holds].mT.flatten(0, 1)])
            bce = bce + hardest(own, wanted, config.hard)
            dice = dice + dice_loss(own, wanted).sum() / max(len(own), 1)
        layers = len(answers.mask)
        good = contact[..., 0] > 0
        place, turn, _ = tool_poses(points, answers)
        label = contact[good]
        pose = hand_error(place[good], turn[good], points[good], label)
        bins = (label[:, 7] / BIN).long().clamp(0, BINS - 1)
        width = functional.cross_entropy(answers.width[good], bins, reduction="sum")
        count = good.sum().clamp(min=1)
        return {
            "score_loss": config.score * score / layers,
            "bce_loss": config.bce * bce / layers,
            "dice_loss": config.dice * dice / layers,
            "pose_loss": config.pose * pose.sum() / count,
            "width_loss": config.width * width / count,
        }


def object_masks(number: Tensor) -> tuple[Tensor, Tensor]:
    """Of 1 + the object of each point [B, N] (0: none): the scene [O] of every object that has a
    grasp, and its mask [O, N]."""
    most = int(number.max()) if number.numel() else 0
    each = number[:, None] == torch.arange(1, most + 1, device=number.device)[:, None]
    rows, objects = each.any(2).nonzero(as_tuple=True)
    return rows, each[rows, objects].float()


@torch.no_grad()
def matched(config: Config, score: Tensor, mask: Tensor, rows: Tensor, target: Tensor) -> Tensor:
    """The query [O] of each object, from logits `score` [B, Q], `mask` [B, Q, N] and the objects'
    scenes `rows` [O] and masks `target` [O, N]: the assignment of the least cost in each scene."""
    logits = mask[rows]
    wanted = target[:, None].expand_as(logits)
    entropy = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(2)
    cost = config.bce * entropy + config.dice * dice_loss(logits, wanted)
    cost = (cost - config.score * functional.logsigmoid(score[rows])).cpu()
    query = torch.zeros(len(rows), dtype=torch.int64)
    for row in rows.unique().tolist():
        own = (rows.cpu() == row).nonzero().flatten()
        chosen, columns = linear_sum_assignment(cost[own].numpy())
        query[own[torch.from_numpy(chosen)]] = torch.from_numpy(columns)
    return query.to(mask.device)


def dice_loss(logits: Tensor, target: Tensor) -> Tensor:
    """1 - (2 sum p t + 1) / (sum p + sum t + 1) over the last dimension, p = sigmoid(logits)."""
    share = logits.sigmoid()
    return 1 - (2 * (share * target).sum(-1) + 1) / (share.sum(-1) + target.sum(-1) + 1)


def hardest(logits: Tensor, target: Tensor, count: int) -> Tensor:
    """Mean cross entropy of masks [K, N] over the `count` points of each with the largest one."""
    if not len(logits):
        return logits.sum()
    each = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return each.topk(min(count, each.shape[1]), 1).values.mean()


def outline(place: Tensor, turn: Tensor, wide: Tensor) -> Tensor:
    """The hand's points [K, 5, 3]: tool point, pads' roots and pads, `wide` [K] (m) apart."""
    zero = torch.zeros_like(wide)
    half = wide / 2
    deep = torch.full_like(wide, -FINGER)
    parts = [(zero, zero), (half, deep), (-half, deep), (half, zero), (-half, zero)]
    own = torch.stack([torch.stack([zero, y, z], 1) for y, z in parts], 1)
    return place[:, None] + own @ turn.mT


def hand_error(place: Tensor, turn: Tensor, points: Tensor, label: Tensor) -> Tensor:
    """The distance [K] (m) of tool poses at `points` [K, 3] against `label` [K, 8] (`contact`)."""
    closing, approach, width = label[:, 1:4], label[:, 4:7], label[:, 7]
    axes = torch.stack([torch.linalg.cross(closing, approach), closing, approach], 2)
    right = outline(points + width[:, None] / 2 * closing, axes, width)
    own = outline(place, turn, width)
    orders = torch.stack([right, right[:, JAWS]])
    gap = (own - orders).square().sum(3)
    return (gap + 1e-10).sqrt().mean(2).amin(0)


def turned(obs: Tensors, jitter: float) -> Tensors:
    """The scenes [B] each turned about the vertical through the middle of the table, and the held
    object with them; noise of `jitter` (m) on the points."""
    points = obs["points"]
    yaw = TURN * (2 * torch.rand(len(points), device=points.device) - 1)
    cos, sin = yaw.cos(), yaw.sin()
    zero, one = torch.zeros_like(yaw), torch.ones_like(yaw)
    turn = torch.stack([cos, sin, zero, -sin, cos, zero, zero, zero, one], 1).view(-1, 3, 3)
    middle = points.new_tensor(MIDDLE)
    contact = obs[LABELS[0]]
    parts = [contact[..., :1], contact[..., 1:4] @ turn, contact[..., 4:7] @ turn, contact[..., 7:]]
    moved = (points - middle) @ turn + middle
    return {
        "points": moved + jitter * torch.randn_like(moved),
        "held": obs["held"] @ turn,
        LABELS[0]: torch.cat(parts, 2),
        LABELS[1]: obs[LABELS[1]],
    }
