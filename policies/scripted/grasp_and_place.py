"""GraspAndPlace: picks an object and puts it down elsewhere, by the proposals of a trained M2T2.

From the cloud at the start of an attempt it takes the best grasp, the object's points (those that
are connected with the contact by steps of 2 cm), and the best placement of these away from where
the object stands. Then it goes through fixed phases with absolute tool poses. If nothing is in the
hand after the lift, it begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.bounds import Positive
from embodied.core.build import ConfigError
from embodied.core.point_cloud import farthest
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.embodiments.fr3 import OPEN
from embodied.policies.m2t2 import YAWS, M2t2, placed
from embodied.policies.networks.point_sets import HIGH, LOW, ON_TABLE, gather

HELD = 64  # points of the held object
LINK = 0.02  # m: points so near belong to the same object
AWAY = 0.14  # m: how far from its place the object is put down, at least
TURNS = (0, 1, 2, YAWS - 2, YAWS - 1)  # placements that turn the wrist by a quarter or less
EMPTY = 0.004  # m: width of a closed hand that holds nothing
LEAST = (0, 2, 7, 0, 0, 3, 6, 0)  # steps of each phase, at least
MOST = (50, 25, 7, 30, 60, 25, 6, 999)  # and at most
OVER, DOWN, CLOSE, LIFT, ACROSS, PUT, RELEASE, AWAY_PHASE = range(8)


@dataclass(frozen=True)
class Config:
    """Settings of picking and placing."""

    run: str  # run folder of `embodied train experiment=grasping_m2t2`
    close: Positive = 0.008  # distance at which a tool pose is reached, m
    lift: Positive = 0.18  # how far objects are lifted, m


class GraspAndPlace(Policy):
    """The carry has the phase, its clock, and tool poses of the grasp and of the placement."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        found = checkpoint.load_policy(config.run)
        if not isinstance(found, M2t2):
            raise ConfigError(f"run={config.run} is not a run of policy=m2t2")
        if spec.act.names != found.pose.names or "points" not in spec.obs:
            raise ConfigError("grasp_and_place is for env=fr3_clutter")
        self.config = config
        self.spec = spec
        self.net = found.eval()
        self.names = spec.obs["state"].names

    def initial(self, n: int) -> Tensors:
        return {
            "phase": torch.full((n,), -1),  # -1: nothing is decided yet
            "clock": torch.zeros(n, dtype=torch.int64),
            "pick": torch.zeros(n, 3),
            "pick_turn": torch.zeros(n, 3, 3),
            "width": torch.zeros(n),
            "put": torch.zeros(n, 3),
            "put_turn": torch.zeros(n, 3, 3),
        }

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.zeros(n, 1)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        state = obs["state"]
        width = state[:, self.names.index("width")]
        lost = (carry["phase"] == ACROSS) & (carry["clock"] == 1) & (width < EMPTY)
        fresh = (carry["phase"] < 0) | lost
        if bool(fresh.any()):
            carry = self._decided(obs["points"], carry, fresh)
        tool = state[:, [self.names.index(f"tool_{axis}") for axis in "xyz"]]
        place, turn, hand = self._target(carry)
        phase, clock = carry["phase"], carry["clock"]
        least, most = torch.tensor(LEAST)[phase], torch.tensor(MOST)[phase]
        there = (place - tool).norm(dim=1) < self.config.close
        on = ((there & (clock >= least)) | (clock >= most)) & (phase < AWAY_PHASE)
        pose = self.net.pose.encode(place, turn)
        action = torch.cat([pose, hand[:, None]], 1).clamp(-1, 1)
        carry = {**carry, "phase": phase + on, "clock": torch.where(on, 0, clock + 1)}
        return action[:, None], carry

    def _target(self, carry: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Tool place [n, 3], turn [n, 3, 3] and hand [n] in [-1, 1] of each row's phase."""
        up = torch.tensor([0.0, 0.0, self.config.lift])
        pick, put = carry["pick"], carry["put"]
        back = pick - 0.09 * carry["pick_turn"][:, :, 2]
        away = put - 0.12 * carry["put_turn"][:, :, 2]
        places = torch.stack([back, pick, pick, pick + up, put + up, put, put, away], 1)
        phase = carry["phase"]
        rows = torch.arange(len(phase))
        later = (phase >= ACROSS)[:, None, None]
        turn = torch.where(later, carry["put_turn"], carry["pick_turn"])
        opened = 2 * (carry["width"] + 0.016).clamp(max=OPEN) / OPEN - 1
        wide = (phase < CLOSE) | (phase >= RELEASE)
        return places[rows, phase], turn, torch.where(wide, opened, torch.full_like(opened, -1.0))

    def _decided(self, above: Tensor, carry: Tensors, fresh: Tensor) -> Tensors:
        """The carry with a new attempt in the rows `fresh` [n]."""
        above = above[fresh]
        none = above.new_zeros(len(above), HELD, 3)
        scene = torch.cat([above, table_points(above, above[:, :1, :2] + 10.0)], 1)
        grasps, _ = self.net.propose(scene, none)
        rows = torch.arange(len(above))
        best = grasps.score.argmax(1)
        pick = grasps.place[rows, best]
        turn = grasps.turn[rows, best]
        width = grasps.width[rows, best]
        # Both orders of the jaws are the same grasp: the one that turns the wrist less.
        flip = torch.where(turn[:, :1, 0:1] < 0, -1.0, 1.0)
        turn = torch.cat([turn[:, :, :2] * flip, turn[:, :, 2:]], 2)
        contact = gather(scene, grasps.point[rows, best][:, None])
        own = connected(above, contact)
        low = torch.where(own[..., None], above, torch.inf).amin(1)
        high = torch.where(own[..., None], above, -torch.inf).amax(1)
        foot = (low + high) / 2 * above.new_tensor([1.0, 1.0, 0.0])
        held = gather(above, own.float().argsort(dim=1, descending=True, stable=True))
        index = torch.arange(HELD) * own.sum(1, keepdim=True) // HELD
        held = gather(held, index) - foot[:, None]
        # The others: the object's own points are replaced by one that stays.
        other = (~own).float().argmax(1)
        rest = torch.where(own[..., None], above[rows, other][:, None], above)
        scene = torch.cat([rest, table_points(rest, foot[:, None, :2])], 1)
        _, places = self.net.propose(scene, held)
        best = torch.tensor(TURNS)[places.score[:, TURNS].argmax(1)]
        spin = placed(best * 2 * torch.pi / YAWS) @ above.new_tensor([1.0, -1.0, -1.0]).diag()
        offset = (pick - foot + above.new_tensor([0.0, 0.0, 0.004]))[..., None]
        put = places.place[rows, best] * above.new_tensor([1.0, 1.0, 0.0])
        new = {
            "phase": torch.zeros(len(above), dtype=torch.int64),
            "clock": torch.zeros(len(above), dtype=torch.int64),
            "pick": pick,
            "pick_turn": turn,
            "width": width,
            "put": put + (spin @ offset).squeeze(2),
            "put_turn": spin @ turn,
        }
        where = fresh.nonzero().flatten()
        return {key: leaf.index_copy(0, where, new[key]) for key, leaf in carry.items()}


def connected(points: Tensor, contact: Tensor) -> Tensor:
    """[B, N]: which of `points` [B, N, 3] are connected with `contact` [B, 1, 3]."""
    near = torch.cdist(points, points) < LINK
    gap = torch.cdist(points, contact).squeeze(2)
    own = gap <= gap.amin(1, keepdim=True)  # the nearest one, if no other
    for _ in range(12):
        own = own | (near & own[:, None]).any(2)
    return own


def table_points(above: Tensor, avoid: Tensor) -> Tensor:
    """Points [B, n, 3] of the table's plane, which is known: those that are not below the points
    `above` [B, N, 3], nor within AWAY (m) of `avoid` [B, 1, 2]."""
    x = torch.linspace(LOW[0] + 0.01, HIGH[0] - 0.01, 16)
    y = torch.linspace(LOW[1] + 0.01, HIGH[1] - 0.01, 24)
    flat = torch.cartesian_prod(x, y)
    grid = torch.cat([flat, torch.zeros(len(flat), 1)], 1).expand(len(above), -1, -1)
    covered = (torch.cdist(grid[..., :2], above[..., :2]) < LINK).any(2)
    open_ = ~covered & (torch.cdist(grid[..., :2], avoid).squeeze(2) > AWAY)
    # `farthest` takes the valid ones first in their row.
    order = open_.float().argsort(dim=1, descending=True, stable=True)
    return gather(
        gather(grid, order), farthest(gather(grid, order), open_.gather(1, order), ON_TABLE.points)
    )
