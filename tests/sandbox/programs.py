"""Legitimate reward programs: in the style of Eureka (`compute_reward`, TorchScript, typed, with
parts), of Text2Reward (`self.*`, numpy, one state at a time, classes), and as people write them."""

from __future__ import annotations

HEAD = "import torch\nfrom torch import Tensor\nfrom typing import Tuple, Dict\n"
SIGNED = "-> Tuple[torch.Tensor, Dict[str, torch.Tensor]]:"

EUREKA_START = f"\n{HEAD}\n@torch.jit.script\ndef compute_reward"

EUREKA_PROGRAMS = {
    "a helper in TorchScript": f"""
{HEAD}
@torch.jit.script
def soft_distance(a: Tensor, b: Tensor, scale: float = 0.2) -> Tensor:
    return 1.0 - torch.tanh(torch.norm(a - b, dim=-1) / scale)

@torch.jit.script
def compute_reward(tool: Tensor, cube: Tensor, goal: Tensor) {SIGNED}
    near = soft_distance(tool, cube)
    placed = soft_distance(cube, goal, 0.1)
    return near + 2 * placed, {{"near": near, "placed": placed}}
""",
    "alignment by a dot product": f"""
{HEAD}
import torch.nn.functional as F

@torch.jit.script
def compute_reward(tool: Tensor, next_tool: Tensor, goal: Tensor) {SIGNED}
    direction = F.normalize(goal - tool, dim=-1)
    motion = next_tool - tool
    progress = (direction * motion).sum(dim=-1)
    align = F.cosine_similarity(motion, direction, dim=-1)
    return 10.0 * progress + 0.1 * align, {{"progress": progress, "align": align}}
""",
    "type of the constants": f"""(qd: Tensor, action: Tensor) {SIGNED}
    max_vel: float = 2.0
    smooth: Tensor = -torch.mean(torch.abs(action), dim=-1)
    excess: Tensor = torch.relu(torch.abs(qd) - max_vel).sum(dim=-1)
    total_reward = smooth - 0.5 * excess
    reward_components: Dict[str, Tensor] = {{"smooth": smooth, "excess": -excess}}
    return total_reward, reward_components
""",
    "a scalar among the components": f"""(tool: Tensor, goal: Tensor) {SIGNED}
    gap = torch.norm(goal - tool, dim=-1)
    return -gap, {{"gap": -gap, "mean_gap": gap.mean(), "temperature": torch.tensor(0.5)}}
""",
    "an unused component and a comment": f"""(tool: Tensor, goal: Tensor) {SIGNED}
    # Die Distanz \u2014 kleiner ist besser (\u2264 5 cm \u2192 Bonus)
    distance = (goal - tool).norm(dim=-1)
    bonus = (distance <= 0.05).float()
    return bonus - distance, {{"Abstand \u2193": -distance}}
""",
}

NUMPY_START = "\nimport numpy as np\n\ndef compute_dense_reward(self, action):\n"

