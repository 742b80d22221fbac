"""M2T2: one transformer proposes grasps for all objects and placements for the held one (2023).

Learned queries read a point cloud through masked cross-attention: what a query attends to is the
mask that it predicted in the layer before (Cheng et al., Mask2Former, 2022). A query's mask says at
which points its grasps begin (or, one query for each turn of the held object, where that can be put
down); each point has its own closing axis c, approach a and width w:

    mask_q(p) = e_q . f_p - s |p - p_q|^2
    grasp at p:  place p + w c / 2,  tool axes (c x a, c, a)

Differences from the published network: each point begins with moments of its neighbourhood, in
place of a third level, and the closing axis is what the network adds to the axis into the surface
that these moments give; one scale of neighbourhoods; 512 points, 3 decoder layers of width 64 (the
authors' sizes are settings), no language tokens. Grasp queries begin at points p_q of the objects,
farthest first (Misra et al., 3DETR, 2021), and their masks fall with the distance to them, because
learned queries need many more scenes. The tool's own axes are the FR3's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.point_cloud import farthest
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.embodiments.cartesian_pose import CartesianPose
from embodied.embodiments.cartesian_pose import Config as PoseConfig
from embodied.embodiments.fr3 import OPEN, hand_points, opening
from embodied.policies.networks.blocks import AttentionLayer
from embodied.policies.networks.point_sets import ABOVE, TABLE, Back, Level, described, gather, mlp

YAWS = 8  # turns of the held object, each with a query of its own
BINS = 10  # of the width
BIN = OPEN / BINS  # m
MIDDLE = (0.52, 0.0, 0.0)  # what the cloud's coordinates are relative to, m
SCALE = 0.1  # m: the unit of coordinates
CLEAR = 0.006  # m: a hand that is nearer to what is seen is taken last


@dataclass(frozen=True)
class Config:
    """Settings of the M2T2 network."""

    width: Count = 64  # units of tokens and point features
    layers: Count = 3  # decoder layers
    heads: Count = 4  # attention heads
    queries: Count = 10  # grasp queries, at least as many as objects
    centres: tuple[Count, Count] = (128, 32)  # points of the two levels
    near: Count = 16  # neighbours of a centre


class Answers(NamedTuple):
    """`score` [B, Q] and `mask` [B, Q + YAWS, N] are logits of each decoder layer, first to last;
    for each point its unit axes `closing`, `approach` [B, N, 3] and logits `width` [B, N, BINS]."""

    score: list[Tensor]
    mask: list[Tensor]
    closing: Tensor
    approach: Tensor
    width: Tensor


class Proposals(NamedTuple):
    """The best grasp or placement of each query: tool poses [B, Q, 3], [B, Q, 3, 3] (m), width
    [B, Q] (m), score [B, Q] in [0, 1], and the point it belongs to [B, Q] (int64)."""

    place: Tensor
    turn: Tensor
    width: Tensor
    score: Tensor
    point: Tensor


class M2t2(Policy):
    """Acts once: the best grasp, or the best placement where `held` [n, 64, 3] is not all zero."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.pose = CartesianPose(PoseConfig())
        missing = {"points", "held"} - set(spec.obs)
        if missing or spec.act.names != self.pose.names:
            raise ConfigError(
                "policy=m2t2 needs observations `points` and `held` and actions of "
                "controller=cartesian_pose: env=grasping"
            )
        self.spec = spec
        self.queries = config.queries
        width = config.width
        few, fewer = config.centres
        self.start = mlp(24, width)
        self.up = Level(width, width, few, config.near, 0.04)
        self.top = Level(width, width, fewer, config.near, 0.12)
        self.back = Back(2 * width, width)
        self.out = Back(2 * width, width)
        self.place = nn.Linear(3, width)
        self.query = nn.Parameter(0.5 * torch.randn(YAWS, width))
        self.log_fall = nn.Parameter(torch.zeros(()))
        self.held = mlp(3, width)
        layer = [AttentionLayer(width, config.heads, cross=True) for _ in range(config.layers)]
        self.layers = nn.ModuleList(layer)
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, 1)
        self.embed = mlp(width, width)
        self.per_point = mlp(width, width)
        self.action = nn.Sequential(mlp(width, width), nn.ReLU(), nn.Linear(width, 6 + BINS))

    def forward(self, points: Tensor, held: Tensor) -> Answers:
        """Of clouds `points` [B, N, 3] (m, base frame) and `held` [B, M, 3] (m)."""
        middle = points.new_tensor(MIDDLE)
        near = (points - middle) / SCALE
        found, inward = described(points, middle, SCALE)
        own = self.start(found)
        few, level, which = self.up(points, own)
        fewer, top, of_few = self.top(few, level)
        level = self.back(few, level, fewer, top)
        each = self.out(points, own, few, level)
        features = self.per_point(each)
        memories = [(top, gather(near, which.gather(1, of_few)), which.gather(1, of_few))]
        memories.append((level, gather(near, which), which))
        tokens = [(memory + self.place(place), at) for memory, place, at in memories]
        thing = self.held(held / SCALE).amax(1)
        seed = farthest(points, points[..., 2] > TABLE, self.queries)
        begin = gather(near, seed)
        x = torch.cat([gather(each, seed) + self.place(begin), self.query + thing[:, None]], 1)
        fall = self.log_fall.exp() * torch.cdist(begin, near).square()
        fall = functional.pad(fall, (0, 0, 0, YAWS))
        scores: list[Tensor] = []
        masks: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            memory, at = tokens[i % 2]
            seen = None
            if masks:
                index = at[:, None].expand(-1, x.shape[1], -1)
                seen = masks[-1].detach().gather(2, index) > 0
                seen = seen | ~seen.any(2, keepdim=True)  # an empty mask would see nothing
            x = layer(x, memory, memory_seen=seen)
            read = self.norm(x)
            scores.append(self.score(read[:, : self.queries]).squeeze(2))
            masks.append(self.embed(read) @ features.mT / features.shape[2] ** 0.5 - fall)
        closing, approach, width = self.action(each).split([3, 3, BINS], 2)
        closing = functional.normalize(inward + closing, dim=2, eps=1e-6)
        approach = functional.normalize(approach, dim=2, eps=1e-6)
        return Answers(scores, masks, closing, approach, width)

    @torch.no_grad()
    def propose(self, points: Tensor, held: Tensor) -> tuple[Proposals, Proposals]:
        """The grasps of the object queries, and the placements of the turns, best point each."""
        answers = self(points, held)
        mask = answers.mask[-1].sigmoid()
        best, point = mask[:, : self.queries].max(2)
        place, turn, width = tool_poses(points, answers)
        place, turn = (gather(leaf.flatten(2), point) for leaf in (place, turn))
        turn = turn.unflatten(2, (3, 3))
        width = width.gather(1, point)
        free = clear(place, turn, width, points[:, : ABOVE.points])
        score = answers.score[-1].sigmoid() * best * torch.where(free, 1.0, 0.1)
        grasps = Proposals(place, turn, width, score, point)
        on_table = mask[:, self.queries :] * (points[..., 2] < TABLE)[:, None]
        best, point = on_table.max(2)
        yaws = torch.arange(YAWS, device=points.device) * 2 * torch.pi / YAWS
        return grasps, Proposals(
            gather(points, point),
            placed(yaws).expand(len(points), -1, -1, -1),
            torch.zeros_like(best),
            best,
            point,
        )

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.zeros(n, 1, device=self.query.device)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        points = obs["points"]
        held = obs["held"]
        holds = (held != 0).flatten(1).any(1)
        grasps, places = (self.encode(each) for each in self.propose(points, held))
        return torch.where(holds[:, None], places, grasps)[:, None], carry

    def encode(self, proposals: Proposals) -> Tensor:
        """Actions [B, A] of the proposals with the highest scores."""
        best = proposals.score.argmax(1)
        rows = torch.arange(len(best), device=best.device)
        pose = self.pose.encode(proposals.place[rows, best], proposals.turn[rows, best])
        width = 2 * proposals.width[rows, best] / OPEN - 1
        return torch.cat([pose, width[:, None]], 1).clamp(-1, 1)