NUMPY_PROGRAMS = {
    "stages with else": """\
    reach = np.linalg.norm(self.cube - self.tool)
    place = np.linalg.norm(self.goal - self.cube)
    if reach > 0.1:
        stage, reward = 1, -reach
    elif place > 0.1:
        stage, reward = 2, 1.0 - place
    else:
        stage, reward = 3, 3.0
    reward -= 0.01 * np.square(action).sum()
    return reward
""",
    "parts in a dict": """\
    parts = {}
    parts["reach"] = -np.linalg.norm(self.cube - self.tool)
    parts["regular"] = -0.01 * np.sum(np.abs(action))
    if self.width < 0.02:
        parts["closed"] = 0.2
    return sum(parts.values()), parts
""",
    "a class with weights": """
import torch

class RewardFunction:
    def __init__(self):
        self.w_reach = 1.0
        self.w_action = 0.01

    def compute_dense_reward(self, action):
        distance = torch.norm(self.tool - self.goal, dim=-1)
        return -self.w_reach * distance - self.w_action * action.pow(2).sum(dim=-1)
""",
    "a class with methods": """
import torch

class Reward:
    SCALE = 5.0

    def distance(self, a, b):
        return torch.linalg.norm(a - b, dim=-1)

    def reaching(self):
        return 1 - torch.tanh(self.SCALE * self.distance(self.tool, self.cube))

    def compute_reward(self):
        reach = self.reaching()
        place = torch.exp(-self.distance(self.cube, self.goal))
        return reach + place, {"reach": reach, "place": place}
""",
    "a static helper": """
import numpy as np

class Reward:
    @staticmethod
    def shaped(distance, scale=3.0):
        return 1.0 - np.tanh(scale * distance)

    def compute_dense_reward(self, action):
        return self.shaped(np.linalg.norm(self.goal - self.cube, axis=-1))
""",
    "helper functions with self": """
import numpy as np

def reach_term(self):
    return -np.linalg.norm(self.tool - self.cube)

def grasp_term(self):
    return 1.0 if self.width < 0.03 else 0.0

def compute_dense_reward(self, action):
    return reach_term(self) + grasp_term(self)
""",
    "math instead of numpy": """
import math

def compute_dense_reward(self, action):
    dx, dy = self.goal[0] - self.tool[0], self.goal[1] - self.tool[1]
    return -math.hypot(dx, dy) - 0.05 * math.fabs(self.goal[2] - self.tool[2])
""",
    "a dataclass of weights": """
from dataclasses import dataclass
import numpy as np

@dataclass
class Weights:
    reach: float = 1.0
    action: float = 0.02

def compute_dense_reward(self, action):
    w = Weights()
    cost = w.action * np.sum(action ** 2, axis=-1)
    return -w.reach * np.linalg.norm(self.tool - self.cube, axis=-1) - cost
""",
    "what the instance remembers of itself": """
import numpy as np

class Reward:
    def compute_dense_reward(self, action):
        self.distance = np.linalg.norm(self.tool - self.goal, axis=-1)
        self.bonus = np.where(self.distance < 0.1, 1.0, 0.0)
        return self.bonus - self.distance
""",
    "a vector and a number": """\
    return -np.linalg.norm(self.tool - self.cube) - 0.5 * abs(self.width)
""",
}

PLAIN = {
    "one line": "def reward(goal, next_tool):\n    return -(goal - next_tool).norm(dim=-1)\n",
    "numpy with parts": """
def reward(cube, goal, action):
    d = np.sqrt(np.square(cube - goal).sum(axis=1))
    cost = 0.01 * np.square(action).mean(axis=1)
    return np.exp(-d) - cost, {"near": np.exp(-d), "cost": -cost}
""",
    "keyword-only and annotations": """
def reward(tool: "Tensor", *, goal: "Tensor", scale: float = 2.0) -> "Tensor":
    return torch.exp(-scale * torch.norm(tool - goal, dim=-1))
""",
    "constants at the top": """
import math
TARGET = torch.tensor([0.4, 0.0, 0.2])
SCALE = math.sqrt(2.0) / 4

def reward(next_cube):
    return torch.exp(-(next_cube - TARGET).norm(dim=-1) / SCALE)
""",
    "one transition at a time in torch": """
def reward(tool, goal, width):
    d = torch.norm(tool - goal)
    if d < 0.5 and width > 0:
        return 1.0 + width
    return -d
""",
    "partial and reduce": """
from functools import partial, reduce

def pull(a, b, scale):
    return torch.exp(-(a - b).norm(dim=-1) / scale)

def reward(tool, cube, goal):
    terms = [partial(f, scale=0.3) for f in (pull, pull)]
    return reduce(lambda x, y: x + y, [terms[0](tool, cube), terms[1](cube, goal)])
""",
    "printing while it works": """
def reward(tool, goal):
    d = (tool - goal).norm(dim=-1)
    print("closest", d.min().item())
    return -d
""",
}