def tool_poses(points: Tensor, answers: Answers) -> tuple[Tensor, Tensor, Tensor]:
    """Place [B, N, 3], turn [B, N, 3, 3] and width [B, N] of the grasp at each of the points."""
    closing = answers.closing
    along = (answers.approach * closing).sum(2, keepdim=True) * closing
    approach = functional.normalize(answers.approach - along, dim=2, eps=1e-6)
    middles = (torch.arange(BINS, device=points.device) + 0.5) * BIN
    width = (answers.width.softmax(2) * middles).sum(2)
    turn = torch.stack([torch.linalg.cross(closing, approach), closing, approach], 3)
    return points + width[..., None] / 2 * closing, turn, width


def clear(place: Tensor, turn: Tensor, width: Tensor, points: Tensor) -> Tensor:
    """[B, Q]: whether hands at tool poses [B, Q, 3], [B, Q, 3, 3], open for `width` [B, Q] (m), are
    CLEAR from all `points` [B, N, 3] (the published system filters collisions after the network
    too)."""
    hand = hand_points(place.double(), turn.double(), opening(width.double())).float()
    gap = torch.cdist(hand.flatten(1, 2), points).amin(2)
    return gap.unflatten(1, hand.shape[1:3]).amin(2) > CLEAR


def placed(yaw: Tensor) -> Tensor:
    """Turns [..., 3, 3] of a tool that points down, turned by `yaw` [...] (rad)."""
    cos = yaw.cos()
    sin = yaw.sin()
    zero = torch.zeros_like(yaw)
    x = torch.stack([cos, sin, zero], -1)
    y = torch.stack([sin, -cos, zero], -1)
    return torch.stack([x, y, torch.stack([zero, zero, zero - 1], -1)], -1)