LIKE_PUBLISHED = {
    "parts of a class tree": """
def compute_dense_reward(self, action):
    reach = np.linalg.norm(self.robot.tool - self.cube)
    moved = np.linalg.norm(self.after.robot.tool - self.before.robot.tool)
    grasped = float(self.robot.gripper.width < 0.02)
    return grasped - reach - 0.1 * moved, {"stage": "reach", "reach": -reach, "none": None}
""",
    "a class tree in torch": """
import torch

class Reward:
    def compute_dense_reward(self, action):
        distance = torch.norm(self.robot.tool - self.state.cube, dim=-1)
        return -distance - 0.01 * self.robot.qd.norm(dim=-1)
""",
    "quaternions of Isaac Gym": """
from isaacgym.torch_utils import *
from isaacgymenvs.utils.torch_jit_utils import quat_diff_rad

@torch.jit.script
def compute_reward(tool: Tensor, q: Tensor):
    turned = quat_unit(q[:, :4])
    forward = quat_rotate_inverse(turned, tool)
    angle = quat_diff_rad(quat_mul(turned, quat_conjugate(turned)), turned)
    return forward[:, 0] - angle, {"angle": -angle}
""",
    "imports that it does not use": """
import logging
import random
import torch
from scipy.spatial.transform import Rotation as R
from scipy.spatial import distance

def reward(tool, goal):
    return -torch.norm(tool - goal, dim=-1)
""",
    "an import that it can do without": """
import numpy as np
try:
    from scipy.spatial.distance import euclidean
except ImportError:
    euclidean = lambda a, b: np.linalg.norm(a - b)

def compute_dense_reward(self, action):
    return -euclidean(self.tool, self.goal)
""",
    "named tuples, vmap and a main guard": """
from typing import NamedTuple

class Parts(NamedTuple):
    near: torch.Tensor
    cost: torch.Tensor

def parts_of(tool, goal, action) -> Parts:
    near = torch.vmap(lambda a, b: -torch.linalg.norm(a - b))(tool, goal)
    return Parts(near, 0.01 * action.square().sum(-1))

def reward(tool, goal, action) -> "Tuple[torch.Tensor, Dict[str, torch.Tensor]]":
    try:
        parts = parts_of(tool, goal, action)
    except RuntimeError as error:
        raise ValueError(f"shapes {tool.shape}: {error}")
    return parts.near - parts.cost, parts._asdict()

if __name__ == "__main__":
    print(reward)
""",
    "what a method sets and then reads": """
class Reward:
    def __init__(self):
        self.bonus = 0.0

    def compute_reward(self):
        self.bonus = (self.width < 0.0).float()
        return self.bonus - torch.norm(self.tool - self.goal, dim=-1)
""",
}

STYLES = {
    "temperatures in the style of Eureka": """
import torch
from typing import Dict, Tuple
from torch import Tensor

def compute_reward(tool: Tensor, goal: Tensor, qd: Tensor) -> Tuple[Tensor, Dict[str, Tensor]]:
    distance_temp: float = 2.0
    velocity_temp: float = 0.1
    distance = torch.norm(tool - goal, p=2, dim=-1)
    distance_reward = torch.exp(-distance_temp * distance)
    velocity_reward = torch.exp(-velocity_temp * torch.sum(qd ** 2, dim=-1))
    reward = 0.8 * distance_reward + 0.2 * velocity_reward
    return reward, {"distance_reward": distance_reward, "velocity_reward": velocity_reward}
""",
    "device and zeros_like": """
@torch.jit.script
def compute_reward(tool: torch.Tensor, cube: torch.Tensor, goal: torch.Tensor):
    device = tool.device
    target = torch.tensor([0.1, 0.2, 0.3], device=device)
    bonus = torch.zeros_like(tool[:, 0])
    bonus[torch.norm(cube - goal, dim=1) < 1.0] = 1.0
    return bonus - torch.norm(tool - target, dim=1), {"bonus": bonus}
""",
    "the orientation of a hand": """
def compute_reward(q: Tensor, next_q: Tensor, action: Tensor):
    object_rot = torch.nn.functional.normalize(q[:, :4], dim=-1)
    goal_rot = torch.nn.functional.normalize(next_q[:, :4], dim=-1)
    quat_diff = quat_mul(object_rot, quat_conjugate(goal_rot))
    rot_dist = 2.0 * torch.asin(torch.clamp(torch.norm(quat_diff[:, 0:3], p=2, dim=-1), max=1.0))
    rot_rew = 1.0 / (torch.abs(rot_dist) + 0.1)
    return rot_rew - 0.002 * torch.sum(action ** 2, dim=-1), {"rot_rew": rot_rew}
""",
    "velocity by a difference": """
def compute_reward(tool, next_tool, goal):
    dt = 1.0 / 60.0
    velocity = (next_tool - tool) / dt
    heading = (goal - tool) / torch.clamp(torch.norm(goal - tool, dim=-1, keepdim=True), min=1e-6)
    forward = torch.sum(velocity * heading, dim=-1).clamp(-5.0, 5.0)
    lateral = torch.norm(velocity - forward.unsqueeze(-1) * heading, dim=-1)
    return forward - 0.01 * torch.tanh(lateral), {"forward": forward, "lateral": -lateral}
""",
    "nested torch.where": """
def compute_reward(tool, cube, goal, width):
    reach = torch.linalg.vector_norm(tool - cube, dim=-1)
    place = torch.linalg.vector_norm(cube - goal, dim=-1)
    grasped = (reach < 0.5) & (width < 0.5)
    otherwise = torch.where(reach < 1.0, 1.0 - reach, -reach)
    return torch.where(grasped, 2.0 + torch.exp(-place), otherwise)
""",
    "masks as floats": """
def compute_reward(tool, cube, goal, action):
    lifted = (cube[..., 2] > 0.04).to(torch.float32)
    close = torch.le(torch.norm(tool - cube, dim=-1), 0.8).float()
    return close * (1 + lifted) - 1e-3 * action.square().mean(-1), dict(lifted=lifted, close=close)
""",
    "einsum and softplus": """
import torch.nn.functional as F

def compute_reward(tool, goal, qd):
    inner = torch.einsum("nd,nd->n", tool, goal)
    smooth = F.huber_loss(qd, torch.zeros_like(qd), reduction="none").mean(-1)
    return F.softplus(inner) - 0.1 * smooth
""",
    "stacked distances": """
def compute_reward(tool, cube, goal):
    gaps = torch.stack([(tool - cube).norm(dim=-1), (cube - goal).norm(dim=-1)], dim=-1)
    weights = torch.as_tensor([0.3, 0.7])
    return -(gaps * weights).sum(dim=-1) - gaps.max(dim=-1).values
""",
    "an in-place sum": """
def compute_reward(tool, cube, goal):
    reward = torch.zeros(tool.shape[0])
    reward += 1.0 - torch.tanh(5.0 * torch.norm(tool - cube, dim=-1))
    reward += 2.0 * (1.0 - torch.tanh(5.0 * torch.norm(cube - goal, dim=-1)))
    reward[reward > 2.5] += 1.0
    return reward
""",
    "Text2Reward, picking up": """
import numpy as np

def compute_dense_reward(self, action) -> float:
    ee_to_cube = np.linalg.norm(self.robot.tool - self.cube)
    reaching = -0.5 * np.clip(ee_to_cube, 0, 2)
    is_near = ee_to_cube < 0.6
    lifting = 0.0
    if is_near:
        lifting = np.clip(self.cube[2] / 0.2, 0.0, 1.0)
    static = -0.1 * np.linalg.norm(self.robot.qd)
    reward = 0.4 * reaching + 0.4 * lifting + 0.2 * static
    if self.cube[2] > 0.2 and np.linalg.norm(self.goal - self.cube) < 0.3:
        reward += 1
    return reward
""",
    "Text2Reward, weights at the top": """
def compute_dense_reward(self, action):
    WEIGHT_REACH, WEIGHT_GOAL, WEIGHT_ACTION = 0.3, 0.6, 0.1
    reach_distance = np.linalg.norm(self.tool - self.cube)
    goal_distance = np.linalg.norm(self.goal - self.cube)
    reward = -WEIGHT_REACH * reach_distance - WEIGHT_GOAL * goal_distance
    reward -= WEIGHT_ACTION * np.linalg.norm(action)
    return float(reward)
""",
    "Text2Reward, stages of milestones": """
def compute_dense_reward(self, action):
    reward = 0
    stage_1 = 1 - np.tanh(10 * np.linalg.norm(self.tool - self.cube))
    reward += stage_1
    if stage_1 > 0.1:
        reward += 1
        stage_2 = 1 - np.tanh(10 * np.linalg.norm(self.cube - self.goal))
        reward += stage_2
        if np.linalg.norm(self.cube - self.goal) <= 0.025:
            reward += 2.25
    return reward - 0.01 * np.sum(np.abs(action))
""",
    "one item of a numpy scalar": """
def compute_dense_reward(self, action):
    d = np.linalg.norm(self.goal - self.cube)
    return (-d).item() if isinstance(d, np.floating) else -float(d)
""",
    "a conditional and a walrus": """
def compute_dense_reward(self, action):
    if (gap := np.linalg.norm(self.tool - self.cube)) > 0.3:
        return -gap
    return 1.0 if self.width < 0.5 else 0.5
""",
    "a match statement": """
def compute_dense_reward(self, action):
    match int(self.width > 0):
        case 0:
            return -np.linalg.norm(self.tool - self.goal)
        case _:
            return -np.linalg.norm(self.cube - self.goal)
""",
    "a nested function": """
def compute_dense_reward(self, action):
    def clipped(value, low=-1.0, high=1.0):
        return max(low, min(high, value))
    return sum(clipped(float(x)) for x in self.goal - self.cube)
""",
    "a list of terms": """
def compute_dense_reward(self, action):
    terms = [-abs(a - b) for a, b in zip(self.tool, self.goal, strict=True)]
    weights = [1.0, 1.0, 0.5]
    return sum(w * t for w, t in zip(weights, terms))
""",
    "a property and a class variable": """
import numpy as np

class RewardFunction:
    near = 0.3

    @property
    def gap(self):
        return np.linalg.norm(self.cube - self.goal, axis=-1)

    def compute_dense_reward(self, action):
        return np.where(self.gap < self.near, 1.0, -self.gap)
""",
    "a class method": """
import torch

class Reward:
    scale = 3.0

    @classmethod
    def kernel(cls, distance):
        return torch.exp(-cls.scale * distance)

    def compute_reward(self):
        return self.kernel(torch.norm(self.tool - self.goal, dim=-1))
""",
    "an abstract base": """
from abc import ABC, abstractmethod
import torch

class Base(ABC):
    @abstractmethod
    def compute_reward(self): ...

class Reward(Base):
    def compute_reward(self):
        return -torch.norm(self.tool - self.goal, dim=-1)
""",
    "an enumeration of stages": """
from enum import Enum
import numpy as np

class Stage(Enum):
    REACH = 0
    PLACE = 1

def stage(self):
    return Stage.PLACE if np.linalg.norm(self.tool - self.cube) < 1.0 else Stage.REACH

def compute_dense_reward(self, action):
    place = stage(self) is Stage.PLACE
    there, here = (self.goal, self.cube) if place else (self.cube, self.tool)
    return stage(self).value - np.linalg.norm(there - here)
""",
    "a table of weights": """
WEIGHTS = {"reach": 1.0, "place": 2.0}

def reward(tool, cube, goal):
    parts = {"reach": -(tool - cube).norm(dim=-1), "place": -(cube - goal).norm(dim=-1)}
    weighted = {name: WEIGHTS[name] * part for name, part in parts.items()}
    return torch.stack(list(weighted.values())).sum(0), weighted
""",
    "future annotations and a docstring": '''
from __future__ import annotations
import torch

def compute_reward(tool: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Negative distance of tool and goal.

    Returns: [N]
    """
    assert tool.ndim == goal.ndim, f"{tool.shape} against {goal.shape}"
    return -torch.cdist(tool[:, None], goal[:, None]).flatten()
''',
    "torch.no_grad": """
import torch

@torch.no_grad()
def compute_reward(tool, goal):
    with torch.no_grad():
        return (tool - goal).pow(2).sum(-1).sqrt().neg()
""",
    "torch.compile": """
import torch

@torch.compile
def compute_reward(tool, goal):
    return torch.addcmul(-(tool - goal).abs().sum(-1), tool[:, 0], goal[:, 0], value=0.1)
""",
    "arguments by name": """
def scaled(value, *, by=1.0, **unused):
    return by * value

def reward(tool, goal):
    return scaled(-(tool - goal).norm(dim=-1), by=0.5, note="closer")
""",
    "a cached helper": """
from functools import lru_cache
import math

@lru_cache(maxsize=None)
def width_of(success, value=0.5):
    return math.sqrt(-2 * math.log(value)) / success

def reward(tool, goal):
    return torch.exp(-0.5 * ((tool - goal).norm(dim=-1) * width_of(0.5)) ** 2)
""",
    "clamped logarithm": """
def reward(cube, goal):
    d = torch.norm(cube - goal, dim=-1)
    return -torch.log(d.clamp(min=1e-4)) / 10 + torch.sigmoid(4 * (0.5 - d))
""",
    "torch.split of the action": """
def reward(action, tool, goal):
    motion, grip = torch.split(action, [3, 1], dim=-1)
    return (motion * (goal - tool)).sum(-1) - 0.1 * grip.squeeze(-1).abs()
""",
    "a polynomial by numpy": """
import numpy as np

def reward(tool, goal, width):
    d = np.linalg.norm(tool - goal, axis=1)
    return np.polyval([-0.1, -1.0, 0.0], d) + np.interp(width, [-1.0, 1.0], [0.0, 0.2])
""",
    "numpy and torch together": """
import numpy as np
import torch

def compute_reward(tool, goal):
    limits = torch.from_numpy(np.array([1.0, 1.0, 0.5], dtype=np.float32))
    return -torch.norm((tool - goal) * limits, dim=-1) + float(np.pi) / 10
""",
    "an integer bonus": """
def reward(tool, cube, goal):
    near = (tool - cube).norm(dim=-1) < 1
    there = (cube - goal).norm(dim=-1) < 1
    return near.int() + 2 * there.long()
""",
    "a symbolic alias of a type": """
import typing as t
import torch
Parts = t.Dict[str, torch.Tensor]

def compute_reward(tool: torch.Tensor, goal: torch.Tensor) -> t.Tuple[torch.Tensor, Parts]:
    parts: Parts = {}
    parts["reach"] = torch.reciprocal(1 + (tool - goal).norm(dim=-1))
    total: t.Optional[torch.Tensor] = None
    for part in parts.values():
        total = part if total is None else total + part
    return total, parts
""",
}

LEGITIMATE = {
    name: each if each[0] in "\nd" else start + each
    for start, programs in (
        (EUREKA_START, EUREKA_PROGRAMS),
        (NUMPY_START, NUMPY_PROGRAMS),
        ("", PLAIN),
        ("", LIKE_PUBLISHED),
        ("", STYLES),
    )
    for name, each in programs.items()
}
